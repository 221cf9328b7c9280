"""Quantised linears on the tape are bitsandbytes' layers under fake tensors, to the byte."""

from __future__ import annotations

from typing import Any

import pytest

from tests.agreement.compare import DTYPES, allocations, assert_agree, run_on_tape
from tests.agreement.golden import Golden
from tests.agreement.test_lora import without_vector_sum
from wazn.dtypes import BFLOAT16, FLOAT32, INT8, UINT8, Dtype
from wazn.model.spec import Linear
from wazn.recipe import KbitPreparation, Quantization, QuantizationFormat
from wazn.simulate.lora import Adapters, LoraModule
from wazn.simulate.ops import mul_scalar
from wazn.simulate.quantized import Linear4bitModule, Linear8bitModule, quantization_state
from wazn.simulate.tape import Tape, Tensor
from wazn.trace.specs import OpTrace, Spec

IN, OUT, RANK = 256, 384, 16
FEW, MANY = (2, 512), (2, 1024)  # tokens: below and above where bitsandbytes dequantises first


def real_4bit(*, double_quant: bool, bias: bool) -> Any:
    import torch
    from bitsandbytes.nn import Linear4bit

    from wazn.trace.quantized import _pack

    with torch.device("meta"):
        layer = Linear4bit(IN, OUT, bias, torch.bfloat16, double_quant, "nf4")
        layer.weight.module = None
        _pack(layer, dtype=torch.bfloat16, double_quant=double_quant, quant_type="nf4")
    return layer


def real_8bit(spec: Spec) -> OpTrace:
    """Measure the real MatMul8bitLt, which the layer takes on CUDA only; `CB` and `SCB` as the layer holds them."""
    from bitsandbytes.autograd._functions import MatMul8bitLt, MatmulLtState

    from wazn.trace.opcheck import measure_op

    def call(x: Any, numbers: Any, scales: Any) -> Any:
        state = MatmulLtState()
        state.CB, state.SCB, state.has_fp16_weights = numbers, scales, False
        return MatMul8bitLt.apply(x, numbers, None, None, state)

    return measure_op(call, spec, Spec((OUT, IN), "int8"), Spec((OUT,), "float32"))


def real_lora_4bit(*, double_quant: bool, bias: bool, dropout: float, dora: bool) -> Any:
    import peft
    import torch
    from peft.tuners.lora.bnb import Linear4bit

    config = peft.LoraConfig(r=RANK, lora_dropout=dropout, use_dora=dora)
    base = real_4bit(double_quant=double_quant, bias=bias)
    with torch.device("meta"):
        layer = Linear4bit(base, "default", config=config, r=RANK, lora_alpha=RANK)
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_("lora_" in name)
        if "lora_" in name:
            parameter.data = parameter.data.float()
    return layer


def measured(layer: Any, spec: Spec, autocast: str | None) -> OpTrace:
    """Measure a layer whose quantisation states are made inside the world, before the measurement."""
    from wazn.trace.opcheck import measure_op
    from wazn.trace.quantized import give_quant_states
    from wazn.trace.world import World

    world = World()
    made: list[Any] = []

    def call(x: Any) -> Any:
        if not made:
            made.append(world.materialise(layer).train())
            made.append(give_quant_states(layer))
        return layer(x)

    return measure_op(call, spec, world=world, autocast=autocast)


