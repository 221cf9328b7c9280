"""Marks on a Trainer's run: steps and phases, batches, gradients, optimizer states, what is computed of the logits.

They are set around calls that every Trainer makes by the same name in every version: `compute_loss`,
`accelerator.backward`, the optimizer's `step`, the model's `zero_grad`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from wazn.timeline.events import Category, Phase
from wazn.trace.imports import patched
from wazn.trace.marks import name_gradients, name_states
from wazn.trace.rehearsal import LOSS
from wazn.trace.tracker import StorageTracker

__all__ = ["marks_on_trainer"]


@contextmanager
def marks_on_trainer(
    tracker: StorageTracker, trainer: Any, *, loss_outside: bool = False
) -> Iterator[None]:
    """Mark what a trainer does until the context ends.

    loss_outside: the trainer computes its loss itself, from what the model returned.
    """
    import accelerate.optimizer
    import accelerate.utils.operations
    import transformers

    marks = _Marks(tracker, trainer)
    raised = accelerate.utils.operations.convert_to_fp32
    with ExitStack() as stack:
        marks.around(trainer.model, "zero_grad", phase=Phase.ZERO_GRAD)
        marks.around(trainer, "compute_loss", phase=Phase.FORWARD, is_loss=True)
        marks.around(trainer, "_prepare_inputs", phase=Phase.FORWARD, after=marks.name_inputs)
        marks.around(trainer.accelerator, "backward", phase=Phase.BACKWARD)
        marks.around(trainer.accelerator, "clip_grad_norm_", phase=Phase.CLIP)
        if hasattr(transformers.Trainer, "get_batch_samples"):  # since 4.46; old TRL has another
            marks.around(
                trainer,
                "get_batch_samples",
                phase=Phase.FORWARD,
                before=marks.next_step,
                after=lambda fetched: marks.name_inputs(fetched[0]),
            )
        else:
            trainer.add_callback(_calls_at_step_begin(marks.next_step))
        stack.enter_context(
            patched(accelerate.optimizer.AcceleratedOptimizer, {"step": marks.optimizer_step()})
        )
        stack.enter_context(
            patched(accelerate.utils.operations, {"convert_to_fp32": marks.of_loss(raised)})
        )
        name_gradients(tracker, trainer.model)
        if loss_outside:
            stack.callback(trainer.model.register_forward_pre_hook(marks.model_called).remove)
            stack.callback(trainer.model.register_forward_hook(marks.model_returned).remove)
        yield


class _Marks:
    def __init__(self, tracker: StorageTracker, trainer: Any) -> None:
        self.tracker = tracker
        self.trainer = trainer

    def next_step(self) -> None:
        self.tracker.step += 1

    def name_inputs(self, batch: Any) -> None:
        self.tracker.name([batch], Category.INPUTS)

    def around(
        self,
        owner: Any,
        name: str,
        *,
        phase: Phase,
        is_loss: bool = False,
        before: Callable[[], None] | None = None,
        after: Callable[[Any], None] | None = None,
    ) -> None:
        """Have calls of a method of this one object marked; what follows stays in its phase."""
        original = getattr(owner, name)
        if is_loss:
            original = self.of_loss(original)

        def call(*args: Any, **kwargs: Any) -> Any:
            if before is not None:
                before()
            self.tracker.phase = phase
            result = original(*args, **kwargs)
            if after is not None:
                after(result)
            return result

        setattr(owner, name, call)

    def of_loss(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Have what a function allocates outside the model's modules count to the loss."""

        def call(*args: Any, **kwargs: Any) -> Any:
            if self.tracker.places is None:
                return function(*args, **kwargs)
            with self.tracker.places.inside(LOSS):
                return function(*args, **kwargs)

        return call

    def optimizer_step(self) -> Callable[..., Any]:
        """Return a step of accelerate's wrapper that is marked, the unscaling of a GradScaler included."""
        from accelerate.optimizer import AcceleratedOptimizer

        original = AcceleratedOptimizer.step

        def step(optimizer: Any, closure: Any = None) -> None:
            self.tracker.phase = Phase.OPTIMIZER
            original(optimizer, closure)
            name_states(self.tracker, self.trainer.model, optimizer.optimizer)

        return step

    def model_called(self, *_: Any) -> None:
        """It may be called more than once for a loss."""
        if self.tracker.phase == Phase.LOSS:
            self.tracker.phase = Phase.FORWARD

    def model_returned(self, *_: Any) -> None:
        """Between the model's return and backward a trainer computes its loss."""
        if self.tracker.phase == Phase.FORWARD:
            self.tracker.phase = Phase.LOSS


def _calls_at_step_begin(call: Callable[[], None]) -> Any:
    from transformers import TrainerCallback

    class Callback(TrainerCallback):  # type: ignore[misc, unused-ignore]
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            call()

    return Callback()
