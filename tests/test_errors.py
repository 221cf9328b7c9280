"""The error tree: one root, one branch per reason, each with the way out."""

from __future__ import annotations

from wazn import errors
from wazn.errors import InputError, MissingExtra, UnknownFact, Unsupported, WaznError


def test_every_error_has_the_one_root() -> None:
    """Whoever catches WaznError catches every reason for which wazn cannot answer."""
    for name in errors.__all__:
        assert issubclass(getattr(errors, name), WaznError)


def test_an_unknown_name_is_a_wrong_question() -> None:
    """A name that no table knows is the asker's to correct; what we cannot do is not."""
    assert issubclass(UnknownFact, InputError)
    assert not issubclass(Unsupported, InputError)
    assert not issubclass(MissingExtra, InputError)


def test_an_unknown_name_offers_the_nearest_ones() -> None:
    """The hint lists them in order; a hint that is given wins."""
    error = UnknownFact("unknown model `lama`", nearest=("llama-2-7b", "llama-3.1-8b"))
    assert error.hint == "did you mean `llama-2-7b`, `llama-3.1-8b`?"
    assert UnknownFact("x", nearest=("y",), hint="z").hint == "z"
    assert UnknownFact("x").hint is None


def test_a_missing_extra_says_the_pip_command() -> None:
    """The command can be pasted into a shell: the brackets are quoted."""
    error = MissingExtra("`wazn trace`", extra="trace")
    assert error.message == "`wazn trace` needs the optional packages of `trace`"
    assert error.hint == "pip install 'wazn[trace]'"


def test_the_tree_in_the_docstring_names_every_error() -> None:
    """The drawing is the documentation: it cannot lag behind the code."""
    assert errors.__doc__ is not None
    for name in errors.__all__:
        assert name in errors.__doc__


def test_the_text_is_the_message_and_the_hint() -> None:
    """`str(error)`, which a traceback ends with, is what the command line prints: the way out is not lost."""
    error = InputError("`rank` must be positive", hint="`rank` 16 is usual")
    assert str(error) == "`rank` must be positive\nhint: `rank` 16 is usual"
    assert str(InputError("`rank` must be positive")) == "`rank` must be positive"
