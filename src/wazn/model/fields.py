"""The keys of a config.json, read with their kinds: every fault of the file is kept and all are raised together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any, TypeVar

from wazn.errors import InputError
from wazn.model.spec import Activation

__all__ = ["LARGEST_SIZE", "MOST_LAYERS", "Fields", "printable"]

LARGEST_SIZE = 10**8  # of one axis of a matrix; the largest known vocabulary has 3 * 10^5 rows
MOST_LAYERS = 512  # the deepest known model has 126; layers that are not alike are run one by one
_LONGEST_QUOTE = 40

T = TypeVar("T")

# The keys of `ACT2FN` in transformers 5.24 whose code wazn knows.
_ACTIVATIONS = {
    "gelu": Activation.GELU,
    "gelu_fast": Activation.GELU_FAST,
    "gelu_new": Activation.GELU_NEW,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "quick_gelu": Activation.QUICK_GELU,
    "relu": Activation.RELU,
    "relu2": Activation.RELU2,
    "silu": Activation.SILU,
    "swish": Activation.SILU,
}


class Fields:
    """A config.json mapping with the defaults of its configuration class behind it.

    Keys are read under the name that the class gives to the attribute; `aliases` says which other spelling of the file
    stands for it (`attribute_map` in transformers: GPT-2 writes `n_embd` for `hidden_size`). A fault gives back a
    harmless value and is remembered, so that one reading finds all of them; `raise_faults` ends the reading.
    """

    def __init__(
        self,
        mapping: Mapping[str, Any],
        *,
        id: str,
        path: str,
        model_type: str,
        defaults: Mapping[str, Any],
        aliases: Mapping[str, str],
    ) -> None:
        self.id = id
        self.path = path
        self.model_type = model_type
        self._defaults = defaults
        self._written = {
            name: spelling for name, spelling in aliases.items() if spelling in mapping
        }
        self._mapping = mapping
        self._faults: list[str] = []
        self._refused: set[str] = set()

    def written(self, key: str) -> str:
        """Return the spelling of `key` in this file."""
        return self._written.get(key, key)

    def given(self, key: str) -> bool:
        """Return whether the file itself has the key, with a value other than null."""
        return self._mapping.get(self.written(key)) is not None

    def value(self, key: str) -> Any:
        """Return what stands under `key`, or the class default, or None."""
        spelling = self.written(key)
        return self._mapping[spelling] if spelling in self._mapping else self._defaults.get(key)

    def count(self, key: str, *, least: int = 1, most: int = LARGEST_SIZE) -> int:
        """Return a whole number from `least` to `most`; a float such as 4096.0 is not one."""
        value = self.value(key)
        if type(value) is not int or not least <= value:
            kind = "a positive integer" if least == 1 else f"an integer of at least {least}"
            return self._refuse(key, value, f"must be {kind}", max(least, 1))
        if value > most:
            return self._refuse(key, value, f"must be at most {most}", max(least, 1))
        return value

    def optional_count(self, key: str, *, least: int = 1) -> int | None:
        """Return a whole number, or None for null and for a missing key without a default."""
        return None if self.value(key) is None else self.count(key, least=least)

    def flag(self, key: str) -> bool:
        """Return true or false; null is false."""
        value = self.value(key)
        if value is None or isinstance(value, bool):
            return bool(value)
        return self._refuse(key, value, "must be true or false", False)

    def number(self, key: str) -> float:
        """Return a finite number."""
        value = self.value(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
            return self._refuse(key, value, "must be a finite number", 1.0)
        return float(value)

    def optional_number(self, key: str) -> float | None:
        """Return a finite number, or None for null and for a missing key without a default."""
        return None if self.value(key) is None else self.number(key)

    def probability(self, key: str) -> float:
        """Return a number from 0 to 1: a dropout; null and missing are 0."""
        value = self.value(key)
        if value is None:
            return 0.0
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
            return self._refuse(key, value, "must be a number from 0 to 1", 0.0)
        return float(value)

    def word(self, key: str) -> str | None:
        """Return a string, or None for null and for a missing key without a default."""
        value = self.value(key)
        if value is None or isinstance(value, str):
            return value
        return self._refuse(key, value, "must be a string", None)

    def activation(self, key: str = "hidden_act") -> Activation:
        """Return the activation that the key names."""
        value = self.value(key)
        known = _ACTIVATIONS.get(value) if isinstance(value, str) else None
        if known is not None:
            return known
        return self._refuse(
            key, value, f"must be one of {', '.join(_ACTIVATIONS)}", Activation.SILU
        )

    def section(self, key: str) -> Mapping[str, Any]:
        """Return a nested object; null and missing are empty."""
        value = self.value(key)
        if value is None:
            return {}
        if isinstance(value, Mapping):
            return value
        return self._refuse(key, value, "must be an object", {})

    def per_layer(
        self, key: str, allowed: Sequence[object], *, num_layers: int
    ) -> list[Any] | None:
        """Return a list with one of the `allowed` values per layer, or None where the file has none."""
        value = self.value(key)
        if value is None or "num_hidden_layers" in self._refused:
            return None
        if not isinstance(value, list) or len(value) != num_layers:
            return self._refuse(key, value, f"must be a list of {num_layers}, one per layer", None)
        for index, entry in enumerate(value):
            if isinstance(entry, list | dict) or entry not in allowed:
                choices = ", ".join(repr(choice) for choice in allowed)
                return self._refuse(f"{key}[{index}]", entry, f"must be one of {choices}", None)
        return value

    def fault(self, message: str, *, of: Sequence[str] = ()) -> None:
        """Remember what is wrong between the keys `of`, unless one of them is wrong by itself already."""
        if self._refused.isdisjoint(of):
            self._faults.append(message)

    def faults_of(self, inner: Fields) -> None:
        """Take over the faults of an object inside this one; `inner.path` ends in the key of that object."""
        where = inner.path.removeprefix(f"{self.path}: ")
        self._faults += (fault.replace("`", f"`{where}.", 1) for fault in inner._faults)

    def raise_faults(self) -> None:
        """Raise one `InputError` with every fault found, if any was."""
        if self._faults:
            raise InputError("\n".join(f"{self.path}: {fault}" for fault in self._faults))

    def _refuse(self, key: str, value: object, rule: str, instead: T) -> T:
        self._refused.add(key)
        self._faults.append(f"`{self.written(key)}` {rule}, found {_quote(value)}")
        return instead


def printable(text: str, *, longest: int = _LONGEST_QUOTE) -> str:
    """Return the start of foreign text, fit to stand in a message: no line breaks, no control characters.

    >>> printable("a\\nb")
    'a\\\\nb'
    """
    start = text[:longest]
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in start)


def _quote(value: object) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{printable(value)}"'
    if isinstance(value, list | dict):
        return f"{'a list' if isinstance(value, list) else 'an object'} of {len(value)}"
    if isinstance(value, int) and value.bit_length() > 128:
        return "a number of more than 38 digits"
    return repr(value)
