"""The error tree: what wazn raises when it cannot answer.

    WaznError
    ├── InputError      the question is wrong: names the place, the value, the rule and the way out
    │   └── UnknownFact     not in the catalogue; carries the nearest names
    ├── Unsupported     the question is fine, we cannot answer it; says what we can
    └── MissingExtra    an optional dependency is absent; carries the pip command

A run that does not fit is an answer, not an error.
"""

from __future__ import annotations

__all__ = ["InputError", "MissingExtra", "UnknownFact", "Unsupported", "WaznError"]


class WaznError(Exception):
    """Any reason for which wazn could not answer; `hint` says what to do instead, or is None."""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        """Return the message, and the hint where there is one on a line of its own."""
        return self.message if self.hint is None else f"{self.message}\nhint: {self.hint}"


class InputError(WaznError):
    """The question is wrong."""


class UnknownFact(InputError):
    """A name that no table knows; `nearest` are the closest names that exist, best first."""

    def __init__(
        self, message: str, *, nearest: tuple[str, ...] = (), hint: str | None = None
    ) -> None:
        if hint is None and nearest:
            hint = "did you mean " + ", ".join(f"`{name}`" for name in nearest) + "?"
        super().__init__(message, hint=hint)
        self.nearest = nearest


class Unsupported(WaznError):
    """The question makes sense and wazn cannot answer it; `hint` names the nearest thing that works."""


class MissingExtra(WaznError):
    """The command needs an optional dependency; `extra` is its name in `pip install 'wazn[extra]'`."""

    def __init__(self, what: str, *, extra: str) -> None:
        super().__init__(
            f"{what} needs the optional packages of `{extra}`",
            hint=f"pip install 'wazn[{extra}]'",
        )
        self.extra = extra
