from __future__ import annotations

import pytest

from hearth.control.requests.correlation import Correlation, TraceParent

TRACE_ID, SPAN_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.mark.parametrize(
    ("text", "is_sampled"),
    [
        (f"00-{TRACE_ID}-{SPAN_ID}-01", True),
        (f"00-{TRACE_ID}-{SPAN_ID}-00", False),
        (f"00-{TRACE_ID}-{SPAN_ID}-03", True),
        (f"01-{TRACE_ID}-{SPAN_ID}-01", True),
        (f"fe-{TRACE_ID}-{SPAN_ID}-01-what-comes-later", True),
    ],
)
def test_a_trace_is_read_as_w3c_writes_it(text: str, is_sampled: bool) -> None:
    trace = TraceParent.parse(text)
    assert trace == TraceParent(TRACE_ID, SPAN_ID, is_sampled)
    assert str(trace) == f"00-{TRACE_ID}-{SPAN_ID}-0{is_sampled:d}"


@pytest.mark.parametrize(
    "text",
    [
        "",
        f"00-{TRACE_ID}-{SPAN_ID}",
        f"00-{TRACE_ID}-{SPAN_ID}-01-more",
        f"00-{TRACE_ID}-{SPAN_ID}-01\n",
        f"ff-{TRACE_ID}-{SPAN_ID}-01",
        f"00-{TRACE_ID.upper()}-{SPAN_ID}-01",
        f"00-{'0' * 32}-{SPAN_ID}-01",
        f"00-{TRACE_ID}-{'0' * 16}-01",
        f"00-{TRACE_ID[1:]}-{SPAN_ID}-01",
        f"fe-{TRACE_ID}-{SPAN_ID}-01more",
    ],
)
def test_anything_else_is_no_trace(text: str) -> None:
    assert TraceParent.parse(text) is None


@pytest.mark.parametrize(
    "client_id",
    ["a", "550e8400-e29b-41d4-a716-446655440000", "Root=1-67891233-abcdef", "|guid.1_", "a/b+c==", "x" * 128],
)
def test_a_clients_id_is_taken_as_it_is(client_id: str) -> None:
    assert Correlation.read([client_id], []).client_id == client_id


@pytest.mark.parametrize(
    "client_ids", [[], [""], ["a b"], ["caf\u00e9"], ["a\nb"], ["a,b"], ["x" * 129], ["a", "a"]]
)
def test_an_id_that_is_none_counts_as_not_there(client_ids: list[str]) -> None:
    assert Correlation.read(client_ids, []).client_id is None


def test_a_trace_that_is_there_twice_counts_as_not_there() -> None:
    text = f"00-{TRACE_ID}-{SPAN_ID}-01"
    assert Correlation.read([], [text]).log_fields == f" traceparent={text}"
    assert Correlation.read([], [text, text]).log_fields == ""
