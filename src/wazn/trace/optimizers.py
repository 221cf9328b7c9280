"""Real optimizers on fake tensors: those of PyTorch, bitsandbytes and transformers, in Trainer's parameter groups.

These are for a loop of our own. The real Trainer makes its own by the name in `TrainingArguments.optim`; what
bitsandbytes and others must believe for either is in `wazn.trace.libraries`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from wazn.errors import InputError
from wazn.trace.tracker import StorageTracker

__all__ = ["OPTIMIZERS", "make_optimizer"]

_LEARNING_RATE = 1e-5


def make_optimizer(name: str, model: Any, tracker: StorageTracker) -> torch.optim.Optimizer:
    """Return the optimizer of this name over the model's trainable parameters.

    Raises: InputError for a name that is not in `OPTIMIZERS`.
    """
    if name not in OPTIMIZERS:
        raise InputError(
            f"optimizer `{name}` cannot be rehearsed",
            hint="take one of " + ", ".join(f"`{known}`" for known in OPTIMIZERS),
        )
    made = OPTIMIZERS[name](model, tracker)
    if name.endswith("-8bit"):
        _keep_embeddings_in_32_bits(model)
    return made


def _keep_embeddings_in_32_bits(model: Any) -> None:
    """As `Trainer.create_optimizer` does since 4.52; before, it asked for a class that it did not use."""
    import transformers
    from bitsandbytes.optim import GlobalOptimManager

    if tuple(int(part) for part in transformers.__version__.split(".")[:2]) < (4, 52):
        return
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding):
            manager = GlobalOptimManager.get_instance()
            manager.register_module_override(module, "weight", {"optim_bits": 32})


def _groups(model: Any) -> list[dict[str, Any]]:
    """Two groups, as `Trainer.create_optimizer` makes them; `TrainingArguments.weight_decay` is 0 by default."""
    from transformers import Trainer

    decayed = set(Trainer.get_decay_parameter_names(None, model))
    trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    groups = [
        {"params": [p for name, p in trainable if name in decayed], "weight_decay": 0.0},
        {"params": [p for name, p in trainable if name not in decayed], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


Groups = list[dict[str, Any]]
Maker = Callable[[Any, StorageTracker], torch.optim.Optimizer]


def _torch(cls: type[torch.optim.Optimizer], **options: Any) -> Maker:
    def make(model: Any, tracker: StorageTracker) -> torch.optim.Optimizer:
        return cls(_groups(model), lr=_LEARNING_RATE, **options)

    return make


def _adafactor(model: Any, tracker: StorageTracker) -> torch.optim.Optimizer:
    from transformers.optimization import Adafactor

    options = {"scale_parameter": False, "relative_step": False}  # as Trainer sets them
    return Adafactor(_groups(model), lr=_LEARNING_RATE, **options)


class _MuonWithAdamW(torch.optim.Optimizer):
    """torch.optim.Muon for matrices, AdamW for the rest: one optimizer to whoever steps it."""

    def __init__(self, matrices: list[torch.Tensor], rest: list[torch.Tensor]) -> None:
        self.parts = [
            cls(parameters, lr=_LEARNING_RATE)
            for cls, parameters in ((torch.optim.Muon, matrices), (torch.optim.AdamW, rest))
            if parameters
        ]
        super().__init__([*matrices, *rest], {"lr": _LEARNING_RATE})

    def step(self, closure: Any = None) -> None:
        """Step both; their states are this one's."""
        for part in self.parts:
            part.step()
            self.state.update(part.state)


def _muon(model: Any, tracker: StorageTracker) -> torch.optim.Optimizer:
    """Muon as its paper uses it: not for embeddings, the head, biases and norms."""
    outer = {id(p) for module in _outer_modules(model) for p in module.parameters()}
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in trained if p.dim() == 2 and id(p) not in outer]
    chosen = {id(p) for p in matrices}
    return _MuonWithAdamW(matrices, [p for p in trained if id(p) not in chosen])


def _outer_modules(model: Any) -> list[torch.nn.Module]:
    """Return the embeddings and the head."""
    embeddings = [module for module in model.modules() if isinstance(module, torch.nn.Embedding)]
    getter = getattr(model, "get_output_embeddings", None)
    head = None if getter is None else getter()
    return embeddings if head is None else [*embeddings, head]


def _bitsandbytes(name: str, **options: Any) -> Maker:
    def make(model: Any, tracker: StorageTracker) -> torch.optim.Optimizer:
        import bitsandbytes.optim

        made: torch.optim.Optimizer = getattr(bitsandbytes.optim, name)(
            _groups(model), lr=_LEARNING_RATE, **options
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
