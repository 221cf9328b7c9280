"""What LoRA adapts and how many parameters that makes, by the rules of peft 0.21 on transformers 5 (or 4.57).

A target matches a module whose full name equals it or ends in `.` and the target; text with one of `*+?[](){}|^$` in it
is a regular expression for the full name. `all-linear` is every linear but the head. `attention` is wazn's word for the
projections of attention.

transformers 5 keeps experts in two stacked tensors. peft translates the old names of the experts' matrices, also those
that `all-linear` stands for, into those tensors for the families of `_CONVERTED`; it then drops every other module of
the same names (dense and shared feed-forwards), adapts the router too, and gives `gate_up_proj` twice the rank. In
other families it leaves the experts alone.
Source: peft 0.21.2, `tuners/tuners_utils.py` (`check_target_module_exists`, `_maybe_include_all_linear_layers`),
`utils/transformers_weight_conversion.py` (`_convert_peft_config_moe`), `tuners/lora/layer.py` (`ParamWrapper`);
transformers 5.24, `conversion_mapping.py` (`_MODEL_TO_CONVERSION_PATTERN`).
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from wazn.errors import InputError
from wazn.model.fields import printable
from wazn.model.linears import attention_linears, layer_linears, outer_linears
from wazn.model.parameters import (
    Group,
    Parameter,
    in_creation_order,
    parameters,
    v4_name,
)
from wazn.model.spec import LayerSpec, Linear, ModelSpec, MoeSpec

__all__ = [
    "ALL_LINEAR",
    "ATTENTION",
    "Adapted",
    "Target",
    "TargetKind",
    "adapted",
    "attention_targets",
    "check_adapter",
    "count_lora_parameters",
    "lora_parameters",
]

ALL_LINEAR = "all-linear"
ATTENTION = "attention"
_LONGEST_PATTERN = 1000  # characters of a regular expression
_MOST_REPEATS = 5
_MOST_OPTIONAL = 8
# escapes, classes and `(?`, in which the signs mean something else; a repeated group; a repeat; an optional part
_TOKENS = re.compile(
    r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\(\?|\)[*+{]|(?:[*+]|\{\d*,\d*\})[?+]?|\?[?+]?", re.DOTALL
)
_REGULAR_EXPRESSION = re.compile(r"[*+?\[\](){}|^$\\]")

# Old name of a matrix of an expert, or of the router, to the parameter that holds it now.
_MIXTRAL = {"gate": "gate.weight", "w1": "gate_up_proj", "w3": "gate_up_proj", "w2": "down_proj"}
_QWEN2_MOE = {
    "gate": "gate.weight",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
    "down_proj": "down_proj",
}
_CONVERTED = {
    **dict.fromkeys(("mixtral", "minimax_m2"), _MIXTRAL),
    **dict.fromkeys(
        (
            *("deepseek_v2", "deepseek_v3", "ernie4_5_moe", "glm4_moe", "glm4_moe_lite"),
            *("olmoe", "qwen3_moe"),
        ),
        _QWEN2_MOE,
    ),
}


class TargetKind(StrEnum):
    """LINEAR: A and B beside a linear. EMBEDDING: beside a table. PARAMETER: on a parameter, a pair per expert."""

    LINEAR = "linear"
    EMBEDDING = "embedding"
    PARAMETER = "parameter"


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """One thing that is adapted.

    name: the module, or for PARAMETER the parameter; relative to its layer, or absolute outside the layers.
    module: where peft puts the adapter: the same, or for PARAMETER the wrapped module.
    experts: matrices in the stack; each has its own A [r, in] and B [out, r].
    rank_multiple: 2 for the fused gate and up.
    narrow: a router or a gate, whose few rows are below any usual rank.
    """

    name: str
    module: str
    in_features: int
    out_features: int
    kind: TargetKind = TargetKind.LINEAR
    experts: int = 1
    rank_multiple: int = 1
    narrow: bool = False

    def num_parameters(self, *, rank: int, dora: bool = False) -> int:
        """Elements of A and B, and of DoRA's magnitudes."""
        matrices = self.experts * self.rank_multiple * rank * (self.in_features + self.out_features)
        return matrices + (self.out_features if dora else 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Adapted:
    """What a choice of targets adapts: per layer (equal ones are one object), and outside the layers.

    before, after: outside the layers, by the order of creation.
    unmatched: entries of a list that match nothing; peft ignores them where others match.
    """

    layers: tuple[tuple[Target, ...], ...]
    before: tuple[Target, ...] = ()
    after: tuple[Target, ...] = ()
    unmatched: tuple[str, ...] = ()

    def everything(self) -> Iterator[Target]:
        """Yield every target of the model, those of equal layers again and again."""
        yield from self.before
        for layer in self.layers:
            yield from layer
        yield from self.after


def attention_targets(spec: ModelSpec) -> tuple[str, ...]:
    """Return the names, below their layer, of the linears of attention: `self_attn.q_proj`, ..."""
    names = dict.fromkeys(
        linear.name
        for layer in {id(layer): layer for layer in spec.layers}.values()
        for linear in attention_linears(layer)
    )
    return tuple(names)


def adapted(
    spec: ModelSpec,
    targets: str | Sequence[str],
    *,
    fused_experts: bool = True,
    modules_to_save: Sequence[str] = (),
) -> Adapted:
    """Return what LoRA adapts.

    Args:
        targets: `attention`, `all-linear`, names (a list, or joined by commas), or a regular expression.
        fused_experts: transformers 5; else 4.57.
        modules_to_save: modules that are trained whole, and therefore never adapted.
    Raises: InputError when nothing matches, when something matches that LoRA cannot adapt, or when only one half of a
        fused matrix is asked for.
    """
    choice = _choice(spec, targets, fused_experts=fused_experts)
    if modules_to_save:
        choice = choice.without(modules_to_save)
    layers = _adapted_layers(spec, choice, fused_experts=fused_experts)
    before, after = _adapted_outside(spec, choice)
    if not any(layers) and not before and not after:
        raise _nothing(spec, targets, fused_experts=fused_experts)
    return Adapted(layers=layers, before=before, after=after, unmatched=choice.unmatched())


def check_adapter(found: Adapted, *, rank: int, dora: bool = False, dropout: float = 0.0) -> None:
    """Refuse what cannot be: a rank above what a matrix can have, or what peft does not do on stacked experts.

    Raises: InputError.
    """
    if rank < 1:
        raise InputError(f"the rank of LoRA must be a positive integer, found `{rank}`")
    distinct = {id(layer): layer for layer in found.layers}.values()
    everything = [*found.before, *(t for layer in distinct for t in layer), *found.after]
    for target in everything:
        limit = min(target.in_features, target.out_features)
        if rank > limit and not target.narrow:
            raise InputError(
                f"a rank of {rank} is above that of `{target.name}` itself, which is "
                f"{target.out_features} by {target.in_features}",
                hint=f"take at most {limit}, or leave `{target.name}` out of the targets",
            )
    wrapped = next((t.name for t in everything if t.kind is TargetKind.PARAMETER), None)
    for wanted, what in ((dora, "DoRA"), (dropout > 0, "dropout")):
        if wrapped is not None and wanted:
            raise InputError(
                f"peft has no {what} on the stacked experts of transformers 5 (`{wrapped}`)",
                hint="adapt attention only, or leave it out",
            )


def count_lora_parameters(found: Adapted, *, rank: int, dora: bool = False) -> int:
    """Return the number of adapter parameters of the whole model."""
    counts: dict[int, int] = {}
    total = 0
    for layer in found.layers:
        key = id(layer)
        if key not in counts:
            counts[key] = sum(t.num_parameters(rank=rank, dora=dora) for t in layer)
        total += counts[key]
    outer = (*found.before, *found.after)
    return total + sum(t.num_parameters(rank=rank, dora=dora) for t in outer)


def lora_parameters(target: Target, *, rank: int, dora: bool = False) -> tuple[Parameter, ...]:
    """Return A [r, in], B [out, r] and DoRA's magnitudes [out] of one target, named as peft names them.

    The experts of a stack lie side by side: A [experts * r, in], B [out, experts * r].
    """
    r = rank * target.rank_multiple * target.experts
    shapes = {"A": (r, target.in_features), "B": (target.out_features, r)}
    pattern = "{}.lora_{}.default.weight"
    if target.kind is TargetKind.EMBEDDING:
        pattern = "{}.lora_embedding_{}.default"
    made = [
        Parameter(name=pattern.format(target.module, letter), shape=shape, group=Group.ADAPTER)
        for letter, shape in shapes.items()
    ]
    if dora:
        name = f"{target.module}.lora_magnitude_vector.default.weight"
        made.append(Parameter(name=name, shape=(target.out_features,), group=Group.ADAPTER))
    return tuple(made)


@dataclass(kw_only=True)
class _Choice:
    """Targets made ready: names or a pattern for modules, and parameters with the multiple of their rank."""

    names: tuple[str, ...] = ()
    pattern: re.Pattern[str] | None = None
    all_linear: bool = False
    parameters: dict[str, int] = field(default_factory=dict)
    saved_names: tuple[str, ...] = ()
    saved: tuple[re.Pattern[str], ...] = ()
    hits: set[str] = field(default_factory=set)

    def without(self, modules_to_save: Sequence[str]) -> _Choice:
        self.saved_names = tuple(modules_to_save)
        self.saved = tuple(
            re.compile(rf"(^|.*\.){re.escape(name)}($|\..*)") for name in modules_to_save
        )
        return self

    def matches(self, name: str) -> bool:
        if any(saved.match(name) for saved in self.saved):
            return False
        if self.pattern is not None:
            return self.pattern.fullmatch(name) is not None
        found = [entry for entry in self.names if name == entry or name.endswith(f".{entry}")]
        self.hits.update(found)
        return bool(found)

    def unmatched(self) -> tuple[str, ...]:
        return tuple(entry for entry in self.names if entry not in self.hits)

    def same_in_all_layers(self) -> bool:
        """Return whether no entry can tell layers apart: none is a pattern or has a number among its parts."""
        if self.pattern is not None:
            return False
        entries = (*self.names, *self.saved_names)
        return not any(part.isdigit() for entry in entries for part in entry.split("."))


def _choice(spec: ModelSpec, targets: str | Sequence[str], *, fused_experts: bool) -> _Choice:
    old_names = _CONVERTED.get(spec.family) if fused_experts else None
    if isinstance(targets, str):
        wanted = targets.strip()
        if wanted.lower() == ATTENTION:
            return _Choice(names=attention_targets(spec))
        if wanted.lower() == ALL_LINEAR:
            if old_names is None:
                return _Choice(all_linear=True)
            leaves = {_leaf(linear.name) for linear in _linears_below_the_head(spec)}
            return _converted(tuple(sorted(leaves | old_names.keys())), old_names)
        if _REGULAR_EXPRESSION.search(wanted):
            return _by_pattern(spec, wanted, old_names)
        targets = [entry.strip() for entry in wanted.split(",")]
    names = tuple(dict.fromkeys(entry for entry in targets if entry))
    return _Choice(names=names) if old_names is None else _converted(names, old_names)


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]


