"""`python -m hearth`: the command where it is not on the path. Nothing else."""

from hearth.cli import main

main()
