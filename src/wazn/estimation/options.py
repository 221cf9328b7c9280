"""The question as a person asks it, and what it means.

Explicit beats the training stack's habit, the habit beats wazn's default. `resolve` fills every gap and says who filled it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from wazn.dtypes import BFLOAT16, FLOAT16, FLOAT32, Dtype, parse_dtype
from wazn.errors import InputError, UnknownFact, Unsupported
from wazn.facts.stacks import Habits
from wazn.recipe import (
    Adapter,
    Attention,
    Checkpointing,
    Loss,
    Method,
    Optimizer,
    Precision,
    Quantization,
    QuantizationFormat,
    Recipe,
)

__all__ = ["PRECISIONS", "Options", "Resolved", "resolve"]

LARGEST_MICRO_BATCH = 1 << 20
LARGEST_SEQ_LEN = 1 << 30
LARGEST_GRAD_ACCUM = 1 << 20
LARGEST_RANK = 1 << 20

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """What was said, in the words of the command line; None is what was not said."""

    method: str | None = None
    rank: int | None = None
    targets: str | None = None
    dora: bool | None = None
    lora_dropout: float | None = None
    quantization: str | None = None
    double_quant: bool | None = None
    precision: str | None = None
    weight_dtype: str | None = None
    autocast_dtype: str | None = None
    adapter_dtype: str | None = None
    master_dtype: str | None = None
    gradient_dtype: str | None = None
    state_dtype: str | None = None
    optimizer: str | None = None
    micro_batch: int | None = None
    seq_len: int | None = None
    grad_accum: int | None = None
    checkpointing: str | None = None
    attention: str | None = None
    loss: str | None = None
    stack: str | None = None
    trainable: str | None = None
    freeze: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Resolved:
    """A recipe, and for each option that was not given who chose: `stack` or `wazn`."""

    recipe: Recipe
    defaults: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class _Preset:
    weight: Dtype
    autocast: Dtype | None
    master: Dtype | None = None


PRECISIONS: Mapping[str, _Preset] = {
    "bf16": _Preset(BFLOAT16, None),
    "bf16-autocast": _Preset(BFLOAT16, BFLOAT16),
    "bf16-mixed": _Preset(FLOAT32, BFLOAT16),
    "bf16-master": _Preset(BFLOAT16, None, FLOAT32),
    "fp16-mixed": _Preset(FLOAT32, FLOAT16),
    "fp32": _Preset(FLOAT32, None),
}

CHECKPOINTING = (
    "none",
    "full",
    "full-reentrant",
    "every-N",
    "selective-op",
    "selective-attention",
)
ATTENTION = ("sdpa", "flash", "eager")


def resolve(options: Options, habits: Habits) -> Resolved:
    """Return the recipe that the options mean under a stack's habits.

    Raises: InputError for a contradiction or a value out of range, UnknownFact for a name that is not on a list.
    """
    return _Resolver(options, habits).resolved()


class _Resolver:
    """Takes each option from whoever says something about it first, and remembers who it was."""

    def __init__(self, options: Options, habits: Habits) -> None:
        self.options = options
        self.habits = habits
        self.defaults: dict[str, str] = {}

    def take(self, name: str, given: _T | None, *, stack: _T | None = None, wazn: _T) -> _T:
        if given is not None:
            return given
        self.defaults[name] = "wazn" if stack is None else "stack"
        return wazn if stack is None else stack

    def resolved(self) -> Resolved:
        options, habits = self.options, self.habits
        method = self.method()
        quantization = self.quantization(method)
        checkpointing, every = self.checkpointing()
        recipe = Recipe(
            method=Method.QLORA if quantization is not None else method,
            adapter=self.adapter(method),
            quantization=quantization,
            precision=self.precision(method),
            optimizer=_choose(
                "optimizer",
                self.take("optimizer", options.optimizer, stack=habits.optimizer.value, wazn=""),
                {item.value: item for item in Optimizer},
            ),
            micro_batch=self.count("micro-batch", options.micro_batch, 1, LARGEST_MICRO_BATCH),
            seq_len=self.count("seq-len", options.seq_len, 2048, LARGEST_SEQ_LEN),
            grad_accum=self.count("grad-accum", options.grad_accum, 1, LARGEST_GRAD_ACCUM),
            checkpointing=checkpointing,
            checkpoint_every=every,
            attention=_choose(
                "attention",
                self.take("attention", options.attention, wazn="sdpa"),
                {
                    "sdpa": Attention.SDPA_FLASH,
                    "flash": Attention.FLASH,
                    "eager": Attention.EAGER,
                },
            ),
            loss=_choose(
                "loss",
                self.take("loss", options.loss, wazn="standard"),
                {item.value: item for item in Loss},
            ),
            stack=f"{habits.stack}@{habits.version}",
            trainable=_patterns(options.trainable),
            freeze=_patterns(options.freeze),
            inputs_require_grad=checkpointing is Checkpointing.FULL_REENTRANT
            and method is not Method.FULL,
        )
        if "stack" not in self.defaults and options.stack is None:
            self.defaults["stack"] = "wazn"
        return Resolved(recipe=recipe, defaults=self.defaults)

    def count(self, name: str, given: int | None, default: int, largest: int) -> int:
        value = self.take(name, given, wazn=default)
        if not 1 <= value <= largest:
            raise InputError(
                f"`--{name}` must be a whole number from 1 to {largest:,}, found `{value}`"
            )
        return value

    def method(self) -> Method:
        options = self.options
        method = _choose(
            "method",
            self.take("method", options.method, wazn="lora"),
            {item.value: item for item in Method},
        )
        if method is Method.QLORA and options.quantization == "none":
            raise InputError(
                "`--method qlora` and `--quantization none` contradict each other",
                hint="`--method lora` for adapters on a base in 16 bits, or leave `--quantization` out",
            )
        if method is Method.FULL and options.quantization not in (None, "none"):
            raise InputError(
                f"`--method full` cannot train weights in `--quantization {options.quantization}`",
                hint="`--method qlora` trains adapters on a quantised base",
            )
        patterns = [name for name in ("trainable", "freeze") if getattr(options, name)]
        if patterns and method is not Method.FREEZE:
            raise InputError(
                f"`--{patterns[0]}` needs `--method freeze`, found `--method {method}`"
            )
        if method is Method.FREEZE and not patterns:
            raise InputError(
                "`--method freeze` needs to know what is trained",
                hint="`--trainable 'model.layers.3*'` or `--freeze 'model.embed_tokens*'`",
            )
        return method

    def adapter(self, method: Method) -> Adapter | None:
        options = self.options
        given = [
            name for name in ("rank", "targets", "dora", "lora_dropout") if getattr(options, name)
        ]
        if method not in (Method.LORA, Method.QLORA):
            if given:
                raise InputError(
                    f"`--{given[0].replace('_', '-')}` is for `--method lora` and `qlora`, "
                    f"found `--method {method}`"
                )
            return None
        targets = self.take("targets", options.targets, wazn="all-linear")
        dropout = self.take("lora-dropout", options.lora_dropout, wazn=0.0)
        return Adapter(
            rank=self.count("rank", options.rank, 16, LARGEST_RANK),
            targets=_patterns(targets),
            dora=bool(options.dora),
            dropout=dropout,
        )

    def quantization(self, method: Method) -> Quantization | None:
        options = self.options
        quantised = method is Method.QLORA or (
            method in (Method.LORA, Method.FREEZE) and options.quantization not in (None, "none")
        )
        if not quantised:
            if options.double_quant:
                raise InputError(
                    "`--double-quant` needs a quantised base",
                    hint="`--method qlora` or `--quantization nf4`",
                )
            return None
        names = {item.value: item for item in QuantizationFormat}
        chosen = _choose(
            "quantization", self.take("quantization", options.quantization, wazn="nf4"), names
        )
        four_bits = chosen is not QuantizationFormat.INT8
        if options.double_quant and not four_bits:
            raise InputError("`--double-quant` is for 4 bits, found `--quantization int8`")
        return Quantization(
            format=chosen,
            double_quant=self.take("double-quant", options.double_quant, wazn=four_bits),
            kbit_preparation=True,
            experts=False,
        )

    def precision(self, method: Method) -> Precision:
        options = self.options
        name = self.take("precision", options.precision, wazn="bf16-autocast")
        preset = _choose("precision", name, PRECISIONS)
        weight = _dtype("weight-dtype", options.weight_dtype) or preset.weight
        autocast = (
            None
            if options.autocast_dtype == "none"
            else _dtype("autocast-dtype", options.autocast_dtype) or preset.autocast
        )
        if autocast is FLOAT32:
            raise InputError("`--autocast-dtype` must be `bf16`, `fp16` or `none`, found fp32")
        return Precision(
            weight_dtype=weight,
            autocast_dtype=autocast,
            adapter_dtype=_dtype("adapter-dtype", options.adapter_dtype) or FLOAT32,
            master_dtype=_dtype("master-dtype", options.master_dtype) or preset.master,
            gradient_dtype=_dtype("gradient-dtype", options.gradient_dtype),
            state_dtype=_dtype("state-dtype", options.state_dtype),
        )

    def checkpointing(self) -> tuple[Checkpointing, int]:
        default = (
            "full-reentrant"
            if self.habits.checkpointing is Checkpointing.FULL_REENTRANT
            else "full"
        )
        name = self.take("checkpointing", self.options.checkpointing, stack=default, wazn="full")
        every = re.fullmatch(r"every-([1-9]\d{0,5})", name)
        if every:
            return Checkpointing.EVERY_N, int(every[1])
        names = {item.value: item for item in Checkpointing if item is not Checkpointing.EVERY_N}
        return _choose("checkpointing", name, {**names, "every-2": Checkpointing.EVERY_N}), 1


def _choose(option: str, value: str, names: Mapping[str, _T]) -> _T:
    """Return what a name on a closed list means. Raises: UnknownFact with the nearest names."""
    if value in names:
        return names[value]
    from difflib import get_close_matches  # only a mistyped name pays for it

    nearest = get_close_matches(value[:80].lower(), list(names), n=3, cutoff=0.5)
    raise UnknownFact(
        f"`--{option}`: unknown name `{value[:80]}`",
        nearest=tuple(nearest),
        hint=None if nearest else "one of " + ", ".join(f"`{name}`" for name in names),
    )


def _dtype(option: str, text: str | None) -> Dtype | None:
    if text is None:
        return None
    try:
        return parse_dtype(text)
    except InputError as error:
        raise InputError(f"`--{option}`: {error.message}", hint=error.hint) from None


def _patterns(text: str | None) -> tuple[str, ...]:
    return tuple(part.strip() for part in (text or "").split(",") if part.strip())


def refuse_unsupported(recipe: Recipe) -> None:
    """Say which of the recipe's choices the tape does not know yet. Raises: Unsupported."""
    if recipe.loss is not Loss.STANDARD:
        raise Unsupported(
            f"`--loss {recipe.loss}` is not modelled", hint="`--loss standard` is an upper bound"
        )
