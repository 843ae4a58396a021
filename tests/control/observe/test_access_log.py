"""Lines of the access log: what they say, and what clients cannot make them say."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from hearth.control.observe.access_log import LINE_FORMATS, AccessLog, fields_of, json_line, text_line
from hearth.control.observe.exchange_record import ExchangeRecord
from hearth.control.observe.metrics import Metrics
from hearth.control.observe.timeline import Timeline
from hearth.control.requests.caller import ANYBODY
from hearth.control.requests.correlation import Correlation, TraceParent
from hearth.core.types import RequestId, WorkerId
from hearth.policy.fleet.events import Why

#: What somebody may send to look like another line, another field, or to a terminal.
HOSTILE = ["/a\nstatus=200", '/a" status=200', "/a b", "/\x1b[2J", "/\u2028x", "/\u202etxt", "/\udc80", ""]


def answered(*, choices: int = 1) -> ExchangeRecord:
    """A request that came at 10 s, whose choices were placed at 10.5 s and said two tokens each."""
    record = ExchangeRecord(
        "POST", "/v1/completions", Correlation("order-17"), "10.0.0.7", began_s=10.0, began_at_s=1.0
    )
    record.caller, record.route, record.status, record.is_whole = "ann", "/v1/completions", 200, True
    record.request_id, record.num_received_bytes, record.num_sent_bytes = "r0", 49, 700
    for number in range(choices):
        timeline = Timeline(RequestId(f"r{number}"), "tiny", 10.25, 1.25, 7, ANYBODY.group)
        timeline.placed(10.5, WorkerId("w0"), Why.RESIDENT, (), None)
        timeline.started(10.5, 4, 0.0)
        timeline.token(11.0 + number)
        timeline.token(12.0 + number)
        timeline.ended(12.0 + number, "stop")
        record.started(timeline, counts_prompt=number == 0)
    record.ended_s = 13.0
    return record


def test_a_line_tells_who_asked_for_what_and_what_came_of_it_and_when() -> None:
    assert text_line(fields_of(answered())).decode() == (
        "1970-01-01T00:00:01.000+00:00 status=200 method=POST route=/v1/completions model=tiny worker=w0 "
        "key=ann peer=10.0.0.7 id=r0 client_id=order-17 trace_id=- prompt_tokens=7 cached_tokens=4 "
        "output_tokens=2 queue_s=0.25 first_token_s=1.0 total_s=3.0 received_bytes=49 sent_bytes=700 "
        "complete=yes"
    )


def test_json_has_the_same_fields() -> None:
    fields = fields_of(answered())
    assert json.loads(json_line(fields)) == fields
    assert (fields["queue_s"], fields["trace_id"], fields["complete"]) == (0.25, None, True)


def test_the_trace_of_the_client_is_named_also_where_nothing_is_recorded() -> None:
    trace = TraceParent("4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7", is_sampled=False)
    record = ExchangeRecord("GET", "/v1/models", Correlation(trace=trace))
    assert fields_of(record)["trace_id"] == trace.trace_id
    record = ExchangeRecord("GET", "/v1/models", trace_id="0123")
    assert fields_of(record)["trace_id"] == "0123"


def test_a_prompt_counts_once_however_many_answers_it_has() -> None:
    fields = fields_of(answered(choices=3))
    assert (fields["prompt_tokens"], fields["cached_tokens"], fields["output_tokens"]) == (7, 4, 6)
    assert fields["first_token_s"] == 1.0


def test_of_a_client_that_left_the_line_says_499_and_that_nothing_was_complete() -> None:
    fields = fields_of(ExchangeRecord("GET", "/v1/models"))
    assert (fields["status"], fields["complete"], fields["prompt_tokens"]) == (499, False, None)


@pytest.mark.parametrize("sent", [*HOSTILE, "x" * 5000])
def test_nobody_writes_a_line_or_a_field_of_his_own(sent: str) -> None:
    record = answered()
    record.path, record.route, record.model, record.caller, record.method = sent, None, sent, sent, sent
    fields = fields_of(record)
    text, coded = text_line(fields).decode("ascii"), json_line(fields).decode("ascii")

    for line in (text, coded):
        assert line.isprintable(), "no control character, and one line"
        assert len(line) < 8000
    names = [word.partition("=")[0] for word in shlex.split(text)[1:]]
    assert names == list(fields)[1:]
    assert json.loads(coded)["model"] == sent[:256]


@pytest.mark.parametrize("name", LINE_FORMATS)
def test_each_request_is_one_line_of_a_private_file(name: str, tmp_path: Path) -> None:
    path = tmp_path / "access.log"
    access_log = AccessLog(path, LINE_FORMATS[name], Metrics())  # type: ignore[index] # it is one of them
    for _ in range(2):
        access_log.write(answered())
    access_log.close()
    access_log.write(answered())  # too late

    assert len(path.read_text().splitlines()) == 2
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_file_that_takes_no_more_is_logged_once_counted_and_noted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    metrics = Metrics()
    access_log = AccessLog(Path("/dev/full"), text_line, metrics)
    for _ in range(3):
        access_log.write(answered())
    access_log.close()

    assert caplog.text.count("access_log_unwritten") == 1
    label = {"what": "access_log_unwritten"}
    assert metrics.registry.get_sample_value("hearth_fallbacks_total", label) == 3
    assert "No space left" in (access_log.note or "")


def test_after_a_line_that_was_cut_the_next_one_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / "access.log"
    access_log = AccessLog(path, text_line, Metrics())
    access_log._note_fault("the disk is full")
    path.write_bytes(b"half a li")
    access_log.write(answered())
    access_log.close()

    assert [line[:10] for line in path.read_text().splitlines()] == ["half a li", "1970-01-01"]
    assert access_log.note is None
