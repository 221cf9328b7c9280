"""What a person should know about an answer beside its numbers, as codes; `wazn.report.notes` has the words."""

from __future__ import annotations

from wazn.cluster import Gpu, limitations
from wazn.dtypes import BFLOAT16, FLOAT32
from wazn.estimation.answer import Fit, OutsideLine, Verdict
from wazn.facts.notes import Note
from wazn.facts.stacks import Habits
from wazn.model.spec import AttentionSpec, ModelSpec, MoeSpec
from wazn.recipe import Attention, KbitPreparation, Quantization, Recipe
from wazn.simulate.attention import implementation

__all__ = ["notes_on"]


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
        *_on_verdict(fit, outside),
        *_on_gpu(recipe, gpu),
        *_on_recipe(spec, recipe, habits),
        *(Note(code="target-unmatched", params={"target": name}) for name in unmatched_targets),
    )


def _on_verdict(fit: Fit, outside: tuple[OutsideLine, ...]) -> list[Note]:
    notes = []
    managed = sum(line.num_bytes for line in outside if line.category == "managed-memory")
    if managed:
        notes.append(Note(code="managed-memory", params={"bytes": managed}))
    if fit.verdict is Verdict.TIGHT and fit.retries:
        notes.append(Note(code="fits-after-release", params={"retries": fit.retries}))
    return notes


def _on_gpu(recipe: Recipe, gpu: Gpu | None) -> list[Note]:
    if gpu is None:
        return []
    notes = []
    if gpu.context_bytes is None:
        notes.append(Note(code="outside-unknown", params={"gpu": gpu.id}))
    precision = recipe.precision
    bf16 = BFLOAT16 in (precision.weight_dtype, precision.autocast_dtype)
    package = recipe.attention is Attention.FLASH
    for item in limitations(gpu, bf16=bf16, flash=recipe.attention is not Attention.EAGER):
        params = {"gpu": item.gpu, "capability": item.compute_capability}
        if item.code == "flash-not-on-this-gpu" and package:
            notes.append(Note(code="flash-package-refuses", params=params))
            continue
        instead = item.instead
        if item.code == "flash-not-on-this-gpu" and bf16 and not gpu.supports_bf16:
            instead = "math"  # the memory-efficient kernel has no bfloat16 there either
        notes.append(Note(code=item.code, params={**params, "instead": instead}))
    return notes


def _on_recipe(spec: ModelSpec, recipe: Recipe, habits: Habits) -> list[Note]:
    notes = []
    if spec.max_positions is not None and recipe.seq_len > spec.max_positions:
        params = {"seq_len": recipe.seq_len, "max_positions": spec.max_positions}
        notes.append(Note(code="beyond-positions", params=params))
    layers = {id(layer): layer for layer in spec.layers}.values()
    if any(
        isinstance(layer.attention, AttentionSpec)
        and implementation(habits, recipe.attention) is not recipe.attention
        for layer in layers
    ):
        notes.append(Note(code="attention-falls-back", params={"family": spec.family}))
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
    if not unprepared:
        helper = quantization.kbit_preparation.value
        notes.append(Note(code="kbit-preparation", params={"helper": helper}))
    return notes
