"""A node with tokens and one without, and a browser without scripts: cookies, forms, redirects."""

from __future__ import annotations

import hashlib
import html
import http.client
import os
import re
import time
import urllib.parse
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.cookies import SimpleCookie
from pathlib import Path
from typing import Any

import pytest

from tests.server.test_maintenance import archive_hour
from tests.system.cluster import Answer, Cluster, ask

_HERE = Path(__file__).parent
BOOTSTRAP = "hadelay_" + "b" * 43
#: The archive of the shared node lists this hour, 60 hours ahead: no archived hour of a new node has files otherwise.
ARCHIVED = int(time.time()) // 3600 + 60
TOKENS = ("security.tokens=true", f"security.bootstrap_token_hash={hashlib.sha256(BOOTSTRAP.encode()).hexdigest()}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(_HERE):
            item.add_marker(pytest.mark.processes)
            item.add_marker(pytest.mark.timeout(900 if "HADELAY_SCREENSHOTS" in os.environ else 120))


@dataclass
class Browser:
    """One session of a browser at one node; it follows redirects and remembers the page that it is on."""

    url: str
    cookies: dict[str, str] = field(default_factory=dict)
    page: str = ""
    #: Path of the present page, which forms name as the page that they come from.
    at: str = ""
    answer: Answer = field(default_factory=lambda: Answer(0, {}, b""))
    #: Set-Cookie headers of the last answers, in full.
    baked: list[str] = field(default_factory=list)

    def ask(self, method: str, path: str, body: bytes | None = None, **headers: str) -> Answer:
        address = urllib.parse.urlsplit(self.url)
        connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=20)
        head = {"Accept": "text/html", "Cookie": "; ".join(f"{k}={v}" for k, v in self.cookies.items())}
        head |= {name.replace("_", "-"): value for name, value in headers.items()}
        try:
            connection.request(method, path, body, {name: value for name, value in head.items() if value})
            answer = connection.getresponse()
            for text in answer.headers.get_all("Set-Cookie") or ():
                self.baked.append(text)
                for name, morsel in SimpleCookie(text).items():
                    self.cookies[name] = morsel.value
                    if morsel["max-age"] == "0":
                        del self.cookies[name]
            return Answer(answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read())
        finally:
            connection.close()

    def go(self, path: str, **headers: str) -> str:
        """Text of the page at `path`, after redirects."""
        self.at = path
        return self._land(self.ask("GET", path, **headers))

    def send(self, path: str, csrf: str | None = None, **fields: Any) -> str:
        """Send a form with the CSRF token of the present page; the page that follows."""
        return self._land(self.post(path, csrf, **fields))

    def post(self, path: str, csrf: str | None = None, **fields: Any) -> Answer:
        token = self.token() if csrf is None else csrf
        data = urllib.parse.urlencode({"csrf": token, **fields}, doseq=True).encode()
        referer = f"{self.url}{self.at}" if self.at else ""
        return self.ask("POST", path, data, Content_Type="application/x-www-form-urlencoded", Referer=referer)

    def refused(self, path: str, **fields: Any) -> tuple[int, str, str]:
        """Send a form as console.js does, which is refused: (status, field, problem in words)."""
        data = urllib.parse.urlencode({"csrf": self.token(), **fields}, doseq=True).encode()
        kind = "application/x-www-form-urlencoded"
        answer = self.ask("POST", path, data, Content_Type=kind, Accept="application/json")
        assert answer.status >= 400, answer
        return answer.status, answer.json["field"], answer.json["words"]

    @property
    def problem(self) -> str:
        """Problem of the form that was sent last, as the page after the redirect shows it; "" without one."""
        found = re.search(r'<p class="notice bad" role="alert">([^<]*)', self.page)
        return html.unescape(found[1]) if found else ""

    def token(self) -> str:
        found = re.search(r'name="csrf" value="([^"]+)"', self.page)
        return found[1] if found else ""

    def _land(self, answer: Answer) -> str:
        for _ in range(5):
            if answer.status != 303:
                break
            self.at = urllib.parse.urljoin(self.at or "/", answer.headers["location"]).partition("#")[0]
            answer = self.ask("GET", self.at)
        self.answer, self.page = answer, answer.body.decode()
        return self.page

    @property
    def text(self) -> str:
        """Words of the page, without tags."""
        main = self.page.partition("<main")[2] or self.page
        return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", "<" + main)).split())


@pytest.fixture(scope="session", autouse=True)
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One node without tokens, shared by all tests here. The first test starts it, whichever that is."""
    archive = tmp_path_factory.mktemp("archive")
    archive_hour(archive, ARCHIVED)
    with Cluster(tmp_path_factory.mktemp("open"), nodes=1, settings=(f"retention.archive={archive}",)) as running:
        # A topic that was looked at has a chart after two samples, 10 s apart: other tests run meanwhile.
        running.publish("n1", "charted", b"x", "?delay=1h")
        Browser(running.urls["n1"]).go("/console/topics/charted")
        yield running


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Three nodes without tokens, members all the time."""
    with Cluster(tmp_path_factory.mktemp("three")) as running:
        yield running


@pytest.fixture(scope="session")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One node that requires tokens."""
    with Cluster(tmp_path_factory.mktemp("guarded"), nodes=1, settings=TOKENS) as running:
        yield running


@pytest.fixture(scope="session")
def admin_token(guarded: Cluster) -> str:
    return make_token(guarded, BOOTSTRAP, "admin")


def make_token(cluster: Cluster, by: str, *scopes: str, name: str = "") -> str:
    body = {"name": name or scopes[0].replace(":", "-"), "scopes": list(scopes)}
    answer = ask(cluster.urls["n1"], "POST", "/v1/tokens", body, {"Authorization": f"Bearer {by}"})
    assert answer.status == 201, answer
    return str(answer.json["token"])


@pytest.fixture
def browser(node: Cluster) -> Browser:
    return Browser(node.urls["n1"])


def signed_in(cluster: Cluster, token: str) -> Browser:
    found = Browser(cluster.urls["n1"])
    found.go("/console/")
    found.send("/console/sign-in", token=token)
    return found