def _linears_below_the_head(spec: ModelSpec) -> Iterator[Linear]:
    for layer in {id(layer): layer for layer in spec.layers}.values():
        yield from layer_linears(layer)
    yield from outer_linears(spec)[:-1]


def _converted(names: tuple[str, ...], old_names: dict[str, str]) -> _Choice:
    kept: list[str] = []
    asked: dict[str, set[str]] = {}
    for name in names:
        old = next((o for o in old_names if name == o or name.endswith(f".{o}")), None)
        if old is None:
            kept.append(name)
        else:
            asked.setdefault(old_names[old], set()).add(old)
    fused = {old for old, new in old_names.items() if new == "gate_up_proj"}
    halves = asked.get("gate_up_proj", fused)
    if halves != fused:
        raise InputError(
            f"`{min(halves)}` cannot be adapted without `{min(fused - halves)}`: "
            "transformers 5 keeps both in one tensor",
            hint="name both, or neither",
        )
    multiples = {new: len(fused) if new == "gate_up_proj" else 1 for new in asked}
    return _Choice(names=tuple(kept), parameters=multiples)


def _by_pattern(spec: ModelSpec, text: str, old_names: dict[str, str] | None) -> _Choice:
    if len(text) > _LONGEST_PATTERN:
        raise InputError(f"a pattern for targets may have {_LONGEST_PATTERN} characters")
    _refuse_endless(text)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about `[[`, which peft compiles as well
            pattern = re.compile(text)
    except re.error as error:
        raise InputError(
            f"`{printable(text, longest=200)}` is neither a list of names nor a regular expression: {error}"
        ) from None
    if old_names is None:
        return _Choice(pattern=pattern)
    matched = _leaves_of_pattern(spec, pattern, old_names)
    if not matched:
        return _Choice(pattern=pattern)
    return _converted(tuple(sorted(matched)), old_names)


