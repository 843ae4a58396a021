"""Sessions of browsers: a cookie in place of an API key. Checks no key and no page: see `guard.py`.

A session holds no key but its id, so it ends with the key, and with the service. All ports of a machine share
their cookies, so the port is part of the name.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from urllib.parse import urlsplit

from starlette.datastructures import Headers

from hearth.control.requests.caller import OPERATOR, Caller, KeyId

MAX_SESSIONS = 1000
#: Of a key, so that none can end the sessions of others by beginning many.
MAX_SESSIONS_PER_KEY = 100
SESSION_S = 12 * 3600.0


@dataclass(frozen=True, slots=True)
class _BrowserSession:
    key_id: KeyId | None  #: None: the operator's
    ends_s: float


class Sessions:
    """Mutable; used on the event loop alone."""

    def __init__(self, find: Callable[[KeyId], Caller | None]) -> None:
        """`find` returns the owner of a key, if it still exists."""
        self._find = find
        self._sessions: OrderedDict[bytes, _BrowserSession] = OrderedDict()  #: by hash; the oldest first

    def begin(self, caller: Caller, headers: Headers) -> str:
        """Return the header that sets the cookie of a new session."""
        assert caller is OPERATOR or caller.key_id is not None, f"without a key: {caller.name}"
        token = secrets.token_urlsafe(32)
        same_key = [known for known, one in self._sessions.items() if one.key_id == caller.key_id]
        if len(same_key) >= MAX_SESSIONS_PER_KEY:
            del self._sessions[same_key[0]]
        self._sessions[_hash(token)] = _BrowserSession(caller.key_id, time.monotonic() + SESSION_S)
        if len(self._sessions) > MAX_SESSIONS:
            self._sessions.popitem(last=False)
        return _cookie(headers, token, int(SESSION_S))

    def end(self, headers: Headers) -> str:
        """Return the header that removes the cookie."""
        self._sessions.pop(_hash(_token(headers)), None)
        return _cookie(headers, "", 0)

    def caller(self, headers: Headers) -> Caller | None:
        """Return who began the session of a request; None: it has none that lasts. Raises ConfigError."""
        session = self._sessions.get(_hash(_token(headers)))
        if session is None or session.ends_s < time.monotonic():
            return None
        return OPERATOR if session.key_id is None else self._find(session.key_id)


def is_own_page(headers: Headers) -> bool:
    """Whether a page of this service sent a request: browsers tell, and no page can change that."""
    origin = headers.get("origin")
    try:
        return origin is not None and urlsplit(origin).netloc == headers.get("host")
    except ValueError:
        return False


def _token(headers: Headers) -> str:
    try:
        found = SimpleCookie(headers.get("cookie", "")).get(_name(headers))
    except CookieError:
        return ""
    return "" if found is None else found.value


def _name(headers: Headers) -> str:
    _, _, port = headers.get("host", "").rpartition(":")
    return f"hearth_session_{port}" if port.isdecimal() else "hearth_session"


def _cookie(headers: Headers, value: str, max_age_s: int) -> str:
    secure = "; Secure" if headers.get("origin", "").startswith("https:") else ""
    name = _name(headers)
    return f"{name}={value}; Path=/; Max-Age={max_age_s}; HttpOnly; SameSite=Strict{secure}"


def _hash(token: str) -> bytes:
    return hashlib.blake2b(token.encode(errors="replace"), digest_size=32).digest()
