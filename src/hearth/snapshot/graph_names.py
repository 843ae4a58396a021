"""The names of graphs in snapshots, as far as whoever reads them has to understand them. Reads no graph.

A name says which part of a step a graph is, whether for steps with adapters, and for how many rows, as in
`decode-8` and `mixed-adapters-512` (`GraphKey.name`).
"""

from __future__ import annotations

from collections.abc import Iterable

from hearth.core.errors import GraphUnreadable

#: Sections that hold graphs begin with this; the rest is the graph's name.
GRAPH_PREFIX = "graph/"


def graph_names(sections: Iterable[str]) -> list[str]:
    """Return the names of graphs that are among the sections of a snapshot."""
    return [name.removeprefix(GRAPH_PREFIX) for name in sections if name.startswith(GRAPH_PREFIX)]


def is_for_adapters(name: str) -> bool:
    """True if a graph is one of steps with adapters."""
    return kind_of(name).endswith("-adapters")


def kind_of(name: str) -> str:
    """Return all of a name but the number of rows."""
    kind, _, _ = name.rpartition("-")
    return kind


def num_rows_of(name: str) -> int:
    """Return the number of rows in the name of a graph. Raises GraphUnreadable."""
    _, _, rows = name.rpartition("-")
    if not rows.isdecimal():
        raise GraphUnreadable(f"the graph `{name}` has no number of rows in its name: it is damaged")
    return int(rows)
