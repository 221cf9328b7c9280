"""Rehearse whole training steps of a real model class from `transformers`, with the real `peft` and optimizers.

    python -m wazn.trace.step CONFIG.json --method lora --micro-batch 4 --seq-len 4096 --layers 2
    python -m wazn.trace.step CONFIG.json --events

The model is built on `meta` and then given fake storages; two optimizer steps of a plain loop follow,
written like the one in `transformers.Trainer`: the result of `model(...)` is let go of before backward,
gradients are clipped, and set to None after the optimizer's step.
"""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, fields
from typing import Any

import torch

from wazn.timeline.events import Category, Phase
from wazn.trace.checkpointing import switch_on_checkpointing
from wazn.trace.flash_attn import flash_attn_stand_in
from wazn.trace.optimizers import make_optimizer
from wazn.trace.quantized import (
    give_quant_states,
    prepare_kbit,
    quantise_linears,
    quantise_linears_8bit,
)
from wazn.trace.rehearsal import Rehearsal, signed_rounded
from wazn.trace.tracker import DEVICE, StorageTracker, tensors_in
from wazn.trace.world import World
from wazn.units import GIB

__all__ = ["Recipe", "Rehearsal", "build_model", "rehearse"]

ATTENTION_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """What to rehearse; names and meanings are those of the command line."""

    method: str = "full"  # full | lora | qlora
    rank: int = 16
    targets: str | tuple[str, ...] = "all-linear"
    lora_dropout: float = 0.0
    dora: bool = False
    quantization: str = "nf4"  # of qlora: nf4 | fp4 | int8
    double_quant: bool = True
    # peft.prepare_model_for_kbit_training: norms, embeddings and head are raised to fp32
    prepare_kbit: bool = True
    weight_dtype: str = "bfloat16"
    autocast_dtype: str | None = None
    adapter_dtype: str | None = None  # None: what peft makes, fp32 on a half-precision base
    raise_outputs: bool = True  # accelerate's convert_outputs_to_fp32, under autocast only
    optimizer: str = "adamw"
    micro_batch: int = 1
    seq_len: int = 2048
    grad_accum: int = 1
    checkpointing: str = "none"  # none | full | full-reentrant | every-n | selective-op
    checkpoint_every: int = 2
    # the embeddings' output requires gradients; None: where reentrant checkpointing needs it
    input_grads: bool | None = None
    attention: str = "sdpa"
    # the loss is divided by the number of labels, as Trainer has it since 4.46
    num_items: bool = True
    attention_mask: bool = True  # what data collators add: a mask of ones
    loop: str = "plain"  # plain | trainer
    max_grad_norm: float | None = 1.0
    set_to_none: bool = True
    keep_outputs: bool = False
    use_cache: bool = False  # Trainer switches it off since 5.0, before only under checkpointing
    num_steps: int = 2
    num_layers: int | None = None
    capability: tuple[int, int] = (8, 0)
    matmul_workspaces: bool = True


def rehearse(config: dict[str, Any], recipe: Recipe) -> Rehearsal:
    """Run `recipe.num_steps` optimizer steps of the model that `config` (a config.json) describes."""
    with flash_attn_stand_in(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of one library, about another's call
        model = build_model(config, recipe)
    with (
        flash_attn_stand_in(),
        World(capability=recipe.capability, matmul_workspaces=recipe.matmul_workspaces) as world,
    ):
        tracker = world.tracker
        tracker.phase = Phase.LOAD
        world.materialise(model)
        quant_states = give_quant_states(model) if recipe.method == "qlora" else []
        categories = dict(_model_blocks(tracker, model))
        for tensor in quant_states:
            categories[tracker.block_id(tensor) or 0] = Category.QUANTIZATION_STATE
        optimizer = make_optimizer(recipe.optimizer, model, tracker)
        loop = _Loop(tracker, model, optimizer, recipe, categories)
        loop.run()
        return Rehearsal(events=tuple(tracker.events), categories=categories)


def build_model(config: dict[str, Any], recipe: Recipe) -> Any:
    """Build the model on `meta`, add adapters and switch training and checkpointing on."""
    from transformers import AutoModelForCausalLM

    hf_config = _text_config(config, recipe.num_layers)
    hf_config.use_cache = recipe.use_cache
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            hf_config,
            attn_implementation=_ATTENTION[recipe.attention],
            **{_dtype_option(): getattr(torch, recipe.weight_dtype)},
        )
        if recipe.method == "qlora":
            if recipe.quantization == "int8":
                quantise_linears_8bit(model)
            else:
                quantise_linears(
                    model, double_quant=recipe.double_quant, quant_type=recipe.quantization
                )
            if recipe.prepare_kbit:
                prepare_kbit(model)
        if recipe.method in ("lora", "qlora"):
            model = _with_adapters(model, recipe)
    model.train()
    switch_on_checkpointing(model, recipe.checkpointing, every=recipe.checkpoint_every)
    needs_input_grads = recipe.input_grads
    if needs_input_grads is None:
        needs_input_grads = recipe.checkpointing == "full-reentrant"
    if recipe.method != "full" and needs_input_grads:
        model.enable_input_require_grads()
    return model


