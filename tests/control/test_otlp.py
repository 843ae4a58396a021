"""Spans as bytes, read by the protobuf classes of OpenTelemetry and compared with what its SDK writes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("opentelemetry.sdk", reason="the extra `otel` is not installed")

from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, SpanProcessor
from opentelemetry.trace import SpanContext

from hearth.control.otlp import AttributeValue, FinishedSpan, OtlpEnvelope, SpanEvent, span_field
from hearth.control.span_export import SdkQueue, within

texts = st.text(max_size=12) | st.text(min_size=120, max_size=140)
numbers = st.integers(-(1 << 63), (1 << 63) - 1) | st.sampled_from([0, 1, 127, 128, 16_383, 16_384])
plain = texts | st.booleans() | numbers | st.floats(allow_nan=False)
#: As the SDK keeps them, without regard to its limits.
common_values = plain | st.lists(texts, max_size=3) | st.lists(numbers, max_size=3)
values: st.SearchStrategy[AttributeValue] = st.recursive(
    plain | st.binary(max_size=140) | st.none(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=4,
)
times_ns = st.integers(0, (1 << 64) - 1)
span_ids = st.integers(1, (1 << 64) - 1)
#: A state of a trace as W3C allows it.
states = st.sampled_from(["", "a=1", "vendor=x,other@name=y"])


def spans(of_values: st.SearchStrategy[AttributeValue]) -> st.SearchStrategy[FinishedSpan]:
    def attributes(max_size: int) -> st.SearchStrategy[dict[str, AttributeValue]]:
        return st.dictionaries(texts.filter(bool), of_values, max_size=max_size)

    return st.builds(
        FinishedSpan,
        name=texts,
        trace_id=st.integers(1, (1 << 128) - 1),
        span_id=span_ids,
        parent_id=st.none() | span_ids,
        begin_ns=times_ns,
        end_ns=times_ns,
        attributes=attributes(5),
        events=st.lists(st.builds(SpanEvent, texts, times_ns, attributes(2), st.just(0)), max_size=4),
        error=st.none() | texts,
        is_server=st.booleans(),
        is_parent_remote=st.booleans(),
        trace_state=states,
        num_dropped_attributes=st.just(0),
        num_dropped_events=st.just(0),
    ).map(lambda span: span if span.parent_id else span._replace(is_parent_remote=False))


def unlimited() -> SpanLimits:
    limits = SpanLimits()
    limits.max_attribute_length = limits.max_span_attribute_length = None
    return limits


def by_the_sdk(span: FinishedSpan, limits: SpanLimits) -> ExportTraceServiceRequest:
    resource = Resource({"service.name": "hearth"}, "https://a.schema")
    return encode_spans([SdkQueue(resource, SpanProcessor(), limits).readable(span)])


def by_us(*written: FinishedSpan, like: ExportTraceServiceRequest) -> ExportTraceServiceRequest:
    (in_resource,) = ExportTraceServiceRequest.FromString(like.SerializeToString()).resource_spans
    (in_scope,) = in_resource.scope_spans
    del in_resource.scope_spans[:], in_scope.spans[:]
    envelope = OtlpEnvelope(in_resource.SerializeToString(), in_scope.SerializeToString())
    return ExportTraceServiceRequest.FromString(envelope.around([span_field(span) for span in written]))


@given(spans(common_values))
def test_a_span_is_what_the_sdk_makes_of_it(span: FinishedSpan) -> None:
    expected = by_the_sdk(span, unlimited())
    assert by_us(span, like=expected) == expected


@given(spans(values), st.lists(spans(common_values), max_size=2))
def test_values_of_all_kinds_are_what_the_sdk_makes_of_them(
    span: FinishedSpan, more: list[FinishedSpan]
) -> None:
    """Encoded as they are: before, the SDK would make text of bytes."""
    context = SpanContext(span.trace_id, span.span_id, is_remote=False)
    readable = ReadableSpan("", context, attributes=span.attributes)
    (in_resource,) = encode_spans([readable]).resource_spans
    expected = in_resource.scope_spans[0].spans[0].attributes
    ours = by_us(span, *more, like=by_the_sdk(span, unlimited())).resource_spans[0].scope_spans[0].spans
    assert len(ours) == 1 + len(more)
    assert list(ours[0].attributes) == list(expected)


small = st.none() | st.integers(0, 3)


@given(spans(common_values), small, small, small, small, small)
def test_limits_cut_what_the_sdk_would_cut(
    span: FinishedSpan,
    max_events: int | None,
    max_attributes: int | None,
    max_event_attributes: int | None,
    max_chars: int | None,
    max_span_chars: int | None,
) -> None:
    limits = SpanLimits()
    limits.max_events, limits.max_span_attributes = max_events, max_attributes
    limits.max_event_attributes, limits.max_attribute_length = max_event_attributes, max_chars
    limits.max_span_attribute_length = max_span_chars
    expected = by_the_sdk(span, limits)
    assert by_us(within(span, limits), like=expected) == expected


def test_half_a_surrogate_pair_and_an_integer_of_65_bits_spoil_no_batch() -> None:
    span = FinishedSpan("a\ud800b", 1, 2, None, 3, 4, {"text": "\udfff", "number": 1 << 64})
    expected = by_the_sdk(span._replace(name="", attributes={}), unlimited())
    (written,) = by_us(span, like=expected).resource_spans[0].scope_spans[0].spans
    assert written.name == "a?b"
    assert [one.value.string_value for one in written.attributes] == ["?", str(1 << 64)]


def test_truth_is_no_number() -> None:
    values: dict[str, AttributeValue] = {"true": True, "one": 1, "float": 1.0, "false": False, "zero": 0}
    for value in values.values():
        span = FinishedSpan("", 1, 2, None, 3, 4, {"same key": value})
        expected = by_the_sdk(span, unlimited())
        assert by_us(span, like=expected) == expected
