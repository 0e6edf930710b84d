"""What texts cite is there: files, ADRs and sections. Commit subjects are short and begin with a part."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from hadelay.version import LAST_DEVELOPMENT
from tools import reference

ROOT = Path(__file__).resolve().parents[2]
DECISIONS = set((ROOT / "docs/adr").glob("*.md")) - {ROOT / "docs/adr/index.md"}
#: Commits after this one follow CONTRIBUTING.md; older commits may not.
FIRST_CHECKED = "6e6694681e76"
LONGEST_SUBJECT = 72
FOLDERS = ("src/hadelay", "chaos", "tests", "docs", "bench", "cluster", "tools")
#: Cited names of files that a program writes, or that belong to another project.
ELSEWHERE = {
    "__init__.py", "job.py", "opt/job.py", "pyarrow.py", "report.md", "google_crc32c/__init__.py", "buy.py",
    "shop/tasks.py", "shop/orders.py", "shop/waiting.py", "shop/tests.py", "test_settings.py", "test_shop.py",
    "test_reminders.py", "tests.py", "errors.py", "test_actors.py", "tests/test_actors.py",
    "test_composition.py", "test_results.py", "common.py", "web.py", "before.py",
    "tests_frameworks_fixtures.py", "t/integration/common.py", "test_kombu_suite.py",
}  # fmt: skip
CITED_FILE = re.compile(r"[\w./-]*[\w-]\.(?:py|md)\b")
#: "architecture §4", "row 13": sections and rows of pages that are not in this repository.
LOST_SECTION = re.compile(r"architecture(?:\.md)? ?§|(?:\(|# -- |\bis )rows? \d|\brows? \d+ and \d")


def texts() -> list[Path]:
    pages = [path for folder in FOLDERS for kind in ("py", "md") for path in (ROOT / folder).rglob(f"*.{kind}")]
    return [path for path in (*pages, ROOT / "README.md", ROOT / "CONTRIBUTING.md") if path != Path(__file__)]


def find(pattern: re.Pattern[str]) -> list[tuple[str, str]]:
    """(file:line, match) of every match in the repository's texts."""
    return [
        (f"{path.relative_to(ROOT)}:{number}", match.group())
        for path in texts()
        for number, line in enumerate(path.read_text().splitlines(), 1)
        for match in pattern.finditer(line)
    ]


def test_cited_files_exist() -> None:
    parts = [path.relative_to(ROOT).parts for path in texts()] + [Path(__file__).relative_to(ROOT).parts]
    parts.append(("CHANGELOG.md",))
    known = {"/".join(path[start:]) for path in parts for start in range(len(path))} | ELSEWHERE
    lost = [(where, cited) for where, cited in find(CITED_FILE) if re.sub(r"^[./]+", "", cited) not in known]
    assert lost == []


def test_cited_decisions_exist() -> None:
    numbers = [number for number, _, _ in reference.decisions()]
    assert len(numbers) == len(set(numbers)) > 100
    assert [(where, cited) for where, cited in find(re.compile(r"ADR \d+")) if int(cited[4:]) not in numbers] == []


@pytest.mark.parametrize("page", sorted(DECISIONS), ids=lambda page: page.stem)
def test_decisions_have_one_form(page: Path) -> None:
    """An anchor and a title with the same number, the text, and at the end the state and what would reopen it."""
    title, *sections = re.split(r'<a id="adr-(\d+)"></a>\n\n', page.read_text())
    assert re.fullmatch(r"# Decisions: \S.*\n\n", title)
    for number, text in zip(sections[::2], sections[1::2], strict=True):
        assert re.match(rf"## ADR {number}: \S.*\n\n", text), number
        assert re.search(r"\n\n\*(Accepted|Proposed)\b[^*]*\b(Reopen|reopens)\b[^*]*\.\*\n+$", text), number
        assert text.count("\n## ") == 0, number


def test_no_section_of_a_lost_page_is_cited() -> None:
    assert find(LOST_SECTION) == []


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_commit_subjects_are_short_and_begin_with_a_part() -> None:
    log = subprocess.run(
        ["git", "-C", str(ROOT), "log", "--no-merges", "--format=%s", f"{FIRST_CHECKED}..HEAD"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if log.returncode:
        pytest.skip(f"no git history back to {FIRST_CHECKED}")
    subjects = log.stdout.splitlines()
    assert [subject for subject in subjects if len(subject) > LONGEST_SUBJECT] == []
    assert [subject for subject in subjects if not re.match(r"[a-z][\w/., -]*: \S", subject)] == []


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_the_commit_that_reads_development_data_can_be_had() -> None:
    """The refusal of such data names it."""
    shallow = ["git", "-C", str(ROOT), "rev-parse", "--is-shallow-repository"]
    if subprocess.run(shallow, capture_output=True, text=True, check=False).stdout.strip() != "false":
        pytest.skip("no git history, or only its end")
    subprocess.run(["git", "-C", str(ROOT), "merge-base", "--is-ancestor", LAST_DEVELOPMENT, "HEAD"], check=True)
