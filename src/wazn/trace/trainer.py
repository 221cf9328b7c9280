"""The real `transformers.Trainer` on fake tensors, unmodified: its optimizer, its collator, its loop.

It is set up as a user sets it up, through `TrainingArguments`; what differs between versions of transformers is asked
of the installed one in `training_arguments`. Marks for phases and steps are set by wrapping what every version calls
by the same name.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from traceback import extract_tb
from typing import Any

from wazn.dtypes import BFLOAT16, FLOAT16
from wazn.errors import InputError, Unsupported
from wazn.recipe import Checkpointing, Optimizer, Recipe
from wazn.trace.batches import Samples, collator_of, last_token, task_of_model
from wazn.trace.checkpointing import checkpointing_options, keep_every
from wazn.trace.optimizers import make_optimizer
from wazn.trace.script import Script, Task
from wazn.trace.tracker import StorageTracker
from wazn.trace.trainer_marks import marks_on_trainer

__all__ = ["optimizers_for", "own_environment", "run", "train", "training_arguments"]

_VARIABLES = "ACCELERATE_"

# Names of `TrainingArguments.optim`; what is missing here Trainer cannot make, and it is handed in.
_OPTIM = {
    Optimizer.ADAMW: "adamw_torch",
    Optimizer.ADAMW_FUSED: "adamw_torch_fused",
    Optimizer.ADAMW_8BIT: "adamw_bnb_8bit",
    Optimizer.PAGED_ADAMW_8BIT: "paged_adamw_8bit",
    Optimizer.PAGED_ADAMW: "paged_adamw_32bit",
    Optimizer.ADAFACTOR: "adafactor",
    Optimizer.LION: "lion_32bit",
    Optimizer.LION_8BIT: "lion_8bit",
    Optimizer.SGD: "sgd",
}


def train(tracker: StorageTracker, model: Any, recipe: Recipe, script: Script) -> Any:
    """Run `script.num_steps` optimizer steps of `Trainer.train()`; return the trainer.

    An encoder-decoder has the `Seq2SeqTrainer`. Must run inside a world; the model has fake storages, and nothing of
    it is checkpointed yet.

    Raises: InputError, Unsupported.
    """
    import transformers

    task = task_of_model(model)
    is_seq2seq = task is Task.SEQ2SEQ
    trainer_class = transformers.Seq2SeqTrainer if is_seq2seq else transformers.Trainer
    arguments_class = (
        transformers.Seq2SeqTrainingArguments if is_seq2seq else transformers.TrainingArguments
    )
    with tempfile.TemporaryDirectory() as folder, own_environment():
        trainer = trainer_class(
            model=model,
            args=training_arguments(arguments_class, folder, recipe, script),
            train_dataset=Samples(recipe, script, task, last=last_token(model)),
            data_collator=collator_of(model, task, script),
            optimizers=optimizers_for(model, recipe, script, tracker),
        )
        run(tracker, trainer, recipe)
    return trainer


@contextmanager
def own_environment() -> Iterator[None]:
    """Keep accelerate's variables out of a run, and what the run sets out of the next one.

    `TrainingArguments` of transformers 4 writes the precision there, and reads it where it is not given.
    """
    before = {name: value for name, value in os.environ.items() if name.startswith(_VARIABLES)}
    for name in before:
        del os.environ[name]
    try:
        yield
    finally:
        for name in [name for name in os.environ if name.startswith(_VARIABLES)]:
            del os.environ[name]
        os.environ.update(before)


def training_arguments(cls: Any, folder: str, recipe: Recipe, script: Script, **more: Any) -> Any:
    """Return `TrainingArguments` (or a class of that kind) that say what the recipe says.

    Everything that the recipe leaves open keeps the installed version's default. Losses are logged at every step:
    that they are is no matter of memory, but it is the code that runs. Samples are not pinned, since pinned memory is
    the host's and the data loader pins in a thread of its own.

    Raises: InputError for an option that the installed version does not have.
    """
    autocast = recipe.precision.autocast_dtype
    choices: dict[str, Any] = {
        "output_dir": folder,
        "per_device_train_batch_size": recipe.micro_batch,
        "gradient_accumulation_steps": recipe.grad_accum,
        "max_steps": script.num_steps,
        "max_grad_norm": recipe.max_grad_norm or 0.0,
        "bf16": autocast is BFLOAT16,
        "fp16": autocast is FLOAT16,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        **_checkpointing(cls, recipe),
        **more,
    }
    if script.liger:
        choices["use_liger_kernel"] = True
    optim = script.optim or _OPTIM.get(recipe.optimizer)
    if optim is not None:
        choices["optim"] = optim
    if choices.get("optim", "").startswith(("galore", "apollo")):
        choices["optim_target_modules"] = "all-linear"  # they have no default
    known = {field.name for field in fields(cls)}
    unknown = choices.keys() - known
    if unknown:
        raise Unsupported(f"the installed `{cls.__name__}` has no `{min(unknown)}`")
    try:
        return cls(**choices)
    except ValueError as error:
        raise InputError(f"`{cls.__name__}` refuses: {error}") from error


def _checkpointing(cls: Any, recipe: Recipe) -> dict[str, Any]:
    if recipe.checkpointing is Checkpointing.NONE:
        return {"gradient_checkpointing": False}
    options = checkpointing_options(recipe.checkpointing)
    renamed = any(field.name == "activation_checkpointing" for field in fields(cls))  # since 5.20
    name = "activation_checkpointing" if renamed else "gradient_checkpointing"
    return {name: True, f"{name}_kwargs": options}


def optimizers_for(
    model: Any, recipe: Recipe, script: Script, tracker: StorageTracker
) -> tuple[Any, None]:
    """Return what Trainer takes as `optimizers`: one that it cannot make itself, or none, and no schedule."""
    if script.optim is not None or recipe.optimizer in _OPTIM:
        return None, None
    return make_optimizer(recipe.optimizer.value, model, tracker), None


def run(
    tracker: StorageTracker, trainer: Any, recipe: Recipe, *, loss_outside: bool = False
) -> None:
    """Run a trainer's `train()` with marks for steps, phases and what belongs to whom.

    loss_outside: the trainer computes its loss itself, from what the model returned.

    Raises: InputError where an optimizer cannot be made, and for fp16 gradients under a GradScaler.
    """
    from transformers import PrinterCallback

    trainer.remove_callback(PrinterCallback)  # it prints what is logged
    if recipe.checkpointing is Checkpointing.EVERY_N:
        trainer.add_callback(_keep_every(trainer.model, recipe.checkpoint_every))
    with marks_on_trainer(tracker, trainer, loss_outside=loss_outside):
        try:
            trainer.train()
        except ImportError as error:
            raise InputError(f"the optimizer cannot be made: {error}") from error
        except ValueError as error:
            if "create_optimizer" in [frame.name for frame in extract_tb(error.__traceback__)]:
                raise InputError(f"the optimizer cannot be made: {error}") from error
            if "FP16 gradients" not in str(error):
                raise
            raise InputError(
                "what is trained in fp16 has gradients in fp16, which the GradScaler of fp16 autocast refuses",
                hint="train weights in fp32: `--weight-dtype float32`, or adapters in fp32",
            ) from error


def _keep_every(model: Any, every: int) -> Any:
    from transformers import TrainerCallback

    class Callback(TrainerCallback):  # type: ignore[misc, unused-ignore]
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            keep_every(model, every)

    return Callback()
