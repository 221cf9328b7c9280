"""The real Trainer runs unmodified, as a user sets it up, and the plain loop holds what it holds."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest

from tests.recipes import AUTOCAST, BF16, lora_recipe, make_recipe, qlora_recipe
from tests.sampling import is_due
from tests.trace.test_step import TINY
from wazn.dtypes import BFLOAT16, FLOAT16, FLOAT32
from wazn.errors import InputError, Unsupported
from wazn.recipe import Attention, Checkpointing, Method, Optimizer, Recipe
from wazn.timeline.events import Category, Phase
from wazn.trace.rehearsal import Rehearsal, signed_rounded
from wazn.trace.script import Loop, Script, Task
from wazn.trace.step import rehearse

HALF = replace(BF16, weight_dtype=FLOAT32, autocast_dtype=FLOAT16)
MIXED = replace(BF16, weight_dtype=FLOAT32, autocast_dtype=BFLOAT16)
TRAINER = Script(loop=Loop.TRAINER)
BERT: dict[str, Any] = {
    "model_type": "bert",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 1000,
}
T5: dict[str, Any] = {
    "model_type": "t5",
    "d_model": 128,
    "d_kv": 64,
    "d_ff": 256,
    "num_layers": 2,
    "num_heads": 2,
    "vocab_size": 1000,
    "decoder_start_token_id": 0,
}
CLASSIFIER = Script(task=Task.SEQUENCE_CLASSIFICATION)
CASES: dict[str, tuple[dict[str, Any], Recipe, Script]] = {
    "full": (TINY, make_recipe(), Script()),
    "autocast": (TINY, make_recipe(precision=AUTOCAST), Script()),
    "mixed, checkpointing": (
        TINY,
        make_recipe(precision=MIXED, checkpointing=Checkpointing.FULL),
        Script(),
    ),
    "fp16": (TINY, make_recipe(precision=HALF), Script()),
    "fp16, accumulation, no clipping": (
        TINY,
        make_recipe(precision=HALF, grad_accum=2, max_grad_norm=None),
        Script(),
    ),
    "accumulation": (
        TINY,
        make_recipe(grad_accum=2, checkpointing=Checkpointing.FULL),
        Script(),
    ),
    "reentrant": (
        TINY,
        lora_recipe(checkpointing=Checkpointing.FULL_REENTRANT, inputs_require_grad=True),
        Script(),
    ),
    "every second layer": (
        TINY,
        make_recipe(checkpointing=Checkpointing.EVERY_N, checkpoint_every=2),
        Script(),
    ),
    "by operation": (TINY, make_recipe(checkpointing=Checkpointing.SELECTIVE_OP), Script()),
    "lora": (TINY, lora_recipe(precision=AUTOCAST), Script()),
    "qlora": (TINY, qlora_recipe(), Script()),
    "freeze": (TINY, make_recipe(method=Method.FREEZE, freeze=("*embed*",)), Script()),
    "fused": (TINY, make_recipe(optimizer=Optimizer.ADAMW_FUSED), Script()),
    "8-bit": (TINY, make_recipe(optimizer=Optimizer.ADAMW_8BIT), Script()),
    "paged": (TINY, make_recipe(optimizer=Optimizer.PAGED_ADAMW_8BIT), Script()),
    "adafactor": (TINY, make_recipe(optimizer=Optimizer.ADAFACTOR), Script()),
    "lion": (TINY, make_recipe(optimizer=Optimizer.LION), Script()),
    "momentum": (TINY, make_recipe(optimizer=Optimizer.SGD_MOMENTUM), Script()),
    "flash": (TINY, make_recipe(attention=Attention.FLASH), Script()),
    "encoder": (BERT, make_recipe(), CLASSIFIER),
    "decoder that classifies": (TINY, lora_recipe(), CLASSIFIER),
    "encoder-decoder": (T5, make_recipe(), Script(task=Task.SEQ2SEQ, target_len=64)),
}
ALWAYS = (
    "mixed, checkpointing",
    "fp16, accumulation, no clipping",
    "lora",
    "8-bit",
    "encoder-decoder",
)


@pytest.mark.parametrize("case", CASES)
def test_the_plain_loop_holds_what_trainer_holds(case: str) -> None:
    """Phase by phase the peaks of two steps differ by scalars, and by the collator's copies: under 32 KiB."""
    if case not in ALWAYS and not is_due(f"trainer: {case}", turns=4):
        pytest.skip("not today's turn")
    config, recipe, script = CASES[case]
    real = rehearse(config, recipe, replace(script, loop=Loop.TRAINER)).peaks()
    plain = rehearse(config, recipe, script).peaks()
    assert {key for key in plain if key[0]} <= set(real)
    for key, peak_bytes in plain.items():
        assert abs(real[key] - peak_bytes) < 2**15, key


