"""Whatever is typed, `wazn calc` answers or says what is wrong: it never fails by itself."""

from __future__ import annotations

import contextlib
import io

import click
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wazn.cli.calc import command
from wazn.cli.main import main

NAMES = sorted(command.commands)
VALUES = st.one_of(
    st.text(max_size=50),
    st.integers().map(str),
    st.floats().map(str),
    st.from_regex(r"\A[0-9]{1,20}([.][0-9]{1,5})?(e[0-9]{1,2})? ?(B|GB|MiB|k|T)?\Z"),
    st.sampled_from(["16", "7B", "0", "1", "q,v", "gate", "adam", "sgd", "0.5GB", "9" * 5000]),
)


def options(name: str) -> list[str]:
    """Return the options of a subcommand that take a value, but for --model, which may touch the disk."""
    params = [p for p in command.commands[name].params if isinstance(p, click.Option)]
    return [p.opts[0] for p in params if not p.is_flag and p.opts[0] not in ("--model", "--help")]


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_no_question_makes_it_fail(data: st.DataObject) -> None:
    """Any options with any values: status 0 with an answer, or 2 with `error:`; never 1, never a traceback."""
    name = data.draw(st.sampled_from(NAMES))
    asked = data.draw(st.lists(st.tuples(st.sampled_from(options(name)), VALUES), max_size=9))
    out, err = io.StringIO(), io.StringIO()
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        pytest.raises(SystemExit) as caught,
    ):
        main(["calc", name, *(word for pair in asked for word in pair)])
    if caught.value.code == 0:
        assert out.getvalue()
        assert err.getvalue() == ""
    else:
        assert caught.value.code == 2, err.getvalue()
        assert out.getvalue() == ""
        assert err.getvalue().startswith("error: ")
        assert len(err.getvalue()) < 1000
