"""Forward and backward of whole models at older releases of transformers, against what their classes allocated.

older_seen.csv: the class of that release (4.40.2, 4.42.4, 4.44.2, 4.45.2, 4.47.1, 4.48.3, 4.51.3, 4.53.3, 4.55.4,
4.57.3, 5.24.0) of a configuration of `families.py` on fake tensors (torch 2.13): 256 tokens, labels, a mask of ones,
`use_cache` as the class has it, under autocast wrapped in accelerate's `convert_outputs_to_fp32`; with `adapters`,
LoRA of that rank on all linears by PEFT 0.10.0, 0.11.1, 0.14.0 and 0.21.2. What is no larger than `larger_than` bytes
was left out: position ids, statistics of norms, squares of booleans, rotary tables. `compared`: `order`, all
allocations in their order, of which a digest is kept; or `peaks`, where masks are put together in other steps or the
gradients come in another order.
"""

from __future__ import annotations

import csv
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest

from tests.agreement.families import CONFIGS
from tests.recipes import BF16, make_recipe
from wazn.dtypes import BFLOAT16, FLOAT32
from wazn.facts.stacks import resolve_stack
from wazn.model.config import read_config
from wazn.recipe import Adapter, Attention, Checkpointing, Method
from wazn.simulate.step import simulate
from wazn.units import round_up

SEEN = list(
    csv.DictReader((Path(__file__).parent / "older_seen.csv").read_text("utf-8").splitlines())
)
DTYPES = {"bfloat16": BFLOAT16, "float32": FLOAT32, "": None}
LINEARS = frozenset(
    [f"self_attn.{name}_proj" for name in "qkvo"]
    + [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
)
Events = dict[str, list[int]]


def on_tape(row: dict[str, str]) -> Events:
    """The allocations and frees of the first forward and backward pass."""
    spec = read_config(CONFIGS[row["config"]], id="test", path="test")
    habits = resolve_stack("hf@" + row["transformers"], family=spec.family)
    rank = int(row["adapters"])
    weights = DTYPES[row["weights"]]
    assert weights is not None
    recipe = make_recipe(
        method=Method.LORA if rank else Method.FULL,
        adapter=Adapter(rank=rank, targets=("all-linear",), dropout=float(row["lora_dropout"]))
        if rank
        else None,
        micro_batch=int(row["micro_batch"]),
        seq_len=256,
        precision=replace(
            BF16,
            weight_dtype=weights,
            autocast_dtype=DTYPES[row["autocast"]],
            adapter_dtype=FLOAT32 if habits.adapters_fp32 else weights,
        ),
        checkpointing=Checkpointing(row["checkpointing"]),
        inputs_require_grad=rank > 0 and row["checkpointing"] != "none",
        attention=Attention(row["attention"]),
        stack="hf@" + row["transformers"],
    )
    targets = LINEARS if rank else frozenset()
    timeline = simulate(spec, recipe, habits, targets, every_layer=True).timeline
    smallest = int(row["larger_than"])
    events: Events = {"forward": [], "backward": []}
    for event in timeline.events():
        phase = "forward" if str(event.phase) == "loss" else str(event.phase)
        if event.step == 1 and phase in events and abs(event.num_bytes) > smallest:
            events[phase].append(event.num_bytes)
    return events


def peaks(events: Events) -> dict[str, int]:
    """The highest level of each phase above what existed before the pass, in blocks of 512 bytes."""
    level = 0
    found = {}
    for phase, sizes in events.items():
        found[phase] = level
        for size in sizes:
            level += round_up(size, 512) if size > 0 else -round_up(-size, 512)
            found[phase] = max(found[phase], level)
    return found


def digest(sizes: list[int]) -> str:
    """The first twelve digits of the SHA-256 of all allocations, written with spaces between them."""
    allocated = " ".join(str(size) for size in sizes if size > 0)
    return sha256(allocated.encode()).hexdigest()[:12]


def _id(row: dict[str, str]) -> str:
    columns = ("transformers", "config", "micro_batch", "weights", "autocast", "checkpointing")
    return "-".join(row[name] for name in (*columns, "attention", "adapters", "lora_dropout"))


@pytest.mark.parametrize("row", SEEN, ids=_id)
def test_the_older_class_is_followed(row: dict[str, str]) -> None:
    """Peaks of forward and of backward agree to the byte, and where it was compared the order of
    all allocations.
    """
    events = on_tape(row)
    assert peaks(events) == {
        "forward": int(row["forward_peak"]),
        "backward": int(row["backward_peak"]),
    }
    if row["compared"] == "order":
        assert {phase: digest(sizes) for phase, sizes in events.items()} == {
            phase: row[phase] for phase in events
        }
