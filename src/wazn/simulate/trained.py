"""Which base weights are trained."""

from __future__ import annotations

import re
from fnmatch import translate

from wazn.errors import InputError
from wazn.model.parameters import layer_parameters, outer_parameters
from wazn.model.spec import ModelSpec
from wazn.recipe import Method, Recipe

__all__ = ["Trained"]


class Trained:
    """Answers for every weight of a model whether it is trained.

    Full fine-tuning trains all, adapters none of them. With `freeze`, a weight is trained whose full name matches one
    of the `trainable` patterns (all, if there are none) and none of the `freeze` patterns, in the language of fnmatch.

    Raises: InputError where a pattern matches no weight, or nothing is left to train.
    """

    def __init__(self, spec: ModelSpec, recipe: Recipe) -> None:
        self.spec = spec
        self.everything = recipe.method is Method.FULL
        self.by_layer: list[frozenset[str]] | None = None
        self.outside: frozenset[str] = frozenset()
        if recipe.method is Method.FREEZE:
            self._match(recipe)

    def in_layer(self, index: int, name: str) -> bool:
        """Say whether the weight `name`, relative to its layer, of layer `index` of the whole model is trained."""
        return self.everything if self.by_layer is None else name in self.by_layer[index]

    def outside_layers(self, name: str) -> bool:
        """Say whether the weight with this full name is trained."""
        return self.everything if self.by_layer is None else name in self.outside

    def kind(self, index: int) -> frozenset[str]:
        """What tells layers apart in which other weights are trained."""
        return frozenset() if self.by_layer is None else self.by_layer[index]

    def _match(self, recipe: Recipe) -> None:
        patterns = {
            pattern: re.compile(translate(pattern))
            for pattern in (*recipe.trainable, *recipe.freeze)
        }
        used: set[str] = set()

        def matches(name: str, chosen: tuple[str, ...]) -> bool:
            hits = [pattern for pattern in chosen if patterns[pattern].match(name)]
            used.update(hits)
            return bool(hits)

        def is_trained(name: str) -> bool:
            frozen = matches(name, recipe.freeze)
            return (matches(name, recipe.trainable) or not recipe.trainable) and not frozen

        outer = outer_parameters(self.spec)
        self.outside = frozenset(
            item.name for item in (*outer.before, *outer.after) if is_trained(item.name)
        )
        self.by_layer = []
        for index, layer in enumerate(self.spec.layers):
            prefix = self.spec.layer_prefix.format(index)
            names = (item.name for item in layer_parameters(layer))
            self.by_layer.append(frozenset(name for name in names if is_trained(prefix + name)))
        for pattern in patterns:
            if pattern not in used:
                example = self.spec.layer_prefix.format(0)
                raise InputError(
                    f"`{pattern}` matches no weight of {self.spec.id}",
                    hint=f"names begin like `{example}*`, `{self.spec.embedding.name}*`",
                )
        if not self.outside and not any(self.by_layer):
            raise InputError("the patterns leave nothing to train")
