"""The forward pass of a model: embedding, tables, layers with or without checkpointing, final norm."""

from __future__ import annotations

from wazn.dtypes import INT64
from wazn.model.spec import ModelSpec
from wazn.recipe import Recipe
from wazn.simulate.build import LoadedModel
from wazn.simulate.checkpointing import run_layers
from wazn.simulate.context import Context
from wazn.simulate.ops import add, dropout, embedding, mul_scalar
from wazn.simulate.tables import make_masks, make_rotary_tables
from wazn.simulate.tape import Tape, Tensor

__all__ = ["hidden_states", "layers_take_positions"]


# their layers are not handed the position ids
_KEEP_POSITIONS_TO_THEMSELVES = frozenset({"gpt_bigcode", "gpt_neo"})
_WITHOUT_POSITIONS = frozenset({"bloom", "mpt"})


def layers_take_positions(spec: ModelSpec) -> bool:
    """Whether the layers are handed the position ids."""
    return spec.family not in _KEEP_POSITIONS_TO_THEMSELVES | _WITHOUT_POSITIONS


def hidden_states(
    tape: Tape, model: LoadedModel, recipe: Recipe, context: Context, input_ids: Tensor
) -> Tensor:
    """Return the last hidden states [B, S, H], normed; leaves the tape outside the layers."""
    spec = model.spec
    tape.label = spec.embedding.name
    x = embedding(tape, model.embedding, input_ids, size=spec.embedding.size)
    # Gemma's embedding scales by itself since 5.4
    older_gemma = spec.family in ("gemma", "gemma2") and context.habits.minor < (5, 4)
    scaled_by_model = spec.family.startswith("granite") or older_gemma
    if spec.embedding_scaled and not scaled_by_model:
        x = mul_scalar(tape, x)
    if recipe.inputs_require_grad and not x.requires_grad:
        x = tape.leaf(x)
    if spec.embedding_scaled and scaled_by_model:
        x = mul_scalar(tape, x)
    inputs_embeds = x  # the model's forward keeps this name to its end
    position_ids = None if spec.family in _WITHOUT_POSITIONS else _position_ids(context, spec)
    if layers_take_positions(spec):
        context.position_ids = position_ids
    make_masks(context, spec, x.dtype)
    positions = _positions(tape, model, spec, position_ids)
    x = _embedded(tape, model, x, positions)
    make_rotary_tables(context, spec, x.dtype)
    x = run_layers(tape, model.layers, recipe, context, x)
    if model.final_norm is not None:
        x = model.final_norm(tape, x)
    del position_ids, inputs_embeds, positions
    if model.project_out is not None:
        x = model.project_out(tape, x)
    context.release()
    return x


def _position_ids(context: Context, spec: ModelSpec) -> Tensor:
    """arange + 0, kept through the pass; OPT counts the places of its attention mask in every sample."""
    tape = context.tape
    tape.label = "position ids"
    with tape.no_grad():
        if spec.family != "opt":
            arange = tape.new(context.seq_len, INT64)
            position_ids = tape.new(context.seq_len, INT64)
            del arange
            return position_ids
        position_ids = tape.new(context.num_tokens, INT64)  # cumsum
        product = tape.new(context.num_tokens, INT64)
        position_ids = tape.new(context.num_tokens, INT64)
        del product
        return position_ids


def _positions(
    tape: Tape, model: LoadedModel, spec: ModelSpec, position_ids: Tensor | None
) -> Tensor | None:
    """Look learned positions up; OPT adds an offset to the ids first."""
    if model.position_embedding is None or spec.position_embedding is None or position_ids is None:
        return None
    tape.label = spec.position_embedding.name
    if spec.family == "opt":
        position_ids = tape.new(position_ids.numel, INT64)
    return embedding(
        tape, model.position_embedding, position_ids, size=spec.position_embedding.size
    )


def _embedded(tape: Tape, model: LoadedModel, x: Tensor, positions: Tensor | None) -> Tensor:
    """Project (OPT-350M), add positions, norm (BLOOM), drop."""
    if model.project_in is not None:
        x = model.project_in(tape, x)
    if positions is not None:
        tape.label = "positions"
        x = add(tape, x, positions)
    if model.embedding_norm is not None:
        x = model.embedding_norm(tape, x)
    tape.label = "embedding.dropout"
    return dropout(tape, x, model.spec.embedding_dropout)
