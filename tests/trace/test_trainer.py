"""The real Trainer runs unmodified, and the plain loop holds what it holds."""

from __future__ import annotations

import dataclasses

import pytest

from tests.trace.test_step import TINY
from wazn.trace.step import Recipe, rehearse


@pytest.mark.parametrize(
    "recipe",
    [
        Recipe(seq_len=512, loop="trainer"),
        Recipe(seq_len=512, loop="trainer", method="lora", autocast_dtype="bfloat16"),
        Recipe(seq_len=512, loop="trainer", grad_accum=2, checkpointing="full"),
    ],
    ids=["full", "lora", "accumulation"],
)
def test_the_plain_loop_holds_what_trainer_holds(recipe: Recipe) -> None:
    """Phase by phase the peaks of two steps differ by scalars, and by the collator's copies: under 32 KiB."""
    real = rehearse(TINY, recipe).peaks()
    plain = rehearse(TINY, dataclasses.replace(recipe, loop="plain")).peaks()
    assert {key for key in plain if key[0]} <= set(real)
    for key, peak_bytes in plain.items():
        assert abs(real[key] - peak_bytes) < 2**15, key
