"""OpenTelemetry spans of attempts, for programs that use OpenTelemetry."""

import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any


def span(task: str, message_id: str, traceparent: str | None) -> AbstractContextManager[Any]:
    """Start a span around an attempt, as a child of the span that published the message. No span in a program that has
    not imported OpenTelemetry."""
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None:
        return nullcontext()
    context = None
    if traceparent is not None:
        _, trace_id, span_id, flags = traceparent.split("-")[:4]
        parent = trace.SpanContext(
            int(trace_id, 16), int(span_id, 16), is_remote=True, trace_flags=trace.TraceFlags(int(flags, 16))
        )
        context = trace.set_span_in_context(trace.NonRecordingSpan(parent))
    attributes = {"messaging.system": "hadelay", "messaging.message.id": message_id}
    found: AbstractContextManager[Any] = trace.get_tracer("hadelay").start_as_current_span(
        f"process {task}", context=context, kind=trace.SpanKind.CONSUMER, attributes=attributes
    )
    return found
