"""Optimizers: their states, made at the first step, and what a step holds for a moment.

A step goes over parameter groups, as Trainer makes them: with weight decay and without (biases and norms). Lists of tensors that a
foreach function makes are allocated parameter by parameter, in order.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Protocol

from wazn.dtypes import FLOAT32
from wazn.recipe import Optimizer, Recipe
from wazn.simulate.tape import Parameter, Tape, Tensor
from wazn.timeline.events import Category, Phase

__all__ = ["OPTIMIZERS", "OptimizerModule", "clip_gradients"]

_NO_DECAY = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")


class OptimizerModule(Protocol):
    """Holds states, and updates the parameters that have gradients."""

    def step(self) -> None:
        """Do one update."""
        ...


def groups(parameters: Sequence[Parameter]) -> list[list[Parameter]]:
    """Return the trained parameters with weight decay, and those without (Trainer.create_optimizer)."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    decayed = [p for p in trained if not _NO_DECAY.search(p.name.lower())]
    rest = [p for p in trained if _NO_DECAY.search(p.name.lower())]
    return [group for group in (decayed, rest) if group]


def tensors_like(
    tape: Tape, parameters: Sequence[Parameter], category: Category, label: str
) -> list[Tensor]:
    """Allocate one tensor for each parameter, of its size and type, in order."""
    made = []
    for parameter in parameters:
        tape.enter_layer(parameter.layer)
        made.append(tape.new_tagged(parameter.numel, parameter.dtype, category, label))
    tape.enter_layer(None)
    return made


def release(tape: Tape, parameters: Sequence[Parameter], tensors: list[Tensor]) -> None:
    """Let go of a list that `tensors_like` made, last to first, as Python frees a list."""
    for parameter in reversed(parameters):
        tape.enter_layer(parameter.layer)
        tensors.pop()
    tape.enter_layer(None)


class AdamWForeach:
    """torch.optim.AdamW(foreach=True): two states, and while a group is updated the square roots of all its second moments.

    Source: torch/optim/adam.py, `_multi_tensor_adam`: `exp_avg_sq_sqrt = torch._foreach_sqrt(device_exp_avg_sqs)`; the
    step counts are tensors on the CPU (`_init_group`).
    """

    def __init__(self, tape: Tape, parameters: Sequence[Parameter], recipe: Recipe) -> None:
        self.tape = tape
        self.groups = groups(parameters)
        self.states: list[list[Tensor]] = []

    def step(self) -> None:
        """Update each group; make its states first if it has none."""
        tape = self.tape
        first = not self.states
        for group in self.groups:
            if first:
                self.states.append(_moments(tape, group))
            roots = tensors_like(tape, group, Category.TEMPORARY, "exp_avg_sq_sqrt")
            release(tape, group, roots)


def _moments(tape: Tape, group: Sequence[Parameter]) -> list[Tensor]:
    states = []
    for parameter in group:
        tape.enter_layer(parameter.layer)
        for name in ("exp_avg", "exp_avg_sq"):
            states.append(
                tape.new_tagged(parameter.numel, parameter.dtype, Category.OPTIMIZER_STATES, name)
            )
    tape.enter_layer(None)
    return states


OPTIMIZERS: dict[Optimizer, Callable[[Tape, Sequence[Parameter], Recipe], OptimizerModule]] = {
    Optimizer.ADAMW: AdamWForeach,
}


def clip_gradients(tape: Tape, parameters: Sequence[Parameter], recipe: Recipe) -> None:
    """torch.nn.utils.clip_grad_norm_ with foreach: a norm per gradient, the norm of norms, a factor.

    Source: torch/nn/utils/clip_grad.py, `_get_total_norm` and `_clip_grads_with_norm_`.
    """
    if recipe.max_grad_norm is None:
        return
    tape.enter(Phase.CLIP)
    trained = [parameter for parameter in parameters if parameter.grad is not None]
    norms = []
    for parameter in trained:
        tape.enter_layer(parameter.layer)
        assert parameter.grad is not None
        norms.append(tape.new_tagged(1, parameter.grad.dtype, Category.TEMPORARY, "norm"))
    tape.enter_layer(None)
    tape.label = "norm"
    stacked = tape.new(sum(tape.copies.get(p.layer, 1) for p in trained), FLOAT32)
    total = tape.new(1, FLOAT32)
    del stacked, total
    release(tape, trained, norms)
