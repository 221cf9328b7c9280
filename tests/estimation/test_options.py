"""What options mean: who chooses what was not said, and what a preset is made of."""

from __future__ import annotations

import pytest

from wazn.dtypes import BFLOAT16, FLOAT16, FLOAT32, Dtype
from wazn.errors import InputError
from wazn.estimation.options import OPTION_NAMES, Options, as_option, resolve
from wazn.facts.stacks import resolve_stack
from wazn.recipe import (
    Attention,
    Checkpointing,
    KbitPreparation,
    Method,
    Optimizer,
    QuantizationFormat,
    Recipe,
)


def recipe(stack: str = "hf", **options: object) -> Recipe:
    """Return what the options mean for a Llama."""
    habits = resolve_stack(stack, family="llama")
    return resolve(Options(**options), habits).recipe  # type: ignore[arg-type]


def test_wazn_fills_the_question() -> None:
    """LoRA of rank 16 on all linears, one sample of 2,048 tokens, autocast on bf16 weights, sdpa."""
    asked = recipe()
    assert asked.method is Method.LORA
    assert asked.adapter is not None
    assert (asked.adapter.rank, asked.adapter.targets) == (16, ("all-linear",))
    assert (asked.micro_batch, asked.seq_len, asked.grad_accum) == (1, 2048, 1)
    assert (asked.precision.weight_dtype, asked.precision.autocast_dtype) == (BFLOAT16, BFLOAT16)
    assert asked.attention is Attention.SDPA


def test_the_stack_fills_the_habits() -> None:
    """transformers 5 takes fused AdamW and checkpoints without reentry; 4.48 takes foreach and reenters."""
    new, old = recipe(), recipe("hf@4.48")
    assert (new.optimizer, new.checkpointing) == (Optimizer.ADAMW_FUSED, Checkpointing.FULL)
    assert (old.optimizer, old.checkpointing) == (Optimizer.ADAMW, Checkpointing.FULL_REENTRANT)


def test_what_was_said_beats_both() -> None:
    """An option that was given is no default of anybody's."""
    habits = resolve_stack("hf", family="llama")
    resolved = resolve(Options(optimizer="sgd", seq_len=7, rank=3), habits)
    assert resolved.recipe.optimizer is Optimizer.SGD
    assert resolved.recipe.seq_len == 7
    assert {"optimizer", "seq-len", "rank"} & set(resolved.defaults) == set()
    assert resolved.defaults["checkpointing"] == "stack"
    assert resolved.defaults["attention"] == "wazn"


@pytest.mark.parametrize(
    ("preset", "weight", "autocast", "master"),
    [
        ("bf16", BFLOAT16, None, None),
        ("bf16-autocast", BFLOAT16, BFLOAT16, None),
        ("bf16-mixed", FLOAT32, BFLOAT16, None),
        ("bf16-master", BFLOAT16, None, FLOAT32),
        ("fp16-autocast", FLOAT16, FLOAT16, None),
        ("fp16-mixed", FLOAT32, FLOAT16, None),
        ("fp32", FLOAT32, None, None),
    ],
)
def test_presets(preset: str, weight: Dtype, autocast: Dtype | None, master: Dtype | None) -> None:
    """Each name means what the command line promises."""
    precision = recipe(method="full", precision=preset).precision
    assert (precision.weight_dtype, precision.autocast_dtype) == (weight, autocast)
    assert precision.master_dtype is master


def test_a_part_of_a_preset_can_be_replaced() -> None:
    """bf16-mixed with weights in bf16, or without autocast, is still the rest of bf16-mixed."""
    assert recipe(precision="bf16-mixed", weight_dtype="bf16").precision.weight_dtype is BFLOAT16
    assert recipe(precision="bf16-mixed", autocast_dtype="none").precision.autocast_dtype is None
    assert recipe(adapter_dtype="bfloat16").precision.adapter_dtype is BFLOAT16