def _dtype_option() -> str:
    """Return the name under which this version of transformers takes the weights' type; `dtype` since 4.56."""
    import transformers

    version = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    return "dtype" if version >= (4, 56) else "torch_dtype"


# None is the choice of transformers: sdpa where the model has it, else eager
_ATTENTION = {"sdpa": None, "eager": "eager", "flash": "flash_attention_2"}


def _text_config(config: dict[str, Any], num_layers: int | None) -> Any:
    """Read a config.json (keys that begin with `_` are remarks); of a model with towers take the
    language model.
    """
    from transformers import AutoConfig

    wanted = {name: value for name, value in config.items() if not name.startswith("_")}
    wanted.pop("auto_map", None)
    hf_config = AutoConfig.for_model(wanted.pop("model_type"), **wanted)
    if hasattr(hf_config, "get_text_config"):  # since 4.45
        hf_config = hf_config.get_text_config()
    if num_layers is None:
        return hf_config
    before = hf_config.num_hidden_layers
    for name, value in vars(hf_config).copy().items():
        if isinstance(value, list | tuple) and len(value) == before:
            setattr(hf_config, name, value[:num_layers])
    hf_config.num_hidden_layers = num_layers
    return hf_config


def _with_adapters(model: Any, recipe: Recipe) -> Any:
    from peft import LoraConfig, get_peft_model

    targets = list(recipe.targets) if isinstance(recipe.targets, tuple) else recipe.targets
    if targets == "attention":
        targets = list(ATTENTION_TARGETS)
    lora = LoraConfig(
        r=recipe.rank,
        lora_alpha=2 * recipe.rank,
        lora_dropout=recipe.lora_dropout,
        target_modules=targets,
        use_dora=recipe.dora,
        task_type="CAUSAL_LM",
    )
    wrapped = get_peft_model(model, lora)
    if recipe.adapter_dtype is not None:
        for parameter in wrapped.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.to(getattr(torch, recipe.adapter_dtype))
    return wrapped


def _model_blocks(tracker: StorageTracker, model: Any) -> Iterator[tuple[int, Category]]:
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        block_id = tracker.block_id(tensor)
        if block_id is not None:
            yield block_id, Category.ADAPTER_WEIGHTS if "lora_" in name else Category.WEIGHTS


class _Loop:
    """The training loop: one call is one optimizer step."""

    def __init__(
        self,
        tracker: StorageTracker,
        model: Any,
        optimizer: torch.optim.Optimizer,
        recipe: Recipe,
        categories: dict[int, Category],
    ) -> None:
        self.tracker = tracker
        self.model = model
        self.optimizer = optimizer
        self.recipe = recipe
        self.categories = categories
        self.batches: list[dict[str, Any]] = []
        self.total_loss = torch.zeros((), device=DEVICE)
        self.step_loss = self.grad_norm = None
        self._mark_loss()

    def run(self) -> None:
        """Run all optimizer steps, in a plain loop or in the real Trainer's."""
        if self.recipe.loop == "trainer":
            self._train()
            return
        for step in range(1, self.recipe.num_steps + 1):
            self.tracker.step = step
            self._optimizer_step()

    def _train(self) -> None:
        from wazn.trace.trainer import train

        train(
            self.tracker,
            self.model,
            self.optimizer,
            micro_batch=self.recipe.micro_batch,
            seq_len=self.recipe.seq_len,
            grad_accum=self.recipe.grad_accum,
            num_steps=self.recipe.num_steps,
            bf16=self.recipe.autocast_dtype == "bfloat16",
            max_grad_norm=self.recipe.max_grad_norm,
            on_step=self._name_long_lived,
        )

    def _name_long_lived(self) -> None:
        self._name([p.grad for p in self.model.parameters()], Category.GRADIENTS)
        self._name(self.optimizer.state.values(), Category.OPTIMIZER_STATES)

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
        self._name_long_lived()
        self.tracker.phase = Phase.ZERO_GRAD
        self.optimizer.zero_grad(set_to_none=self.recipe.set_to_none)

    def _fetch(self) -> tuple[list[dict[str, Any]], Any]:
        shape = (self.recipe.micro_batch, self.recipe.seq_len)
        names = ["input_ids", "labels"] + ["attention_mask"] * self.recipe.attention_mask
        batches = [
            {name: torch.empty(shape, dtype=torch.int64, device=DEVICE) for name in names}
            for _ in range(self.recipe.grad_accum)
        ]
        self._name(batches, Category.INPUTS)
        if not (self.recipe.num_items and self._takes_num_items()):
            return batches, None
        return batches, sum((batch["labels"] != -100).sum() for batch in batches)

    def _takes_num_items(self) -> bool:
        """Say whether the model hands unknown arguments on to its loss, as `Trainer` finds out since 4.46."""
        base = self._base()
        parameters = inspect.signature(base.forward).parameters.values()
        return hasattr(base, "loss_function") and any(
            parameter.kind is parameter.VAR_KEYWORD for parameter in parameters
        )

    def _base(self) -> Any:
        """Return the model without the wrapper of peft."""
        has_adapters = hasattr(self.model, "get_base_model")
        return self.model.get_base_model() if has_adapters else self.model

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
        if self.recipe.autocast_dtype is not None and self.recipe.raise_outputs:
            from accelerate.utils.operations import convert_to_fp32

            outputs = convert_to_fp32(outputs)
        return outputs["loss"], outputs

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.recipe.autocast_dtype is None:
            return nullcontext()
        return torch.autocast("cpu", dtype=getattr(torch, self.recipe.autocast_dtype))

    def _name(self, values: Iterable[Any], category: Category) -> None:
        for tensor in tensors_in(list(values)):
            block_id = self.tracker.block_id(tensor)
            if block_id is not None:
                self.categories.setdefault(block_id, category)

    def _mark_loss(self) -> None:
        """Mark what the model's loss function does; models before transformers 4.46 have none."""
        base = self._base()
        original = getattr(base, "loss_function", None)
        if original is None:
            return

        def marked(*args: Any, **kwargs: Any) -> Any:
            with _phase(self.tracker, Phase.LOSS):
                return original(*args, **kwargs)

        try:
            base.loss_function = marked
        except AttributeError:  # a property without a setter, in 4.46 and 4.47
            own = type(base)
            base.__class__ = type(own.__name__, (own,), {"loss_function": staticmethod(marked)})


