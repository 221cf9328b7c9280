"""A plain training loop, written like the one in `transformers.Trainer`.

The result of `model(...)` is let go of before backward, gradients are clipped, and set to None after the optimizer's
step.
"""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from wazn.recipe import Recipe
from wazn.timeline.events import Category, Phase
from wazn.trace.batches import TOKEN, last_token, lengths
from wazn.trace.images import image_batch, sees_images
from wazn.trace.marks import base_of, name_states
from wazn.trace.script import Script
from wazn.trace.tracker import DEVICE, StorageTracker

__all__ = ["PlainLoop"]


class PlainLoop:
    """Runs optimizer steps; must be made and run inside a world."""

    def __init__(
        self,
        tracker: StorageTracker,
        model: Any,
        optimizer: torch.optim.Optimizer,
        recipe: Recipe,
        script: Script,
    ) -> None:
        self.tracker = tracker
        self.model = model
        self.optimizer = optimizer
        self.recipe = recipe
        self.script = script
        self.batches: list[dict[str, Any]] = []
        self.total_loss = torch.zeros((), device=DEVICE)
        self.step_loss = self.grad_norm = None

    def run(self) -> None:
        """Run `script.num_steps` optimizer steps."""
        for step in range(1, self.script.num_steps + 1):
            self.tracker.step = step
            self._optimizer_step()

    def _optimizer_step(self) -> None:
        """Run the micro-batches, clip, step, and let the gradients go.

        Like `Trainer`, it fetches all batches of a step first and holds them, the step's loss and the norm
        of the gradients until the next step has its own.
        """
        self.tracker.phase = Phase.FORWARD
        self.batches, num_items = self._fetch()
        for inputs in self.batches:
            self.step_loss = self._micro_batch(inputs, num_items)
            self.total_loss += self.step_loss
        trainable = [p for p in self.model.parameters() if p.requires_grad]
        if self.recipe.max_grad_norm is not None:
            self.tracker.phase = Phase.CLIP
            self.grad_norm = torch.nn.utils.clip_grad_norm_(trainable, self.recipe.max_grad_norm)
        self.tracker.phase = Phase.OPTIMIZER
        self.optimizer.step()
        name_states(self.tracker, self.model, self.optimizer)
        self.tracker.phase = Phase.ZERO_GRAD
        self.optimizer.zero_grad(set_to_none=self.recipe.zero_grad_set_to_none)

    def _fetch(self) -> tuple[list[dict[str, Any]], Any]:
        batches = [self._batch() for _ in range(self.recipe.grad_accum)]
        self.tracker.name(batches, Category.INPUTS)
        if not (self.script.num_items and self._takes_num_items()):
            return batches, None
        return batches, sum((batch["labels"] != -100).sum() for batch in batches)

    def _batch(self) -> dict[str, Any]:
        base, recipe = base_of(self.model), self.recipe
        if sees_images(base):
            return image_batch(
                base,
                micro_batch=recipe.micro_batch,
                seq_len=recipe.seq_len,
                num_images=self.script.num_images,
                image_size=self.script.image_size,
                device=DEVICE,
            )
        shape = (recipe.micro_batch, recipe.seq_len)
        names = ["input_ids", "labels"] + ["attention_mask"] * self.script.attention_mask
        shapes: dict[str, tuple[int, ...]] = dict.fromkeys(names, shape)
        if type(base).__name__.endswith("ForSequenceClassification"):
            shapes["labels"] = shape[:1]
        elif base.config.is_encoder_decoder and self.script.target_len is not None:
            shapes["labels"] = (recipe.micro_batch, self.script.target_len)
        # as a collator has them, so that positions that come of ids and mask are known
        values = {"input_ids": TOKEN, "attention_mask": 1, "labels": 0}
        batch = {
            name: torch.full(shape, values[name], dtype=torch.int64, device=DEVICE)
            for name, shape in shapes.items()
        }
        if self.script.attention_mask and self.script.padding:
            rows = [
                [1] * length + [0] * (recipe.seq_len - length)
                for length in lengths(recipe, self.script)
            ]
            batch["attention_mask"] = torch.tensor(rows).to(DEVICE)
        last = last_token(base)
        if last != TOKEN:
            row = [TOKEN] * (recipe.seq_len - 1) + [last]
            batch["input_ids"] = torch.tensor([row] * recipe.micro_batch).to(DEVICE)
        return batch

    def _takes_num_items(self) -> bool:
        """Say whether the model hands unknown arguments on to its loss, as `Trainer` finds out since 4.46."""
        base = base_of(self.model)
        parameters = inspect.signature(base.forward).parameters.values()
        return hasattr(base, "loss_function") and any(
            parameter.kind is parameter.VAR_KEYWORD for parameter in parameters
        )

    def _micro_batch(self, inputs: dict[str, Any], num_items: Any) -> Any:
        self.tracker.phase = Phase.FORWARD
        loss, outputs = self._loss(inputs, num_items)
        if not self.recipe.keep_outputs:
            outputs = None
        if num_items is None and self.recipe.grad_accum > 1:
            loss = loss / self.recipe.grad_accum
        self.tracker.phase = Phase.BACKWARD
        loss.backward()
        del outputs
        return loss.detach()

    def _loss(self, inputs: dict[str, Any], num_items: Any) -> tuple[Any, Any]:
        counted = {} if num_items is None else {"num_items_in_batch": num_items}
        with self._autocast():
            outputs = self.model(**inputs, **counted)
        if self.recipe.precision.autocast_dtype is not None and self.script.raise_outputs:
            from accelerate.utils.operations import convert_to_fp32

            outputs = convert_to_fp32(outputs)
        return outputs["loss"], outputs

    def _autocast(self) -> AbstractContextManager[Any]:
        dtype = self.recipe.precision.autocast_dtype
        if dtype is None:
            return nullcontext()
        return torch.autocast("cpu", dtype=getattr(torch, dtype.name))
