"""Runs the `hearth` command with a gateway that digests no prompt: python -m bench.unaware serve ..."""

from __future__ import annotations

from hearth.cli import main
from hearth.policy.fleet import prefixes

prefixes.LENGTHS = ()

if __name__ == "__main__":
    main()
