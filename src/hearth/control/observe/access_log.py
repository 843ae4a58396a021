"""The access log: a line per HTTP request, without prompts and answers. Values from clients are escaped."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import msgspec

from hearth.control.observe.exchange_record import ExchangeRecord
from hearth.control.observe.metrics import Metrics

#: A value that stands in a line of text as it is.
_PLAIN = re.compile(r"[A-Za-z0-9_.:+/|@~,{}-]+", re.ASCII)
_MAX_CHARS = 256  #: of a value
_quick_json = msgspec.json.Encoder().encode

Field = str | int | float | bool | None
#: Turns the fields of a request into a line without its end.
LineFormat = Callable[[Mapping[str, Field]], bytes]

log = logging.getLogger(__name__)


class AccessLog:
    """Mutable; used on the event loop alone."""

    def __init__(self, path: Path, line_format: LineFormat, metrics: Metrics) -> None:
        self._path, self._line_format = path, line_format
        self._unwritten = metrics.fallbacks.labels("access_log_unwritten")
        self._fault: str | None = None  #: why the last line is missing; None: it is not
        self._file: int | None = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def write(self, record: ExchangeRecord) -> None:
        """Append a line, into the kernel's memory, which takes microseconds. No-op once closed."""
        if self._file is None:  # an exchange that ends after the service
            return
        line = self._line_format(fields_of(record)) + b"\n"
        if self._fault is not None:  # a part of the last line may be there
            line = b"\n" + line
        try:
            num_written = os.write(self._file, line)
            self._note_fault(None if num_written == len(line) else "the disk is full")
        except OSError as error:
            self._note_fault(str(error))

    @property
    def note(self) -> str | None:
        if self._fault is None:
            return None
        return f"the access log `{self._path}` cannot be written: {self._fault}"

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None  # or a line would go to whatever file has its number next

    def _note_fault(self, fault: str | None) -> None:
        if fault is not None:
            self._unwritten.inc()
            if self._fault is None:  # once, not with every request
                log.error("access_log_unwritten path=%s reason=%s", self._path, fault)
        self._fault = fault


def fields_of(record: ExchangeRecord) -> dict[str, Field]:
    has_requests, sent_trace = bool(record.requests), record.correlation.trace
    return {
        "time": datetime.fromtimestamp(record.began_at_s, UTC).isoformat(timespec="milliseconds"),
        "status": record.status_code,
        "method": record.method,
        "route": record.route or record.path,
        "model": record.model,
        "worker": record.workers,
        "key": record.caller,
        "peer": record.peer,
        "id": record.request_id,
        "client_id": record.correlation.client_id,
        "trace_id": record.trace_id if sent_trace is None else sent_trace.trace_id,
        "prompt_tokens": record.num_prompt_tokens if has_requests else None,
        "cached_tokens": record.num_cached_tokens if has_requests else None,
        "output_tokens": record.num_output_tokens if has_requests else None,
        "queue_s": _rounded(record.queue_s),
        "first_token_s": _rounded(record.first_token_s),
        "total_s": _rounded(record.total_s),
        "received_bytes": record.num_received_bytes,
        "sent_bytes": record.num_sent_bytes,
        "complete": record.is_whole,
    }


def text_line(fields: Mapping[str, Field]) -> bytes:
    time, *rest = fields.items()
    return " ".join([str(time[1]), *(f"{name}={_spelled(value)}" for name, value in rest)]).encode("ascii")


def json_line(fields: Mapping[str, Field]) -> bytes:
    cut = {name: value[:_MAX_CHARS] if isinstance(value, str) else value for name, value in fields.items()}
    try:
        line = _quick_json(cut)
    except UnicodeEncodeError:  # half a character
        return _escaped_json(cut)
    return line if line.isascii() else _escaped_json(cut)


def _escaped_json(fields: Mapping[str, Field]) -> bytes:
    return json.dumps(fields, separators=(",", ":")).encode("ascii")


LINE_FORMATS: dict[Literal["text", "json"], LineFormat] = {"text": text_line, "json": json_line}


def _spelled(value: Field) -> str:
    match value:
        case None:
            return "-"
        case bool():
            return "yes" if value else "no"
        case str():
            short = value[:_MAX_CHARS]
            return short if _PLAIN.fullmatch(short) else json.dumps(short)
        case _:
            return str(value)


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)
