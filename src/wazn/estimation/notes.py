"""What a person should know about an answer beside its numbers, as codes; `wazn.report.notes` has the words."""

from __future__ import annotations

from wazn.cluster import Gpu, limitations
from wazn.dtypes import BFLOAT16, FLOAT32, Dtype
from wazn.estimation.answer import Fit, OutsideLine, Verdict
from wazn.facts.notes import Note
from wazn.facts.stacks import Habits
from wazn.model.parameters import Group, count_parameters, layer_parameters
from wazn.model.spec import AttentionSpec, LayerSpec, ModelSpec, MoeSpec
from wazn.recipe import (
    Attention,
    Checkpointing,
    KbitPreparation,
    Method,
    Quantization,
    QuantizationFormat,
    Recipe,
)
from wazn.simulate.attention import implementation
from wazn.units import GIB

__all__ = ["THIN_MARGIN_BYTES", "groups_heads", "notes_on", "notes_on_verdict", "running_attention"]

# Measured processes held 0.3 to 1.8 GiB more than is counted (docs/accuracy.md): a margin below is none.
THIN_MARGIN_BYTES = 2 * GIB
# Families whose published weights are quantised, and how; what is weighed are the 16-bit weights made of them.
_PUBLISHED_IN = {"gpt_oss": "MXFP4"}


def running_attention(spec: ModelSpec, recipe: Recipe, habits: Habits) -> Attention:
    """Return the attention that runs in the softmax layers, which is not always what was asked for."""
    if any(isinstance(layer.attention, AttentionSpec) for layer in _distinct_layers(spec)):
        return implementation(habits, recipe.attention)
    return recipe.attention


def groups_heads(spec: ModelSpec, habits: Habits) -> bool:
    """Return whether sdpa is handed fewer key than query heads, which its memory-efficient kernel does not take."""
    if habits.repeat_kv or habits.sdpa_mask:  # heads are repeated; with a mask too
        return False
    return any(
        isinstance(layer.attention, AttentionSpec)
        and layer.attention.num_kv_heads < layer.attention.num_heads
        for layer in _distinct_layers(spec)
    )


def _distinct_layers(spec: ModelSpec) -> list[LayerSpec]:
    return list({id(layer): layer for layer in spec.layers}.values())


def notes_on(
    spec: ModelSpec,
    recipe: Recipe,
    habits: Habits,
    gpu: Gpu | None,
    fit: Fit,
    outside: tuple[OutsideLine, ...],
    unmatched_targets: tuple[str, ...],
) -> tuple[Note, ...]:
    """Return the notes on a run and its verdict, the most important first."""
    return (
        *notes_on_verdict(fit, outside),
        *_on_gpu(spec, recipe, habits, gpu),
        *_on_recipe(spec, recipe, habits),
        *(Note(code="target-unmatched", params={"target": name}) for name in unmatched_targets),
    )


def notes_on_verdict(fit: Fit, outside: tuple[OutsideLine, ...]) -> tuple[Note, ...]:
    """Return the notes on a verdict, whatever was run."""
    notes = []
    managed = sum(line.num_bytes for line in outside if line.category == "managed-memory")
    if managed:
        notes.append(Note(code="managed-memory", params={"bytes": managed}))
    if fit.verdict is Verdict.TIGHT and fit.retries:
        notes.append(Note(code="fits-after-release", params={"retries": fit.retries}))
    spare_bytes = fit.headroom_bytes
    if fit.verdict is Verdict.FITS and spare_bytes is not None and spare_bytes < THIN_MARGIN_BYTES:
        notes.append(Note(code="thin-margin", params={"headroom_bytes": spare_bytes}))
    return tuple(notes)


