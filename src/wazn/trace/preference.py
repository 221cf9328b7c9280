"""TRL's trainers on fake tensors, unmodified: SFT, DPO, reward models, and the training part of GRPO.

They are handed what a script hands them: a base model and a `peft_config`, a data set (of text where the trainer
tokenises, of token lists for SFT), a tokenizer, a second model where the reference must be one. What is in the data set
does not matter to memory, how long it is does.
"""

from __future__ import annotations

import inspect
import sys
import tempfile
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, fields
from math import gcd
from typing import Any

from torch.utils.data import DataLoader

from wazn.errors import InputError, MissingExtra, Unsupported
from wazn.recipe import Recipe
from wazn.timeline.events import Category
from wazn.trace.adapters import hint_on_targets, lora_config
from wazn.trace.batches import TOKEN, WORD, lengths, task_of_model, tokenizer
from wazn.trace.imports import patched
from wazn.trace.marks import base_of, name_model, owner_of
from wazn.trace.quantized import give_quant_states
from wazn.trace.script import Loop, Reference, Script, Task
from wazn.trace.tracker import StorageTracker
from wazn.trace.trainer import optimizers_for, own_environment, run, training_arguments
from wazn.trace.trl_kernels import trl_on_cuda
from wazn.trace.trl_offloading import offloading_on_cuda

__all__ = ["train_with_trl"]

_REFERENCE = "reference"  # goes before the names of a second model's modules
_KL = 0.04  # GRPO's `beta` where there is a reference; any number but zero makes one
_GENERATIONS = 8  # the default of `GRPOConfig`
_UPGRADE = "`pip install -U trl`"

_NAMES = {Loop.SFT: "SFT", Loop.DPO: "DPO", Loop.REWARD: "Reward", Loop.GRPO: "GRPO"}

Row = dict[str, Any]


