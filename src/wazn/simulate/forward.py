"""The forward pass of a model: embedding, position tables, layers with or without checkpointing, final norm."""

from __future__ import annotations

from wazn.dtypes import FLOAT32, INT64
from wazn.recipe import Recipe
from wazn.simulate.build import LoadedModel
from wazn.simulate.checkpointing import run_layers
from wazn.simulate.context import Context
from wazn.simulate.ops import embedding, to
from wazn.simulate.tape import Tape, Tensor

__all__ = ["hidden_states"]


def hidden_states(
    tape: Tape, model: LoadedModel, recipe: Recipe, context: Context, input_ids: Tensor
) -> Tensor:
    """Return the last hidden states [B, S, H], normed; leaves the tape outside the layers."""
    spec = model.spec
    tape.label = spec.embedding.name
    x = embedding(tape, model.embedding, input_ids, size=spec.embedding.size)
    if recipe.inputs_require_grad and not x.requires_grad:
        x = tape.leaf(x)
    position_ids = tape.new(context.seq_len, INT64)
    if spec.rotary_dim:
        context.cos, context.sin = _rotary_tables(tape, x, context.seq_len, spec.rotary_dim)
    x = run_layers(tape, model.layers, recipe, context, x)
    del position_ids
    if model.final_norm is not None:
        x = model.final_norm(tape, x)
    return x


def _rotary_tables(tape: Tape, x: Tensor, seq_len: int, rotary_dim: int) -> tuple[Tensor, Tensor]:
    """LlamaRotaryEmbedding.forward: [1, S, rotary_dim] in the type of the hidden states."""
    tape.label = "rotary tables"
    with tape.no_grad():
        positions = tape.new(seq_len, FLOAT32)
        frequencies = tape.new(seq_len * rotary_dim // 2, FLOAT32)
        del positions
        angles = tape.new(seq_len * rotary_dim, FLOAT32)
        tables = []
        for _ in ("cos", "sin"):
            raw = tape.new(seq_len * rotary_dim, FLOAT32)
            tables.append(tape.new(seq_len * rotary_dim, FLOAT32))  # times the attention scaling
            del raw
        del frequencies
        cos, sin = tables
        del tables
        result = to(tape, cos, x.dtype), to(tape, sin, x.dtype)
        del angles
        return result
