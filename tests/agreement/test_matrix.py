"""Simulate against trace: a family at a time, every method, with and without checkpointing, and whole models.

What is compared of each of the two optimizer steps, and what the matrix is made of: see `matrix`.
"""

from __future__ import annotations

import pytest

from tests.agreement.golden import Golden
from tests.agreement.matrix import Held, cases, real, tape
from tests.agreement.steps import Case
from tests.agreement.whole import WHOLE

CASES = cases()

# The loop's own numbers, which the tape leaves out: how many labels there are, the loss of the last step and of all of
# them, the norm of the gradients. Each is a block of its own, and some are made anew while the old one lives.
SCALARS_BYTES = 5 * 512


def assert_held(seen: Held, case: Case) -> None:
    """Each figure agrees, but for the loop's scalars."""
    ours, allowed = tape(case), SCALARS_BYTES
    assert abs(ours.peak_bytes - seen.peak_bytes) <= allowed
    assert ours.levels == pytest.approx(seen.levels, abs=allowed)
    assert ours.peaks == pytest.approx(seen.peaks, abs=allowed)
    for category in {*ours.categories, *seen.categories}:
        difference_bytes = ours.categories.get(category, 0) - seen.categories.get(category, 0)
        assert abs(difference_bytes) <= allowed, category


@pytest.mark.parametrize("name", CASES)
def test_case(name: str, golden: Golden) -> None:
    """A family cut to a few layers: peak, levels, and categories at the peak are those of the real libraries."""
    seen = Held.unpacked(golden.value(lambda: real(CASES[name]).packed()))
    assert_held(seen, CASES[name])


@pytest.mark.parametrize("name", WHOLE)
def test_whole(name: str, golden: Golden) -> None:
    """A model with all its layers, most of which the tape does not run: the same."""
    seen = Held.unpacked(golden.value(lambda: real(WHOLE[name]).packed()))
    assert_held(seen, WHOLE[name])


def test_size_of_the_matrix() -> None:
    """At least 14 families x 3 methods x 2 kinds of checkpointing x 3 sizes x 2 attentions, and 12 whole models."""
    families = {name.partition(",")[0] for name in CASES}
    assert len(families) >= 14
    assert len(CASES) >= 14 * 3 * 2 * 3 * 2
    assert len(WHOLE) >= 12
