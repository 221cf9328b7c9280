"""The masks that a pass makes, release by release, against those that the real classes handed to sdpa."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest

from tests.simulate.test_versions import LLAMA
from wazn.dtypes import BFLOAT16, BOOL
from wazn.facts.stacks import resolve_stack
from wazn.model.config import read_config
from wazn.recipe import Attention
from wazn.simulate.context import Context
from wazn.simulate.tables import make_masks
from wazn.simulate.tape import Tape

FACTS = Path(__file__).parents[1] / "facts"
WINDOWS = list(csv.DictReader((FACTS / "windows_seen.csv").read_text("utf-8").splitlines()))
B, S = 2, 40
MOE: dict[str, Any] = {
    "num_local_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
}


def masks(family: str, version: str, window: int) -> tuple[Context, dict[int | None, str]]:
    """What a pass of 40 tokens has by window: `boolean` or `additive`; layers without a window are under None."""
    config = {
        **LLAMA,
        **MOE,
        "model_type": family,
        "sliding_window": window,
        "use_sliding_window": True,
        "max_window_layers": 0,
        "layer_types": ["sliding_attention"] * LLAMA["num_hidden_layers"],
    }
    if family == "exaone4":
        config["sliding_window_pattern"] = None
    spec = read_config(config, id=family, path="config.json")
    habits = resolve_stack("hf@" + version, family=family)
    context = Context(
        tape=Tape(),
        habits=habits,
        micro_batch=B,
        seq_len=S,
        attention=Attention.SDPA,
        capability=(8, 0),
    )
    make_masks(context, spec, BFLOAT16)
    kinds = {
        key: "boolean" if mask.dtype is BOOL else "additive" for key, mask in context.masks.items()
    }
    return context, kinds


@pytest.mark.parametrize(
    "row",
    [row for row in WINDOWS if row["mask"] != "unused"],
    ids=lambda row: f"{row['family']}-{row['version']}",
)
def test_windows_make_the_masks_that_were_seen(row: dict[str, str]) -> None:
    """A window no longer than the sequence gives the layers that have it the mask that was seen; a longer one none.

    windows_seen.csv: the class of that release, 40 tokens, windows of 39, 40 and 41. The mask has B x S x S elements.
    """
    for window in (S - 1, S):
        context, kinds = masks(row["family"], row["version"], window)
        expected = {} if row["mask"] == "none" else {window: row["mask"]}
        assert kinds == expected
        assert all(mask.numel == B * S * S for mask in context.masks.values())
    assert masks(row["family"], row["version"], S + 1)[1] == {}


@pytest.mark.parametrize("row", [row for row in WINDOWS if row["mask"] == "unused"])
def test_a_mask_that_no_layer_gets(row: dict[str, str]) -> None:
    """Qwen2-MoE from 5.0: a boolean one at every length, which is kept and given to no layer without a window."""
    spec = read_config(
        {**LLAMA, **MOE, "model_type": row["family"]}, id="qwen2_moe", path="config.json"
    )
    context = Context(
        tape=Tape(),
        habits=resolve_stack("hf@" + row["version"], family=row["family"]),
        micro_batch=B,
        seq_len=S,
        attention=Attention.SDPA,
        capability=(8, 0),
    )
    make_masks(context, spec, BFLOAT16)
    assert [mask.dtype for mask in context.masks.values()] == [BOOL]
    assert context.mask(None) is None
