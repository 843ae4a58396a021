"""The `hearth` command; see `commands.py`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from hearth.node.template_process import TemplateProcess, start_template


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command. Exit codes: 0 done, 1 failed, 2 wrong input, 3 not there, 130 interrupted."""
    template = _early_template(sys.argv[1:]) if argv is None else None
    try:
        from hearth.cli.commands import run_command  # only now: it takes a second

        run_command(argv, template)
    except KeyboardInterrupt:  # during imports; commands handle it themselves
        sys.exit(130)


def _early_template(words: Sequence[str]) -> TemplateProcess | None:
    """Start the process that workers are forked from, if this command runs any: its imports take long."""
    if words[:1] not in (["serve"], ["join"]) or {"-h", "--help"} & set(words):
        return None
    try:
        os.fstat(2)
        return start_template(errors=2)
    except OSError:  # the service tries again, and logs why it fails
        return None
