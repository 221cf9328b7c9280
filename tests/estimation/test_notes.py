"""What is said beside the numbers, and that it is true."""

from __future__ import annotations

import re
from pathlib import Path

from wazn.facts.stacks import RULED_FIELDS

SOURCE = Path(__file__).resolve().parents[2] / "src" / "wazn"


def test_all_habits_are_followed() -> None:
    """The simulation or the options read every habit, but for the type to load, which is the question's."""
    files = [*(SOURCE / "simulate").glob("*.py"), SOURCE / "estimation" / "options.py"]
    text = "\n".join(path.read_text("utf-8") for path in files)
    read = set(re.findall(r"\bhabits\.(\w+)", text))
    assert set(RULED_FIELDS) - read == {"loads_fp32"}
