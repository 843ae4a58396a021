"""Commands and flags of Ollama and vLLM: aliases, and answers in one line."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.core import TyperCommand, TyperGroup

from hearth.cli.commands import whole_app
from hearth.cli.familiar import ALIASES, INSTEAD
from hearth.cli.help import command_of
from tests.cli.fake_service import FakeService
from tests.cli.shell import Hearth


def test_no_command_has_what_is_answered() -> None:
    group = command_of(whole_app())
    assert isinstance(group, TyperGroup)
    flags = _flags_of(group)
    assert "--host-memory" in flags
    assert not {*flags, *group.commands} & {*ALIASES, *INSTEAD}
    for word in INSTEAD:
        command, _, flag = word.partition(" ")
        assert not flag or flag not in _flags_of(group.commands[command])


def _flags_of(command: object) -> set[str]:
    assert isinstance(command, TyperCommand | TyperGroup)
    flags = {flag for parameter in command.params for flag in (*parameter.opts, *parameter.secondary_opts)}
    children = command.commands.values() if isinstance(command, TyperGroup) else ()
    return flags.union(*map(_flags_of, children))


@pytest.mark.parametrize(("alias", "name"), ALIASES.items())
def test_an_alias_is_the_command_that_it_stands_for(hearth: Hearth, alias: str, name: str) -> None:
    words = () if name.startswith("--") else ("--help",)
    shown = hearth(*alias.split(), *words)
    assert (shown.code, shown.out) == (0, hearth(*name.split(), *words).out)


def test_help_of_a_command_is_its_own(hearth: Hearth) -> None:
    assert hearth("help", "ls").out == hearth("list", "--help").out
    assert hearth("help", "keys", "add").out == hearth("keys", "add", "--help").out


@pytest.mark.parametrize("word", INSTEAD)
def test_a_foreign_command_or_flag_is_answered_in_a_line(hearth: Hearth, word: str) -> None:
    command, _, flag = (f"serve {word}" if word.startswith("-") else word).partition(" ")
    shown = hearth(command, "something", f"{flag or '--flag'}=3")
    assert (shown.code, shown.out, shown.err.count("\n")) == (2, "", 1)
    assert shown.err.startswith(f"hearth: there is no `{word}`; ")


def test_all_foreign_flags_are_answered_at_once_also_with_underscores(hearth: Hearth) -> None:
    shown = hearth("serve", "smol", "--max_model_len", "8", "--port", "1", "--tensor-parallel-size=2")
    assert (shown.code, shown.err.count("\n")) == (2, 2)
    assert "`--max-model-len`; use" in shown.err
    assert "`--tensor-parallel-size`; leave" in shown.err


def test_words_after_two_dashes_are_no_flags(hearth: Hearth, data_dir: Path, service: FakeService) -> None:
    assert hearth("run", "--url", service.url, "--", "smol", "--max-model-len").code == 0


def test_a_flag_that_no_tool_has_is_still_refused(hearth: Hearth) -> None:
    shown = hearth("serve", "--max-model-length", "3")
    assert shown.code == 2
    assert "No such option" in shown.err