def _on_gpu(spec: ModelSpec, recipe: Recipe, habits: Habits, gpu: Gpu | None) -> list[Note]:
    if gpu is None:
        return []
    notes = []
    attention = running_attention(spec, recipe, habits)
    if gpu.vendor != "nvidia":
        notes.append(Note(code="allocator-of-cuda", params={"gpu": gpu.id}))
    if gpu.context_bytes is None:
        notes.append(Note(code="outside-unknown", params={"gpu": gpu.id}))
    precision = recipe.precision
    bf16 = BFLOAT16 in (precision.weight_dtype, precision.autocast_dtype)
    package = recipe.attention is Attention.FLASH
    for item in limitations(gpu, bf16=bf16, flash=attention is not Attention.EAGER):
        params = {"gpu": item.gpu, "capability": item.compute_capability}
        if item.code == "bf16-not-in-hardware":
            # the gradient scaler of fp16 refuses fp16 gradients: weights that are trained have to be fp32
            trains_weights = recipe.method in (Method.FULL, Method.FREEZE)
            params["precision"] = "fp16-mixed" if trains_weights else "fp16-autocast"
        if item.code == "flash-not-on-this-gpu" and package:
            notes.append(Note(code="flash-package-refuses", params=params))
            continue
        instead = item.instead
        without_bf16 = bf16 and not gpu.supports_bf16
        if item.code == "flash-not-on-this-gpu" and (without_bf16 or groups_heads(spec, habits)):
            instead = "math"  # the memory-efficient kernel takes neither
        notes.append(Note(code=item.code, params={**params, "instead": instead}))
    return notes


def _on_recipe(spec: ModelSpec, recipe: Recipe, habits: Habits) -> list[Note]:
    notes = []
    if spec.max_positions is not None and recipe.seq_len > spec.max_positions:
        params = {"seq_len": recipe.seq_len, "max_positions": spec.max_positions}
        notes.append(Note(code="beyond-positions", params=params))
    if running_attention(spec, recipe, habits) is not recipe.attention:
        notes.append(Note(code="attention-falls-back", params={"family": spec.family}))
    if spec.family in _PUBLISHED_IN:
        params_of_weights = {
            "format": _PUBLISHED_IN[spec.family],
            "dtype": recipe.precision.weight_dtype.name,
        }
        notes.append(Note(code="published-quantised", params=params_of_weights))
    if recipe.quantization is not None:
        notes += _on_quantization(spec, recipe, recipe.quantization)
    if recipe.grad_accum > 1:
        notes.append(
            Note(code="accumulation-keeps-gradients", params={"grad_accum": recipe.grad_accum})
        )
    return notes


def _on_quantization(spec: ModelSpec, recipe: Recipe, quantization: Quantization) -> list[Note]:
    notes = []
    unprepared = quantization.kbit_preparation is KbitPreparation.NONE
    has_experts = any(isinstance(layer.mlp, MoeSpec) for layer in spec.layers)
    if has_experts and not quantization.experts:
        kept = recipe.precision.weight_dtype if unprepared else FLOAT32
        notes.append(Note(code="experts-not-quantised", params={"dtype": kept.name}))
        if _larger_than_lora(spec, recipe.precision.weight_dtype, quantization, kept):
            notes.append(Note(code="qlora-larger-than-lora", params={}))
    int8 = quantization.format is QuantizationFormat.INT8
    if int8 and recipe.checkpointing is Checkpointing.FULL:
        notes.append(Note(code="int8-keeps-inputs", params={}))
    if not unprepared:
        helper = quantization.kbit_preparation.value
        notes.append(Note(code="kbit-preparation", params={"helper": helper}))
    return notes


def _larger_than_lora(
    spec: ModelSpec, dtype: Dtype, quantization: Quantization, experts_dtype: Dtype
) -> bool:
    """Return whether the base holds more with this quantization than in `dtype` without any.

    Counted as if all but the experts became as small as the format makes it: what is said is certain.
    """
    in_layer = {
        id(layer): sum(
            parameter.num_elements
            for parameter in layer_parameters(layer)
            if parameter.group is Group.EXPERTS
        )
        for layer in _distinct_layers(spec)
    }
    experts = sum(in_layer[id(layer)] for layer in spec.layers)
    rest = count_parameters(spec) - experts
    bits = 8 if quantization.format is QuantizationFormat.INT8 else 4
    quantised_bytes = experts * experts_dtype.itemsize + rest * bits // 8
    return quantised_bytes > (experts + rest) * dtype.itemsize
