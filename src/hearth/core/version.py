"""The version of Hearth, written here once: the package's metadata has it from this file."""

from __future__ import annotations

VERSION = "0.1.0"


def hearth_version() -> str:
    return VERSION
