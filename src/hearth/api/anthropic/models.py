"""Formats deployed models as Anthropic's API does."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime

from starlette.requests import Request

from hearth.control.observe.views import ModelView


def speaks_anthropic(request: Request) -> bool:
    return "anthropic-version" in request.headers


def model_object(name: str, view: ModelView) -> dict[str, object]:
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": datetime.fromtimestamp(int(view.created_at_s), UTC).isoformat().replace("+00:00", "Z"),
        "lifecycle": "active",
        "max_input_tokens": view.max_context,
        "max_tokens": view.max_context,
    }


def model_list(models: Iterable[dict[str, object]]) -> dict[str, object]:
    listed = list(models)
    first, last = (listed[0]["id"], listed[-1]["id"]) if listed else (None, None)
    return {"data": listed, "has_more": False, "first_id": first, "last_id": last}
