"""The names of graphs in snapshots, such as `decode-8` and `mixed-adapters-512` (`GraphKey.name`)."""

from __future__ import annotations

from collections.abc import Iterable

from hearth.core.errors import GraphUnreadable

#: Sections that hold graphs begin with this; the rest is the graph's name.
GRAPH_PREFIX = "graph/"


def graph_names(sections: Iterable[str]) -> list[str]:
    return [name.removeprefix(GRAPH_PREFIX) for name in sections if name.startswith(GRAPH_PREFIX)]


def is_for_adapters(name: str) -> bool:
    return kind_of(name).endswith("-adapters")


def kind_of(name: str) -> str:
    kind, _, _ = name.rpartition("-")
    return kind


def num_rows_of(name: str) -> int:
    _, _, rows = name.rpartition("-")
    if not rows.isdecimal():
        raise GraphUnreadable(f"the graph `{name}` has no number of rows in its name: it is damaged")
    return int(rows)
