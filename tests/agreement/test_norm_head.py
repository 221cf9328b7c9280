"""Baichuan 2's output matrix on the tape is the real one under fake tensors, to the byte."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.agreement.compare import DTYPES, assert_agree, run_on_tape
from tests.agreement.golden import Golden
from tests.recipes import make_recipe
from wazn.facts.models import resolve_model
from wazn.facts.stacks import resolve_stack
from wazn.model.config import read_config
from wazn.model.spec import Linear, ModelSpec
from wazn.recipe import Method
from wazn.simulate.normalised import NormHead
from wazn.simulate.step import simulate
from wazn.simulate.tape import Parameter, Tape, Tensor
from wazn.timeline.breakdown import peak
from wazn.timeline.events import Phase
from wazn.trace.specs import Spec

HEAD = Linear(name="lm_head", in_features=512, out_features=10240)


def real(x: Any, weight: Any) -> Any:
    """NormHead.forward of modeling_baichuan.py, in training."""
    import torch.nn.functional as F

    norm_weight = F.normalize(weight)
    return F.linear(x, norm_weight)


def contract(tape: Tape, x: Tensor, weight: Tensor) -> Tensor:
    assert isinstance(weight, Parameter)
    return NormHead(HEAD, weight)(tape, x)


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("weights", ["bfloat16", "float32"])
@pytest.mark.parametrize("autocast", [None, "bfloat16"])
def test_head(autocast: str | None, weights: str, trained: bool, golden: Golden) -> None:
    """Forward and backward allocate what the real code does, under autocast and without, trained and frozen."""
    x = Spec((2, 256, 512), weights if autocast is None else autocast, requires_grad=True)
    weight = Spec((10240, 512), weights, requires_grad=trained)

    def measure() -> Any:
        from wazn.trace.opcheck import measure_op

        return measure_op(real, x, weight, autocast=autocast)

    lower = None if autocast is None else DTYPES[autocast]
    assert_agree(golden.op(measure), run_on_tape(contract, x, weight, autocast=lower))


def test_whole_model() -> None:
    """Baichuan2-7B with a frozen head enters backward with one copy of its 125,696 x 4,096 matrix in bf16."""
    name = "baichuan-inc/Baichuan2-7B-Base"
    spec = read_config(dict(resolve_model(name).mapping), id=name, path=name)
    recipe = make_recipe(method=Method.FREEZE, freeze=("lm_head.weight",))
    habits = resolve_stack("hf@5.24", family=spec.family)

    def before_backward(spec: ModelSpec) -> int:
        phases = peak(simulate(spec, recipe, habits).timeline).phases
        return next(p.resident_bytes for p in phases if (p.step, p.phase) == (1, Phase.LOSS))

    copied = before_backward(spec) - before_backward(replace(spec, head_normalized=False))
    assert copied == 125_696 * 4096 * 2
