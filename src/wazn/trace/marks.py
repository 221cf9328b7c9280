"""Marks on a run: which phase it is in, what the loss function makes, whose the long-lived tensors are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from wazn.timeline.events import Category, Phase
from wazn.trace.rehearsal import LOSS
from wazn.trace.tracker import StorageTracker

__all__ = [
    "base_of",
    "head_of",
    "mark_loss",
    "name_gradients",
    "name_model",
    "name_states",
    "owner_of",
]


def base_of(model: Any) -> Any:
    """Return the model without the wrapper of peft."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def head_of(model: Any) -> str | None:
    """Return the path of the module that makes the logits, or None."""
    base = base_of(model)
    head = base.get_output_embeddings() if hasattr(base, "get_output_embeddings") else None
    return next((name for name, module in base.named_modules() if module is head), None)


def name_model(tracker: StorageTracker, model: Any, quant_states: list[torch.Tensor]) -> None:
    """Name weights, adapters and the states of quantised weights."""
    for tensor in quant_states:
        tracker.name(tensor, Category.QUANTIZATION_STATE)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        is_adapter = "lora_" in name or ".modules_to_save." in name
        category = Category.ADAPTER_WEIGHTS if is_adapter else Category.WEIGHTS
        tracker.name(tensor, category, owner_of(name))


def owner_of(name: str) -> str:
    """Return the path of the module that holds a parameter, as `Places` writes it."""
    return name.replace("base_model.model.", "", 1).rpartition(".")[0]


def name_gradients(tracker: StorageTracker, model: Any) -> None:
    """Name each gradient as soon as autograd has put it into its place."""

    def mark(name: str, parameter: torch.nn.Parameter) -> None:
        def call(_: torch.Tensor) -> None:
            tracker.name(parameter.grad, Category.GRADIENTS, owner_of(name))

        parameter.register_post_accumulate_grad_hook(call)

    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            mark(name, parameter)


def name_states(tracker: StorageTracker, model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Name what the optimizer keeps, and what has taken the place of weights (4-bit layers cast their biases)."""
    name_model(tracker, model, [])
    owners = {id(parameter): owner_of(name) for name, parameter in model.named_parameters()}
    for parameter, state in optimizer.state.items():
        tracker.name(state, Category.OPTIMIZER_STATES, owners.get(id(parameter), ""))


def mark_loss(tracker: StorageTracker, model: Any) -> None:
    """Mark what the model's loss function does; models before transformers 4.46 have none."""
    base = base_of(model)
    original = getattr(base, "loss_function", None)
    if original is None:
        return

    def marked(*args: Any, **kwargs: Any) -> Any:
        with phase(tracker, Phase.LOSS), at_loss(tracker):
            return original(*args, **kwargs)

    try:
        base.loss_function = marked
    except AttributeError:  # a property without a setter, in 4.46 and 4.47
        own = type(base)
        base.__class__ = type(own.__name__, (own,), {"loss_function": staticmethod(marked)})


@contextmanager
def phase(tracker: StorageTracker, name: Phase) -> Iterator[None]:
    """Be in a phase while the context lasts."""
    before, tracker.phase = tracker.phase, name
    try:
        yield
    finally:
        tracker.phase = before


@contextmanager
def at_loss(tracker: StorageTracker) -> Iterator[None]:
    """Be at the place of the loss function while the context lasts."""
    if tracker.places is None:
        yield
    else:
        with tracker.places.inside(LOSS):
            yield
