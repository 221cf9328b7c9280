"""The training script around a recipe: what a `Recipe` does not say and the libraries decide. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

__all__ = ["Loop", "Script", "Task"]


class Loop(StrEnum):
    """Who runs the optimizer steps."""

    PLAIN = "plain"  # a loop of our own, written like Trainer's
    TRAINER = "trainer"  # transformers.Trainer


class Task(StrEnum):
    """What the model is trained to do, thus which of transformers' auto classes makes it."""

    CAUSAL_LM = "causal-lm"


@dataclass(frozen=True, kw_only=True, slots=True)
class Script:
    """What to rehearse beside the recipe.

    num_layers: the model cut to so many layers; None for all of them.
    capability: compute capability of the card, such as (8, 0) for an A100; it decides the attention kernel.
    matmul_workspaces: whether the first matrix product of forward and of backward allocates cuBLAS's workspace.

    Of the plain loop alone:

    num_items: the loss is divided by the number of labels, as Trainer has it since 4.46.
    attention_mask: batches hold a mask of ones, as data collators add it.
    raise_outputs: accelerate's `convert_outputs_to_fp32`, under autocast.
    use_cache: of the model's configuration; Trainer switches it off since 5.0, before only under checkpointing.
    """

    loop: Loop = Loop.PLAIN
    task: Task | None = None
    num_steps: int = 2
    num_layers: int | None = None
    capability: tuple[int, int] = (8, 0)
    matmul_workspaces: bool = True
    num_items: bool = True
    attention_mask: bool = True
    raise_outputs: bool = True
    use_cache: bool = False
