"""Calls the command's entry point as a shell would. Asserts only that it ends with an exit code."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from hearth import cli


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
