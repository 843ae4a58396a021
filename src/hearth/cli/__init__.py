"""The `hearth` command: reads flags, puts the parts together and prints; `commands.py` has all of it."""

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
    except KeyboardInterrupt:  # while modules are imported; what runs by then sees to it by itself
        sys.exit(130)


def _early_template(words: Sequence[str]) -> TemplateProcess | None:
    """Start the template of a service that these words start; it ends with this process, whatever comes."""
    if words[:1] != ["serve"] or {"-h", "--help"} & set(words):
        return None
    try:
        os.fstat(2)
        return start_template(errors=2)
    except OSError:  # the service will try, and tell of it
        return None
