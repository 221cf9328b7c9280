"""What older releases do that the newest does not, one at a time, counted by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.recipes import BF16, make_recipe
from tests.simulate.test_repeat import canonical
from wazn.dtypes import BFLOAT16
from wazn.facts.stacks import CausalBuffers, Habits, KvCache, resolve_stack
from wazn.model.config import read_config
from wazn.model.spec import ModelSpec
from wazn.recipe import (
    Adapter,
    Checkpointing,
    KbitPreparation,
    Method,
    Optimizer,
    Quantization,
    QuantizationFormat,
)
from wazn.simulate.step import simulate
from wazn.timeline.events import Timeline

L, H, UP, B, S = 5, 64, 160, 2, 32
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": H,
    "intermediate_size": UP,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": L,
    "vocab_size": 320,
    "max_position_embeddings": 256,
}
SPEC: ModelSpec = read_config(LLAMA, id="llama", path="config.json")
NEWEST = resolve_stack("hf", family="llama")
KEYS = VALUES = B * S * (H // 2)


def levels(timeline: Timeline, step: int = 1) -> dict[str, tuple[int, int]]:
    """The level at the end of each phase of a step, and the highest within it."""
    level = 0
    found: dict[str, tuple[int, int]] = {}
    for event in timeline.events():
        level += event.num_bytes
        if event.step == step or str(event.phase) == "load":
            highest = found.get(str(event.phase), (0, 0))[1]
            found[str(event.phase)] = level, max(highest, level)
    return found


def run(habits: Habits, **choices: Any) -> Timeline:
    """Two steps of a small Llama, full fine-tuning in bf16."""
    recipe = make_recipe(**{"micro_batch": B, "seq_len": S, **choices})
    return simulate(SPEC, recipe, habits).timeline


@pytest.mark.parametrize("kind", [KvCache.TUPLE, KvCache.OBJECT])
def test_outputs_hold_keys_and_values(kind: KvCache) -> None:
    """At the end of the loss the outputs hold every layer's keys; the values are held, as v_proj's
    result, in any case.
    """
    with_cache = levels(run(replace(NEWEST, kv_cache=kind)))
    without = levels(run(NEWEST))
    # flash attention saves the rotated keys and the values, so the cache adds nothing while the graph is there
    assert with_cache["loss"] == without["loss"]
    frozen = {"method": Method.FREEZE, "trainable": ("lm_head*",)}
    with_cache = levels(run(replace(NEWEST, kv_cache=kind), **frozen))
    without = levels(run(NEWEST, **frozen))
    assert with_cache["loss"][1] - without["loss"][1] == L * (KEYS + VALUES) * 2


def test_a_tuple_is_copied_to_fp32_under_autocast() -> None:
    """2 x L x B x S x (key heads x size) x 4 bytes, alive until the outputs are let go of."""
    autocast = {"precision": replace(BF16, autocast_dtype=BFLOAT16)}
    tuples = run(replace(NEWEST, kv_cache=KvCache.TUPLE), **autocast)
    objects = run(replace(NEWEST, kv_cache=KvCache.OBJECT), **autocast)
    allocated = [
        sum(event.num_bytes for event in timeline.events() if event.num_bytes > 0)
        for timeline in (tuples, objects)
    ]
    num_steps = 2
    assert allocated[0] - allocated[1] == num_steps * L * (KEYS + VALUES) * 4


@pytest.mark.parametrize("checkpointing", [Checkpointing.FULL, Checkpointing.FULL_REENTRANT])
def test_checkpointing_keeps_no_cache(checkpointing: Checkpointing) -> None:
    """transformers sets use_cache to False where it checkpoints."""
    timelines = [
        run(replace(NEWEST, kv_cache=kind), checkpointing=checkpointing)
        for kind in (KvCache.TUPLE, KvCache.NONE)
    ]
    assert levels(timelines[0]) == levels(timelines[1])


def test_buffers_of_each_layer() -> None:
    """cos and sin of every position in the type of the weights; a square of booleans."""
    stored = levels(run(replace(NEWEST, rotary_stored=True)))["load"][0]
    squares = levels(run(replace(NEWEST, causal_buffers=CausalBuffers.PER_LAYER)))["load"][0]
    one = levels(run(replace(NEWEST, causal_buffers=CausalBuffers.ONE)))["load"][0]
    plain = levels(run(NEWEST))["load"][0]
    assert stored - plain == L * 2 * 256 * 16 * 2
    assert squares - plain == L * 256 * 256
    assert one - plain == 256 * 256


def test_micro_batches_that_are_fetched_at_once() -> None:
    """Ids, labels and mask of all micro-batches, 8 bytes each, are there from the first on; before
    4.46 those of one.
    """
    batch = 3 * B * S * 8
    for at_once, held in ((True, 4), (False, 1)):
        habits = replace(NEWEST, fetches_step_at_once=at_once)
        timeline = simulate(
            SPEC, make_recipe(micro_batch=B, seq_len=S, grad_accum=4), habits
        ).timeline
        inputs = [event for event in timeline.events() if str(event.tag.category) == "inputs"]
        level = 0
        highest = 0
        for event in inputs:
            level += event.num_bytes
            highest = max(highest, level)
        assert level == held * batch  # of the second step: the loop still holds them
        assert highest == 2 * held * batch  # the last ones go when the next ones are bound


def test_micro_batches_beyond_those_that_are_run() -> None:
    """An accumulation of ten, of which three are run, has ten batches on the card."""
    recipe = make_recipe(micro_batch=B, seq_len=64, grad_accum=3)
    timeline = simulate(SPEC, recipe, NEWEST, num_fetched=10).timeline
    inputs = [event.num_bytes for event in timeline.events() if str(event.tag.category) == "inputs"]
    assert sum(inputs) == 10 * 3 * B * 64 * 8


def test_quantised_inputs_that_are_kept() -> None:
    """bitsandbytes before 0.43.2 holds the inputs of 4-bit linears until the loss dies.

    In each layer the input of q, k and v (one tensor), of o, of gate and up (one tensor), of down;
    not the first layer's first,
    which requires no gradient, so that no node is made for it.
    """
    kept, let_go = (
        simulate(
            SPEC,
            make_recipe(
                method=Method.QLORA,
                micro_batch=B,
                seq_len=S,
                adapter=Adapter(rank=4, targets=("all-linear",)),
                quantization=Quantization(
                    format=QuantizationFormat.NF4,
                    double_quant=True,
                    kbit_preparation=KbitPreparation.NONE,
                    experts=False,
                    keeps_input=keeps,
                ),
            ),
            NEWEST,
            frozenset(
                [f"self_attn.{name}_proj" for name in "qkvo"]
                + [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
            ),
        ).timeline
        for keeps in (True, False)
    )
    levels_at_last_gradient = []
    for timeline in (kept, let_go):
        level = at_last = 0
        for event in timeline.events():
            if event.step == 2:
                break
            level += event.num_bytes
            if event.num_bytes > 0 and str(event.phase) == "backward":
                at_last = level
        levels_at_last_gradient.append(at_last)
    expected = L * B * S * (3 * H + UP) * 2 - B * S * H * 2
    assert levels_at_last_gradient[0] - levels_at_last_gradient[1] == expected


@pytest.mark.parametrize("version", ["4.40", "4.42", "4.45", "4.48", "4.52", "4.55", "4.57"])
@pytest.mark.parametrize("method", [Method.FULL, Method.LORA, Method.QLORA])
@pytest.mark.parametrize("checkpointing", [Checkpointing.NONE, Checkpointing.FULL_REENTRANT])
@pytest.mark.parametrize("inputs_require_grad", [True, False])
def test_repetition_is_exact(
    version: str, method: Method, checkpointing: Checkpointing, inputs_require_grad: bool
) -> None:
    """What older releases hold across layers is repeated as a run of every layer and micro-batch has it."""
    spec = read_config(
        {**LLAMA, "model_type": "mistral", "num_hidden_layers": 7, "sliding_window": 16},
        id="mistral",
        path="config.json",
    )
    habits = resolve_stack("hf@" + version, family="mistral")
    adapter = None if method is Method.FULL else Adapter(rank=4, targets=("attention",))
    quantization = Quantization(
        format=QuantizationFormat.NF4,
        double_quant=True,
        kbit_preparation=KbitPreparation.PEFT,
        experts=True,
        keeps_input=habits.keeps_quantized_input,
    )
    recipe = make_recipe(
        method=method,
        adapter=adapter,
        quantization=quantization if method is Method.QLORA else None,
        micro_batch=B,
        seq_len=S,
        grad_accum=3,
        checkpointing=checkpointing,
        inputs_require_grad=inputs_require_grad or checkpointing is not Checkpointing.NONE,
        precision=replace(BF16, autocast_dtype=BFLOAT16),
        stack="hf@" + version,
    )
    targets = frozenset(f"self_attn.{name}_proj" for name in "qkvo") if adapter else frozenset()
    short = simulate(spec, recipe, habits, targets).timeline
    whole = simulate(spec, recipe, habits, targets, every_layer=True).timeline
    assert canonical(short) == canonical(whole)


@pytest.mark.parametrize(("version", "state_bytes"), [("4.51", 2), ("4.52", 8)])
def test_8bit_optimizers_and_embeddings(version: str, state_bytes: int) -> None:
    """Two states of an embedding: a byte each, and since 4.52 four (transformers, `Trainer.create_optimizer`)."""
    spec = read_config({**LLAMA, "tie_word_embeddings": False}, id="llama", path="config.json")
    recipe = make_recipe(optimizer=Optimizer.ADAMW_8BIT, stack="hf@" + version)
    habits = resolve_stack("hf@" + version, family="llama")
    sizes = [
        event.num_bytes
        for event in simulate(spec, recipe, habits, frozenset()).timeline.events()
        if event.tag.label in ("state1", "state2") and event.num_bytes > 0
    ]
    embedding = LLAMA["vocab_size"] * LLAMA["hidden_size"]
    expected = [embedding * state_bytes // 2] * 2
    assert [size for size in sizes if size in (embedding, 4 * embedding)][:2] == expected
