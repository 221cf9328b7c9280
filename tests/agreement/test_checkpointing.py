"""What each kind of checkpointing keeps and computes again is what PyTorch does."""

from __future__ import annotations

from typing import Any

import pytest

from tests.recipes import make_recipe
from wazn.facts.stacks import resolve_stack
from wazn.model.config import read_config
from wazn.recipe import Attention, Checkpointing
from wazn.simulate import ops
from wazn.simulate.step import simulate
from wazn.simulate.tape import Tape, Tensor
from wazn.timeline.breakdown import peak

torch = pytest.importorskip("torch")

from tests.agreement.compare import assert_agree, run_on_tape  # noqa: E402
from wazn.trace.opcheck import measure_op  # noqa: E402
from wazn.trace.specs import Spec  # noqa: E402

CONFIG = {
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 2000,
    "num_hidden_layers": 3,
}
SCALARS_BYTES = 4 * 512  # a buffer of the rotary table, and numbers of the loss


@pytest.mark.parametrize("name", ["none", "full", "full-reentrant", "every-n", "selective-op"])
def test_whole_layers_and_operations(name: str) -> None:
    """Loss and backward of a small Llama peak where the real model does under the same checkpointing."""
    from wazn.trace.script import Script
    from wazn.trace.step import rehearse

    recipe = make_recipe(checkpointing=Checkpointing(name), checkpoint_every=2)
    real = rehearse(CONFIG, recipe, Script(num_steps=1, matmul_workspaces=False)).peaks()
    spec = read_config(CONFIG, id="llama", path="config.json")
    levels = peak(simulate(spec, recipe, resolve_stack("hf", family="llama")).timeline).phases
    tape = {(level.step, level.phase.value): level.peak_bytes for level in levels}
    for phase in ("loss", "backward"):
        assert 0 <= real[1, phase] - tape[1, phase] <= SCALARS_BYTES, phase


def test_attention_alone() -> None:
    """A checkpointed call of softmax(q) * v keeps its inputs, and backward makes the rest again, to the byte."""
    inputs = Spec((2, 8, 64, 64), requires_grad=True)

    def function(q: Any, v: Any) -> Any:
        return torch.nn.functional.softmax(q, dim=-1, dtype=torch.float32) * v

    def real(q: Any, v: Any) -> Any:
        return torch.utils.checkpoint.checkpoint(function, q, v, use_reentrant=False)

    def contract(tape: Tape, q: Tensor, v: Tensor) -> Tensor:
        return tape.checkpoint(
            lambda q, v: ops.mul(tape, ops.softmax(tape, q, ops.FLOAT32), v), q, v
        )

    assert_agree(measure_op(real, inputs, inputs), run_on_tape(contract, inputs, inputs))


def test_selective_attention_keeps_no_scores() -> None:
    """With eager attention the scores, [B, h, S, S] in each of 3 layers, are not kept, as in Megatron.

    Without it a layer keeps the probabilities in fp32 and their copy in 16 bits, 6 bytes a score; with it, its inputs,
    that is, nothing that it would not keep anyway but the copies of the repeated keys and values.
    """
    habits = resolve_stack("hf", family="llama")
    spec = read_config(CONFIG, id="llama", path="config.json")
    before, after = (
        next(
            level.resident_bytes
            for level in peak(
                simulate(
                    spec,
                    make_recipe(checkpointing=Checkpointing(name), attention=Attention.EAGER),
                    habits,
                ).timeline
            ).phases
            if level.phase.value == "loss"
        )
        for name in ("none", "selective-attention")
    )
    scores = 3 * 2 * 8 * 512 * 512
    assert before - after >= 6 * scores
