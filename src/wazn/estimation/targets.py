"""What carries adapters on the tape: the targets of a recipe, on this model."""

from __future__ import annotations

from typing import NamedTuple

from wazn.errors import InputError, Unsupported
from wazn.model.spec import ModelSpec
from wazn.recipe import Recipe

__all__ = ["AdaptedNames", "adapted_names"]


class AdaptedNames(NamedTuple):
    """Names, below their layer, of linears and of stacked parameters; and the targets that match nothing."""

    names: frozenset[str] = frozenset()
    unmatched: tuple[str, ...] = ()


def adapted_names(spec: ModelSpec, recipe: Recipe) -> AdaptedNames:
    """Return what the recipe's adapter stands on.

    Raises: InputError where nothing matches or the rank is above a matrix's own; Unsupported where adapters stand on
    what the tape does not adapt.
    """
    adapter = recipe.adapter
    if adapter is None:
        return AdaptedNames()
    from wazn.model.linears import layer_linears  # only adapters pay for these
    from wazn.model.lora import adapted, check_adapter

    try:
        found = adapted(
            spec,
            ",".join(adapter.targets),
            fused_experts=recipe.fused_experts,
            modules_to_save=adapter.modules_to_save,
        )
    except InputError as error:
        raise InputError(f"`--targets`: {error.message}", hint=error.hint) from None
    try:
        check_adapter(found, rank=adapter.rank, dora=adapter.dora, dropout=adapter.dropout)
    except InputError as error:
        raise InputError(f"`--rank` and `--targets`: {error.message}", hint=error.hint) from None
    if found.before or found.after:
        name = (*found.before, *found.after)[0].name
        raise Unsupported(
            f"adapters outside the layers cannot be weighed yet (`{name}`)",
            hint=f"leave `{name}` out of `--targets`",
        )
    distinct = {id(layer): layer for layer in found.layers}.values()
    everywhere = frozenset(target.name for layer in distinct for target in layer)
    pairs = {(id(a), id(b)): (a, b) for a, b in zip(spec.layers, found.layers, strict=True)}
    for layer_spec, layer in pairs.values():
        linears = layer_linears(layer_spec, fused_experts=recipe.fused_experts)
        expected = everywhere.intersection(linear.name for linear in linears)
        if expected.difference(target.name for target in layer):
            raise Unsupported(
                "adapters on some of several equal layers cannot be weighed yet",
                hint="choose targets by module, such as `q_proj,v_proj`",
            )
    return AdaptedNames(names=everywhere, unmatched=found.unmatched)
