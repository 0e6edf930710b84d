"""The receivers of docs/howto/webhooks.md, each under its framework's server, get real calls of a real node."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hadelay.testing import LocalNode
from tests.frameworks.servers import Server, examples, serving

SECRET, NEW, OTHER = ("whsec_" + letter * 32 for letter in "abc")
#: The project around the page's view, in the same file.
DJANGO = """
from django.conf import settings
from django.core.management import execute_from_command_line
from django.urls import path
settings.configure(DEBUG=True, ROOT_URLCONF=__name__, SECRET_KEY="x", ALLOWED_HOSTS=["127.0.0.1"], MIDDLEWARE=[
    "django.middleware.common.CommonMiddleware", "django.middleware.csrf.CsrfViewMiddleware"])
urlpatterns = [path("invoices", invoices)]
if __name__ == "__main__":
    execute_from_command_line()
"""
#: How each framework is started, in a directory with receiver.py.
SERVERS = {
    "Flask": "-m flask --app receiver run --port {port}",
    "FastAPI": "-m uvicorn receiver:app --port {port}",
    "Django": "receiver.py runserver --noreload 127.0.0.1:{port}",
}


@pytest.fixture(scope="module")
def receivers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Server]]:
    """All of them, started side by side."""
    found, texts = {}, dict(examples("webhooks.md"))
    for framework, words in SERVERS.items():
        directory = tmp_path_factory.mktemp(framework)
        (directory / "receiver.py").write_text(texts[framework] + (DJANGO if framework == "Django" else ""))
        found[framework] = Server(directory, words, WEBHOOK_SECRET=SECRET)
    with serving(found):
        yield found


@pytest.fixture(scope="module")
def node() -> Iterator[LocalNode]:
    with LocalNode() as running:
        yield running


@pytest.mark.processes
@pytest.mark.parametrize("framework", SERVERS)
def test_genuine_calls_are_taken_and_others_refused(
    framework: str, receivers: dict[str, Server], node: LocalNode
) -> None:
    receiver, topic = receivers[framework], framework.lower()
    url = receiver.url + "/invoices"
    node.client.put_topic(topic, webhook={"url": url, "secret": SECRET})
    put = node.client.put(topic, {"invoice": 4711})
    receiver.until("invoice 4711\n")
    assert node.client.wait_for(put.id, timeout=10).state == "acked"

    # Both signatures come while the secret changes; the receiver still knows the old one.
    node.client.put_topic(topic, webhook={"url": url, "secrets": [NEW, SECRET]})
    node.client.put(topic, {"invoice": 4712})
    receiver.until("invoice 4712\n")

    node.client.put_topic(topic, webhook={"url": url, "secret": OTHER}, max_attempts=1)
    refused = node.client.wait_for(node.client.put(topic, {"invoice": 4713}).id, timeout=10)
    assert refused.state == "dead"
    assert [event.reason for event in refused.history if event.reason] == ["HTTP 401"]
    assert "invoice 4713" not in receiver.log
