"""Cross-origin requests: which web pages may ask, and what their browsers are told. Lets nobody in.

A browser shows a page the answers of another origin only if their headers allow it, and before anything but
the simplest requests it asks for permission, by a preflight without a key. Who may ask at all is `guard.py`'s
concern. Cookies are never allowed: nothing here reads any.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.responses import Response

from hearth.api.errors import error_response
from hearth.api.rate_limit_headers import RATE_LIMIT_HEADERS, RETRY_HEADERS
from hearth.api.unread_fields import IGNORED_FIELDS

ANY = "*"
#: As long as browsers keep the answer to a preflight at most.
PREFLIGHT_S = 7200
#: Beyond those that any page may read.
EXPOSED_HEADERS = ", ".join(
    ("x-request-id", "x-hearth-request-id", IGNORED_FIELDS, *RETRY_HEADERS, *RATE_LIMIT_HEADERS)
)
_HEADER_NAMES = re.compile(r"[A-Za-z0-9_.,\t -]*")


@dataclass(frozen=True, slots=True)
class AllowedOrigins:
    """The origins of web pages that may ask, each as browsers spell it, or `*`."""

    origins: frozenset[str] = frozenset()

    def names(self, origin: str) -> bool:
        """True if an origin is allowed by its own name."""
        return origin != ANY and origin in self.origins

    def headers(self, origin: str | None) -> list[tuple[bytes, bytes]]:
        """Return what every response has for the browser of a page; `origin` None: no page asks."""
        if not self.origins:
            return []
        told = [(b"vary", b"origin")]
        if origin is not None and self._allows(origin):
            told.append((b"access-control-allow-origin", origin.encode("latin-1")))
            told.append((b"access-control-expose-headers", EXPOSED_HEADERS.encode()))
        return told

    def preflight(self, method: str, headers: Headers) -> Response | None:
        """Return the answer to a browser that asks for permission; None: the request is no such question."""
        origin = headers.get("origin")
        if method != "OPTIONS" or origin is None or "access-control-request-method" not in headers:
            return None
        if not self._allows(origin):
            return error_response(
                403,
                f"pages of other origins may not ask, given: {origin:.80}; name it in "
                "`service.allowed_origins`, or start with `--allow-origin`",
                "forbidden",
            )
        asked = headers.get("access-control-request-headers", "")
        told = {
            "access-control-allow-methods": "GET, HEAD, POST, DELETE",
            # Any: clients of OpenAI add a dozen of their own.
            "access-control-allow-headers": asked if _HEADER_NAMES.fullmatch(asked) else "",
            "access-control-max-age": str(PREFLIGHT_S),
            "vary": "access-control-request-method, access-control-request-headers",
        }
        if "access-control-request-private-network" in headers:
            told["access-control-allow-private-network"] = "true"
        return Response(status_code=204, headers=told)

    def _allows(self, origin: str) -> bool:
        return origin in self.origins or ANY in self.origins
