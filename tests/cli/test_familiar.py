"""Commands and flags of Ollama and vLLM: aliases, and answers in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from hearth.cli.commands import whole_app
from hearth.cli.familiar import ALIASES, COMMANDS, FLAGS
from hearth.cli.help import command_of, flags_by_command
from tests.cli.fake_service import FakeService
from tests.cli.shell import Hearth

OURS = flags_by_command(command_of(whole_app()))


@pytest.mark.parametrize(("alias", "name"), ALIASES.items())
def test_an_alias_is_the_command_that_it_stands_for(hearth: Hearth, alias: str, name: str) -> None:
    assert alias not in OURS, "a command of its own"
    words = () if name.startswith("--") else ("--help",)
    shown = hearth(alias, *words)
    assert (shown.code, shown.out) == (0, hearth(name, *words).out)


@pytest.mark.parametrize("command", [name for commands in COMMANDS.values() for name in commands])
def test_a_foreign_command_is_answered_in_a_line(hearth: Hearth, command: str) -> None:
    shown = hearth(command, "something", "--flag")
    assert (shown.code, shown.out, shown.err.count("\n")) == (2, "", 1)
    assert shown.err.startswith(f"hearth: `{command}` is a command of ")


@pytest.mark.parametrize("flag", [flag for flags in FLAGS.values() for flag in flags])
def test_a_foreign_flag_is_answered_in_a_line(hearth: Hearth, flag: str) -> None:
    command = next(name for name in ("serve", "run", "create") if flag not in OURS[name])
    shown = hearth(command, "m", f"{flag}=3")
    assert (shown.code, shown.out, shown.err.count("\n")) == (2, "", 1)
    assert shown.err.startswith(f"hearth: `{flag}` is a flag of ")


def test_a_flag_that_a_command_has_is_its_own(hearth: Hearth, data_dir: Path, service: FakeService) -> None:
    assert "--host-memory" in OURS["serve"]
    assert "--file" not in OURS["keys"] or "--file" not in FLAGS["Ollama"]
    assert hearth("run", "smol", "hi", "--max-tokens", "3", "--url", service.url).code == 0


def test_words_after_two_dashes_are_no_flags(hearth: Hearth, data_dir: Path, service: FakeService) -> None:
    assert hearth("run", "--url", service.url, "--", "smol", "--max-model-len").code == 0


def test_a_flag_that_no_tool_has_is_still_refused(hearth: Hearth) -> None:
    shown = hearth("serve", "--max-model-length", "3")
    assert shown.code == 2
    assert "No such option" in shown.err
