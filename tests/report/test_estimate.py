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


def _bars(answer: Estimate, style: Style) -> list[tuple[int, str]]:
    """The bars as they are printed: where each begins, and its blocks; the whole comes last."""
    lines = as_text(answer, (), style).splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("The peak")) + 1
    last = next(i for i, line in enumerate(lines) if line.startswith("  all of it"))
    drawn = [line[33:].replace("│", " ").replace("|", " ") for line in lines[first : last + 1]]
    return [(len(bar) - len(bar.lstrip()), bar.strip()) for bar in drawn]


def test_the_bars_stack_up_to_the_need(full: Estimate) -> None:
    """Each bar starts in the cell where the one before ends; the last one is all of them; the mark is the capacity."""
    *parts, (start, whole) = _bars(full, Style(width=100))
    end = 0
    for begin, bar in parts:
        assert abs(begin - end) <= 1
        end = begin + len(bar)
    assert end <= 67
    assert start == 0
    assert len(whole) == 67
    assert whole.index("▌") == int(full.fit.capacity_bytes * 67 / full.peak.device_bytes)  # type: ignore[operator]


@pytest.mark.parametrize("width", [60, 80, 100])
@pytest.mark.parametrize("unicode", [True, False])
@pytest.mark.parametrize("model", ["qwen2.5-1.5b", "llama-3.1-8b", "gemma-2-9b"])
def test_a_larger_part_never_looks_smaller(model: str, unicode: bool, width: int) -> None:
    """Ordered by size, the bars are ordered by width, to eighths of a cell where there are such blocks."""
    answer = wazn.estimate(model, seq_len=1000)
    style = Style(width=width, unicode=unicode)
    sizes = [
        float(line[20:31].split()[0])
        for line in as_text(answer, (), style).splitlines()
        if line[:2] == "  " and line[25:31].strip().endswith("GiB")
    ]
    eighths = {block: number for number, block in enumerate("▏▎▍▌▋▊▉█", start=1)} | {"#": 8}
    widths = [sum(eighths[block] for block in bar) for _, bar in _bars(answer, style)]
    assert len(sizes) == len(widths) > 3
    ordered = sorted(zip(sizes, widths, strict=True))
    assert [w for _, w in ordered] == sorted(widths)


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


def test_where_nothing_helps_that_is_said(full: Estimate) -> None:
    """Only where it does not fit, and no change makes it fit."""
    sentence = "Nothing that wazn can change makes it fit."
    save = Change(options={"seq_len": 8}, saved_bytes=2**31, verdict=Verdict.DOES_NOT_FIT)
    tight = replace(save, verdict=Verdict.TIGHT)
    for helping, said in (((), True), ((save,), True), ((save, tight), False)):
        assert (sentence in " ".join(as_text(full, helping, Style()).split())) is said
    assert sentence not in as_text(wazn.estimate("smollm2-135m"), (), Style())


def test_a_gibibyte_is_not_written_in_mebibytes() -> None:
    """As in PyTorch's own message; a matrix of all gate and up projections of Mixtral's 8 experts has 1.75 GiB."""
    answer = wazn.estimate("mixtral-8x7b", gpu="a100-80gb", method="qlora", seq_len=2048)
    text = " ".join(as_text(answer, (), Style()).split())
    assert "it tries to allocate 1.75 GiB (weights)" in text


def test_the_attention_that_runs_is_named() -> None:
    """Gemma 2 is asked for sdpa and runs eager attention."""
    text = " ".join(as_text(wazn.estimate("gemma-2-9b", seq_len=64), (), Style()).split())
    assert "eager attention; hf@" in text
    assert "sdpa attention" not in text


def test_a_folder_s_name_never_commands_the_terminal(full: Estimate) -> None:
    """Escape sequences and line breaks in names (of folders, of targets) are written out."""
    hostile = replace(full, model=replace(full.model, id="a\x1b[31m\nb\u202ec"))
    text = as_text(hostile, (), Style())
    assert r"a\x1b[31m\nb\u202ec: " in text
    assert "\x1b" not in text
