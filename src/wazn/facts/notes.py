"""What a look-up has to tell beside its answer: a code and its parameters. `report` finds the words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["Note"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Note:
    """Something the person should know about an answer, without words: `code` names it, `params` fill it in."""

    code: str
    params: Mapping[str, str | int | float]
