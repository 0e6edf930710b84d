"""OpenTelemetry's own SDK: a publish in a span, and the attempt as its child."""

import subprocess
import sys

import pytest

pytest.importorskip("opentelemetry.sdk", reason="requirements-frameworks.lock is not installed")

PROGRAM = """
import asyncio
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from hadelay.client import AsyncClient
from hadelay.tasks import App
from hadelay.tasks.cpu import CpuPool
from hadelay.tasks.runner import Runner
from hadelay.testing import LocalNode

spans = InMemorySpanExporter()
provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(spans))
trace.set_tracer_provider(provider)


async def main(url):
    app = App(url)
    tracer = trace.get_tracer("shop")

    @app.task(max_attempts=1)
    async def remind(order: int) -> None:
        with tracer.start_as_current_span("mail"):
            assert order == 1, "no such order"

    with tracer.start_as_current_span("order"):
        await remind.put(1)
        await remind.put(2)
    await remind.put(1)
    async with AsyncClient(url) as client:
        consumer = client.consume(["tasks"], concurrency=1)
        left = [1, 2, 3]
        runner = Runner(app, client, CpuPool("shop:app"), lambda report: left.pop() and left or consumer.stop())
        await consumer.work(runner)
        runner.close()
    app.client.close()


with LocalNode() as node:
    asyncio.run(main(node.url))
found = {span.context.span_id: span for span in spans.get_finished_spans()}
for span in found.values():
    parent = span.parent and found[span.parent.span_id]
    kind = parent.name if parent else None
    same = parent is None or parent.context.trace_id == span.context.trace_id
    print("SPAN", span.name, kind, span.kind.name, span.status.status_code.name, same)
"""


def test_attempts_are_children_of_the_publish() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert sorted(line[5:] for line in done.stdout.splitlines() if line.startswith("SPAN")) == [
        "mail process __main__.main.<locals>.remind INTERNAL ERROR True",
        "mail process __main__.main.<locals>.remind INTERNAL UNSET True",
        "mail process __main__.main.<locals>.remind INTERNAL UNSET True",
        "order None INTERNAL UNSET True",
        "process __main__.main.<locals>.remind None CONSUMER UNSET True",
        "process __main__.main.<locals>.remind order CONSUMER ERROR True",
        "process __main__.main.<locals>.remind order CONSUMER UNSET True",
    ]
