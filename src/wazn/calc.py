"""The textbook formulas, in closed form: what slides and papers say, before anything is counted.

Legend: Ψ parameters, r rank, L layers, B micro-batch. Everything is exact: bytes are integers, what
is not whole (half a bit per parameter) is a `Fraction`, and bytes are rounded up once, at the end.

These are *not* estimates of a run: they know neither the loss nor the allocator. `wazn.estimate` does.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

from wazn.errors import InputError, UnknownFact, Unsupported

if TYPE_CHECKING:
    from wazn.model.spec import ModelSpec

__all__ = [
    "OPTIMIZER_RULES",
    "Accumulation",
    "Adapter",
    "Inference",
    "KvCache",
    "Lora",
    "OptimizerRule",
    "Part",
    "Qlora",
    "Split",
    "Training",
    "accumulation",
    "inference",
    "kv_cache",
    "kv_cache_of_model",
    "lora",
    "lora_of_model",
    "optimizer_rule",
    "qlora",
    "training",
]

Number = int | float | Fraction

# The largest values that a question about a language model can mean; beyond them lies a slip of the
# keyboard. The largest model published so far has about 2e12 parameters.
_MOST_PARAMETERS = 10**15
_MOST_TOKENS = 10**10
_MOST_BYTES = 10**18
_MOST_OF_A_DIMENSION = 10**7
_MOST_COUNTED = 10**6
_MOST_BITS = 64

_OPTIMIZER_STATE = ("master-weights", "momentum", "variance", "block-constants")


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One term of a split: what `bytes_per_parameter` bytes are held for."""

    code: str
    bytes_per_parameter: Fraction


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """The bytes per parameter of a run, term by term, under the assumptions that `code` names."""

    code: str
    parts: tuple[Part, ...]

    @property
    def bytes_per_parameter(self) -> Fraction:
        """The sum of the terms."""
        return sum((part.bytes_per_parameter for part in self.parts), Fraction(0))

    @property
    def optimizer_bytes_per_parameter(self) -> Fraction:
        """The terms that ZeRO calls optimizer state: the master copy, momentum, variance (its K)."""
        return sum(
            (part.bytes_per_parameter for part in self.parts if part.code in _OPTIMIZER_STATE),
            Fraction(0),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerRule:
    """The usual bytes per parameter of an optimizer, and beside it the counted splits.

    `rule_of_thumb` is None where no rule but the count is in use.
    """

    rule_of_thumb: int | None
    splits: tuple[Split, ...]


def _split(code: str, **parts: int | Fraction) -> Split:
    return Split(
        code=code,
        parts=tuple(
            Part(code=name.replace("_", "-"), bytes_per_parameter=Fraction(value))
            for name, value in parts.items()
        ),
    )


# bitsandbytes keeps one fp32 scale per block of 256 elements, for each of the two 8-bit states
# (bitsandbytes 0.50, optim/optimizer.py, `Optimizer2State.init_state`: `blocksize = 256`).
_BLOCK_CONSTANTS = 2 * Fraction(4, 256)

OPTIMIZER_RULES: dict[str, OptimizerRule] = {
    # Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
    # 2020, section 3.1: 2Ψ + 2Ψ + KΨ with K = 12 for Adam in mixed precision
    "adam": OptimizerRule(
        rule_of_thumb=16,
        splits=(
            _split(
                "mixed-precision", weights=2, gradients=2, master_weights=4, momentum=4, variance=4
            ),
        ),
    ),
    # Dettmers et al., "8-bit Optimizers via Block-wise Quantization", 2021, for the states; "12" is
    # what courses and blogs round it to
    "adam-8bit": OptimizerRule(
        rule_of_thumb=12,
        splits=(
            _split(
                "with-master-copy",
                weights=2,
                gradients=2,
                master_weights=4,
                momentum=1,
                variance=1,
                block_constants=_BLOCK_CONSTANTS,
            ),
        ),
    ),
    "adam-bf16": OptimizerRule(
        rule_of_thumb=None,
        splits=(_split("all-bf16", weights=2, gradients=2, momentum=2, variance=2),),
    ),
    "adam-fp32": OptimizerRule(
        rule_of_thumb=None,
        splits=(_split("all-fp32", weights=4, gradients=4, momentum=4, variance=4),),
    ),
    "lion": OptimizerRule(
        rule_of_thumb=None,
        splits=(_split("with-master-copy", weights=2, gradients=2, master_weights=4, momentum=4),),
    ),
    "sgd-momentum": OptimizerRule(
        rule_of_thumb=8,
        splits=(
            _split("without-master-copy", weights=2, gradients=2, momentum=4),
            _split("with-master-copy", weights=2, gradients=2, master_weights=4, momentum=4),
        ),
    ),
    "sgd": OptimizerRule(
        rule_of_thumb=None,
        splits=(
            _split("without-master-copy", weights=2, gradients=2),
            _split("with-master-copy", weights=2, gradients=2, master_weights=4),
        ),
    ),
}

_OTHER_NAMES = {"adamw": "adam", "adamw-8bit": "adam-8bit"}  # decoupled decay holds nothing more


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """`peak_bytes` = Ψ x bytes per parameter + activations."""

    num_parameters: int
    bytes_per_parameter: Fraction
    activation_bytes: int
    states_bytes: int
    peak_bytes: int
    optimizer: str | None
    rule: OptimizerRule | None
    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Accumulation:
    """Accumulation multiplies the batch and leaves the activations of one micro-batch alive."""

    micro_batch: int
    steps: int
    replicas: int
    activation_per_sample_bytes: int
    effective_batch: int
    peak_activation_bytes: int
    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Adapter:
    """The two factors of one adapted module: [r, in] and [out, r].

    `matrices` of them lie in one module (stacked experts; 1 otherwise), `times` such modules are in the
    model; `num_parameters` is of one module.
    """

    module: str
    in_features: int
    out_features: int
    matrices: int
    num_parameters: int
    times: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Lora:
    """`num_trainable` = the sum over adapters of r x (in + out)."""

    rank: int
    adapters: tuple[Adapter, ...]
    num_trainable: int
    num_parameters: int | None
    trainable_fraction: Fraction | None
    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Qlora:
    """4-bit weights, and the constants of their blocks once plain and once double-quantized."""

    num_parameters: int
    block: int
    double_block: int
    weights_bytes: int
    constant_bits_per_parameter: Fraction
    constants_bytes: int
    double_constant_bits_per_parameter: Fraction
    double_constants_bytes: int
    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class KvCache:
    """Keys and values of every layer, KV head and token.

    With latent attention (DeepSeek) there are no KV heads: one vector of `latent_dim` per layer and
    token is kept, and `kv_heads` and `head_dim` are None; otherwise `latent_dim` is None.
    """

    layers: int
    kv_heads: int | None
    head_dim: int | None
    latent_dim: int | None
    tokens: int
    sequences: int
    bits: Fraction
    per_token_bytes: Fraction
    total_bytes: int
    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Inference:
    """`total_bytes` = weights + the KV cache, where one was asked for."""

    num_parameters: int
    bits: Fraction
    weights_bytes: int
    cache: KvCache | None
    total_bytes: int
    notes: tuple[str, ...]


def training(
    *,
    num_parameters: int,
    bytes_per_parameter: Number | None = None,
    optimizer: str | None = None,
    activation_bytes: int = 0,
) -> Training:
    """Return what the textbook holds in training: Ψ x bytes per parameter, and activations.

    Exactly one of `bytes_per_parameter` and `optimizer` is given. An optimizer's rule of thumb is the
    headline where there is one; its counted splits are in `rule`.

    Raises: InputError for a size that is not positive or absurd; UnknownFact for an optimizer.
    Source: Rajbhandari et al. 2020 (ZeRO), section 3.1.

    >>> training(num_parameters=7 * 10**9, bytes_per_parameter=16).peak_bytes
    112000000000
    """
    _check("num_parameters", num_parameters, _MOST_PARAMETERS)
    if (bytes_per_parameter is None) == (optimizer is None):
        raise InputError(
            "exactly one of `bytes_per_parameter` and `optimizer` must be given",
            hint="`bytes_per_parameter` 16 and `optimizer` adam are the same question",
        )
    _check("activation_bytes", activation_bytes, _MOST_BYTES, least=0)
    if bytes_per_parameter is not None:
        rule = None
        per_parameter = _exact("bytes_per_parameter", bytes_per_parameter, _MOST_BITS)
    else:
        assert optimizer is not None
        optimizer = _OTHER_NAMES.get(optimizer, optimizer)
        rule = optimizer_rule(optimizer)
        per_parameter = Fraction(rule.rule_of_thumb or rule.splits[0].bytes_per_parameter)
    states_bytes = math.ceil(num_parameters * per_parameter)
    return Training(
        num_parameters=num_parameters,
        bytes_per_parameter=per_parameter,
        activation_bytes=activation_bytes,
        states_bytes=states_bytes,
        peak_bytes=states_bytes + activation_bytes,
        optimizer=optimizer,
        rule=rule,
        notes=() if activation_bytes else ("activations-not-given",),
    )


def optimizer_rule(name: str) -> OptimizerRule:
    """Return the rule and the counted splits of an optimizer.

    Raises: UnknownFact with the names that exist.
    """
    rule = OPTIMIZER_RULES.get(_OTHER_NAMES.get(name, name))
    if rule is None:
        raise UnknownFact(
            f"`optimizer`: no textbook rule for `{name[:100]}`",
            hint="there are rules for " + ", ".join(f"`{known}`" for known in OPTIMIZER_RULES),
        )
    return rule


def accumulation(
    *, micro_batch: int, steps: int, activation_per_sample_bytes: int, replicas: int = 1
) -> Accumulation:
    """Return the effective batch B x steps x replicas, and the activations of one micro-batch.

    Raises: InputError for a size that is not positive or absurd.
    Source: the activations of a micro-batch are freed by its backward pass, before the next begins.

    >>> accumulation(micro_batch=4, steps=8, activation_per_sample_bytes=500_000_000).effective_batch
    32
    """
    _check("micro_batch", micro_batch, _MOST_COUNTED)
    _check("steps", steps, _MOST_COUNTED)
    _check("replicas", replicas, _MOST_COUNTED)
    _check("activation_per_sample_bytes", activation_per_sample_bytes, _MOST_BYTES)
    return Accumulation(
        micro_batch=micro_batch,
        steps=steps,
        replicas=replicas,
        activation_per_sample_bytes=activation_per_sample_bytes,
        effective_batch=micro_batch * steps * replicas,
        peak_activation_bytes=micro_batch * activation_per_sample_bytes,
        notes=("accumulation-keeps-gradients",) if steps > 1 else (),
    )


def lora(
    *,
    rank: int,
    layers: int,
    hidden: int,
    modules: tuple[str, ...] = ("q", "v"),
    kv_hidden: int | None = None,
    intermediate: int | None = None,
    num_parameters: int | None = None,
) -> Lora:
    """Return LoRA's trainable parameters: r x (in + out) for each adapted matrix of each layer.

    Args:
        modules: of `q`, `k`, `v`, `o`, `gate`, `up`, `down`; also written `q_proj` and so on.
        kv_hidden: output width of `k` and `v` where the KV heads are fewer; `hidden` if None.
        intermediate: width of the MLP; needed for `gate`, `up` and `down`.
        num_parameters: of the whole model, for the share that is trained.
    Raises: InputError for sizes, an unknown or repeated module, a rank over the matrix.
    Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021, section 4.

    >>> lora(rank=8, layers=32, hidden=4096).num_trainable
    4194304
    """
    _check("rank", rank, _MOST_OF_A_DIMENSION)
    _check("layers", layers, _MOST_COUNTED)
    _check("hidden", hidden, _MOST_OF_A_DIMENSION)
    if kv_hidden is not None:
        _check("kv_hidden", kv_hidden, _MOST_OF_A_DIMENSION)
    if intermediate is not None:
        _check("intermediate", intermediate, _MOST_OF_A_DIMENSION)
    widths = _module_widths(hidden=hidden, kv_hidden=kv_hidden, intermediate=intermediate)
    shapes = [(name, *_module(name, widths)) for name in _distinct(modules)]
    for module, in_features, out_features in shapes:
        if rank > min(in_features, out_features):
            raise InputError(
                f"`rank` {rank:,} is more than the smaller side of `{module}`"
                f" ({in_features:,} to {out_features:,}): the adapter could not have that rank",
                hint=f"`rank` 8 to 256 is usual; at most {min(in_features, out_features):,} here",
            )
    adapters = tuple(
        Adapter(
            module=module,
            in_features=in_features,
            out_features=out_features,
            matrices=1,
            num_parameters=rank * (in_features + out_features),
            times=layers,
        )
        for module, in_features, out_features in shapes
    )
    return _lora(rank=rank, adapters=adapters, num_parameters=num_parameters)


def lora_of_model(spec: ModelSpec, *, rank: int, modules: tuple[str, ...] = ("q", "v")) -> Lora:
    """Return LoRA's trainable parameters on a model, as peft would make them.

    Args:
        modules: `attention`, `all-linear`, or names of modules; `q` and so on stand for `q_proj`.
    Raises: InputError for a rank over a matrix, and where nothing matches.
    """
    from wazn.model.lora import adapted, check_adapter
    from wazn.model.parameters import count_parameters

    _check("rank", rank, _MOST_OF_A_DIMENSION)
    short = _module_widths(hidden=1, kv_hidden=None, intermediate=None)
    names = [f"{name}_proj" if name in short else name for name in map(str.strip, modules)]
    found = adapted(spec, names[0] if len(names) == 1 else names)
    if found.unmatched:
        raise InputError(
            f"`modules`: nothing in {spec.id} is called `{'`, `'.join(found.unmatched)}`",
            hint="`modules` attention or `modules` all-linear fits every model",
        )
    check_adapter(found, rank=rank)
    times = Counter(
        (t.name, t.in_features, t.out_features, t.experts * t.rank_multiple)
        for t in found.everything()
    )
    adapters = tuple(
        Adapter(
            module=name,
            in_features=in_features,
            out_features=out_features,
            matrices=matrices,
            num_parameters=matrices * rank * (in_features + out_features),
            times=count,
        )
        for (name, in_features, out_features, matrices), count in times.items()
    )
    return _lora(rank=rank, adapters=adapters, num_parameters=count_parameters(spec))


def _lora(*, rank: int, adapters: tuple[Adapter, ...], num_parameters: int | None) -> Lora:
    num_trainable = sum(adapter.num_parameters * adapter.times for adapter in adapters)
    if num_parameters is not None:
        _check("num_parameters", num_parameters, _MOST_PARAMETERS)
    return Lora(
        rank=rank,
        adapters=adapters,
        num_trainable=num_trainable,
        num_parameters=num_parameters,
        trainable_fraction=Fraction(num_trainable, num_parameters) if num_parameters else None,
        notes=(),
    )


def qlora(*, num_parameters: int, block: int = 64, double_block: int = 256) -> Qlora:
    """Return the 4-bit weights and the quantization constants, plain and double-quantized.

    Plain: one 32-bit constant per `block` weights. Double: one 8-bit constant per `block`, and one
    32-bit constant per `double_block` of those.

    Raises: InputError for a size that is not positive or absurd.
    Source: Dettmers et al., "QLoRA", 2023, section 3 (Double Quantization): 32/64 = 0.5 bit and
    8/64 + 32/(64 x 256) = 0.127 bit per parameter.

    >>> qlora(num_parameters=7 * 10**9).weights_bytes
    3500000000
    """
    _check("num_parameters", num_parameters, _MOST_PARAMETERS)
    _check("block", block, _MOST_OF_A_DIMENSION)
    _check("double_block", double_block, _MOST_OF_A_DIMENSION)
    plain_bits = Fraction(32, block)
    double_bits = Fraction(8, block) + Fraction(32, block * double_block)
    return Qlora(
        num_parameters=num_parameters,
        block=block,
        double_block=double_block,
        weights_bytes=_bytes(num_parameters, Fraction(4)),
        constant_bits_per_parameter=plain_bits,
        constants_bytes=_bytes(num_parameters, plain_bits),
        double_constant_bits_per_parameter=double_bits,
        double_constants_bytes=_bytes(num_parameters, double_bits),
        notes=("all-weights-in-4-bits",),
    )


def kv_cache(
    *, layers: int, kv_heads: int, head_dim: int, tokens: int, sequences: int = 1, bits: Number = 16
) -> KvCache:
    """Return the bytes of the KV cache: 2 x L x KV heads x head size x tokens x sequences.

    Shape: keys and values, each [layers, sequences, kv_heads, tokens, head_dim].

    Raises: InputError for a size that is not positive or absurd.
    Source: counted from the shape.

    >>> kv_cache(layers=32, kv_heads=8, head_dim=128, tokens=8192).total_bytes
    1073741824
    """
    _check("layers", layers, _MOST_COUNTED)
    _check("kv_heads", kv_heads, _MOST_COUNTED)
    _check("head_dim", head_dim, _MOST_OF_A_DIMENSION)
    _check("tokens", tokens, _MOST_TOKENS)
    _check("sequences", sequences, _MOST_COUNTED)
    return _kv_cache(
        layers=layers,
        kv_heads=kv_heads,
        head_dim=head_dim,
        latent_dim=None,
        tokens=tokens,
        sequences=sequences,
        bits=bits,
    )


def kv_cache_of_model(
    spec: ModelSpec, *, tokens: int, sequences: int = 1, bits: Number = 16
) -> KvCache:
    """Return the KV cache of a model, every layer keeping every token.

    Latent attention keeps the compressed vector and the rotary part of the key (DeepSeek-V2, 2024,
    section 2.1.2: (d_c + d_h^R) elements per layer and token).

    Raises: InputError for sizes; Unsupported where the layers' caches differ in shape.
    """
    from wazn.model.spec import AttentionSpec

    shapes: set[tuple[int | None, int | None, int | None]] = set()
    notes: tuple[str, ...] = ()
    for layer in spec.layers:
        attention = layer.attention
        if isinstance(attention, AttentionSpec):
            shapes.add((attention.num_kv_heads, attention.head_dim, None))
            if attention.window is not None:
                notes = ("cache-windows-not-used",)
        else:
            shapes.add((None, None, attention.kv_lora_rank + attention.rope_head_dim))
    if len(shapes) != 1:
        raise Unsupported(
            f"the layers of {spec.id} keep caches of {len(shapes)} different shapes",
            hint="`wazn calc kv-cache` with the sizes of each kind of layer, and the sum",
        )
    kv_heads, head_dim, latent_dim = shapes.pop()
    _check("tokens", tokens, _MOST_TOKENS)
    _check("sequences", sequences, _MOST_COUNTED)
    return _kv_cache(
        layers=spec.num_layers,
        kv_heads=kv_heads,
        head_dim=head_dim,
        latent_dim=latent_dim,
        tokens=tokens,
        sequences=sequences,
        bits=bits,
        notes=notes,
    )


def _kv_cache(
    *,
    layers: int,
    kv_heads: int | None,
    head_dim: int | None,
    latent_dim: int | None,
    tokens: int,
    sequences: int,
    bits: Number,
    notes: tuple[str, ...] = (),
) -> KvCache:
    exact_bits = _exact("bits", bits, _MOST_BITS)
    per_layer = latent_dim if latent_dim is not None else 2 * (kv_heads or 0) * (head_dim or 0)
    return KvCache(
        layers=layers,
        kv_heads=kv_heads,
        head_dim=head_dim,
        latent_dim=latent_dim,
        tokens=tokens,
        sequences=sequences,
        bits=exact_bits,
        per_token_bytes=layers * per_layer * exact_bits / 8,
        total_bytes=_bytes(layers * per_layer * tokens * sequences, exact_bits),
        notes=notes,
    )


def inference(*, num_parameters: int, bits: Number = 16, cache: KvCache | None = None) -> Inference:
    """Return the weights at any bit width, plus a KV cache.

    Raises: InputError for a size that is not positive or absurd.
    Source: counted from the shape.

    >>> inference(num_parameters=7 * 10**9, bits=16).total_bytes
    14000000000
    """
    _check("num_parameters", num_parameters, _MOST_PARAMETERS)
    exact_bits = _exact("bits", bits, _MOST_BITS)
    weights_bytes = _bytes(num_parameters, exact_bits)
    return Inference(
        num_parameters=num_parameters,
        bits=exact_bits,
        weights_bytes=weights_bytes,
        cache=cache,
        total_bytes=weights_bytes + (cache.total_bytes if cache else 0),
        notes=cache.notes if cache else ("kv-cache-not-asked-for",),
    )


def _bytes(elements: int, bits: Fraction) -> int:
    return math.ceil(elements * bits / 8)


def _module_widths(
    *, hidden: int, kv_hidden: int | None, intermediate: int | None
) -> dict[str, tuple[int, int] | None]:
    kv = hidden if kv_hidden is None else kv_hidden
    return {
        "q": (hidden, hidden),
        "k": (hidden, kv),
        "v": (hidden, kv),
        "o": (hidden, hidden),
        "gate": (hidden, intermediate) if intermediate else None,
        "up": (hidden, intermediate) if intermediate else None,
        "down": (intermediate, hidden) if intermediate else None,
    }


def _module(name: str, widths: dict[str, tuple[int, int] | None]) -> tuple[int, int]:
    if name not in widths:
        raise InputError(
            f"`modules`: unknown module `{name[:100]}`",
            hint="`modules` are of " + ", ".join(f"`{known}`" for known in widths),
        )
    shape = widths[name]
    if shape is None:
        raise InputError(
            f"`modules`: `{name}` needs the width of the MLP", hint="give `intermediate` as well"
        )
    return shape


def _distinct(modules: tuple[str, ...]) -> tuple[str, ...]:
    names = tuple(module.strip().removesuffix("_proj") for module in modules)
    if not names:
        raise InputError("`modules` is empty", hint="`modules` q,v is what the LoRA paper adapts")
    if len(set(names)) != len(names):
        raise InputError("`modules` names a module twice", hint="name each module once")
    return names


def _check(name: str, value: int, most: int, *, least: int = 1) -> None:
    """Refuse a size that no question can mean."""
    if not isinstance(value, int):
        raise InputError(f"`{name}` must be a whole number, found `{str(value)[:40]}`")
    if least <= value <= most:
        return
    found = f"`{value:,}`" if abs(value) < 10**40 else "a number of more than 40 digits"
    if value < least:
        rule = "positive" if least else "zero or more"
        raise InputError(f"`{name}` must be {rule}, found {found}")
    raise InputError(
        f"`{name}` is at most {most:,}, found {found}", hint="check the unit and the zeros"
    )


def _exact(name: str, value: Number, most: int) -> Fraction:
    """Return a positive number as written (a float by its shortest decimal), or refuse it."""
    if isinstance(value, float):
        if not math.isfinite(value):
            raise InputError(f"`{name}` must be a number, found `{value}`")
        value = Fraction(repr(value))
    if not 0 < value <= most:
        raise InputError(f"`{name}` must be more than 0 and at most {most}, found `{value}`")
    return Fraction(value)
