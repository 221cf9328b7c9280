"""The real Trainer runs unmodified, and the plain loop holds what it holds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.recipes import BF16, lora_recipe, make_recipe
from tests.trace.test_step import TINY
from wazn.dtypes import BFLOAT16
from wazn.recipe import Checkpointing, Recipe
from wazn.trace.script import Loop, Script
from wazn.trace.step import rehearse


@pytest.mark.parametrize(
    "recipe",
    [
        make_recipe(micro_batch=1),
        lora_recipe(micro_batch=1, precision=replace(BF16, autocast_dtype=BFLOAT16)),
        make_recipe(micro_batch=1, grad_accum=2, checkpointing=Checkpointing.FULL),
    ],
    ids=["full", "lora", "accumulation"],
)
def test_the_plain_loop_holds_what_trainer_holds(recipe: Recipe) -> None:
    """Phase by phase the peaks of two steps differ by scalars, and by the collator's copies: under 32 KiB."""
    real = rehearse(TINY, recipe, Script(loop=Loop.TRAINER)).peaks()
    plain = rehearse(TINY, recipe).peaks()
    assert {key for key in plain if key[0]} <= set(real)
    for key, peak_bytes in plain.items():
        assert abs(real[key] - peak_bytes) < 2**15, key
