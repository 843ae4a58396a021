from __future__ import annotations

import pytest
import torch

from hearth.kernels.branch import run_beside
from hearth.system.cuda.driver import CudaDriver
from hearth.system.cuda.graphs import CudaGraphs


def test_both_are_run_once_where_nothing_is_captured() -> None:
    ran: list[str] = []

    run_beside(torch.device("cpu"), lambda: ran.append("main"), lambda: ran.append("branch"))

    assert sorted(ran) == ["branch", "main"]


@pytest.mark.gpu
def test_neither_waits_for_the_other_in_a_graph_and_the_next_waits_for_both() -> None:
    x, y, total = (torch.full((1000,), value, device="cuda") for value in (1.0, 2.0, 0.0))
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        run_beside(x.device, lambda: x.add_(1), lambda: y.mul_(2))
        torch.add(x, y, out=total)

    sources, targets, _ = CudaGraphs(CudaDriver(0)).edges(graph.raw_cuda_graph())
    assert len(set(sources.tolist())) == 2
    assert len(set(targets.tolist())) == 1
    for number in range(1, 4):
        graph.replay()
        assert (total == 1 + number + 2 * 2**number).all()