def test_adapters_follow_peft() -> None:
    """fp32 since PEFT casts them (the stack of 4.43); before, of the base's type; on a quantised base always fp32."""
    assert recipe("hf@4.48").precision.adapter_dtype is FLOAT32
    assert recipe("hf@4.42").precision.adapter_dtype is BFLOAT16
    assert recipe("hf@4.42", method="qlora").precision.adapter_dtype is FLOAT32


def test_qlora() -> None:
    """QLoRA is nf4 with double quantisation, and LoRA on a quantised base is QLoRA; int8 has no second scale."""
    for asked in (recipe(method="qlora"), recipe(method="lora", quantization="nf4")):
        assert asked.method is Method.QLORA
        assert asked.quantization is not None
        assert asked.quantization.format is QuantizationFormat.NF4
        assert asked.quantization.double_quant
    plain = recipe(method="qlora", double_quant=False).quantization
    eight = recipe(method="qlora", quantization="int8").quantization
    assert plain is not None
    assert eight is not None
    assert not plain.double_quant
    assert not eight.double_quant
    assert recipe(quantization="none").quantization is None


def test_the_embeddings_output_is_made_to_need_a_gradient() -> None:
    """With checkpointing: by transformers 5, by k-bit preparation, and where reentry needs it; never for nothing."""
    assert recipe().inputs_require_grad
    assert not recipe(checkpointing="none").inputs_require_grad
    assert not recipe("hf@4.48", checkpointing="full").inputs_require_grad
    assert recipe("hf@4.48", checkpointing="full-reentrant").inputs_require_grad
    assert recipe("hf@4.48", checkpointing="full", method="qlora").inputs_require_grad
    assert not recipe(method="full").inputs_require_grad


def test_every_n() -> None:
    """`every-3` checkpoints each third layer."""
    asked = recipe(checkpointing="every-3")
    assert (asked.checkpointing, asked.checkpoint_every) == (Checkpointing.EVERY_N, 3)


def test_targets() -> None:
    """A list is split at its commas, a regular expression is left whole."""
    names = recipe(targets=" q_proj, v_proj ,").adapter
    pattern = recipe(targets=r".*\.(q|v)_proj{1,2}").adapter
    assert names is not None
    assert pattern is not None
    assert names.targets == ("q_proj", "v_proj")
    assert pattern.targets == (r".*\.(q|v)_proj{1,2}",)


@pytest.mark.parametrize("name", OPTION_NAMES)
@pytest.mark.parametrize("value", [object(), {}, b"lora", 1.5j])
def test_values_of_another_kind_are_refused(name: str, value: object) -> None:
    """Whatever a program passes, it hears which option was wrong."""
    with pytest.raises(InputError, match=f"`{as_option(name)}`"):
        Options(**{name: value})  # type: ignore[arg-type]


def test_a_truth_is_no_number() -> None:
    """True is 1 in Python, and still no micro-batch; 1 is no truth."""
    for wrong in ({"micro_batch": True}, {"dora": 1}, {"method": "x" * 100_000}):
        with pytest.raises(InputError):
            Options(**wrong)  # type: ignore[arg-type]


def test_k_bit_preparation_can_be_left_out() -> None:
    """It is PEFT's helper and not bitsandbytes' doing; without a quantised base there is nothing to prepare."""
    with_it, without = recipe(method="qlora"), recipe(method="qlora", kbit_preparation="none")
    assert with_it.quantization is not None
    assert without.quantization is not None
    assert with_it.quantization.kbit_preparation is KbitPreparation.PEFT
    assert without.quantization.kbit_preparation is KbitPreparation.NONE
    with pytest.raises(InputError, match="`--kbit-preparation` needs a quantised base"):
        recipe(kbit_preparation="trl")


@pytest.mark.parametrize("name", ["rank", "lora_dropout"])
def test_a_nought_for_adapters_is_still_for_adapters(name: str) -> None:
    """`--method full --rank 0` contradicts itself as much as `--rank 8` does."""
    options = Options(**{"method": "full", name: 0})
    with pytest.raises(InputError, match="is for `--method lora`"):
        resolve(options, resolve_stack("hf", family="llama"))