def named(rehearsal: Rehearsal, category: Category, *, step: int = 1) -> int:
    """Return the rounded bytes of a category's allocations in a step, and before it."""
    return sum(
        signed_rounded(event.num_bytes)
        for event in rehearsal.events
        if event.num_bytes > 0
        and event.step <= step
        and rehearsal.names.get(event.block_id, ("", ""))[0] == category
    )


def made(rehearsal: Rehearsal, op: str, *, phase: Phase = Phase.FORWARD) -> list[tuple[int, ...]]:
    """Return the shapes of what operations of this name made in a phase of the first step."""
    return [
        event.shape
        for event in rehearsal.events
        if event.num_bytes > 0 and event.step == 1 and event.phase == phase and op in event.op
    ]


PHASES = (
    Phase.FORWARD,
    Phase.LOSS,
    Phase.BACKWARD,
    Phase.CLIP,
    Phase.OPTIMIZER,
    Phase.ZERO_GRAD,
)


@pytest.fixture(scope="module")
def full() -> Rehearsal:
    """Full fine-tuning of a model of 1,692,928 parameters in Trainer, 2 x 512 tokens."""
    return rehearse(TINY, make_recipe(), TRAINER)


def test_a_run_is_marked_from_loading_to_the_last_step(full: Rehearsal) -> None:
    """Loading, then two steps of six phases each, in the order in which Trainer takes them."""
    steps = [(step, phase) for step in (1, 2) for phase in PHASES]
    assert list(full.peaks()) == [(0, Phase.LOAD), *steps]


def test_what_is_long_lived_is_named(full: Rehearsal) -> None:
    """In bf16: weights, gradients and each of AdamW's two states are 2 bytes a parameter; the batch is three tensors of
    2 x 512 numbers of 8 bytes.

    Parameters by hand: two embeddings of 1000 x 256; a layer of 256 x (256 + 128 + 128 + 256) for attention, 3 x 256 x
    512 for the MLP and 2 x 256 for norms; 256 for the last norm. Rounding adds what is not a multiple of 512 bytes: the
    32 numbers of rotary frequencies in the weights, kept twice. AdamW's step counters are on the host.
    """
    layer = 256 * (256 + 128 + 128 + 256) + 3 * 256 * 512 + 2 * 256
    parameters = 2 * 1000 * 256 + 2 * layer + 256
    assert named(full, Category.WEIGHTS) == 2 * parameters + 2 * 512
    assert named(full, Category.GRADIENTS) == 2 * parameters
    assert named(full, Category.OPTIMIZER_STATES) == 2 * 2 * parameters
    assert named(full, Category.INPUTS) == 3 * 2 * 512 * 8


def test_a_scaler_takes_no_memory_but_its_numbers() -> None:
    """fp16 under a GradScaler peaks where bf16 does, but for its scale and flags: under 8 KiB.

    The kernel that unscales writes in place: `amp_foreach_non_finite_check_and_unscale_cuda_` in
    aten/src/ATen/native/cuda/AmpKernels.cu; both types have two bytes.
    """
    half = rehearse(TINY, make_recipe(precision=HALF), TRAINER).peaks()
    brain = rehearse(TINY, make_recipe(precision=MIXED), TRAINER).peaks()
    for key, peak_bytes in brain.items():
        assert 0 <= half[key] - peak_bytes < 2**13, key


def test_weights_trained_in_fp16_are_refused() -> None:
    """PyTorch's own words are "Attempting to unscale FP16 gradients."; the answer says which weights to take."""
    halves = replace(HALF, weight_dtype=FLOAT16)
    with pytest.raises(InputError, match="GradScaler") as refused:
        rehearse(TINY, make_recipe(precision=halves), TRAINER)
    assert "--weight-dtype float32" in str(refused.value.hint)


