"""Build the docs as pages of HTML in site-out/html: `make site`.

The pages in docs/ are written for GitHub. This program makes a copy for Zensical, in which

    <!-- tabs -->       begins tabs, one per paragraph that is a bold word, and <!-- /tabs --> ends them
    links out of docs/  lead to copies of the files, because the site has no address of a repository

and completes the navigation of mkdocs.yml with pages that it does not name. Afterwards every link of the built pages
must lead to a page and an anchor that exist, and no page may load anything from elsewhere.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import yaml

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "site-out"
#: Pages outside docs/ → their places in the site, such as project/readme.
BESIDE = {
    page: f"project/{page.lower().replace('/', '-')}"
    for page in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "bench/README.md")
}
_LINK = re.compile(r"(?<=\]\()[^)\s]+(?=\))")
_FENCE = re.compile(r"^```.*?^```$", re.M | re.S)
_TABS = re.compile(r"^<!-- tabs -->\n(.*?)^<!-- /tabs -->$", re.M | re.S)
_LEXERS = {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".json": "json", ".toml": "toml", ".service": "ini"}


class Stage:
    """The copy of the pages that Zensical reads."""

    def __init__(self, out: Path) -> None:
        self.out = out
        #: Files of the repository → their places among the copies.
        self.places = dict(BESIDE)
        for path in sorted((ROOT / "docs").rglob("*")):
            if path.is_file():
                self.places[path.relative_to(ROOT).as_posix()] = path.relative_to(ROOT / "docs").as_posix()

    def write(self) -> None:
        for source, place in list(self.places.items()):
            target = self.out / place
            target.parent.mkdir(parents=True, exist_ok=True)
            if source.endswith(".md"):
                target.write_text(self.page(source, place))
            else:
                shutil.copyfile(ROOT / source, target)

    def page(self, source: str, place: str) -> str:
        text = (ROOT / source).read_text()
        return tabbed(
            outside_fences(text, lambda part: _LINK.sub(lambda link: self.link(link[0], source, place), part))
        )

    def link(self, link: str, source: str, place: str) -> str:
        """The link of a page, as it is in the copy of the page."""
        if "://" in link or link.startswith(("#", "mailto:")):
            return link
        path, hash_, anchor = link.partition("#")
        target = os.path.normpath(os.path.join(os.path.dirname(source), path))
        there = self.places.get(target) or self.copy(target)
        return os.path.relpath(there, os.path.dirname(place) or ".") + hash_ + anchor

    def copy(self, target: str) -> str:
        """Copy a file, or the list of a directory, as a page; returns its place."""
        path = ROOT / target
        if path.is_dir():
            names = sorted(
                one.name + "/" * one.is_dir() for one in path.iterdir() if not one.name.startswith((".", "_"))
            )
            place, body = f"source/{target}/index.md", "\n".join(names)
        else:
            place, body = f"source/{target}.md", path.read_text()
        fence = "`" * 8
        (self.out / place).parent.mkdir(parents=True, exist_ok=True)
        (self.out / place).write_text(f"# {target}\n\n{fence}{_LEXERS.get(path.suffix, 'text')}\n{body}\n{fence}\n")
        self.places[target] = place
        return place


def outside_fences(text: str, change: Any) -> str:
    """Change the text of a page outside its code blocks."""
    parts, at = [], 0
    for fence in _FENCE.finditer(text):
        parts += [change(text[at : fence.start()]), fence[0]]
        at = fence.end()
    return "".join([*parts, change(text[at:])])


def tabbed(text: str) -> str:
    def tabs(block: re.Match[str]) -> str:
        lines = []
        for line in block[1].splitlines():
            label = re.fullmatch(r"\*\*(.+)\*\*", line)
            lines.append(f'=== "{label[1]}"' if label else f"    {line}".rstrip())
        return "\n".join(lines)

    return _TABS.sub(tabs, text)


def navigation(nav: list[Any], places: list[str]) -> list[Any]:
    """The navigation of mkdocs.yml, with each unnamed page at the end of the last section that has its directory."""
    named = set(re.findall(r"[\w/.-]+\.md", str(nav)))
    for place in places:
        directory = place.rpartition("/")[0]
        if place not in named and not place.startswith("source/"):
            section = next(one for one in reversed(nav) if f"{directory}/" in str(one))
            next(iter(section.values())).append(place)
    return nav


class _Page(HTMLParser):
    """Anchors, links and loaded files of a built page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = dict(attributes)
        self.anchors |= {str(found[name]) for name in ("id", "name") if found.get(name)}
        if tag == "a" and found.get("href"):
            self.links.append(str(found["href"]))
        elif tag in ("link", "script", "img", "source", "iframe") and (of := found.get("href") or found.get("src")):
            self.loaded.append(of)


def dead_links(site: Path) -> list[str]:
    """Links of the built pages that lead nowhere, and files that they load from elsewhere."""
    pages = {path: _Page(path) for path in site.rglob("*.html") if path.name != "404.html"}
    wrong = []
    for path, page in pages.items():
        for link in [*page.links, *page.loaded]:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                if link in page.loaded and parts.scheme != "data":
                    wrong.append(f"{path.relative_to(site)} loads {link}")
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            anchors = pages[target].anchors if target in pages else set()
            if not target.exists() or (parts.fragment and unquote(parts.fragment) not in anchors):
                wrong.append(f"{path.relative_to(site)}: {link}")
    return wrong


def main() -> int:
    shutil.rmtree(OUT, ignore_errors=True)
    stage = Stage(OUT / "pages")
    stage.write()
    config = (ROOT / "mkdocs.yml").read_text()
    head, nav = config[: config.index("\nnav:")], yaml.safe_load(config[config.index("\nnav:") :])["nav"]
    pages = [place for place in stage.places.values() if place.endswith(".md")]
    completed = yaml.safe_dump({"nav": navigation(nav, pages)}, sort_keys=False, allow_unicode=True)
    head = head.replace("docs_dir: docs", "docs_dir: pages").replace("site_dir: site-out/html", "site_dir: html")
    (OUT / "mkdocs.yml").write_text(f"{head}\n{completed}")
    command = [Path(sys.executable).parent / "zensical", "build", "--strict", "-f", OUT / "mkdocs.yml"]
    done = subprocess.run(command, cwd=OUT, env={**os.environ, "NO_COLOR": "1"}, check=False)
    if done.returncode:
        return done.returncode
    wrong = dead_links(OUT / "html")
    for one in sorted(wrong):
        print(f"dead link: {one}")
    print(f"{len(pages)} pages: python3 -m http.server -d site-out/html --bind 127.0.0.1 8080")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
