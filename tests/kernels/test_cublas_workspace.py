"""Steps are captured only with a torch that lets them keep their memory."""

from __future__ import annotations

import pytest

from hearth.kernels.cublas_workspace import capture_obstacle


@pytest.mark.parametrize("version", ["2.11.0", "2.11.0+cu130", "2.11.1"])
def test_steps_are_captured_where_torch_keeps_the_memory_of_cublas(version: str) -> None:
    assert capture_obstacle(version) is None


@pytest.mark.parametrize("version", ["2.12.0", "2.13.0+cpu", "2.13.0a0+git1234"])
def test_steps_are_not_captured_where_it_goes_with_any_graph(version: str) -> None:
    assert f"torch {version} frees memory that captured steps use" in (capture_obstacle(version) or "")
