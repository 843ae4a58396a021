"""How long a launch takes on the device. Knows no kernel."""

from __future__ import annotations

from collections.abc import Callable

import torch


def microseconds(launches: list[Callable[[], object]]) -> float:
    """Return the median over replays of a graph of all launches of the time per launch."""
    for launch in launches[:2]:
        launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    graph.replay()
    times = []
    for _ in range(7):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(1e3 * begin.elapsed_time(end) / len(launches))
    return sorted(times)[3]
