"""The adapters on the tape are peft's layers under fake tensors, to the byte."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.agreement.compare import DTYPES, assert_agree, run_on_tape
from tests.agreement.golden import Golden
from wazn.dtypes import BFLOAT16, FLOAT32, Dtype
from wazn.model.spec import Linear
from wazn.simulate.lora import Adapters, LoraModule
from wazn.simulate.modules import LinearModule
from wazn.simulate.tape import Tape, Tensor
from wazn.trace.specs import OpTrace, Spec

IN, OUT, RANK, TOKENS = 256, 384, 16, (2, 512)

PRECISIONS: dict[str, tuple[str, str, str, str | None]] = {
    # of the input, of the base, of the adapters, of autocast
    "fp32 adapters on bf16": ("bfloat16", "bfloat16", "float32", None),
    "bf16 adapters on bf16": ("bfloat16", "bfloat16", "bfloat16", None),
    "fp16": ("float16", "float16", "float32", None),
    "fp32": ("float32", "float32", "float32", None),
    "bf16 base under autocast": ("bfloat16", "bfloat16", "float32", "bfloat16"),
    "bf16 base under autocast, bf16 adapters": ("bfloat16", "bfloat16", "bfloat16", "bfloat16"),
    "bf16 base under autocast, fp32 input": ("float32", "bfloat16", "float32", "bfloat16"),
    "fp32 base under autocast": ("float32", "float32", "float32", "bfloat16"),
    "fp16 base under fp16 autocast": ("float16", "float16", "float32", "float16"),
}


def peft_layer(
    base: str, adapter: str, *, dropout: float, dora: bool, bias: bool, conv1d: bool = False
) -> Any:
    import peft
    import torch
    from peft.tuners.lora.layer import Linear as LoraLinear
    from transformers.pytorch_utils import Conv1D

    config = peft.LoraConfig(r=RANK, lora_dropout=dropout, use_dora=dora, fan_in_fan_out=conv1d)
    with torch.device("meta"):
        inner = Conv1D(OUT, IN) if conv1d else torch.nn.Linear(IN, OUT, bias=bias)
        inner = inner.to(getattr(torch, base))
        layer = LoraLinear(
            inner,
            "default",
            config=config,
            r=RANK,
            lora_alpha=RANK,
            is_target_conv_1d_layer=conv1d,
        )
    for name, parameter in layer.named_parameters():
        is_adapter = "lora_" in name
        parameter.requires_grad_(is_adapter)
        if is_adapter:
            parameter.data = parameter.data.to(getattr(torch, adapter))
    return layer


def tape_layer(tape: Tape, base: Dtype, adapter: Dtype, **options: Any) -> LoraModule:
    def parameter(name: str, numel: int, dtype: Dtype, *, trained: bool) -> Any:
        return tape.parameter(name=name, numel=numel, dtype=dtype, requires_grad=trained)

    spec = Linear(name="q_proj", in_features=IN, out_features=OUT, bias=options["bias"])
    weight = parameter("weight", IN * OUT, base, trained=False)
    bias = parameter("bias", OUT, base, trained=False) if options["bias"] else None
    adapters = Adapters(
        lora_a=parameter("lora_A", RANK * IN, adapter, trained=True),
        lora_b=parameter("lora_B", RANK * OUT, adapter, trained=True),
        magnitude=parameter("m", OUT, adapter, trained=True) if options["dora"] else None,
        rank=RANK,
        dropout=options["dropout"],
    )
    return LoraModule(spec, LinearModule(spec, weight, bias), adapters)


def without_vector_sum(real: OpTrace) -> OpTrace:
    """Leave out the sum of DoRA's two gradients of its scale, a vector.

    Each is a view of a sum over the tokens that shares its storage with the sum, so that PyTorch adds into a third
    vector; the tape knows element counts and no shapes, and adds in place.
    """
    events = [
        event
        for event in real.events
        if not (event.op == "aten.add.Tensor" and event.shape == (1, OUT))
    ]
    return replace(real, events=tuple(events))


def call(tape: Tape, module: LoraModule, x: Tensor) -> Tensor:
    return module(tape, x)


def real(spec: Spec, base: str, adapter: str, *, autocast: str | None, **options: Any) -> OpTrace:
    """Measure peft's layer."""
    from wazn.trace.opcheck import measure_op

    layer = peft_layer(base, adapter, **options)
    return without_vector_sum(measure_op(layer, spec, autocast=autocast))


def compare(golden: Golden, name: str, *, requires_grad: bool = True, **options: Any) -> None:
    x, base, adapter, autocast = PRECISIONS[name]
    spec = Spec((*TOKENS, IN), x, requires_grad=requires_grad)
    seen = golden.op(lambda: real(spec, base, adapter, autocast=autocast, **options))
    tape = run_on_tape(
        call,
        spec,
        autocast=None if autocast is None else DTYPES[autocast],
        prepare=lambda tape: tape_layer(tape, DTYPES[base], DTYPES[adapter], **options),
    )
    assert_agree(seen, tape)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("name", PRECISIONS)
def test_lora_linear(name: str, dora: bool, dropout: float, golden: Golden) -> None:
    """peft's lora.Linear saves, casts and frees what the tape's module does, in every mixture of types."""
    compare(golden, name, dora=dora, dropout=dropout, bias=False)


@pytest.mark.parametrize("dora", [False, True])
def test_bias(dora: bool, golden: Golden) -> None:
    """The base's bias is in its result; DoRA takes it off before it scales."""
    compare(golden, "fp32 adapters on bf16", dora=dora, dropout=0.0, bias=True)


@pytest.mark.parametrize("name", ["fp32 adapters on bf16", "bf16 base under autocast"])
def test_input_without_gradient(name: str, golden: Golden) -> None:
    """In the first layer, whose input needs no gradient, only the adapters have a backward."""
    compare(golden, name, requires_grad=False, dora=False, dropout=0.1, bias=False)


@pytest.mark.parametrize("dora", [False, True])
def test_conv1d(dora: bool, golden: Golden) -> None:
    """On GPT-2's Conv1D the adapter holds what it holds on a linear with a bias."""
    spec = Spec((*TOKENS, IN), "bfloat16", requires_grad=True)
    options = {"dropout": 0.0, "dora": dora, "bias": True}
    seen = golden.op(
        lambda: real(spec, "bfloat16", "float32", autocast=None, **options, conv1d=True)
    )
    tape = run_on_tape(
        call, spec, prepare=lambda tape: tape_layer(tape, BFLOAT16, FLOAT32, **options)
    )
    assert_agree(seen, tape)
