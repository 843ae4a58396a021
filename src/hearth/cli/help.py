"""Formats Typer's help: paragraphs fill the width, and flags without a value show no type."""

from __future__ import annotations

import inspect
import re
from functools import cache

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption
from typer.main import get_command

HELP_FLAGS = ["-h", "--help"]


@cache
def command_of(app: typer.Typer) -> TyperCommand | TyperGroup:
    command = get_command(app)
    assert isinstance(command, TyperCommand | TyperGroup), f"Typer made another: {type(command)}"
    _tidy(command)
    return command


def _tidy(command: TyperCommand | TyperGroup) -> None:
    command.help = _filled(command.help or "")
    context = typer.Context(command, help_option_names=HELP_FLAGS)
    for parameter in command.get_params(context):
        if isinstance(parameter, TyperOption) and parameter.is_flag and parameter.metavar is None:
            parameter.metavar = ""
    for child in command.commands.values() if isinstance(command, TyperGroup) else ():
        assert isinstance(child, TyperCommand | TyperGroup), f"Typer made another: {type(child)}"
        _tidy(child)


def _filled(text: str) -> str:
    return re.sub(r"(?<=\S)\n(?=\S)", " ", inspect.cleandoc(text))
