"""Ends a process whose essential part has failed."""

from __future__ import annotations

import logging
import os
import traceback
from typing import NoReturn

log = logging.getLogger(__name__)


def end_process(part: str, error: BaseException) -> NoReturn:
    """Log an error and end the process at once, so that clients see their connections close."""
    log.critical("service_broken part=%s error=%s\n%s", part, type(error).__name__, frames_of(error))
    logging.shutdown()
    os._exit(1)


def frames_of(error: BaseException) -> str:
    """Return the traceback of an error without its message, which may contain user text."""
    return "".join(traceback.format_tb(error.__traceback__))
