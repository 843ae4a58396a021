from __future__ import annotations

import pytest

from tests.engine.harness import TIES


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Two schedules may part where the reference's two best logits nearly tie; say how often they did."""
    if TIES:
        terminalreporter.write_line(
            f"greedy tokens compared: {TIES['tokens']}, near ties decided the other way: {TIES['ties']}"
        )
