"""4-bit linear layers of bitsandbytes on fake tensors: the real `Linear4bit` and `MatMul4Bit` over
storages without data.

`Params4bit` cannot wrap a fake tensor, so the packed weight is a plain parameter that carries the
attributes which `Linear4bit` and `peft` read. Shapes and lifetimes are those of
`bitsandbytes.functional.quantize_4bit`: two values in a byte, one fp32 scale for 64 values; with double
quantization the scales are bytes, with one fp32 scale for 256 of them, a table of 256 values and an offset.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from wazn.trace.outliers import has_outlier_operators
from wazn.trace.tracker import DEVICE
from wazn.units import ceil_div

__all__ = [
    "give_quant_states",
    "prepare_kbit",
    "quantise_linears",
    "quantise_linears_8bit",
    "quantised_linears",
]

_BLOCK = 64
_NESTED_BLOCK = 256
_OUTLIER_THRESHOLD = 6.0  # `llm_int8_threshold` of transformers' BitsAndBytesConfig


def quantise_linears(model: Any, *, double_quant: bool, quant_type: str = "nf4") -> None:
    """Replace the linear layers that `transformers` replaces by 4-bit ones, in a model on `meta`.

    Their data is packed, without states. The output head, tied weights and fused experts stay as they are.
    """
    from bitsandbytes.nn import Linear4bit

    dtype = model.dtype
    for name, shape, has_bias in _linears(model):
        layer = Linear4bit(
            shape[1],
            shape[0],
            has_bias,
            compute_dtype=dtype,
            compress_statistics=double_quant,
            quant_type=quant_type,
            device="meta",
        )
        _pack(layer, dtype=dtype, double_quant=double_quant, quant_type=quant_type)
        model.set_submodule(name, layer)
    model.is_loaded_in_4bit = True
    _sign(
        model,
        load_in_4bit=True,
        bnb_4bit_compute_dtype=dtype,
        bnb_4bit_quant_type=quant_type,
        bnb_4bit_use_double_quant=double_quant,
    )


def quantise_linears_8bit(model: Any) -> None:
    """Replace the same layers by 8-bit ones, with the threshold for outliers that transformers sets.

    Before bitsandbytes 0.46 without one: its outliers cannot be assumed there.
    """
    from bitsandbytes.nn import Linear8bitLt

    threshold = _OUTLIER_THRESHOLD if has_outlier_operators() else 0.0
    dtype = model.dtype
    for name, shape, has_bias in _linears(model):
        layer = Linear8bitLt(
            shape[1],
            shape[0],
            has_bias,
            has_fp16_weights=False,
            threshold=threshold,
            device="meta",
        )
        weight = torch.empty(shape, dtype=torch.int8, device="meta")
        layer.weight = torch.nn.Parameter(weight, requires_grad=False)
        layer.weight.CB = layer.weight.SCB = None
        layer.weight.has_fp16_weights = False
        if layer.bias is not None:
            layer.bias = torch.nn.Parameter(layer.bias.to(dtype), requires_grad=False)
        model.set_submodule(name, layer)
    model.is_loaded_in_8bit = True
    _sign(model, load_in_8bit=True, llm_int8_threshold=threshold)


def _sign(model: Any, **options: Any) -> None:
    """Note on a model what `from_pretrained` notes on one that it quantised; Trainer and peft look there."""
    from transformers import BitsAndBytesConfig
    from transformers.quantizers import AutoHfQuantizer

    quantization = BitsAndBytesConfig(**options)
    model.is_quantized = True
    model.quantization_method = quantization.quant_method
    model.config.quantization_config = quantization
    model.hf_quantizer = AutoHfQuantizer.from_config(quantization, pre_quantized=False)


def _linears(model: Any) -> Iterator[tuple[str, tuple[int, int], bool]]:
    """Yield the name, the shape (outputs, inputs) and whether there is a bias, of every layer to replace."""
    from transformers.pytorch_utils import Conv1D

    kept = _kept(model)
    for name, module in list(model.named_modules()):
        if type(module) in (torch.nn.Linear, Conv1D) and _is_replaced(name, kept):
            first, second = module.weight.shape
            is_transposed = type(module) is Conv1D
            shape = (second, first) if is_transposed else (first, second)
            yield name, shape, module.bias is not None


def _kept(model: Any) -> list[str]:
    """Return what transformers does not replace: the output head, the last module, names of what is kept in fp32
    (T5's `wo`).

    Source: `get_modules_to_not_convert` in transformers/quantizers/base.py; it adds what is tied, the head again.
    """
    head = model.get_output_embeddings()
    last = [name for name, _ in model.named_parameters()][-1].rpartition(".")[0]
    in_fp32 = getattr(model, "_keep_in_fp32_modules", None) or ()
    return [last, *(name for name, module in model.named_modules() if module is head), *in_fp32]


def _is_replaced(name: str, kept: list[str]) -> bool:
    """Ask transformers whether a module's path is none of those; before 5.0 `_replace_with_bnb_linear` said it."""
    try:
        from transformers.quantizers.quantizers_utils import should_convert_module
    except ImportError:
        is_kept = any(name == path or f"{path}." in name for path in kept)
        return not is_kept and name.rpartition(".")[2] not in kept
    return bool(should_convert_module(name, kept))


def quantised_linears(model: Any) -> list[Any]:
    """Return the 4-bit linear layers of a model."""
    from bitsandbytes.nn import Linear4bit

    return [module for module in model.modules() if isinstance(module, Linear4bit)]


def _pack(layer: Any, *, dtype: torch.dtype, double_quant: bool, quant_type: str) -> None:
    num_values = layer.in_features * layer.out_features
    packed = torch.empty((ceil_div(num_values, 2), 1), dtype=torch.uint8, device="meta")
    layer.weight = torch.nn.Parameter(packed, requires_grad=False)
    layer.weight.compress_statistics = double_quant
    layer.weight.quant_type = quant_type
    layer.weight.original_dtype = dtype
    if layer.bias is not None:
        layer.bias = torch.nn.Parameter(layer.bias.to(dtype), requires_grad=False)


def give_quant_states(model: Any) -> list[torch.Tensor]:
    """Give every quantised layer of a model with fake storages its state; returns the states' tensors."""
    from bitsandbytes.nn import Linear8bitLt

    made: list[torch.Tensor] = []
    for layer in model.modules():
        if isinstance(layer, Linear8bitLt):
            layer.state.CB = layer.weight.data
            layer.state.SCB = _empty((layer.out_features,), torch.float32)
            made.append(layer.state.SCB)
    for layer in quantised_linears(model):
        state, tensors = _quant_state(layer)
        layer.weight.quant_state = layer.quant_state = state
        made += tensors
    return made


def _quant_state(layer: Any) -> tuple[Any, list[torch.Tensor]]:
    from bitsandbytes.functional import QuantState

    shape = torch.Size((layer.out_features, layer.in_features))
    blocks = ceil_div(shape.numel(), _BLOCK)
    code = _empty((16,), torch.float32)
    nested: dict[str, Any] = {}
    if layer.weight.compress_statistics:
        absmax, offset = _empty((blocks,), torch.uint8), _empty((), torch.float32)
        outer = _empty((ceil_div(blocks, _NESTED_BLOCK),), torch.float32)
        outer_code = _empty((256,), torch.float32)
        state2 = QuantState(
            absmax=outer, code=outer_code, blocksize=_NESTED_BLOCK, dtype=torch.float32
        )
        nested = {"offset": offset, "state2": state2}
        tensors = [absmax, offset, outer, outer_code, code]
    else:
        absmax = _empty((blocks,), torch.float32)
        tensors = [absmax, code]
    state = QuantState(
        absmax=absmax,
        shape=shape,
        code=code,
        blocksize=_BLOCK,
        quant_type=layer.weight.quant_type,
        dtype=layer.weight.original_dtype,
        **nested,
    )
    return state, tensors


def _empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=DEVICE)


def prepare_kbit(model: Any) -> None:
    """Freeze the model and raise what is not quantised to fp32, as
    `peft.prepare_model_for_kbit_training` does.
    """
    from peft import prepare_model_for_kbit_training

    prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
