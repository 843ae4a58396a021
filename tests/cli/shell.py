"""Calls the command's entry point as a shell would. Asserts only that it ends with an exit code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from hearth import cli

#: Returns what the shell offers at the end of a line, for a data directory.
Completed = Callable[[str, Path], list[str]]


@dataclass(frozen=True, slots=True)
class Outcome:
    code: int
    out: str
    err: str


class Hearth:
    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *argv: str) -> Outcome:
        with pytest.raises(SystemExit) as caught:
            cli.main(argv)
        captured = self._capsys.readouterr()
        assert isinstance(caught.value.code, int)
        return Outcome(caught.value.code, captured.out, captured.err)


def variables_of_bash(line: str, data_dir: Path) -> dict[str, str]:
    """Return the variables by which bash asks for what can follow a line."""
    return {
        "HEARTH_DATA_DIR": str(data_dir),
        "_HEARTH_COMPLETE": "complete_bash",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(line.split(" ")) - 1),
    }