def train_with_trl(
    tracker: StorageTracker, model: Any, recipe: Recipe, script: Script, reference: Any = None
) -> Any:
    """Run `script.num_steps` optimizer steps of the trainer that `script.loop` names; return the trainer.

    Must run inside a world; the model has fake storages and no adapters. `reference` is a second model where
    `needs_reference` says so.

    Raises: InputError, Unsupported; MissingExtra without TRL.
    """
    _refuse(model, script)
    try:
        import datasets
        import trl
        from trl.trainer import utils as _  # noqa: F401  # what is patched must be there
    except ImportError as error:
        raise MissingExtra("a rehearsal of a TRL trainer", extra="trace") from error

    needed = f"{_NAMES[script.loop]}Config"
    if getattr(trl, needed, None) is None:
        raise Unsupported(f"the installed TRL has no `{needed}`", hint=_UPGRADE)
    datasets.disable_progress_bars()
    if reference is not None:
        _name_reference(tracker, reference)
    with (
        tempfile.TemporaryDirectory() as folder,
        own_environment(),
        trl_on_cuda(tracker),
        offloading_on_cuda(tracker) if script.activation_offloading else nullcontext(),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore", FutureWarning)
        trainer = _TRAINERS[script.loop](
            _Run(
                trl=trl,
                folder=folder,
                tracker=tracker,
                model=model,
                recipe=recipe,
                script=script,
                reference=reference,
            )
        )
        if tracker.places is not None:
            tracker.places.of_model(trainer.model)
        name_model(tracker, trainer.model, [])
        run(tracker, trainer, recipe, loss_outside=True)
    return trainer


def _refuse(model: Any, script: Script) -> None:
    """Raises: Unsupported for what TRL's trainers need files for, or do not do."""
    wanted = Task.SEQUENCE_CLASSIFICATION if script.loop is Loop.REWARD else Task.CAUSAL_LM
    if script.num_images or task_of_model(model) is not wanted:
        raise Unsupported(
            f"the {script.loop} loop is rehearsed with language models and text",
            hint="images, encoders and encoder-decoders go through `--loop trainer`",
        )
    if script.packing is not None and script.loop is not Loop.SFT:
        raise InputError(f"the {script.loop} loop packs nothing", hint="leave `--packing` out")


def _name_reference(tracker: StorageTracker, reference: Any) -> None:
    """Name a second model's tensors; with a quantised one, make the states of its layers first."""
    tracker.name(give_quant_states(reference), Category.QUANTIZATION_STATE, _REFERENCE)
    if tracker.places is not None:
        tracker.places.of_model(reference, under=f"{_REFERENCE}.")
    for name, tensor in [*reference.named_parameters(), *reference.named_buffers()]:
        tracker.name(tensor, Category.WEIGHTS, f"{_REFERENCE}.{owner_of(name)}")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Run:
    """What all trainers are made of."""

    trl: Any
    folder: str
    tracker: StorageTracker
    model: Any
    recipe: Recipe
    script: Script
    reference: Any

    def arguments(self, cls: Any, **more: Any) -> Any:
        """Return a trainer's configuration; samples may be as long as the recipe says."""
        known = {field.name for field in fields(cls)}
        longest = "max_length" if "max_length" in known else "max_seq_length"
        if longest in known:
            more[longest] = self.recipe.seq_len
        if self.script.activation_offloading:
            more["activation_offloading"] = True
        return training_arguments(cls, self.folder, self.recipe, self.script, **more)

    def trainer(self, cls: Any, rows: list[Row], **choices: Any) -> Any:
        """Make a trainer whose data set is the rows of one micro-batch, as often as the run needs them.

        Raises: InputError with what the trainer refuses.
        """
        from datasets import Dataset

        takes = inspect.signature(cls.__init__).parameters
        named = "processing_class" if "processing_class" in takes else "tokenizer"  # since TRL 0.12
        has_adapters = hasattr(self.model, "get_base_model")
        try:
            return cls(
                model=self.model,
                peft_config=None if has_adapters else lora_config(self.model, self.recipe),
                optimizers=optimizers_for(self.model, self.recipe, self.script, self.tracker),
                train_dataset=Dataset.from_list(
                    rows * (self.recipe.grad_accum * self.script.num_steps)
                ),
                **{named: tokenizer()},
                **choices,
            )
        except ValueError as error:
            raise InputError(
                f"trl's `{cls.__name__}` refuses: {error}", hint=hint_on_targets(self.model, error)
            ) from error

    def prompt_len(self) -> int:
        """Return the tokens of the prompt.

        Raises: InputError where nothing is left for the completion and the token that ends it.
        """
        seq_len, wanted = self.recipe.seq_len, self.script.prompt_len
        length = seq_len // 2 if wanted is None else wanted
        if not 1 <= length <= seq_len - 2:
            raise InputError(
                f"`prompt_len` must leave two tokens of {seq_len} for the completion, found `{length}`"
            )
        return length


def _sft(run: _Run) -> Any:
    if run.script.packing is None:
        samples = lengths(run.recipe, run.script)
    else:  # the trainer lays them end to end
        samples = [run.recipe.seq_len // run.script.packing] * (
            run.script.packing * run.recipe.micro_batch
        )
    arguments = run.arguments(run.trl.SFTConfig, packing=run.script.packing is not None)
    rows = [{"input_ids": [TOKEN] * n, "attention_mask": [1] * n} for n in samples]
    return run.trainer(run.trl.SFTTrainer, rows, args=arguments)


def _dpo(run: _Run) -> Any:
    cls, config = run.trl.DPOTrainer, run.trl.DPOConfig
    more: dict[str, Any] = {}
    if run.script.reference is Reference.PRECOMPUTED:
        cls = _with_constant_reference(cls)
        more["precompute_ref_log_probs"] = True
    if run.script.reference is Reference.MODEL and hasattr(config, "force_use_ref_model"):
        more["force_use_ref_model"] = True  # with adapters, up to TRL 0.2x
    prompt, rows = run.prompt_len(), []
    for length in lengths(run.recipe, run.script):
        chosen, rejected = run.recipe.seq_len - prompt, max(2, length - prompt)
        rows.append(
            {
                "prompt": _text(prompt),
                "chosen": " " + _text(chosen - 1),  # the trainer ends it
                "rejected": " " + _text(rejected - 1),
            }
        )
    module = sys.modules[run.trl.DPOTrainer.__module__]
    with patched(module, {"hash_module": _no_hash}):  # of weights, which are fake
        return run.trainer(cls, rows, args=run.arguments(config, **more), ref_model=run.reference)


def _no_hash(model: Any) -> str:
    return ""


def _with_constant_reference(trainer_class: Any) -> Any:
    """Return DPO's trainer with the pass over the data set before training cut to one batch.

    Every batch is alike, and its log-probabilities cannot be written to a data set without data.

    Raises: Unsupported before TRL 0.29.
    """
    if not hasattr(trainer_class, "_precompute_ref_logps"):
        raise Unsupported("precomputed references need a newer TRL", hint=_UPGRADE)
    names_model = "model" in inspect.signature(trainer_class.compute_ref_log_probs).parameters

    class Trainer(trainer_class):  # type: ignore[misc, unused-ignore]
        def _precompute_ref_logps(self, dataset: Any, name: str, batch_size: int) -> Any:
            loader = DataLoader(dataset, batch_size, collate_fn=self.data_collator)
            batch = next(iter(self.accelerator.prepare(loader)))
            self.compute_ref_log_probs(*([self.model] if names_model else []), batch)
            for column in ("ref_chosen_logps", "ref_rejected_logps"):
                dataset = dataset.add_column(column, [0.0] * len(dataset))
            return dataset

    return Trainer


def _reward(run: _Run) -> Any:
    run.model.config.pad_token_id = tokenizer().pad_token_id  # scripts did it before TRL 0.2x
    rows = [
        {"chosen": _text(run.recipe.seq_len - 1), "rejected": _text(max(1, length - 1))}
        for length in lengths(run.recipe, run.script)
    ]
    arguments = run.arguments(run.trl.RewardConfig)
    return run.trainer(run.trl.RewardTrainer, rows, args=arguments)


def _grpo(run: _Run) -> Any:
    """Completions come from outside, as from an inference engine: a `rollout_func`, or in its place before TRL 0.2x a
    `generate` that answers at once.

    Raises: InputError, Unsupported.
    """
    cls = run.trl.GRPOTrainer
    if run.script.reference is Reference.PRECOMPUTED:
        raise InputError(
            "GRPO has no precomputed reference", hint="leave `reference` out, or say `model`"
        )
    num_generations = run.script.num_generations or _GENERATIONS
    _refuse_split_groups(run.recipe, num_generations)
    prompt = run.prompt_len()
    completion = run.recipe.seq_len - prompt

    def roll_out(prompts: list[str], trainer: Any) -> Row:
        return {
            "prompt_ids": [[TOKEN] * prompt for _ in prompts],
            "completion_ids": [[TOKEN] * completion for _ in prompts],
            "logprobs": None,
        }

    def generate(prompt_ids: Any = None, *, input_ids: Any = None, **_: Any) -> Any:
        given = input_ids if prompt_ids is None else prompt_ids
        return given.new_full((given.shape[0], prompt + completion), TOKEN)

    def reward(completions: list[Any], **_: Any) -> list[float]:
        return [float(index) for index in range(len(completions))]

    def second_model(path: str, **options: Any) -> Any:
        return run.reference  # which the trainer loads itself, from where the first one came

    choices: dict[str, Any] = {"reward_funcs": [reward]}
    if "rollout_func" in inspect.signature(cls.__init__).parameters:
        choices["rollout_func"] = roll_out
    else:
        base_of(run.model).generate = generate
    arguments = run.arguments(
        run.trl.GRPOConfig,
        num_generations=num_generations,
        max_completion_length=completion,
        beta=_KL if run.script.reference is Reference.MODEL else 0.0,
    )
    rows = [{"prompt": _text(prompt)} for _ in range(run.recipe.micro_batch)]
    module = sys.modules[cls.__module__]
    if run.reference is not None and not hasattr(module, "create_model_from_path"):
        raise Unsupported("a second model in GRPO needs a newer TRL", hint=_UPGRADE)
    with patched(module, {"create_model_from_path": second_model}):
        return run.trainer(cls, rows, args=arguments, **choices)


def _refuse_split_groups(recipe: Recipe, num_generations: int) -> None:
    """Raises: InputError where the completions of an optimizer step are not whole groups of a prompt's.

    Source: `generation_batch_size` in trl/trainer/grpo_config.py.
    """
    completions = recipe.micro_batch * recipe.grad_accum
    if completions % num_generations == 0:
        return
    samples, batches = (
        num_generations // gcd(num_generations, number)
        for number in (recipe.grad_accum, recipe.micro_batch)
    )
    raise InputError(
        f"`GRPOConfig` refuses: {completions} completions in a step are no multiple of the {num_generations} "
        "generations of a prompt",
        hint=f"`--micro-batch {samples}`, or `--grad-accum {batches}`",
    )


_TRAINERS: dict[Loop, Callable[[_Run], Any]] = {
    Loop.SFT: _sft,
    Loop.DPO: _dpo,
    Loop.REWARD: _reward,
    Loop.GRPO: _grpo,
}


def _text(num_tokens: int) -> str:
    return " ".join([WORD] * num_tokens)
