"""What the pages show is run: `console` blocks against a cluster, `python` blocks as programs, `toml` as configuration.

A console block's lines after a command are what it prints, in order; `…` stands for anything. `sh` blocks are what a
newcomer types to set things up: their make targets have to exist, their hadelay commands have to parse.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from hadelay.cli.app import COMMANDS
from hadelay.settings.load import load
from tests.cli.support import Dev, cluster, environment
from tools import website

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), ROOT / "bench/README.md", *ROOT.glob("docs/**/*.md")])
#: Their console blocks need clusters of their own: test_operations.py, test_shards_page.py.
OPERATIONS = {ROOT / f"docs/howto/{page}.md" for page in ("disaster-recovery", "upgrade", "members", "shards")}
FENCE = re.compile(r"^( *)(`{3,}).*?^\1\2$", re.M | re.S)
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.M | re.S)


def blocks(page: Path, kind: str) -> list[str]:
    return [text for language, text in BLOCK.findall(page.read_text()) if language == kind]


def having(kind: str) -> list[Path]:
    return [page for page in PAGES if blocks(page, kind)]


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.fixture(scope="module")
def dev(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dev]:
    with cluster(tmp_path_factory.mktemp("pages")) as running:
        yield running


@pytest.fixture
def own_dev(tmp_path: Path) -> Iterator[Dev]:
    with cluster(tmp_path / "dev") as running:
        yield running


@pytest.fixture(scope="module")
def shell(dev: Dev, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which `hadelay` is a command that finds the cluster."""
    directory = tmp_path_factory.mktemp("bin")
    command = directory / "hadelay"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m hadelay "$@"\n')
    command.chmod(0o755)
    return environment(PATH=f"{directory}:{os.environ['PATH']}", HADELAY_SERVERS=dev.servers)


def on_our_ports(text: str, dev: Dev) -> str:
    for i, node in enumerate(dev.nodes):
        text = text.replace(f"127.0.0.1:{8400 + i}", node["http"].removeprefix("http://"))
    return text


def steps(block: str) -> Iterator[tuple[str, str]]:
    """(command, expected output) of each `$` line."""
    for part in re.split(r"^\$ ", block, flags=re.M)[1:]:
        command, _, expected = part.partition("\n")
        yield command, expected


def matches(expected: str, printed: str) -> bool:
    """Each expected line is found, in order, among the printed ones; `…` is any text within a line."""
    lines = iter(printed.splitlines())
    for wanted in expected.splitlines():
        pattern = ".*".join(map(re.escape, wanted.strip().split("…")))
        if not any(re.fullmatch(pattern, line.strip()) for line in lines):
            return False
    return True


@pytest.mark.processes
@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
@pytest.mark.parametrize("page", [page for page in having("console") if page not in OPERATIONS], ids=name)
def test_console(page: Path, dev: Dev, shell: dict[str, str], tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if page.name == "pipeline.md":  # judges all messages of its cluster, so those of other pages must not be there
        dev = request.getfixturevalue("own_dev")
        shell = {**shell, "HADELAY_SERVERS": ",".join(node["http"] for node in dev.nodes)}
    script, expectations = [], []
    for block in blocks(page, "console"):
        block = block.replace("/tmp/hadelay-howto", str(tmp_path))  # may have the files of another run
        for command, expected in steps(block):
            # One shell for the page: a variable set in one step is there in the next.
            script.append(f"{on_our_ports(command, dev)}\ncode=$?; echo; echo '=== end'; [ $code = 0 ] || exit $code")
            expectations.append((command, on_our_ports(expected, dev)))
    done = subprocess.run(
        ["bash", "-c", "\n".join(script)], capture_output=True, text=True, env=shell, timeout=200, check=False
    )
    printed = done.stdout.split("=== end\n")
    for (command, expected), output in zip(expectations, printed, strict=False):
        assert matches(expected, output), f"$ {command}\nprinted\n{output}\ninstead of\n{expected}\n{done.stderr}"
    assert done.returncode == 0, done.stderr
    assert len(printed) == len(expectations) + 1


@pytest.mark.processes
@pytest.mark.parametrize("page", having("python"), ids=name)
def test_python(page: Path, dev: Dev, shell: dict[str, str]) -> None:
    for block in blocks(page, "python"):
        done = subprocess.run(
            [sys.executable, "-c", on_our_ports(block, dev)],
            capture_output=True,
            text=True,
            env=shell,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout


@pytest.mark.parametrize("page", having("toml"), ids=name)
def test_toml(page: Path, tmp_path: Path) -> None:
    for block in blocks(page, "toml"):
        path = tmp_path / "page.toml"
        path.write_text(block)
        load(str(path))


@pytest.mark.parametrize("page", having("sh"), ids=name)
def test_sh(page: Path) -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M))
    commands = {command.path for command in COMMANDS}
    for line in "".join(blocks(page, "sh")).splitlines():
        words = line.partition("#")[0].split()
        if words[:1] == ["make"]:
            assert words[1] in targets, line
        elif words and words[0].endswith("hadelay"):
            assert words[1] in commands or " ".join(words[1:3]) in commands, line
        elif words and "/" in words[0] and not words[0].startswith("."):
            assert (ROOT / words[0]).exists(), line


def anchors(page: Path) -> set[str]:
    """Anchors of a page on GitHub: of its headings, and those that it names itself."""
    text, found = FENCE.sub("", page.read_text()), set[str]()
    for heading in re.findall(r"^#+ (.*)$", text, re.M):
        words = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        slug = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        found.add(slug if slug not in found else f"{slug}-1")
    return found | set(re.findall(r'<a id="([^"]+)">', text))


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)", FENCE.sub("", page.read_text())):
        if "://" in target:
            continue
        there = page.parent / target if target else page
        assert there.exists(), target
        assert not anchor or (there.suffix == ".md" and anchor in anchors(there)), f"{target}#{anchor}"


def test_the_pages_of_the_site_link_only_among_themselves(tmp_path: Path) -> None:
    """The copies that tools/website.py makes for `make site`, which checks the pages of HTML in the same way."""
    stage = website.Stage(tmp_path)
    stage.write()
    copies = sorted(tmp_path.rglob("*.md"))
    assert {copy.name for copy in copies} > {page.name for page in ROOT.glob("docs/**/*.md")}
    for copy in copies:
        text = FENCE.sub("", copy.read_text())
        assert not re.search("^<!-- /?tabs", text, re.M)
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text):
            assert "://" in target or (copy.parent / target).is_file(), f"{copy.relative_to(tmp_path)}: {target}"
    assert '=== "Python"\n\n    ```python\n    from hadelay' in (tmp_path / "tutorial/quick-start.md").read_text()


def test_the_navigation_of_the_site_names_each_page_once() -> None:
    config = (ROOT / "mkdocs.yml").read_text()
    nav = yaml.safe_load(config[config.index("\nnav:") :])["nav"]
    places = [place for place in website.Stage(ROOT).places.values() if place.endswith(".md")]
    named = re.findall(r"[\w/.-]+\.md", str(website.navigation(nav, places)))
    assert sorted(named) == sorted(places)


def test_examples_say_the_type_of_what_they_publish() -> None:
    """Or it is kept as the form that curl takes it for."""
    publishes = re.compile(r"curl .*/v1/topics/[^/ ]+/messages(?![/:\w])")
    lines = [
        line for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
        for line in page.read_text().replace("\\\n", " ").splitlines()
        if publishes.search(line) and re.search(r" (-d|--data\S*|-T) ", line)
    ]  # fmt: skip
    assert len(lines) > 10
    assert not [line for line in lines if "Content-Type: " not in line]
