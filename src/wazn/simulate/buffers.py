"""Tensors that a model keeps beside its weights: what rotary embeddings, scaled embeddings and
GPT-Neo's masks are made of.

They are made in fp32 (masks as booleans) and no checkpoint holds them. Sources: `nn.Buffer` in the
models of transformers 5.24.
"""

from __future__ import annotations

from wazn.dtypes import BOOL, FLOAT32, Dtype
from wazn.model.spec import AttentionSpec, ModelSpec
from wazn.simulate.tables import table_windows
from wazn.simulate.tape import Tape, Tensor
from wazn.timeline.events import Category

__all__ = ["load_buffers"]

_SCALED_BY_A_TENSOR = frozenset({"gemma", "gemma2", "gemma3_text"})


def load_buffers(tape: Tape, spec: ModelSpec) -> tuple[Tensor, ...]:
    """Allocate them, those of the layers in their layer."""
    found: list[Tensor] = []

    def keep(numel: int, label: str, dtype: Dtype = FLOAT32) -> None:
        found.append(tape.new_tagged(numel, dtype, Category.WEIGHTS, label))

    if spec.family in _SCALED_BY_A_TENSOR:
        keep(1, "embed_scale")
    for index, layer in enumerate(spec.layers):
        attention = layer.attention
        if isinstance(attention, AttentionSpec) and attention.code == "gpt_neo":
            assert spec.max_positions is not None
            tape.enter_layer(index)
            keep(spec.max_positions * spec.max_positions, "attention.bias", BOOL)
    tape.enter_layer(None)
    if not spec.rotary_dim:
        return tuple(found)
    if spec.layers[0].attention.rotary_code == "gptj":
        assert spec.max_positions is not None
        keep(spec.max_positions * spec.rotary_dim, "embed_positions")
        return tuple(found)
    for _ in table_windows(spec):
        keep(spec.rotary_dim // 2, "inv_freq")
        keep(spec.rotary_dim // 2, "original_inv_freq")
    return tuple(found)
