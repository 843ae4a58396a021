from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.fixture(scope="session", autouse=True)
def _quick_interpreter(quick_interpreter: None) -> None:
    """Run all kernels here by it."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Triton's interpreter computes with numpy, which warns where a device silently rounds to infinity."""
    for item in items:
        if item.path.parent == HERE:
            item.add_marker(
                pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
            )
