"""Packages of kernels count as installed in the modules of transformers that look for them."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from tests.recipes import lora_recipe, make_recipe
from wazn.errors import Unsupported
from wazn.recipe import Adapter, Checkpointing
from wazn.trace.fast_kernels import patches
from wazn.trace.script import Script
from wazn.trace.step import rehearse

_RWKV = {
    "model_type": "rwkv",
    "hidden_size": 64,
    "attention_hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "vocab_size": 1000,
}


def test_rwkv_runs_its_kernel_whatever_the_length() -> None:
    """The real `RwkvLinearAttention`: no loop over tokens, so as many allocations for 64 tokens as for 512."""
    counts = {
        len(rehearse(_RWKV, make_recipe(seq_len=length), Script(num_steps=1)).events)
        for length in (64, 512)
    }
    assert len(counts) == 1


_MAMBA = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 1000, "state_size": 16}
_MAMBA_2 = {**_MAMBA, "num_heads": 8, "head_dim": 16, "n_groups": 1, "chunk_size": 64}


@pytest.mark.parametrize(
    "config", [{"model_type": "mamba", **_MAMBA}, {"model_type": "mamba2", **_MAMBA_2}]
)
def test_checkpointed_layers_run_their_kernels_twice(config: dict[str, Any]) -> None:
    """Backward computes a layer again, once; with adapters on its first projection, too."""
    script = Script(num_steps=1)
    adapter = Adapter(rank=4, targets=("in_proj",))
    for recipe in (make_recipe, partial(lora_recipe, adapter=adapter, inputs_require_grad=True)):
        made = rehearse(config, recipe(checkpointing=Checkpointing.FULL), script)
        plain = rehearse(config, recipe(), script)
        assert len(made.events) > len(plain.events)


def test_a_module_is_changed_only_inside() -> None:
    """And token by token nothing is generated."""
    from transformers.models.mamba import modeling_mamba

    patch = patches()["transformers.models.mamba.modeling_mamba"]
    own = modeling_mamba.mamba_inner_fn
    with patch(modeling_mamba):
        assert modeling_mamba.mamba_inner_fn is not own
        with pytest.raises(Unsupported):
            modeling_mamba.causal_conv1d_update()
    assert modeling_mamba.mamba_inner_fn is own
