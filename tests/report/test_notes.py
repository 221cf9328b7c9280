"""The words of the notes: for every code that the code can say, and for no other."""

from __future__ import annotations

import ast
import re
import typing
from pathlib import Path

import pytest

from wazn.cluster import Limitation
from wazn.facts.notes import Note
from wazn.report.notes import NOTES, note_text

SOURCE = Path(__file__).resolve().parents[2] / "src" / "wazn"


def codes_in_source() -> set[str]:
    """Return every code that is written out in a call of `Note`, and those of the limitations of cards."""
    found = set()
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Note":
                code = next(k.value for k in node.keywords if k.arg == "code")
                if isinstance(code, ast.Constant):
                    found.add(code.value)
    limitations = typing.get_type_hints(Limitation)["code"]
    return found | set(typing.get_args(limitations))


def test_every_code_has_words_and_the_other_way_round() -> None:
    """No note is mute, and no sentence waits for a code that nobody says."""
    assert codes_in_source() == set(NOTES)


def test_every_code_is_documented_and_the_other_way_round() -> None:
    """docs/answer.md lists the codes that programs may meet, and only those."""
    page = (SOURCE.parents[1] / "docs" / "answer.md").read_text("utf-8")
    listed = re.findall(r"^\| `([a-z0-9-]+)` \|", page.partition("## Notes")[2], re.MULTILINE)
    assert sorted(listed) == sorted(NOTES)


@pytest.mark.parametrize("code", NOTES)
def test_a_note_is_a_sentence(code: str) -> None:
    """It ends like one and is short enough to be read."""
    assert NOTES[code].endswith(".")
    assert len(NOTES[code]) < 300


def test_parameters_are_filled_in() -> None:
    """Numbers get separators, bytes become a size, names stay as they are."""
    text = note_text(
        Note(code="beyond-positions", params={"seq_len": 200_000, "max_positions": 131_072})
    )
    assert "200,000 tokens" in text
    assert "131,072 positions" in text
    assert "1.00 GiB" in note_text(Note(code="managed-memory", params={"bytes": 2**30}))
    assert not re.search(r"[{}]", text)


def test_how_often_is_written_in_words() -> None:
    """Once and twice have words of their own; the plural is for more."""
    for retries, words in ((1, "(once here)"), (2, "(twice here)"), (1234, "(1,234 times here)")):
        assert words in note_text(Note(code="fits-after-release", params={"retries": retries}))


@pytest.mark.parametrize(
    ("capability", "beginning"),
    [("7.5", "X (compute capability 7.5) has"), ("gfx1030", "X (gfx1030) has"), ("mps", "X has")],
)
def test_a_compute_capability_is_nvidia_s(capability: str, beginning: str) -> None:
    """AMD's chips have names; Apple's and Habana's have neither."""
    params = {"gpu": "X", "capability": capability, "instead": "fp16", "precision": "fp16-autocast"}
    text = note_text(Note(code="bf16-not-in-hardware", params=params))
    assert text.startswith(beginning)
    assert text.endswith("--precision fp16-autocast.")
