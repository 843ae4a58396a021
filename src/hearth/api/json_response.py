"""A response of JSON, from any value that msgspec knows."""

from __future__ import annotations

import msgspec
from starlette.responses import Response


def as_json(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")
