"""The version of the installed Hearth. Reads what the installer has noted and nothing else."""

from __future__ import annotations

from importlib import metadata


def hearth_version() -> str:
    """Return the installed version, or a text that says there is none."""
    try:
        return metadata.version("hearth")
    except metadata.PackageNotFoundError:  # it runs from its sources
        return "(not installed, run from its sources)"
