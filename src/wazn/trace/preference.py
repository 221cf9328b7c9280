"""TRL's trainers on fake tensors, unmodified: SFT, DPO, reward models, and the training part of GRPO.

They are handed what a script hands them: a base model and a `peft_config`, a data set (of text where the trainer
tokenises, of token lists for SFT), a tokenizer, a second model as the reference where there must be one.
"""

from __future__ import annotations

import inspect
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from torch.utils.data import DataLoader

from wazn.errors import InputError, MissingExtra, Unsupported
from wazn.recipe import Recipe
from wazn.timeline.events import Category
from wazn.trace.adapters import lora_config
from wazn.trace.batches import TOKEN, WORD, lengths, tokenizer
from wazn.trace.imports import patched
from wazn.trace.marks import name_model, owner_of
from wazn.trace.quantized import give_quant_states
from wazn.trace.script import Loop, Reference, Script
from wazn.trace.tracker import StorageTracker
from wazn.trace.trainer import optimizers_for, own_environment, run, training_arguments
from wazn.trace.trl_kernels import trl_on_cuda

__all__ = ["train_with_trl"]

_REFERENCE = "reference"  # goes before the names of a second model's modules
_KL = 0.04  # GRPO's `beta` where there is a reference; any number but zero makes one


def train_with_trl(
    tracker: StorageTracker, model: Any, recipe: Recipe, script: Script, reference: Any = None
) -> Any:
    """Run `script.num_steps` optimizer steps of the trainer that `script.loop` names; return the trainer.

    Must run inside a world; the model has fake storages and no adapters. `reference` is a second model where
    `needs_reference` says so.

    Raises: InputError, Unsupported; MissingExtra without TRL.
    """
    try:
        import datasets
        import trl
        from trl.trainer import utils as _  # noqa: F401  # what is patched must be there
    except ImportError as error:
        raise MissingExtra("a rehearsal of a TRL trainer", extra="trace") from error

    datasets.disable_progress_bars()
    if reference is not None:
        _name_reference(tracker, reference)
    with (
        tempfile.TemporaryDirectory() as folder,
        own_environment(),
        trl_on_cuda(tracker),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore", FutureWarning)
        trainer = _TRAINERS[script.loop](trl, folder, tracker, model, recipe, script, reference)
        if tracker.places is not None:
            tracker.places.of_model(trainer.model)
        name_model(tracker, trainer.model, [])
        run(tracker, trainer, recipe, loss_outside=True)
    return trainer


def _name_reference(tracker: StorageTracker, reference: Any) -> None:
    """Name a second model's tensors; with a quantised one, make the states of its layers first."""
    tracker.name(give_quant_states(reference), Category.QUANTIZATION_STATE, _REFERENCE)
    if tracker.places is not None:
        tracker.places.of_model(reference, under=f"{_REFERENCE}.")
    for name, tensor in [*reference.named_parameters(), *reference.named_buffers()]:
        tracker.name(tensor, Category.WEIGHTS, f"{_REFERENCE}.{owner_of(name)}")


def _sft(
    trl: Any,
    folder: str,
    tracker: StorageTracker,
    model: Any,
    recipe: Recipe,
    script: Script,
    reference: Any,
) -> Any:
    packed = script.packing is not None
    arguments = _arguments(trl.SFTConfig, folder, recipe, script, packing=packed)
    return _made(
        trl.SFTTrainer,
        model,
        recipe,
        script,
        tracker,
        args=arguments,
        train_dataset=_dataset(
            [{"input_ids": [TOKEN] * n} for n in _sft_lengths(recipe, script)], recipe, script
        ),
    )


def _sft_lengths(recipe: Recipe, script: Script) -> list[int]:
    """Return the tokens of each sample that the trainer is given for one micro-batch; packing lays them end to end."""
    if script.packing is None:
        return lengths(recipe, script)
    return [recipe.seq_len // script.packing] * (script.packing * recipe.micro_batch)


def _dpo(
    trl: Any,
    folder: str,
    tracker: StorageTracker,
    model: Any,
    recipe: Recipe,
    script: Script,
    reference: Any,
) -> Any:
    precomputed = script.reference is Reference.PRECOMPUTED
    arguments = _arguments(
        trl.DPOConfig, folder, recipe, script, precompute_ref_log_probs=precomputed
    )
    prompt, rows = _prompt_len(recipe, script), []
    for length in lengths(recipe, script):
        chosen = _text(recipe.seq_len - prompt - 1)
        rows.append(
            {
                "prompt": _text(prompt),
                "chosen": f" {chosen}",
                "rejected": f" {_text(max(1, length - prompt - 1))}",
            }
        )
    module = sys.modules[trl.DPOTrainer.__module__]
    with patched(module, {"hash_module": _no_hash}):  # of weights, which are fake
        return _made(
            _with_constant_reference(trl.DPOTrainer) if precomputed else trl.DPOTrainer,
            model,
            recipe,
            script,
            tracker,
            args=arguments,
            train_dataset=_dataset(rows, recipe, script),
            ref_model=reference,
        )


def _no_hash(model: Any) -> str:
    return ""


def _reward(
    trl: Any,
    folder: str,
    tracker: StorageTracker,
    model: Any,
    recipe: Recipe,
    script: Script,
    reference: Any,
) -> Any:
    rows = [
        {"chosen": _text(recipe.seq_len - 1), "rejected": _text(length - 1)}
        for length in lengths(recipe, script)
    ]
    return _made(
        trl.RewardTrainer,
        model,
        recipe,
        script,
        tracker,
        args=_arguments(trl.RewardConfig, folder, recipe, script),
        train_dataset=_dataset(rows, recipe, script),
    )


def _grpo(
    trl: Any,
    folder: str,
    tracker: StorageTracker,
    model: Any,
    recipe: Recipe,
    script: Script,
    reference: Any,
) -> Any:
    """Completions come from a function of the script's own (`rollout_func`), as from an engine beside the training."""
    prompt = _prompt_len(recipe, script)
    completion = recipe.seq_len - prompt
    if "rollout_func" not in inspect.signature(trl.GRPOTrainer.__init__).parameters:
        raise Unsupported(
            "GRPO needs a TRL whose `GRPOTrainer` takes a `rollout_func`",
            hint="`pip install -U trl`",
        )
    if script.reference is Reference.PRECOMPUTED:
        raise InputError(
            "GRPO has no precomputed reference", hint="leave `reference` out, or say `model`"
        )
    arguments = _arguments(
        trl.GRPOConfig,
        folder,
        recipe,
        script,
        num_generations=script.num_generations,
        max_completion_length=completion,
        beta=_KL if script.reference is Reference.MODEL else 0.0,
    )

    def roll_out(prompts: list[str], trainer: Any) -> dict[str, Any]:
        count = len(prompts)
        return {
            "prompt_ids": [[TOKEN] * prompt] * count,
            "completion_ids": [[TOKEN] * completion] * count,
            "logprobs": None,
        }

    def reward(completions: list[Any], **_: Any) -> list[float]:
        return [float(index) for index, _ in enumerate(completions)]

    def second_model(path: str, **options: Any) -> Any:
        return reference  # GRPO loads it itself, from where the first one came

    module = sys.modules[trl.GRPOTrainer.__module__]
    num_prompts = max(1, recipe.micro_batch * recipe.grad_accum)
    with patched(module, {"create_model_from_path": second_model}):
        return _made(
            trl.GRPOTrainer,
            model,
            recipe,
            script,
            tracker,
            args=arguments,
            train_dataset=_dataset([{"prompt": _text(prompt)}] * num_prompts, recipe, script),
            reward_funcs=[reward],
            rollout_func=roll_out,
        )


_TRAINERS: dict[Loop, Callable[..., Any]] = {
    Loop.SFT: _sft,
    Loop.DPO: _dpo,
    Loop.REWARD: _reward,
    Loop.GRPO: _grpo,
}


def _arguments(cls: Any, folder: str, recipe: Recipe, script: Script, **more: Any) -> Any:
    """Return a trainer's configuration; samples may be as long as the recipe says."""
    known = {field.name for field in fields(cls)}
    longest = "max_length" if "max_length" in known else "max_seq_length"
    if longest in known:
        more[longest] = recipe.seq_len
    if script.activation_offloading:
        more["activation_offloading"] = True
    return training_arguments(cls, folder, recipe, script, **more)


def _made(
    cls: Any, model: Any, recipe: Recipe, script: Script, tracker: StorageTracker, **choices: Any
) -> Any:
    """Make a trainer with what all of them take.

    Raises: InputError with what the trainer refuses.
    """
    tokenizer_option = "processing_class"  # `tokenizer` before TRL 0.12
    if tokenizer_option not in inspect.signature(cls.__init__).parameters:
        tokenizer_option = "tokenizer"
    has_adapters = hasattr(model, "get_base_model")
    try:
        return cls(
            model=model,
            peft_config=None if has_adapters else lora_config(model, recipe),
            optimizers=optimizers_for(model, recipe, script, tracker),
            **{tokenizer_option: tokenizer()},
            **choices,
        )
    except ValueError as error:
        raise InputError(f"trl's `{cls.__name__}` refuses: {error}") from error


def _dataset(rows: list[dict[str, Any]], recipe: Recipe, script: Script) -> Any:
    """Return the rows of one micro-batch as often as the run needs them."""
    from datasets import Dataset

    return Dataset.from_list(rows * (recipe.grad_accum * script.num_steps))


def _text(num_tokens: int) -> str:
    return " ".join([WORD] * num_tokens)


def _prompt_len(recipe: Recipe, script: Script) -> int:
    """Raises: InputError where nothing is left for the completion and the token that ends it."""
    length = recipe.seq_len // 2 if script.prompt_len is None else script.prompt_len
    if not 1 <= length <= recipe.seq_len - 2:
        raise InputError(
            f"`prompt_len` must leave two tokens of {recipe.seq_len} for the completion, found `{length}`"
        )
    return length


def _with_constant_reference(trainer_class: Any) -> Any:
    """Return DPO's trainer with the pass over the data set before training cut to one batch.

    Every batch is alike, and its log-probabilities cannot be written to a data set without data.
    """
    if not hasattr(trainer_class, "_precompute_ref_logps"):
        raise Unsupported("precomputed references need a newer TRL", hint="`pip install -U trl`")

    class Trainer(trainer_class):  # type: ignore[misc, unused-ignore]
        def _precompute_ref_logps(self, dataset: Any, name: str, batch_size: int) -> Any:
            loader = DataLoader(dataset, batch_size, collate_fn=self.data_collator)
            self.compute_ref_log_probs(self.model, next(iter(self.accelerator.prepare(loader))))
            for column in ("ref_chosen_logps", "ref_rejected_logps"):
                dataset = dataset.add_column(column, [0.0] * len(dataset))
            return dataset

    return Trainer
