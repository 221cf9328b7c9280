"""What a block is for: categories by the pass, the recomputation and the module that made it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.agreement.families import CONFIGS
from tests.recipes import AUTOCAST, lora_recipe, make_recipe
from wazn.recipe import Checkpointing, Recipe
from wazn.timeline.events import Category, Event, Phase
from wazn.trace.script import Script
from wazn.trace.step import rehearse

SCALARS_BYTES = 4096  # what is larger is no number of the loop's


def born(config: dict[str, Any], recipe: Recipe, phase: Phase) -> list[Event]:
    """What the first step allocates in a phase, but for its scalars."""
    events = rehearse(config, recipe, Script(matmul_workspaces=False)).timeline().events()
    return [
        event
        for event in events
        if event.num_bytes > SCALARS_BYTES and (event.step, event.phase) == (1, phase)
    ]


def of_module(events: list[Event], module: str) -> list[Event]:
    """Those that were made in this module itself."""
    return [event for event in events if event.tag.origin and event.tag.origin.module == module]


@pytest.mark.parametrize("kind", [Checkpointing.FULL, Checkpointing.FULL_REENTRANT])
def test_what_is_saved_again_is_an_activation(kind: Checkpointing) -> None:
    """silu's input and result, [2, 512, 704] in bf16, are saved by a recomputation; the gradients of both are not."""
    recipe = make_recipe(checkpointing=kind)
    events = born(CONFIGS["llama"], recipe, Phase.BACKWARD)
    silu = of_module(events, "model.layers.0.mlp.act_fn")
    assert [event.tag.category for event in silu] == [Category.ACTIVATIONS, Category.TEMPORARY]
    assert all(event.num_bytes == 2 * 512 * 704 * 2 for event in silu)


@pytest.mark.parametrize("kind", [Checkpointing.FULL, Checkpointing.FULL_REENTRANT])
def test_a_layer_that_runs_again_has_its_name(kind: Checkpointing) -> None:
    """Residual additions of a recomputed layer are the layer's own, though only its `forward` is checkpointed."""
    events = born(CONFIGS["llama"], make_recipe(checkpointing=kind), Phase.BACKWARD)
    own = of_module(events, "model.layers.1")
    assert {event.num_bytes for event in own} == {2 * 512 * 256 * 2}
    assert own[0].tag.label == "aten.add.Tensor"


def test_what_surrounds_the_head_is_of_the_logits() -> None:
    """Gemma 2 caps its logits, [2, 512, 1024], outside the head and the loss, in three steps, with adapters too."""
    for recipe in (make_recipe(), lora_recipe(dropout=0.0)):
        config = {**CONFIGS["gemma2"], "final_logit_softcapping": 30.0}
        events = of_module(born(config, recipe, Phase.FORWARD), "")
        labels = [event.tag.label for event in events if event.tag.category is not Category.INPUTS]
        assert labels == ["aten.div.Tensor", "aten.tanh.default", "aten.mul.Tensor"]
        assert {event.tag.category for event in events} == {
            Category.LOGITS_AND_LOSS,
            Category.INPUTS,
        }


def test_what_the_loop_makes_of_the_logits() -> None:
    """Under autocast accelerate copies the logits to fp32, [2, 512, 1024], outside of every module."""
    events = born(CONFIGS["llama"], make_recipe(precision=AUTOCAST), Phase.FORWARD)
    copies = [event for event in of_module(events, "") if event.num_bytes == 2 * 512 * 1024 * 4]
    assert [event.tag.category for event in copies] == [Category.LOGITS_AND_LOSS]
