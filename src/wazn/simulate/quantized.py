"""Linears that bitsandbytes stores in 4 or 8 bits.

Sources, bitsandbytes 0.50: nn/modules.py (`Linear4bit`, `Linear8bitLt`), autograd/_functions.py (`MatMul4Bit`,
`MatMul8bitLt`), functional.py (`quantize_4bit`, `dequantize_4bit`), backends/cuda/ops.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from wazn.dtypes import BFLOAT16, BOOL, FLOAT16, FLOAT32, INT8, INT32, UINT8, Dtype
from wazn.model.spec import Linear
from wazn.recipe import Quantization, QuantizationFormat
from wazn.simulate.ops import to
from wazn.simulate.tape import Parameter, Tape, Tensor
from wazn.timeline.events import Category
from wazn.units import ceil_div

__all__ = ["Linear4bitModule", "Linear8bitModule", "QuantizationState", "quantization_state"]

NESTED_BLOCK = 256  # quantize_4bit: `quantize_blockwise(..., blocksize=256)`
CODE_4BIT = 16  # values of a 4-bit type
CODE_8BIT = 256  # values of the dynamic 8-bit type that nested scales are stored in
LARGEST_FUSED_ROWS = 1536  # `_gemm_4bit_custom_max_m`


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantizationState:
    """What stands beside a quantised weight: `tensors` in the order in which they are made."""

    tensors: tuple[Tensor, ...]
    num_blocks: int
    nested: bool


def quantization_state(tape: Tape, spec: Linear, quantization: Quantization) -> QuantizationState:
    """Allocate the constants of one weight [N, K]: nothing of it is shared between layers.

    4 bits: an fp32 scale per block; with double quantization a byte per block, an fp32 scale per 256 of those, a
    table of 256 fp32 values, and an offset; in both cases the table of the 16 values of the type. 8 bits: an fp32
    scale per row.
    """

    def make(numel: int, dtype: Dtype, label: str) -> Tensor:
        return tape.new_tagged(numel, dtype, Category.QUANTIZATION_STATE, f"{spec.name}.{label}")

    numel = spec.in_features * spec.out_features
    blocks = ceil_div(numel, quantization.block_size)
    if quantization.format is QuantizationFormat.INT8:
        return QuantizationState(
            tensors=(make(spec.out_features, FLOAT32, "SCB"),), num_blocks=0, nested=False
        )
    if not quantization.double_quant:
        tensors = make(CODE_4BIT, FLOAT32, "code"), make(blocks, FLOAT32, "absmax")
        return QuantizationState(tensors=tensors, num_blocks=blocks, nested=False)
    return QuantizationState(
        tensors=(
            make(blocks, UINT8, "absmax"),
            make(1, FLOAT32, "offset"),
            make(ceil_div(blocks, NESTED_BLOCK), FLOAT32, "nested absmax"),
            make(CODE_8BIT, FLOAT32, "nested code"),
            make(CODE_4BIT, FLOAT32, "code"),
        ),
        num_blocks=blocks,
        nested=True,
    )


class Linear4bitModule:
    """bitsandbytes.nn.Linear4bit: computes in `compute_dtype`, returns the type of its input, keeps no input for
    backward; before 0.43.2 its node has the input as a plain attribute (`ctx.tensors`), for as long as there is a node.

    quantization: says of which release it is.
    """

    __slots__ = ("bias", "compute_dtype", "dense_dtype", "quantization", "spec", "state", "weight")

    def __init__(
        self,
        spec: Linear,
        weight: Parameter,
        bias: Parameter | None,
        state: QuantizationState,
        quantization: Quantization,
        *,
        compute_dtype: Dtype,
        dense_dtype: Dtype,
    ) -> None:
        self.spec = spec
        self.weight = weight
        self.bias = bias
        self.state = state
        self.quantization = quantization
        self.compute_dtype = compute_dtype
        self.dense_dtype = dense_dtype  # of the weight before it was quantised

    def __call__(self, tape: Tape, x: Tensor) -> Tensor:
        """x: [..., in_features]; returns [..., out_features]."""
        tape.label = self.spec.name
        dtype = x.dtype
        compute_dtype = self.compute_dtype
        if self.quantization.computes_in_input_dtype and dtype in (FLOAT32, BFLOAT16):
            compute_dtype = dtype
        x = to(tape, x, compute_dtype)
        bias = None if self.bias is None else to(tape, self.bias, compute_dtype)
        return to(tape, self._matmul(tape, x, bias), dtype)

    def _matmul(self, tape: Tape, x: Tensor, bias: Tensor | None) -> Tensor:
        """MatMul4Bit: the weight is dequantised for the product, and again in backward."""
        numel_x = x.numel
        out = (
            self._fused_product(tape, x)
            if self.quantization.fused_product
            else self._linear(tape, x, bias)
        )
        if self.quantization.keeps_input and x.requires_grad:
            tape.hold(x)

        def backward(gradient: Tensor) -> tuple[Tensor, None]:
            dense = self.dense_weight(tape)
            cast = to(tape, dense, gradient.dtype)
            del dense
            for_x = tape.new(numel_x, gradient.dtype)
            del cast
            return for_x, None

        inputs = (x,) if bias is None else (x, bias)
        return tape.record(out, inputs, (), backward)

    def _fused_product(self, tape: Tape, x: Tensor) -> Tensor:
        """bitsandbytes::gemm_4bit."""
        rows = x.numel // self.spec.in_features
        held: tuple[Tensor, ...] = ()
        if rows > LARGEST_FUSED_ROWS:  # below, a kernel may read the packed weight itself
            held = self._dequantise_for_product(tape, x.dtype)
        out = tape.new(rows * self.spec.out_features, x.dtype)
        del held
        return out

    def _linear(self, tape: Tape, x: Tensor, bias: Tensor | None) -> Tensor:
        """linear(A, dequantize_4bit(B).to(A.dtype).t(), bias); autocast casts the last argument first."""
        dense = self.dense_weight(tape)
        weight = to(tape, dense, x.dtype)
        del dense
        dtype = tape.autocast_dtype or x.dtype
        casts = [
            to(tape, argument.detach(), dtype)
            for argument in (bias, weight, x)
            if argument is not None
        ]
        out = tape.new(x.numel // self.spec.in_features * self.spec.out_features, dtype)
        del casts
        return out

    def _dequantise_for_product(self, tape: Tape, dtype: Dtype) -> tuple[Tensor, ...]:
        """_dequant_linear_fallback of the CUDA backend."""
        held: tuple[Tensor, ...] = ()
        if self.state.nested:
            blocks = self.state.num_blocks
            held = tape.new(blocks, FLOAT32), tape.new(blocks, FLOAT32)
        return (*held, tape.new(self.spec.in_features * self.spec.out_features, dtype))

    def dense_weight(self, tape: Tape) -> Tensor:
        """dequantize_4bit: the weight [N, K] in the type that it had before it was quantised."""
        scales = tape.new(self.state.num_blocks, FLOAT32) if self.state.nested else None
        dense = tape.new(self.spec.in_features * self.spec.out_features, self.dense_dtype)
        del scales
        return dense


class Linear8bitModule:
    """bitsandbytes.nn.Linear8bitLt with its threshold for outliers, 6.0 in transformers, or with 0.0: none.

    The input stays alive until all of backward is done, as an attribute of the autograd function; checkpointing does
    not see it, so that the inputs of the first forward pass stay alive beside the checkpoints. With a threshold,
    outlier columns are assumed to be there and few: what holds them alone is not counted.
    """

    __slots__ = ("bias", "has_outliers", "spec", "state", "weight")

    def __init__(
        self,
        spec: Linear,
        weight: Parameter,
        bias: Parameter | None,
        state: QuantizationState,
        *,
        has_outliers: bool = True,
    ) -> None:
        self.spec = spec
        self.weight = weight
        self.bias = bias
        self.state = state
        self.has_outliers = has_outliers

    def __call__(self, tape: Tape, x: Tensor) -> Tensor:
        """x: [..., in_features]; returns [..., out_features]."""
        tape.label = self.spec.name
        numel_x, dtype = x.numel, x.dtype
        quantised = self._quantise(tape, x)
        out = self._product(tape, numel_x // self.spec.in_features, dtype)
        del quantised
        if x.requires_grad:
            tape.hold(x)

        def backward(gradient: Tensor) -> tuple[Tensor]:
            dense = self._dense(tape, dtype)
            raised = to(tape, gradient, dtype)
            for_x = tape.new(numel_x, dtype)
            del dense, raised
            return (for_x.view_with_base(),)

        return tape.record(out, (x,), (), backward)

    def _quantise(self, tape: Tape, x: Tensor) -> tuple[Tensor, Tensor]:
        """int8_vectorwise_quant of the CUDA backend, on an fp16 copy: one byte per element, one fp32 scale per row."""
        half = to(tape, x.detach(), FLOAT16)
        rows = x.numel // self.spec.in_features
        row_stats, quantised = tape.new(rows, FLOAT32), tape.new(x.numel, INT8)
        if self.has_outliers:
            absolute = tape.new(x.numel, FLOAT16)
            outliers = tape.new(x.numel, BOOL)
            del absolute, outliers
        del half
        return row_stats, quantised

    def _product(self, tape: Tape, rows: int, dtype: Dtype) -> Tensor:
        """int8_scaled_mm: an int32 product, its fp16 value, and that in the type of the input; outliers are added to
        a new tensor, by an addmm, which autocast lowers.
        """
        numel = rows * self.spec.out_features
        product = tape.new(numel, INT32)
        out = to(tape, tape.new(numel, FLOAT16), dtype)
        del product
        if not self.has_outliers:
            return out
        lowered = to(tape, out, tape.autocast_dtype or dtype)
        return tape.new(numel, lowered.dtype)

    def dense_weight(self, tape: Tape) -> Tensor:
        """int8_vectorwise_dequant: the weight times its scales, then times a number, in fp32."""
        numel = self.spec.in_features * self.spec.out_features
        scaled = tape.new(numel, FLOAT32)
        dense = tape.new(numel, FLOAT32)
        del scaled
        return dense

    def _dense(self, tape: Tape, dtype: Dtype) -> Tensor:
        dense = tape.new(self.spec.in_features * self.spec.out_features, dtype)
        scales = tape.new(self.spec.out_features, FLOAT32)
        del scales
        return dense