def _refuse_endless(text: str) -> None:
    """Raises: InputError for a pattern that may run for hours: `re` backtracks, and nothing can stop it."""
    tokens = _TOKENS.findall(text)
    groups = [token for token in tokens if token[0] == ")"]
    repeats = [token for token in tokens if token[0] in "*+{"]
    optional = [token for token in tokens if token[0] == "?"]
    if groups or len(repeats) > _MOST_REPEATS or len(optional) > _MOST_OPTIONAL:
        raise InputError(
            f"`{printable(text, longest=200)}` may take for ever to match: "
            + (
                f"a group is repeated (`{groups[0]}`)"
                if groups
                else f"it has more than {_MOST_REPEATS} repeats or {_MOST_OPTIONAL} optional parts"
            ),
            hint=r"`.*\.(q_proj|v_proj)` needs one repeat; a list of names needs none",
        )


def _leaves_of_pattern(
    spec: ModelSpec, pattern: re.Pattern[str], old_names: dict[str, str]
) -> set[str]:
    """Return the last parts of the names that the pattern matches, the experts' old names among them."""
    weights = [p.name for p in parameters(spec)]
    keys = {spec.head.name, *weights}
    for weight in weights:
        module = weight
        while module := module.rpartition(".")[0]:
            keys.add(module)
    matched = {_leaf(key) for key in keys if pattern.fullmatch(key)}
    for old, new in old_names.items():
        homes = (name.removesuffix(new) for name in weights if name.endswith(f".{new}"))
        if old not in matched and any(pattern.fullmatch(home + old) for home in homes):
            matched.add(old)
    return matched


