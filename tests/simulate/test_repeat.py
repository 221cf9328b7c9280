"""Running equal layers once gives the events of running each of them, in the same order."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.recipes import make_recipe
from wazn.estimation.options import Options, resolve
from wazn.estimation.targets import adapted_names
from wazn.facts.models import load_model
from wazn.facts.stacks import resolve_stack
from wazn.model.config import read_config
from wazn.model.spec import ModelSpec
from wazn.recipe import Adapter, Checkpointing, Method, Optimizer
from wazn.simulate.repeat import plan_layers
from wazn.simulate.step import simulate
from wazn.timeline.breakdown import peak
from wazn.timeline.events import Timeline

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
}
LORA: dict[str, Any] = {
    "method": Method.LORA,
    "adapter": Adapter(rank=4, targets=("attention",), dropout=0.1),
}
TARGETS = frozenset(f"self_attn.{name}_proj" for name in "qkvo")
RECIPES: dict[str, dict[str, Any]] = {
    "full": {},
    "full, checkpointing": {"checkpointing": Checkpointing.FULL},
    "full, every second layer": {"checkpointing": Checkpointing.EVERY_N, "checkpoint_every": 2},
    "full, three micro-batches": {"grad_accum": 3, "checkpointing": Checkpointing.FULL},
    "full, gradients kept": {"zero_grad_set_to_none": False},
    "full, gradients kept, two micro-batches": {"zero_grad_set_to_none": False, "grad_accum": 2},
    "full, Adafactor": {"optimizer": Optimizer.ADAFACTOR},
    "full, 8-bit AdamW": {"optimizer": Optimizer.ADAMW_8BIT},
    "full, Muon": {"optimizer": Optimizer.MUON},
    "full, outputs kept": {"keep_outputs": True},
    "freeze, one layer of a kind": {
        "method": Method.FREEZE,
        "trainable": ("model.layers.[2-5].mlp.*", "lm_head*"),
        "freeze": ("*.up_proj.*",),
    },
    "lora": LORA,
    "lora, reentrant": {
        **LORA,
        "checkpointing": Checkpointing.FULL_REENTRANT,
        "inputs_require_grad": True,
    },
    "lora, two micro-batches": {**LORA, "grad_accum": 2},
}


def llama(num_layers: int) -> ModelSpec:
    """A small Llama."""
    return read_config({**LLAMA, "num_hidden_layers": num_layers}, id="llama", path="config.json")


def canonical(timeline: Timeline) -> list[tuple[Any, ...]]:
    """Name blocks in order of allocation."""
    names: dict[int, int] = {}
    rows = []
    for number, event in enumerate(timeline.events()):
        if event.num_bytes == 0:  # an empty tensor is no block
            continue
        if event.num_bytes > 0:
            names[event.block_id] = number
        rows.append((names[event.block_id], *event[1:]))
    return rows


@pytest.mark.parametrize(
    ("name", "num_layers"),
    [(name, n) for name in RECIPES for n in (1, 2, 3, 4, 9) if n == 9 or "freeze" not in name],
)
def test_repetition_is_exact(name: str, num_layers: int) -> None:
    """The compressed timeline has the events of a run of every layer, micro-batch and step, one by one."""
    choices = RECIPES[name]
    recipe = make_recipe(micro_batch=1, seq_len=32, **choices)
    targets = TARGETS if "adapter" in choices else frozenset()
    habits = resolve_stack("hf", family="llama")
    spec = llama(num_layers)
    short = simulate(spec, recipe, habits, targets, workspace_bytes=1024)
    whole = simulate(spec, recipe, habits, targets, workspace_bytes=1024, every_layer=True)
    assert canonical(short.timeline) == canonical(whole.timeline)
    assert peak(short.timeline).peak_bytes == peak(whole.timeline).peak_bytes
    assert short.managed_bytes == whole.managed_bytes
    assert short.num_trainable_parameters == whole.num_trainable_parameters


def test_work_does_not_grow_with_layers() -> None:
    """126 layers are described by as many segments as 12."""
    recipe = make_recipe(checkpointing=Checkpointing.FULL)
    habits = resolve_stack("hf", family="llama")
    parts = [len(simulate(llama(n), recipe, habits).timeline.parts) for n in (12, 126)]
    assert parts[0] == parts[1]


@pytest.mark.parametrize(
    ("kinds", "run"),
    [
        ("aaaaaa", (0, 1, 5)),
        ("daaaaaa", (0, 1, 2, 6)),
        ("abababababab", (0, 1, 2, 3, 10, 11)),
        ("aab" * 6 + "a", None),
        ("abc", (0, 1, 2)),
    ],
)
def test_plan(kinds: str, run: tuple[int, ...] | None) -> None:
    """The first, a middle and the last repetition of the shortest period are run; worked by hand."""
    plan = plan_layers(kinds)
    if run is not None:
        assert plan.run == run
    else:
        assert len(plan.run) == 3 * 3 + 1


@given(
    st.text("ab", max_size=3),
    st.text("ab", min_size=1, max_size=4),
    st.integers(1, 12),
    st.text("ab", max_size=3),
)
def test_plan_stands_for_every_layer(prefix: str, block: str, times: int, suffix: str) -> None:
    """Each layer that is left out is of the kind of the one that stands for it, and all are counted."""
    kinds = prefix + block * times + suffix
    plan = plan_layers(kinds)
    copies = [plan.copies.get(index, 1) for index in range(len(plan.run))]
    assert sum(copies) == len(kinds)
    counted = "".join(kinds[index] * count for index, count in zip(plan.run, copies, strict=True))
    assert sorted(counted) == sorted(kinds)


@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
def test_repetition_is_exact_where_the_norms_come_last(method: str) -> None:
    """A first layer that makes a tensor less than the others numbers its blocks differently: all are run then."""
    spec = load_model("allenai/OLMo-2-0425-1B")
    habits = resolve_stack("hf", family=spec.family)
    recipe = resolve(Options(method=method, seq_len=512), habits).recipe
    targets = adapted_names(spec, recipe).names
    once, each = (
        simulate(spec, recipe, habits, targets, every_layer=every).timeline
        for every in (False, True)
    )
    assert canonical(once) == canonical(each)
