"""What is trained beside a frozen base: adapters and the copies of modules that are trained whole, in peft's order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from wazn.errors import InputError
from wazn.model.lora import Adapted, Target, lora_parameters
from wazn.model.parameters import (
    Group,
    Parameter,
    layer_parameters,
    outer_parameters,
    parameters,
)
from wazn.model.spec import ModelSpec

__all__ = ["saved_copies", "trainable_parameters"]

_COPY = ".modules_to_save.default"


def saved_copies(
    spec: ModelSpec, modules_to_save: Sequence[str], *, fused_experts: bool = True
) -> tuple[Parameter, ...]:
    """Return the trainable copies of the modules that are trained whole (peft's `modules_to_save`).

    peft copies every module whose full name ends in an entry (`norm` is also the end of `input_layernorm`); a tied head
    gets a copy of its own, no longer tied.

    Raises: InputError when an entry matches nothing.
    """
    copies: list[Parameter] = []
    hits: set[str] = set()
    weights = list(parameters(spec, fused_experts=fused_experts))
    if spec.tied:
        weights.append(_head_weight(spec))
    for weight in weights:
        module = _module_ending_in(weight.name, modules_to_save, hits)
        if module is not None:
            name = f"{module}{_COPY}{weight.name.removeprefix(module)}"
            copies.append(
                Parameter(name=name, shape=weight.shape, group=weight.group, layer=weight.layer)
            )
    missing = [entry for entry in modules_to_save if entry not in hits]
    if missing:
        raise InputError(
            f"`{missing[0]}` is the end of no module's name in {spec.id}",
            hint=f"for example `{spec.embedding.name.rpartition('.')[2]}` and `{spec.head.name}`",
        )
    return tuple(copies)


def trainable_parameters(
    spec: ModelSpec,
    found: Adapted,
    *,
    rank: int,
    dora: bool = False,
    saved: Sequence[Parameter] = (),
    fused_experts: bool = True,
) -> Iterator[Parameter]:
    """Yield everything that is trained, with full names, in the order of the peft model's `named_parameters()`.

    Args:
        saved: from `saved_copies`.
    """
    outer = outer_parameters(spec)
    outside = [p for p in saved if p.layer is None]
    names = [p.name for p in outer.before]
    before, after = _split(outside, names)
    yield from _in_order_of(names, before, found.before, rank=rank, dora=dora)
    inside: dict[int, list[Parameter]] = {}
    for copy in saved:
        if copy.layer is not None:
            inside.setdefault(copy.layer, []).append(copy)
    weights: dict[int, list[str]] = {}
    for index, (layer, targets) in enumerate(zip(spec.layers, found.layers, strict=True)):
        if id(layer) not in weights:
            made = layer_parameters(layer, fused_experts=fused_experts)
            weights[id(layer)] = [p.name for p in made]
        prefix = spec.layer_prefix.format(index)
        copies = [replace(p, name=p.name.removeprefix(prefix)) for p in inside.get(index, ())]
        for p in _in_order_of(weights[id(layer)], copies, targets, rank=rank, dora=dora):
            yield replace(p, name=prefix + p.name, layer=index)
    names = [p.name for p in outer.after]
    yield from _in_order_of(names, after, found.after, rank=rank, dora=dora)


def _split(copies: list[Parameter], names: list[str]) -> tuple[list[Parameter], list[Parameter]]:
    """Return the copies of the weights in `names`, and the others."""
    inside = [p for p in copies if p.name.replace(_COPY, "") in names]
    return inside, [p for p in copies if p not in inside]


def _in_order_of(
    weights: list[str],
    copies: list[Parameter],
    targets: Sequence[Target],
    *,
    rank: int,
    dora: bool,
) -> list[Parameter]:
    """Return adapters and copies in the order of the weights that they stand beside."""
    placed = [(_place(p.name.replace(_COPY, ""), weights), p) for p in copies]
    for target in targets:
        place = _place(target.module.removesuffix(".base_layer"), weights)
        placed += [(place, p) for p in lora_parameters(target, rank=rank, dora=dora)]
    return [p for _, p in sorted(placed, key=lambda pair: pair[0])]


def _place(name: str, weights: list[str]) -> int:
    for index, weight in enumerate(weights):
        if weight == name or weight.startswith(f"{name}."):
            return index
    return len(weights)  # a tied head, which is the last module


def _head_weight(spec: ModelSpec) -> Parameter:
    shape = (spec.head.out_features, spec.head.in_features)
    return Parameter(name=f"{spec.head.name}.weight", shape=shape, group=Group.HEAD)


def _module_ending_in(weight: str, entries: Sequence[str], hits: set[str]) -> str | None:
    """Return the outermost module around `weight` whose name ends in an entry."""
    parts = weight.split(".")
    for length in range(1, len(parts)):
        module = ".".join(parts[:length])
        found = [entry for entry in entries if module.endswith(entry)]
        if found:
            hits.update(found)
            return module
    return None