@pytest.mark.parametrize(("padding", "masks"), [(0.0, 0), (0.5, 1)])
def test_padding_brings_the_mask_that_cuda_gets(padding: float, masks: int) -> None:
    """A row of 256 tokens beside one of 512: the causal mask is written out for each row, [B, 1, S, S]; where nothing
    is padded it is not made.

    Source: `_ignore_causal_mask_sdpa` in transformers/masking_utils.py.
    """
    rehearsal = rehearse(TINY, make_recipe(), replace(TRAINER, padding=padding))
    shapes = {event.shape for event in rehearsal.events if event.dtype == "bool"}
    assert ((2, 1, 512, 512) in shapes) == bool(masks)


def test_a_batch_of_one_has_no_padding() -> None:
    """The only sample of a micro-batch is the longest: a run with padding is the run without."""
    recipe = make_recipe(micro_batch=1)
    padded = rehearse(TINY, recipe, replace(TRAINER, padding=0.5)).peaks()
    assert padded == rehearse(TINY, recipe, TRAINER).peaks()


def test_packing_lays_sequences_end_to_end() -> None:
    """2 samples of 4 sequences are one row of 1,024 tokens, and flash-attn gets 8 sequences: 9 bounds of 4 bytes, its
    log-sum-exp [H, T] = [4, 1024], and no mask.

    Source: `DataCollatorWithFlattening` in transformers/data/data_collator.py.
    """
    recipe = make_recipe(attention=Attention.FLASH)
    rehearsal = rehearse(TINY, recipe, replace(TRAINER, packing=4))
    shapes = [event.shape for event in rehearsal.events if event.step == 1 and event.num_bytes > 0]
    assert (4, 1024) in shapes
    assert (9,) in shapes
    assert not any(shape[-2:] == (1024, 1024) for shape in shapes)


@pytest.mark.parametrize(
    ("optim", "states"), [("adagrad", 1), ("rmsprop", 1), ("sgd", 0), ("adamw_torch_fused", 2)]
)
def test_any_optimizer_of_training_arguments(optim: str, states: int, full: Rehearsal) -> None:
    """Trainer makes it by its name: Adagrad and RMSprop keep one tensor for each parameter, SGD none, AdamW two, of the
    parameters' type. A step counter of 512 bytes for each of 21 tensors is on the card where the kernel reads it, and
    Adagrad's too: it is there before accelerate moves all states (`AcceleratedOptimizer.__init__`).
    """
    rehearsal = rehearse(TINY, make_recipe(), replace(TRAINER, optim=optim))
    weights = named(full, Category.GRADIENTS)
    counters = 21 * 512 if optim in ("adagrad", "adamw_torch_fused") else 0
    assert named(rehearsal, Category.OPTIMIZER_STATES) == states * weights + counters


@pytest.mark.parametrize(
    ("optim", "words"),
    [("lomo", "lomo"), ("adam", "knows no `adam`")],
    ids=["package that is not there", "name that is not there"],
)
def test_an_optimizer_that_cannot_be_made(optim: str, words: str) -> None:
    """A missing package is named, and a name that TrainingArguments does not know comes with the nearest."""
    with pytest.raises(InputError, match=words):
        rehearse(TINY, make_recipe(), replace(TRAINER, optim=optim))


def test_frozen_parts_have_no_gradients(full: Rehearsal) -> None:
    """Without the input embedding's 1000 x 256 parameters the gradients are 512,000 bytes less."""
    recipe = make_recipe(method=Method.FREEZE, freeze=("model.embed_tokens.*",))
    less = named(full, Category.GRADIENTS) - named(
        rehearse(TINY, recipe, TRAINER), Category.GRADIENTS
    )
    assert less == 1000 * 256 * 2


def test_images_are_neither_packed_nor_padded() -> None:
    """That is said before a step is taken."""
    config = {"model_type": "llava"}
    with pytest.raises(Unsupported, match="neither packed nor padded"):
        rehearse(
            config, make_recipe(), replace(TRAINER, task=Task.IMAGE_TEXT, num_layers=1, packing=2)
        )


def test_a_run_leaves_nothing_behind(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is printed, though every step is logged; accelerate's variables are as before."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    before = dict(os.environ)
    rehearse(TINY, make_recipe(micro_batch=1), TRAINER)
    assert dict(os.environ) == before
    assert capsys.readouterr() == ("", "")
