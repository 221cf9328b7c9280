"""The question as a person asks it, and what it means.

Explicit beats the training stack's habit, the habit beats wazn's default. `resolve` fills every gap and says who filled
it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from wazn.cluster import Cluster, Gpu, Layout, Offload, Parallel
from wazn.dtypes import BFLOAT16, FLOAT16, FLOAT32, Dtype, parse_dtype
from wazn.errors import InputError, UnknownFact, Unsupported
from wazn.facts.names import nearest_names
from wazn.facts.stacks import Habits
from wazn.recipe import (
    Adapter,
    Attention,
    Checkpointing,
    KbitPreparation,
    Loss,
    Method,
    Optimizer,
    Precision,
    Quantization,
    QuantizationFormat,
    Recipe,
)

__all__ = [
    "CHECKPOINTING",
    "OPTION_NAMES",
    "PRECISIONS",
    "Options",
    "Resolved",
    "as_option",
    "resolve",
]

LARGEST_MICRO_BATCH = 1 << 20
LARGEST_SEQ_LEN = 1 << 30
LARGEST_GRAD_ACCUM = 1 << 20
LARGEST_RANK = 1 << 20
LARGEST_NUM_GPUS = 1 << 20
_LONGEST_TEXT = 2000

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """What was said, in the words of the command line; None is what was not said.

    Raises: InputError where a value is not even of the right kind.
    """

    method: str | None = None
    rank: int | None = None
    targets: str | None = None
    dora: bool | None = None
    lora_dropout: float | None = None
    modules_to_save: str | None = None
    quantization: str | None = None
    double_quant: bool | None = None
    kbit_preparation: str | None = None
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
    keep_outputs: bool | None = None
    zero_grad_to_none: bool | None = None
    gpus: int | None = None
    nodes: int | None = None
    parallel: str | None = None
    tp: int | None = None
    pp: int | None = None
    cp: int | None = None
    ep: int | None = None
    offload: str | None = None

    def __post_init__(self) -> None:
        for name, value in self.given().items():
            kind, what = _KINDS.get(name, _TEXT)
            fitting = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
            if not fitting or (isinstance(value, str) and len(value) > _LONGEST_TEXT):
                raise InputError(f"`{as_option(name)}`: expected {what}, found `{str(value)[:40]}`")

    def given(self) -> dict[str, Any]:
        """Return what was said, by name."""
        everything = ((name, getattr(self, name)) for name in OPTION_NAMES)
        return {name: value for name, value in everything if value is not None}


OPTION_NAMES = tuple(Options.__dataclass_fields__)
_TEXT: tuple[type | tuple[type, ...], str] = (str, f"text of at most {_LONGEST_TEXT} characters")
_OF_ADAPTERS = ("rank", "targets", "dora", "lora_dropout", "modules_to_save")
_COUNTS = ("rank", "micro_batch", "seq_len", "grad_accum", "gpus", "nodes", "tp", "pp", "cp", "ep")
_SWITCHES = ("dora", "double_quant", "keep_outputs", "zero_grad_to_none")
_KINDS: Mapping[str, tuple[type | tuple[type, ...], str]] = {
    **dict.fromkeys(_COUNTS, (int, "a whole number")),
    **dict.fromkeys(_SWITCHES, (bool, "true or false")),
    "lora_dropout": ((int, float), "a number"),
}


def as_option(name: str) -> str:
    """Write an option's name as the command line does.

    >>> as_option("micro_batch")
    '--micro-batch'
    """
    return "--" + name.replace("_", "-")


@dataclass(frozen=True, kw_only=True, slots=True)
class Resolved:
    """A recipe on a cluster, and for each option that was not given who chose: `stack` or `wazn`."""

    recipe: Recipe
    cluster: Cluster
    defaults: Mapping[str, str]


class _Preset(NamedTuple):
    weight: Dtype
    autocast: Dtype | None
    master: Dtype | None = None


PRECISIONS: Mapping[str, _Preset] = {
    "bf16": _Preset(BFLOAT16, None),
    "bf16-autocast": _Preset(BFLOAT16, BFLOAT16),
    "bf16-mixed": _Preset(FLOAT32, BFLOAT16),
    "bf16-master": _Preset(BFLOAT16, None, FLOAT32),
    "fp16-autocast": _Preset(FLOAT16, FLOAT16),
    "fp16-mixed": _Preset(FLOAT32, FLOAT16),
    "fp32": _Preset(FLOAT32, None),
}
CHECKPOINTING: Mapping[str, Checkpointing] = {
    "none": Checkpointing.NONE,
    "full": Checkpointing.FULL,
    "full-reentrant": Checkpointing.FULL_REENTRANT,
    "every-2": Checkpointing.EVERY_N,  # as an example, so that a slip finds it
    "selective-op": Checkpointing.SELECTIVE_OP,
    "selective-attention": Checkpointing.SELECTIVE_ATTENTION,
}
_RUNS_LAYERS_AGAIN = (Checkpointing.FULL, Checkpointing.FULL_REENTRANT, Checkpointing.EVERY_N)


def resolve(options: Options, habits: Habits, gpu: Gpu | None = None) -> Resolved:
    """Return what the options mean under a stack's habits.

    Raises: InputError for a contradiction or a value out of range, UnknownFact for a name that is not on a list,
        Unsupported for more than one GPU.
    """
    return _Resolver(options, habits).resolved(gpu)


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

    def count(self, name: str, given: int | None, default: int, largest: int) -> int:
        value = self.take(name, given, wazn=default)
        if not 1 <= value <= largest:
            raise InputError(
                f"`--{name}`: expected a number from 1 to {largest:,}, found `{value}`"
            )
        return value

    def degree(self, name: str, given: int | None) -> int:
        """Return a number of GPUs. Raises: Unsupported before the layout can contradict itself for more than one."""
        value = self.count(name, given, 1, LARGEST_NUM_GPUS)
        if value > 1:
            raise Unsupported(
                f"`--{name}`: more than one GPU cannot be weighed yet",
                hint="`--gpus 1` says what each GPU of plain data parallelism holds, but for the buckets",
            )
        return value

    def choose(
        self, name: str, given: str | None, names: Mapping[str, _T], *, wazn: str, stack: str = ""
    ) -> _T:
        return _choose(name, self.take(name, given, stack=stack or None, wazn=wazn), names)

    def resolved(self, gpu: Gpu | None) -> Resolved:
        options, habits = self.options, self.habits
        self.take("stack", options.stack, wazn="hf")
        method = self.method()
        adapter = self.adapter(method)
        quantization = self.quantization(method)
        precision = self.precision(method)
        optimizers = {item.value: item for item in Optimizer}
        losses = {item.value: item for item in Loss}
        attentions = {item.value: item for item in Attention}
        optimizer = self.choose(
            "optimizer", options.optimizer, optimizers, wazn="adamw", stack=habits.optimizer.value
        )
        micro_batch = self.count("micro-batch", options.micro_batch, 1, LARGEST_MICRO_BATCH)
        seq_len = self.count("seq-len", options.seq_len, 2048, LARGEST_SEQ_LEN)
        grad_accum = self.count("grad-accum", options.grad_accum, 1, LARGEST_GRAD_ACCUM)
        checkpointing, every = self.checkpointing()
        recipe = Recipe(
            method=Method.QLORA if quantization is not None and adapter is not None else method,
            adapter=adapter,
            quantization=quantization,
            precision=precision,
            optimizer=optimizer,
            micro_batch=micro_batch,
            seq_len=seq_len,
            grad_accum=grad_accum,
            checkpointing=checkpointing,
            checkpoint_every=every,
            attention=self.choose("attention", options.attention, attentions, wazn="sdpa"),
            loss=self.choose("loss", options.loss, losses, wazn="standard"),
            stack=f"{habits.stack}@{habits.version}",
            trainable=_patterns(options.trainable),
            freeze=_patterns(options.freeze),
            keep_outputs=self.take("keep-outputs", options.keep_outputs, stack=False, wazn=False),
            zero_grad_set_to_none=self.take(
                "zero-grad-to-none", options.zero_grad_to_none, stack=True, wazn=True
            ),
            fused_experts=habits.fused_experts,
            inputs_require_grad=self.inputs_require_grad(method, quantization, checkpointing),
        )
        return Resolved(recipe=recipe, cluster=self.cluster(gpu), defaults=self.defaults)

    def method(self) -> Method:
        options = self.options
        methods = {item.value: item for item in Method}
        method = self.choose("method", options.method, methods, wazn="lora")
        if method is Method.QLORA and options.quantization == "none":
            raise InputError(
                "`--method qlora` and `--quantization none` contradict each other",
                hint="`--method lora` trains adapters on a base in 16 bits",
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
        if method not in (Method.LORA, Method.QLORA):
            for name in (*_OF_ADAPTERS, "adapter_dtype"):
                value = getattr(options, name)
                if value is not None and value is not False:  # `in` would take a 0 for False
                    raise InputError(
                        f"`{as_option(name)}` is for `--method lora` and `--method qlora`, "
                        f"found `--method {method}`"
                    )
            return None
        targets = _targets(self.take("targets", options.targets, wazn="all-linear"))
        if not targets:
            raise InputError("`--targets` names nothing", hint="`all-linear`, `attention` or names")
        for word in ("all-linear", "attention"):
            if word in targets and len(targets) > 1:
                raise InputError(
                    f"`--targets`: `{word}` stands alone, found {len(targets)} names",
                    hint=f"`--targets {word}`, or names alone",
                )
        dropout = float(self.take("lora-dropout", options.lora_dropout, wazn=0.0))
        if not 0.0 <= dropout < 1.0:
            raise InputError(
                f"`--lora-dropout`: expected a number from 0 to below 1, found `{dropout:g}`"
            )
        return Adapter(
            rank=self.count("rank", options.rank, 16, LARGEST_RANK),
            targets=targets,
            dora=self.take("dora", options.dora, wazn=False),
            dropout=dropout,
            modules_to_save=_patterns(options.modules_to_save),
        )

    def quantization(self, method: Method) -> Quantization | None:
        options = self.options
        if method is not Method.QLORA and options.quantization in (None, "none"):
            for name in ("double_quant", "kbit_preparation"):
                if getattr(options, name) not in (None, False, "none"):
                    raise InputError(
                        f"`{as_option(name)}` needs a quantised base",
                        hint="`--method qlora` or `--quantization nf4`",
                    )
            return None
        names = {item.value: item for item in QuantizationFormat}
        if options.quantization not in (None, *names):
            names["none"] = QuantizationFormat.NF4  # only to be offered; it was dealt with above
        chosen = self.choose("quantization", options.quantization, names, wazn="nf4")
        four_bits = chosen is not QuantizationFormat.INT8
        if options.double_quant and not four_bits:
            raise InputError("`--double-quant` is for 4 bits, found `--quantization int8`")
        return Quantization(
            format=chosen,
            double_quant=self.take("double-quant", options.double_quant, wazn=four_bits),
            kbit_preparation=self.choose(
                "kbit-preparation",
                options.kbit_preparation,
                {item.value: item for item in KbitPreparation},
                wazn="peft",
            ),
            experts=not self.habits.fused_experts,
            keeps_input=four_bits and self.habits.keeps_quantized_input,
            computes_in_input_dtype=four_bits and self.habits.computes_in_input_dtype,
            fused_product=four_bits and self.habits.fused_4bit_product,
        )

    def precision(self, method: Method) -> Precision:
        options = self.options
        preset = self.choose("precision", options.precision, PRECISIONS, wazn="bf16-autocast")
        weight = _dtype("weight-dtype", options.weight_dtype) or preset.weight
        autocast = preset.autocast
        if options.autocast_dtype is not None:
            autocast = (
                None
                if options.autocast_dtype.lower() == "none"
                else _dtype("autocast-dtype", options.autocast_dtype)
            )
        if autocast is FLOAT32:
            raise InputError("`--autocast-dtype`: expected `bf16`, `fp16` or `none`, found `fp32`")
        adapter = _dtype("adapter-dtype", options.adapter_dtype)
        if adapter is None:
            quantised = method is Method.QLORA or options.quantization not in (None, "none")
            adapter = FLOAT32 if quantised or self.habits.adapters_fp32 else weight
            if method in (Method.LORA, Method.QLORA):
                self.defaults["adapter-dtype"] = "stack"
        return Precision(
            weight_dtype=weight,
            autocast_dtype=autocast,
            adapter_dtype=adapter,
            master_dtype=_dtype("master-dtype", options.master_dtype) or preset.master,
            gradient_dtype=_dtype("gradient-dtype", options.gradient_dtype),
            state_dtype=_dtype("state-dtype", options.state_dtype),
        )

    def checkpointing(self) -> tuple[Checkpointing, int]:
        default = self.habits.checkpointing.value
        name = self.take("checkpointing", self.options.checkpointing, stack=default, wazn="full")
        every = re.fullmatch(r"every-([1-9]\d{0,5})", name)
        if every:
            return Checkpointing.EVERY_N, int(every[1])
        return _choose("checkpointing", name, CHECKPOINTING), 1

    def inputs_require_grad(
        self, method: Method, quantization: Quantization | None, checkpointing: Checkpointing
    ) -> bool:
        """The stack does it with checkpointing, as does k-bit preparation; reentrant checkpointing needs it."""
        if method is Method.FULL or checkpointing not in _RUNS_LAYERS_AGAIN:
            return False
        return (
            self.habits.inputs_require_grad
            or (
                quantization is not None
                and quantization.kbit_preparation is not KbitPreparation.NONE
            )
            or checkpointing is Checkpointing.FULL_REENTRANT
        )

    def cluster(self, gpu: Gpu | None) -> Cluster:
        options = self.options
        modes = {item.value: item for item in Parallel}
        places = {item.value: item for item in Offload}
        degrees = {
            name: self.degree(name, getattr(options, name))
            for name in ("gpus", "nodes", "tp", "pp", "cp", "ep")
        }
        return Cluster(
            gpu=gpu,
            gpus_per_node=degrees["gpus"],
            num_nodes=degrees["nodes"],
            layout=Layout(
                parallel=self.choose("parallel", options.parallel, modes, wazn="ddp"),
                tensor_parallel=degrees["tp"],
                pipeline_parallel=degrees["pp"],
                context_parallel=degrees["cp"],
                expert_parallel=degrees["ep"],
                offload=self.choose("offload", options.offload, places, wazn="none"),
            ),
        )


def _choose(option: str, value: str, names: Mapping[str, _T]) -> _T:
    """Return what a name on a closed list means. Raises: UnknownFact with the nearest names."""
    if value in names:
        return names[value]
    nearest = nearest_names(value, names, at_most=3)
    raise UnknownFact(
        f"`--{option}`: unknown name `{value[:80]}`",
        nearest=nearest,
        hint=None if nearest else "one of " + ", ".join(f"`{name}`" for name in names),
    )


def _dtype(option: str, text: str | None) -> Dtype | None:
    if text is None:
        return None
    try:
        return parse_dtype(text)
    except InputError as error:
        raise InputError(f"`--{option}`: {error.message}", hint=error.hint) from None


def _targets(text: str) -> tuple[str, ...]:
    """A list of names, or one regular expression, which may hold commas."""
    if re.search(r"[*+?\[\](){}|^$\\]", text):
        return (text.strip(),)
    return _patterns(text)


def _patterns(text: str | None) -> tuple[str, ...]:
    return tuple(part.strip() for part in (text or "").split(",") if part.strip())
