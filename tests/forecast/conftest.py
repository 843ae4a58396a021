"""Networks are trained for a moment only."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hearth.forecast import network


@pytest.fixture(autouse=True, scope="session")
def little_training() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(network, "NUM_ROUNDS", 3)
        yield
