"""The Grafana dashboard of the tree, as far as tests look into it."""

from __future__ import annotations

import json
import re
from pathlib import Path

DASHBOARD = Path(__file__).parents[1] / "deploy" / "grafana" / "hearth.json"
#: What Grafana puts in the places of its variables.
VARIABLES = {"$__rate_interval": "1m", "$model": ".*"}


def queries() -> dict[str, list[str]]:
    """The queries of each panel, by its title, as Grafana would send them."""
    panels = [panel for panel in json.loads(DASHBOARD.read_text())["panels"] if panel["type"] != "row"]
    assert len({panel["title"] for panel in panels}) == len(panels)
    return {panel["title"]: [_filled(one["expr"]) for one in panel["targets"]] for panel in panels}


def metrics_in(query: str) -> dict[str, set[str]]:
    """The metrics that a query names, each with the labels that it is matched by or grouped by."""
    grouped = {name for found in re.findall(r"\bby \(([^)]*)\)", query) for name in found.split(", ")}
    named = re.finditer(r"\b((?:hearth|process)_\w+)(?:\{([^}]*)\})?", query)
    return {found[1]: grouped | set(re.findall(r"(\w+)\s*[=!]~?", found[2] or "")) for found in named}


def _filled(query: str) -> str:
    for name, value in VARIABLES.items():
        query = query.replace(name, value)
    assert "$" not in query, query
    return query
