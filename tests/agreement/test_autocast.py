"""Layers under autocast: what runs in the lower type, what in fp32, and how long the casts of weights live."""

from __future__ import annotations

from typing import Any

import pytest

from tests.agreement.compare import assert_agree, run_on_tape
from tests.agreement.golden import Golden
from tests.agreement.layers import real_layer, tape_layer
from wazn.dtypes import BFLOAT16, FLOAT32
from wazn.simulate import ops
from wazn.simulate.tape import Tape
from wazn.trace.specs import OpTrace, Spec

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 640,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "qwen2": {**LLAMA, "model_type": "qwen2"},
    "qwen3": {**LLAMA, "model_type": "qwen3", "head_dim": 64},
    "phi": {**LLAMA, "model_type": "phi"},
    "gpt2": {"model_type": "gpt2", "n_embd": 256, "n_layer": 1, "n_head": 4, "vocab_size": 320},
}
GEMMA2 = {**LLAMA, "model_type": "gemma2", "head_dim": 64, "num_hidden_layers": 2}


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", CONFIGS)
def test_layer(name: str, dtype: str, trained: bool, golden: Golden) -> None:
    """A whole layer casts, saves and frees under bf16 autocast what the tape's layer does."""
    options: dict[str, Any] = {"dtype": dtype, "trained": trained, "autocast": "bfloat16"}
    real = golden.op(lambda: real_layer(CONFIGS[name], **options))
    assert_agree(real, tape_layer(CONFIGS[name], **options))


@pytest.mark.parametrize("trained", [True, False])
def test_layer_in_fp16(trained: bool, golden: Golden) -> None:
    """fp16 autocast is the same with another type."""
    options: dict[str, Any] = {"dtype": "float32", "trained": trained, "autocast": "float16"}
    real = golden.op(lambda: real_layer(LLAMA, **options))
    assert_agree(real, tape_layer(LLAMA, **options))


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("config", [LLAMA, GEMMA2], ids=["llama", "gemma2"])
def test_eager_attention(config: dict[str, Any], trained: bool, golden: Golden) -> None:
    """Eager attention casts its products down and its softmax up."""
    options: dict[str, Any] = {
        "dtype": "float32",
        "trained": trained,
        "autocast": "bfloat16",
        "attention": "eager",
    }
    real = golden.op(lambda: real_layer(config, **options))
    assert_agree(real, tape_layer(config, **options))


@pytest.mark.parametrize("trained", [True, False])
def test_weight_used_twice(trained: bool, golden: Golden) -> None:
    """A trained fp32 weight is cast once per region; a frozen one at every use."""
    x = Spec((2, 256, 256), "float32", requires_grad=True)
    weight = Spec((256, 256), "float32", requires_grad=trained)

    def real() -> OpTrace:
        from torch.nn.functional import linear

        from wazn.trace.opcheck import measure_op

        return measure_op(lambda x, w: linear(linear(x, w), w), x, weight, autocast="bfloat16")

    def contract(tape: Tape, x: Any, w: Any) -> Any:
        once = ops.linear(tape, x, w, None, out_features=256)
        return ops.linear(tape, once, w, None, out_features=256)

    assert_agree(golden.op(real), run_on_tape(contract, x, weight, autocast=BFLOAT16))


def test_cast_outlives_its_use() -> None:
    """The cached cast of a trained weight stays until the outermost region ends, also without a graph."""
    tape = Tape()
    weight = tape.parameter(name="w", numel=1024, dtype=FLOAT32, requires_grad=True)
    with tape.autocast(BFLOAT16), tape.no_grad():
        ops.autocast(tape, weight)
        assert alive_bytes(tape) == 1024 * (4 + 2)
        ops.autocast(tape, weight)
        assert alive_bytes(tape) == 1024 * (4 + 2)
    assert alive_bytes(tape) == 1024 * 4


def alive_bytes(tape: Tape) -> int:
    return sum(sum(segment.sizes) for segment in tape.segments)
