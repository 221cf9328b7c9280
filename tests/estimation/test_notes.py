"""What is said beside the numbers, and that it is true."""

from __future__ import annotations

import re
from pathlib import Path

import wazn
from wazn.facts.stacks import RULED_FIELDS

SOURCE = Path(__file__).resolve().parents[2] / "src" / "wazn"


def test_all_habits_are_followed_but_one_that_is_told() -> None:
    """The simulation or the options read every habit, but for the type to load, which is the question's, and one."""
    files = [*(SOURCE / "simulate").glob("*.py"), SOURCE / "estimation" / "options.py"]
    text = "\n".join(path.read_text("utf-8") for path in files)
    read = set(re.findall(r"\bhabits\.(\w+)", text))
    assert set(RULED_FIELDS) - read == {"loads_fp32", "keeps_quantized_input"}


def test_the_habit_that_is_not_followed_is_told() -> None:
    """bitsandbytes before 0.43.2, the one of 4.42, keeps the inputs of 4-bit layers."""

    def codes(**question: str) -> list[str]:
        answer = wazn.estimate("llama-2-7b", seq_len=64, **question)
        return [note.code for note in answer.notes]

    assert "quantised-inputs-kept" in codes(method="qlora", stack="hf@4.42")
    assert "quantised-inputs-kept" not in codes(method="qlora", stack="hf@4.43")
    assert "quantised-inputs-kept" not in codes(method="lora", stack="hf@4.42")
