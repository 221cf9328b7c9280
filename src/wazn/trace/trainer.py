"""The real `transformers.Trainer` loop on fake tensors: two optimizer steps, unmodified.

Batches come from a data set of real token lists through the real collator and data loader; the optimizer
is handed in, because `Trainer` would choose the CPU's implementation here. Marks for the phases are set by
wrapping the Trainer's own calls.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from wazn.dtypes import BFLOAT16
from wazn.recipe import Recipe
from wazn.timeline.events import Phase
from wazn.trace.marks import name_states
from wazn.trace.script import Script
from wazn.trace.tracker import StorageTracker

__all__ = ["train"]


def train(
    tracker: StorageTracker,
    model: Any,
    optimizer: torch.optim.Optimizer,
    recipe: Recipe,
    script: Script,
) -> None:
    """Run `script.num_steps` optimizer steps of `Trainer.train()`.

    Must run inside a world; the model has fake storages. Nothing is saved; the output folder is temporary.
    """
    from transformers import Trainer, TrainingArguments

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            per_device_train_batch_size=recipe.micro_batch,
            gradient_accumulation_steps=recipe.grad_accum,
            max_steps=script.num_steps,
            bf16=recipe.precision.autocast_dtype is BFLOAT16,
            max_grad_norm=recipe.max_grad_norm or 0.0,
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=False,
        )
        trainer = Trainer(
            model=model,
            args=arguments,
            train_dataset=_Tokens(
                script.num_steps * recipe.grad_accum * recipe.micro_batch, recipe.seq_len
            ),
            optimizers=(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)),
        )
        _mark_phases(tracker, trainer, partial(name_states, tracker, model, optimizer))
        trainer.train()


class _Tokens(torch.utils.data.Dataset[dict[str, list[int]]]):
    """So many samples of the same length, labels equal to inputs."""

    def __init__(self, num_samples: int, seq_len: int) -> None:
        self.num_samples = num_samples
        self.seq_len = seq_len

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        names = ("input_ids", "labels", "attention_mask")
        return {name: [1] * self.seq_len for name in names}


def _mark_phases(tracker: StorageTracker, trainer: Any, on_step: Callable[[], None]) -> None:
    def marked(
        owner: Any, name: str, phase: Phase, *, before: Callable[[], None] | None = None
    ) -> None:
        original = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if before is not None:
                before()
            tracker.phase = phase
            return original(*args, **kwargs)

        setattr(owner, name, call)

    def next_step() -> None:
        tracker.step += 1

    def optimizer_begins(*_: Any) -> None:
        tracker.phase = Phase.OPTIMIZER

    trainer.optimizer.register_step_pre_hook(optimizer_begins)

    marked(trainer, "get_batch_samples", Phase.FORWARD, before=next_step)
    marked(trainer, "compute_loss", Phase.FORWARD)
    marked(trainer.accelerator, "backward", Phase.BACKWARD)
    marked(trainer.accelerator, "clip_grad_norm_", Phase.CLIP)
    marked(trainer.model, "zero_grad", Phase.ZERO_GRAD, before=on_step)
