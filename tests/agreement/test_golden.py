"""The stored numbers: where they come from, and that each of them is looked at again."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import sampling
from tests.agreement.golden import FOLDER, load, runs, sizes_of

FILES = sorted(path.stem for path in FOLDER.glob("*.json"))
PINNED = dict(
    line.split("==")
    for line in (Path(__file__).parents[2] / "constraints.txt").read_text("utf-8").splitlines()
    if "==" in line
)


@pytest.mark.parametrize("file", FILES)
def test_seen_with_what_ci_installs(file: str) -> None:
    """The versions are those of constraints.txt: CI does run the sample, and a raised pin asks for new numbers."""
    seen = load(file)["versions"]
    assert seen == {name: PINNED[name] for name in seen}


@pytest.mark.parametrize("case", ["test_sdpa[llama]", "test_case[C3]", "test_norm[rms]"])
def test_every_case_has_its_turn(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within any twelve days a case is run for real on exactly one; asked for all, it is run every day."""
    monkeypatch.delenv("WAZN_SAMPLE", raising=False)
    days = [datetime.date(2027, 2, 20) + datetime.timedelta(n) for n in range(sampling.TURNS)]
    due = []
    for day in days:
        monkeypatch.setattr(sampling, "DAY", day.isoformat())
        due.append(sampling.is_due(case))
    assert sum(due) == 1
    monkeypatch.setenv("WAZN_SAMPLE", "all")
    assert sampling.is_due(case)


def test_turns_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """On each day between 4 and 13 of 100 cases are due: the work is spread."""
    monkeypatch.delenv("WAZN_SAMPLE", raising=False)
    cases = [case for file in FILES for case in load(file)["cases"]]
    for number in range(sampling.TURNS):
        day = datetime.date(2027, 2, 20) + datetime.timedelta(number)
        monkeypatch.setattr(sampling, "DAY", day.isoformat())
        assert 0.04 < sum(map(sampling.is_due, cases)) / len(cases) < 0.13


@given(sizes=st.lists(st.sampled_from([1, 512, 513, 10**12])))
def test_what_is_written_is_read(sizes: list[int]) -> None:
    """Sizes in order survive being written with equal neighbours once."""
    assert sizes_of(runs(sizes)) == sizes
