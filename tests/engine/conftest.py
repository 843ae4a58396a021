from __future__ import annotations

import pytest


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Two schedules may part where the reference's two best logits nearly tie; say how often they did."""
    # Not at the top: this file may be read before it is settled whether Triton's interpreter is to be used.
    from tests.engine.harness import TIES

    if TIES:
        terminalreporter.write_line(
            f"greedy tokens compared: {TIES['tokens']}, near ties decided the other way: {TIES['ties']}"
        )
