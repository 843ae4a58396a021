"""CORS: which web pages may read responses. `guard.py` authorises requests; cookies are never allowed."""

from __future__ import annotations

import re
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.responses import Response

from hearth.api.errors import error_response
from hearth.api.rate_limit_headers import RATE_LIMIT_HEADERS, RETRY_HEADERS
from hearth.api.unread_fields import IGNORED_FIELDS

ANY = "*"
#: The longest that browsers cache a preflight.
PREFLIGHT_S = 7200
EXPOSED_HEADERS = ", ".join(
    ("x-request-id", "x-hearth-request-id", IGNORED_FIELDS, *RETRY_HEADERS, *RATE_LIMIT_HEADERS)
)
_HEADER_NAMES = re.compile(r"[A-Za-z0-9_.,\t -]*")


@dataclass(frozen=True, slots=True)
class AllowedOrigins:
    origins: frozenset[str] = frozenset()

    def names(self, origin: str) -> bool:
        return origin != ANY and origin in self.origins

    def headers(self, origin: str | None) -> list[tuple[bytes, bytes]]:
        if not self.origins:
            return []
        told = [(b"vary", b"origin")]
        if origin is not None and self._allows(origin):
            told.append((b"access-control-allow-origin", origin.encode("latin-1")))
            told.append((b"access-control-expose-headers", EXPOSED_HEADERS.encode()))
        return told

    def preflight(self, method: str, headers: Headers) -> Response | None:
        origin = headers.get("origin")
        if method != "OPTIONS" or origin is None or "access-control-request-method" not in headers:
            return None
        if not self._allows(origin):
            return error_response(
                403,
                f"origin not allowed: {origin:.80}; add it to `service.allowed_origins`, or start with "
                "`--allow-origin`",
                "forbidden",
            )
        asked = headers.get("access-control-request-headers", "")
        told = {
            "access-control-allow-methods": "GET, HEAD, POST, PATCH, DELETE",
            # Any header: OpenAI's clients add a dozen.
            "access-control-allow-headers": asked if _HEADER_NAMES.fullmatch(asked) else "",
            "access-control-max-age": str(PREFLIGHT_S),
            "vary": "access-control-request-method, access-control-request-headers",
        }
        if "access-control-request-private-network" in headers:
            told["access-control-allow-private-network"] = "true"
        return Response(status_code=204, headers=told)

    def _allows(self, origin: str) -> bool:
        return origin in self.origins or ANY in self.origins
