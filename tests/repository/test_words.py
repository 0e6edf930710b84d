"""The glossary's forbidden words are not in the source, neither as words nor in names; test names begin with their
subject."""

from __future__ import annotations

import io
import re
import tokenize
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
GLOSSARY = ROOT / "docs/explanation/glossary.md"
#: Words of the glossary that have a meaning which we use too, and are not checked: a place in a queue, a hand of a
#: clock, the owner of a file, "in good part".
HAVE_OTHER_MEANINGS = {"place", "hand", "owner"}
#: File → number of such words that are left in it. This list may only get shorter.
LEFT: dict[str, int] = {
    "chaos/sim/nemesis.py": 4,  # "held_answers" seeds the random numbers of this fault, so the name stays
    "src/hadelay/bridge/rabbitmq.py": 1,  # RabbitMQ's default user is "guest"
    "bench/speak.py": 2,  # RabbitMQ's user and password are "guest"
}
#: Directories whose texts and names the glossary rules. Of tests it rules the names only: their topics and bodies are
#: data.
RULED = ("src", "chaos", "bench", "tools", "cluster")
#: First words of a clause or of a phrase without a subject: a test's name begins with the noun that the test is about.
NO_SUBJECT = {
    "after", "although", "as", "at", "because", "before", "by", "for", "from", "however", "if", "in", "it", "nor",
    "of", "once", "since", "that", "to", "unless", "until", "what", "whatever", "when", "where", "whether", "which",
    "while", "who", "whoever", "whom", "whose", "why", "without",
}  # fmt: skip
#: A word in a text or in a name: `told` in "told_commit", "HeldGrant" and "was told".
WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")


def ruled_out() -> set[str]:
    """Single words in the left column of the second table."""
    table = GLOSSARY.read_text().partition("\n## Words that this project does not use\n")[2]
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("|")][2:]
    terms = {term.partition("(")[0].strip() for cell in cells for term in re.split(r"·|,", cell)}
    return {term for term in terms if re.fullmatch(r"[a-z]+", term)} - HAVE_OTHER_MEANINGS


def found_in(text: str, words: set[str]) -> Counter[str]:
    return Counter(word for part in WORD.findall(text) if (word := part.lower()) in words)


def names_in(text: str) -> str:
    return " ".join(
        one.string for one in tokenize.generate_tokens(io.StringIO(text).readline) if one.type == tokenize.NAME
    )


def test_words_that_the_glossary_rules_out_are_not_in_the_source() -> None:
    words = ruled_out()
    paths = [path for part in RULED for kind in ("py", "html", "js") for path in (ROOT / part).rglob(f"*.{kind}")]
    found = {path.relative_to(ROOT).as_posix(): found_in(path.read_text(), words) for path in paths}
    assert len(found) > 500
    more = {name: dict(counts) for name, counts in found.items() if counts.total() > LEFT.get(name, 0)}
    assert more == {}, "the glossary says which word to take"
    assert all(found[name].total() == count for name, count in LEFT.items()), "make LEFT shorter"


def test_words_that_the_glossary_rules_out_are_not_in_names_of_tests() -> None:
    words = ruled_out()
    counts = {path.name: found_in(names_in(path.read_text()), words) for path in (ROOT / "tests").rglob("*.py")}
    assert {name: dict(found) for name, found in counts.items() if found} == {}


def test_words_are_read_from_the_glossary() -> None:
    assert {"held", "wish", "told", "upkeep", "fate", "flying"} <= ruled_out()


@pytest.mark.parametrize(
    "planted", ["was told so", "told_commit = 1", "class HeldGrant:", "_held", "HELD = 1", "# A wish."]
)
def test_planted_words_are_found(planted: str) -> None:
    assert found_in(planted, ruled_out()).total() == 1


def all_tests(text: str) -> list[str]:
    return re.findall(r"^\s*(?:async )?def (test_\w+)\(", text, re.MULTILINE)


def has_subject(name: str) -> bool:
    return name.split("_")[1] not in NO_SUBJECT


def test_names_of_tests_begin_with_their_subject() -> None:
    names = {name: path.name for path in (ROOT / "tests").rglob("*.py") for name in all_tests(path.read_text())}
    assert len(names) > 2_000
    assert {name: file for name, file in names.items() if not has_subject(name)} == {}


@pytest.mark.parametrize("name", ["test_when_a_node_stops", "test_what_is_refused", "test_without_tokens", "test_it"])
def test_planted_names_without_a_subject_are_found(name: str) -> None:
    (found,) = all_tests(f"class TestNode:\n    async def {name}(self) -> None: ...\n")
    assert not has_subject(found)


def test_planted_words_in_names_of_tests_are_found() -> None:
    assert found_in(names_in("topic = 'told'  # held\ndef test_it_was_told(): ...\n"), ruled_out()) == {"told": 1}
