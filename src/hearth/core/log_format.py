"""The lines of the service's log, as text or as JSON objects. Writes none: see `node/process_log.py`."""

from __future__ import annotations

import logging
import re
from datetime import datetime
from typing import Literal

import msgspec

LogFormat = Literal["text", "json"]
LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s %(message)s"

#: A line of LOG_FORMAT; processes other than the gateway have their names before the logger.
_LINE = re.compile(
    r"(?P<time>\d{4}-\S+ \S+) (?P<level>[A-Z]+) (?:(?P<process>\S+) (?=hearth))?(?P<logger>[\w.]+) "
    r"(?P<text>(?P<event>[\w.]+).*)"
)
#: A value ends before the next name, as it may have spaces.
_FIELD = re.compile(r"(\w+)=(?:`([^`]*)`|(.*?))(?=\s\w+=|$)")


class JsonFormatter(logging.Formatter):
    """Writes an object per line of text, also of a traceback."""

    def __init__(self) -> None:
        super().__init__(LOG_FORMAT)

    def format(self, record: logging.LogRecord) -> str:
        return "\n".join(json_line(line) for line in super().format(record).splitlines())


def formatter_of(log_format: LogFormat) -> logging.Formatter:
    return JsonFormatter() if log_format == "json" else logging.Formatter(LOG_FORMAT)


def json_line(line: str) -> str:
    """Return a line as an object: with time, level, event and fields, or text alone if it is no log line.

    An object stays as it is, as in the access log.
    """
    if line.startswith("{"):
        return line
    if (match := _LINE.fullmatch(line)) is None:
        return msgspec.json.encode({"text": line}).decode()
    try:
        time = datetime.fromisoformat(match["time"]).astimezone().isoformat(timespec="milliseconds")
    except (ValueError, OverflowError):  # a line of another program that resembles one of ours
        return msgspec.json.encode({"text": line}).decode()
    fields = {name: quoted or plain for name, quoted, plain in _FIELD.findall(match["text"])}
    found = {name: text for name, text in match.groupdict().items() if text is not None}
    return msgspec.json.encode({**found, "time": time, "fields": fields}).decode()