def _adapted_layers(
    spec: ModelSpec, choice: _Choice, *, fused_experts: bool
) -> tuple[tuple[Target, ...], ...]:
    candidates: dict[int, tuple[Target, ...]] = {}
    made: dict[tuple[int, object], tuple[Target, ...]] = {}
    same = choice.same_in_all_layers()
    result = []
    for index, layer in enumerate(spec.layers):
        key = id(layer)
        if key not in candidates:
            candidates[key] = _candidates(layer, fused_experts=fused_experts)
        if same and (key, None) in made:
            result.append(made[key, None])
            continue
        chosen = _chosen(layer, candidates[key], choice, spec.layer_prefix.format(index))
        result.append(made.setdefault((key, None if same else chosen), chosen))
    return tuple(result)


def _candidates(layer: LayerSpec, *, fused_experts: bool) -> tuple[Target, ...]:
    narrow = set()
    if isinstance(layer.mlp, MoeSpec):
        names = {layer.mlp.router.name}
        if layer.mlp.shared_gate is not None:
            names.add(layer.mlp.shared_gate.name)
        narrow = names if fused_experts else {v4_name(name, layer.mlp) for name in names}
    return tuple(
        _target(linear, narrow=linear.name in narrow)
        for linear in layer_linears(layer, fused_experts=fused_experts)
    )


def _target(linear: Linear, *, narrow: bool = False) -> Target:
    return Target(
        name=linear.name,
        module=linear.name,
        in_features=linear.in_features,
        out_features=linear.out_features,
        narrow=narrow,
    )


