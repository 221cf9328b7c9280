"""Real optimizers on fake tensors: those of PyTorch, bitsandbytes and transformers, in Trainer's parameter
groups.

The kernels of bitsandbytes update tensors in place and return nothing, so they are skipped; the states are
made by its own code. Paged states live in managed memory outside PyTorch's allocator and count as host
memory here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from wazn.errors import InputError
from wazn.trace.tracker import StorageTracker

__all__ = ["OPTIMIZERS", "make_optimizer"]

_LEARNING_RATE = 1e-5
_SMALLEST_PAGED = (
    100_000  # elements; `Optimizer8bit.get_state_buffer` in bitsandbytes/optim/optimizer.py
)


def make_optimizer(name: str, model: Any, tracker: StorageTracker) -> torch.optim.Optimizer:
    """Return the optimizer of this name over the model's trainable parameters.

    Raises: InputError for a name that is not in `OPTIMIZERS`.
    """
    if name not in OPTIMIZERS:
        raise InputError(
            f"optimizer `{name}` cannot be rehearsed",
            hint="take one of " + ", ".join(f"`{known}`" for known in OPTIMIZERS),
        )
    return OPTIMIZERS[name](_groups(model), tracker)


def _groups(model: Any) -> list[dict[str, Any]]:
    """With weight decay and without, as `Trainer.create_optimizer` makes them."""
    from transformers import Trainer

    decayed = set(Trainer.get_decay_parameter_names(None, model))
    trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    groups = [
        {"params": [p for name, p in trainable if name in decayed], "weight_decay": 0.01},
        {"params": [p for name, p in trainable if name not in decayed], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


Groups = list[dict[str, Any]]
Maker = Callable[[Groups, StorageTracker], torch.optim.Optimizer]


def _torch(cls: type[torch.optim.Optimizer], **options: Any) -> Maker:
    def make(groups: Groups, tracker: StorageTracker) -> torch.optim.Optimizer:
        return cls(groups, lr=_LEARNING_RATE, **options)

    return make


def _adafactor(groups: Groups, tracker: StorageTracker) -> torch.optim.Optimizer:
    from transformers.optimization import Adafactor

    options = {"scale_parameter": False, "relative_step": False}  # as Trainer sets them
    return Adafactor(groups, lr=_LEARNING_RATE, **options)


def _muon(groups: Groups, tracker: StorageTracker) -> torch.optim.Optimizer:
    """Muon takes matrices only."""
    matrices = [
        {**group, "params": [p for p in group["params"] if p.dim() == 2]} for group in groups
    ]
    return torch.optim.Muon([group for group in matrices if group["params"]], lr=_LEARNING_RATE)


def _bitsandbytes(name: str, **options: Any) -> Maker:
    def make(groups: Groups, tracker: StorageTracker) -> torch.optim.Optimizer:
        import bitsandbytes.optim

        made: torch.optim.Optimizer = getattr(bitsandbytes.optim, name)(
            groups, lr=_LEARNING_RATE, **options
        )
        return made

    return make


OPTIMIZERS: dict[str, Maker] = {
    "adamw": _torch(torch.optim.AdamW),
    "adamw-fused": _torch(torch.optim.AdamW, fused=True),
    "adamw-8bit": _bitsandbytes("AdamW8bit"),
    "paged-adamw-8bit": _bitsandbytes("PagedAdamW8bit"),
    "paged-adamw": _bitsandbytes("PagedAdamW32bit"),
    "adafactor": _adafactor,
    "lion": _bitsandbytes("Lion32bit"),
    "lion-8bit": _bitsandbytes("Lion8bit"),
    "sgd": _torch(torch.optim.SGD),
    "sgd-momentum": _torch(torch.optim.SGD, momentum=0.9),
    "muon": _muon,
}
