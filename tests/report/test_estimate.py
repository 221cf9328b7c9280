"""The text for people: what it says, how wide it is, what the bars mean."""

from __future__ import annotations

from dataclasses import replace

import pytest

import wazn
from wazn.estimation.answer import Estimate, Verdict
from wazn.estimation.changes import Change, changes
from wazn.report.estimate import CATEGORIES, PHASES, Style, as_text
from wazn.timeline.events import Category, Phase


@pytest.fixture(scope="module")
def full() -> Estimate:
    """Full fine-tuning of Llama-3.1-8B on a card that is far too small."""
    return wazn.estimate("llama-3.1-8b", method="full", gpu="rtx-4090")


def test_every_category_and_phase_has_words() -> None:
    """What the timeline can say, the report can say."""
    assert set(Category) <= set(CATEGORIES)
    assert set(Phase) == set(PHASES)


def test_the_headline_has_need_capacity_and_difference(full: Estimate) -> None:
    """The first lines answer the question: whether, how much, what the card has, what is missing."""
    text = " ".join(as_text(full, (), Style()).split())
    need, capacity = full.peak.device_bytes / 2**30, 23.51
    assert f"It does not fit: it needs {need:.2f} GiB, rtx-4090-24gb has {capacity} GiB" in text
    assert "PyTorch stops in" in text


def test_the_bars_stack_up_to_the_need(full: Estimate) -> None:
    """Each bar starts where the one before ended; the last one is all of them; the mark is the card's capacity."""
    lines = as_text(full, (), Style(width=100)).splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("The peak")) + 1
    last = next(i for i, line in enumerate(lines) if line.startswith("  all of it"))
    drawn = [line[33:].ljust(67) for line in lines[first:last]]
    ends = [max(bar.rfind("█"), bar.rfind("▏")) for bar in drawn]
    starts = [min(p for p in (bar.find("█"), bar.find("▏")) if p >= 0) for bar in drawn]
    assert starts[0] == 0
    for end, start in zip(ends, starts[1:], strict=False):
        assert start - end in (0, 1)
    whole = lines[last][33:]
    assert len(whole) == 67
    assert whole.index("▌") == int(full.fit.capacity_bytes * 67 / full.peak.device_bytes)  # type: ignore[operator]


def test_the_sizes_sum_to_the_need(full: Estimate) -> None:
    """The lines, as they are printed, sum to the line of the whole, but for their rounding."""
    sizes = [
        float(line.split("GiB")[0].split()[-1])
        for line in as_text(full, (), Style()).splitlines()
        if line.startswith("  ") and "GiB" in line[:33]
    ]
    *parts, whole = sizes
    assert sum(parts) == pytest.approx(whole, abs=0.005 * len(parts) + 0.005)


def test_letters_where_there_are_no_blocks(full: Estimate) -> None:
    """Without Unicode the text is ASCII, bars and all."""
    text = as_text(full, changes(full), Style(unicode=False))
    assert text.isascii()
    assert "###" in text


def test_no_bars_where_there_is_no_room(full: Estimate) -> None:
    """Below 44 columns the numbers stay and the bars go."""
    text = as_text(full, (), Style(width=40))
    assert "█" not in text
    assert "optimizer states" in text


def test_who_chose_what_was_not_said(full: Estimate) -> None:
    """What was said is nobody's choice; of the rest each is named, with its value where no other line shows it."""
    text = " ".join(as_text(full, (), Style()).split())
    by_the_stack, by_wazn = (part.split(".")[0] for part in text.split("Chosen by ")[1:])
    assert by_the_stack.startswith("hf@5")
    assert "optimizer" in text.split("Chosen by hf@5.24: ")[1].split(".")[0]
    assert by_wazn.startswith("wazn: ")
    assert "method" not in by_wazn
    assert "grad-accum 1" in by_wazn
    assert "adamw-fused" in text


def test_what_would_help_is_written_as_one_would_type_it(full: Estimate) -> None:
    """A change is options, what it saves, and what became of the verdict."""
    change = Change(
        options={"micro_batch": 2, "grad_accum": 4}, saved_bytes=2**31, verdict=Verdict.FITS
    )
    text = as_text(full, (change,), Style())
    assert "  --micro-batch 2 --grad-accum 4  saves 2.00 GiB, fits\n" in text


def test_a_folder_s_name_never_commands_the_terminal(full: Estimate) -> None:
    """Escape sequences and line breaks in names (of folders, of targets) are written out."""
    hostile = replace(full, model=replace(full.model, id="a\x1b[31m\nb\u202ec"))
    text = as_text(hostile, (), Style())
    assert r"a\x1b[31m\nb\u202ec: " in text
    assert "\x1b" not in text
