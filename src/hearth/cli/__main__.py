"""`python -m hearth.cli`: the command where it is not installed. Nothing else."""

from hearth.cli import main

main()