def _chosen(
    layer: LayerSpec, candidates: tuple[Target, ...], choice: _Choice, prefix: str
) -> tuple[Target, ...]:
    if choice.all_linear:
        return tuple(
            t for t in candidates if not any(s.match(prefix + t.name) for s in choice.saved)
        )
    for name in _not_adaptable(layer):
        if choice.matches(prefix + name):
            raise InputError(
                f"LoRA adapts linears and embeddings, and `{name}` is neither",
                hint="leave it out of the targets",
            )
    found = [t for t in candidates if choice.matches(prefix + t.name)]
    if isinstance(layer.mlp, MoeSpec):
        found += _parameters_of(layer.mlp, choice.parameters)
    return tuple(in_creation_order(found, layer.registration))


def _not_adaptable(layer: LayerSpec) -> Iterator[str]:
    yield from (norm.name for norm in layer.norms)
    if isinstance(layer.mlp, MoeSpec):
        yield layer.mlp.experts_name
        if not layer.mlp.router_is_linear:
            yield layer.mlp.router.name


def _parameters_of(moe: MoeSpec, wanted: dict[str, int]) -> list[Target]:
    """Return the stacked experts and the router where they are wanted; peft wraps `down_proj` around `gate_up_proj`."""
    made = []
    if "gate.weight" in wanted and moe.router.name.endswith(".gate"):
        made.append(
            Target(
                name=f"{moe.router.name}.weight",
                module=moe.router.name,
                in_features=moe.router.in_features,
                out_features=moe.router.out_features,
                kind=TargetKind.PARAMETER,
                narrow=True,
            )
        )
    hidden, intermediate = moe.expert.down.out_features, moe.expert.down.in_features
    both = {"gate_up_proj", "down_proj"} <= wanted.keys()
    for name, in_features, out_features, module in (
        ("gate_up_proj", hidden, 2 * intermediate, ".base_layer" if both else ""),
        ("down_proj", intermediate, hidden, ""),
    ):
        if name in wanted:
            made.append(
                Target(
                    name=f"{moe.experts_name}.{name}",
                    module=f"{moe.experts_name}{module}",
                    in_features=in_features,
                    out_features=out_features,
                    kind=TargetKind.PARAMETER,
                    experts=moe.num_experts,
                    rank_multiple=wanted[name],
                )
            )
    return made


def _adapted_outside(
    spec: ModelSpec, choice: _Choice
) -> tuple[tuple[Target, ...], tuple[Target, ...]]:
    projections = [_target(linear) for linear in outer_linears(spec)[:-1]]
    if choice.all_linear:
        return tuple(t for t in projections if not _is_saved(choice, t.name)), ()
    tables = [
        Target(
            name=table.name,
            module=table.name,
            in_features=table.rows,
            out_features=table.size,
            kind=TargetKind.EMBEDDING,
        )
        for table in (spec.embedding, spec.position_embedding)
        if table is not None
    ]
    norms = [n.name for n in (spec.embedding_norm, spec.final_norm) if n is not None]
    for name in norms:
        if choice.matches(name):
            raise InputError(f"LoRA adapts linears and embeddings, and `{name}` is neither")
    before = in_creation_order(
        [t for t in (*tables, *projections) if choice.matches(t.name)], spec.registration
    )
    after = [_target(spec.head)] if choice.matches(spec.head.name) else []
    return tuple(before), tuple(after)


def _is_saved(choice: _Choice, name: str) -> bool:
    return any(saved.match(name) for saved in choice.saved)


def _nothing(spec: ModelSpec, targets: str | Sequence[str], *, fused_experts: bool) -> InputError:
    wanted = targets if isinstance(targets, str) else ",".join(targets)
    layers = {id(layer): layer for layer in spec.layers}.values()
    names = dict.fromkeys(
        _leaf(linear.name)
        for layer in layers
        for linear in layer_linears(layer, fused_experts=fused_experts)
    )
    return InputError(
        f"the targets `{printable(wanted, longest=200)}` match no linear of {spec.id}",
        hint=f"its linears are {', '.join(names)}; or write `{ATTENTION}` or `{ALL_LINEAR}`",
    )