def tape_4bit(tape: Tape, *, double_quant: bool, bias: bool) -> Linear4bitModule:
    spec = Linear(name="q_proj", in_features=IN, out_features=OUT, bias=bias)
    quantization = Quantization(
        format=QuantizationFormat.NF4,
        double_quant=double_quant,
        kbit_preparation=KbitPreparation.PEFT,
        experts=False,
    )
    weight = tape.parameter(name="w", numel=IN * OUT // 2, dtype=UINT8, requires_grad=False)
    b = tape.parameter(name="b", numel=OUT, dtype=BFLOAT16, requires_grad=False)
    return Linear4bitModule(
        spec,
        weight,
        b if bias else None,
        quantization_state(tape, spec, quantization),
        quantization,
        compute_dtype=BFLOAT16,
        dense_dtype=BFLOAT16,
    )


def tape_8bit(tape: Tape, *, has_outliers: bool) -> Linear8bitModule:
    spec = Linear(name="q_proj", in_features=IN, out_features=OUT)
    quantization = Quantization(
        format=QuantizationFormat.INT8,
        double_quant=False,
        kbit_preparation=KbitPreparation.PEFT,
        experts=False,
    )
    weight = tape.parameter(name="w", numel=IN * OUT, dtype=INT8, requires_grad=False)
    state = quantization_state(tape, spec, quantization)
    return Linear8bitModule(spec, weight, None, state, has_outliers=has_outliers)


def tape_lora_4bit(tape: Tape, *, dropout: float, dora: bool, **base: Any) -> LoraModule:
    def adapter(name: str, numel: int, dtype: Dtype = FLOAT32) -> Any:
        return tape.parameter(name=name, numel=numel, dtype=dtype, requires_grad=True)

    module = tape_4bit(tape, **base)
    adapters = Adapters(
        lora_a=adapter("lora_A", RANK * IN),
        lora_b=adapter("lora_B", RANK * OUT),
        magnitude=adapter("magnitude", OUT) if dora else None,
        rank=RANK,
        dropout=dropout,
    )
    return LoraModule(module.spec, module, adapters, quantized=True, clone=True)


def call(tape: Tape, module: Linear4bitModule | Linear8bitModule | LoraModule, x: Tensor) -> Tensor:
    return module(tape, x)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tokens", [FEW, MANY])
@pytest.mark.parametrize("double_quant", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_linear_4bit(
    dtype: str, double_quant: bool, tokens: tuple[int, int], bias: bool, golden: Golden
) -> None:
    """Linear4bit keeps nothing of its input and dequantises in forward and in backward."""
    spec = Spec((*tokens, IN), dtype, requires_grad=True)
    options = {"double_quant": double_quant, "bias": bias}
    real = golden.op(lambda: measured(real_4bit(**options), spec, None))
    assert_agree(real, run_on_tape(call, spec, prepare=lambda tape: tape_4bit(tape, **options)))


@pytest.mark.parametrize("requires_grad", [True, False])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("autocast", [None, "bfloat16"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_lora_on_4bit(
    dtype: str, autocast: str | None, dropout: float, requires_grad: bool, golden: Golden
) -> None:
    """peft's lora.bnb.Linear4bit copies the base's result and casts as the tape's module does."""
    spec = Spec((*MANY, IN), dtype, requires_grad=requires_grad)
    options = {"double_quant": True, "bias": False, "dropout": dropout, "dora": False}
    real = golden.op(lambda: measured(real_lora_4bit(**options), spec, autocast))
    tape = run_on_tape(
        call,
        spec,
        autocast=None if autocast is None else DTYPES[autocast],
        prepare=lambda tape: tape_lora_4bit(tape, **options),
    )
    assert_agree(real, tape)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_linear_8bit(dtype: str, golden: Golden) -> None:
    """MatMul8bitLt keeps its input, and spells the weight out in backward, in the type of the input."""
    spec = Spec((*MANY, IN), dtype, requires_grad=True)
    real = golden.op(lambda: real_8bit(spec))
    tape = run_on_tape(call, spec, prepare=lambda tape: tape_8bit(tape, has_outliers=False))
    assert allocations(tape.changes["backward"]) == allocations(real.changes("backward"))
    assert tape.kept_bytes == real.kept_bytes
    assert tape.saved_bytes == real.saved_bytes
    assert tape.backward_peak_bytes == real.backward_peak_bytes
    assert tape.gradient_bytes == real.gradient_bytes


@pytest.mark.parametrize(("has_outliers", "per_output"), [(False, 4 + 2 + 2), (True, 4 + 2 + 2)])
def test_8bit_product(has_outliers: bool, per_output: int) -> None:
    """The product of 8-bit numbers stands in int32 beside its fp16 value and the result, over the quantised input.

    By pencil from bitsandbytes 0.50, backends/cuda/ops.py (`int8_mm_dequant`); the fake operators of bitsandbytes
    return results only.
    """
    rows = MANY[0] * MANY[1]
    spec = Spec((*MANY, IN), "bfloat16", requires_grad=True)
    tape = run_on_tape(call, spec, prepare=lambda tape: tape_8bit(tape, has_outliers=has_outliers))
    assert tape.forward_peak_bytes == rows * (4 + IN) + rows * OUT * per_output


def test_8bit_product_under_autocast() -> None:
    """The column of outliers is added by an addmm, which is on autocast's list: from fp32 the result is bf16.

    So it is without autocast's knowledge of the operator itself: `int8_mixed_scaled_mm` in bitsandbytes 0.50,
    backends/default/ops.py, is Python that runs while autocast is on.
    """
    spec = Spec((*MANY, IN), "float32", requires_grad=True)
    tape = run_on_tape(
        call, spec, autocast=BFLOAT16, prepare=lambda tape: tape_8bit(tape, has_outliers=True)
    )
    assert tape.kept_bytes == MANY[0] * MANY[1] * OUT * 2


def test_8bit_input_outlives_checkpointing() -> None:
    """Checkpointing drops what autograd saves, not what a Python function keeps as an attribute: the 8-bit input
    stays.
    """
    tape = Tape()
    module = tape_8bit(tape, has_outliers=False)
    x = tape.parameter(name="x", numel=MANY[0] * MANY[1] * IN, dtype=BFLOAT16, requires_grad=True)

    def block(x: Tensor) -> Tensor:
        return module(tape, mul_scalar(tape, x))

    before_bytes = alive_bytes(tape)
    result = tape.checkpoint(block, x)
    kept_bytes = alive_bytes(tape) - before_bytes
    assert kept_bytes == (x.numel + result.numel) * BFLOAT16.itemsize


def alive_bytes(tape: Tape) -> int:
    return sum(sum(segment.sizes) for segment in tape.segments)


def dequantise_on_fake_tensors(patch: pytest.MonkeyPatch) -> None:
    """Stand in for peft's own way to dequantise, which asks for a class that cannot hold a fake tensor."""
    import torch
    from bitsandbytes.functional import dequantize_4bit
    from peft.tuners.lora import dora

    def dequantize(module: Any) -> Any:
        state = getattr(module.weight, "quant_state", None)
        if state is None:  # while the layer is made
            return torch.empty((OUT, IN), dtype=torch.bfloat16, device="meta")
        return dequantize_4bit(module.weight.data, state)

    patch.setattr(dora, "dequantize_module_weight", dequantize)
    patch.setattr(dora, "deepcopy", lambda module: module)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("autocast", [None, "bfloat16"])
def test_dora_on_4bit(
    autocast: str | None, dropout: float, golden: Golden, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DoRA dequantises the weight once more in every forward pass."""
    spec = Spec((*MANY, IN), "bfloat16", requires_grad=True)
    options = {"double_quant": True, "bias": False, "dropout": dropout, "dora": True}

    def real() -> OpTrace:
        with monkeypatch.context() as patch:
            dequantise_on_fake_tensors(patch)
            layer = real_lora_4bit(**options)
            return without_vector_sum(measured(layer, spec, autocast))

    tape = run_on_tape(
        call,
        spec,
        autocast=None if autocast is None else DTYPES[autocast],
        prepare=lambda tape: tape_lora_4bit(tape, **options),
    )
    assert_agree(golden.op(real), tape)