@contextmanager
def _phase(tracker: StorageTracker, phase: Phase) -> Iterator[None]:
    before, tracker.phase = tracker.phase, phase
    try:
        yield
    finally:
        tracker.phase = before


def main(arguments: list[str] | None = None) -> None:
    """Rehearse from the command line: peaks by phase, and every event on request. A tool for developers."""
    import argparse
    import json
    from pathlib import Path

    parser = argparse.ArgumentParser(prog="python -m wazn.trace.step", description=main.__doc__)
    parser.add_argument("config", type=Path, help="a config.json")
    parser.add_argument("--layers", type=int, dest="num_layers", help="cut the model to so many")
    parser.add_argument("--events", action="store_true", help="print every allocation and free")
    for item in fields(Recipe):
        if item.name in ("num_layers", "capability", "targets"):
            continue
        option = "--" + item.name.replace("_", "-")
        if item.name == "input_grads" or isinstance(item.default, bool):
            parser.add_argument(option, action=argparse.BooleanOptionalAction, default=item.default)
        else:
            kind = type(item.default) if item.default is not None else str
            parser.add_argument(option, type=kind, default=item.default)
    parser.add_argument("--targets", default="all-linear", help="or attention, or q_proj,v_proj")
    parser.add_argument("--capability", default="8.0")
    given = vars(parser.parse_args(arguments))
    config = json.loads(given.pop("config").read_text())
    wants_events = given.pop("events")
    targets = given["targets"]
    given["targets"] = tuple(targets.split(",")) if "," in targets or "_" in targets else targets
    given["capability"] = tuple(int(part) for part in given["capability"].split("."))
    if given["max_grad_norm"] is not None:
        given["max_grad_norm"] = float(given["max_grad_norm"]) or None
    rehearsal = rehearse(config, Recipe(**given))
    write = sys.stdout.write
    if wants_events:
        for line in _event_lines(rehearsal):
            write(line + "\n")
    for (step, phase), peak_bytes in rehearsal.peaks().items():
        write(f"step {step} {phase:18} peak {peak_bytes:>15,} {peak_bytes / GIB:9.3f} GiB\n")
    for name, num_bytes in rehearsal.breakdown_at_peak().items():
        write(f"at the peak: {name:28} {num_bytes:>15,} {num_bytes / GIB:9.3f} GiB\n")


def _event_lines(rehearsal: Rehearsal) -> Iterator[str]:
    current_bytes = 0
    for event in rehearsal.events:
        current_bytes += signed_rounded(event.num_bytes)
        category = rehearsal.categories.get(event.block_id, "")
        yield (
            f"{event.step} {event.phase:18} block {event.block_id:<6} {event.num_bytes:>+14} "
            f"-> {current_bytes:>14} {event.op} {list(event.shape)} {event.dtype} {category}"
        )


if __name__ == "__main__":
    main()
