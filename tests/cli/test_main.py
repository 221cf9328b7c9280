"""The door of people: statuses, the two lines of an error, pipes, interrupts, terminals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from wazn.cli import main as main_module
from wazn.cli.base import nearest_names
from wazn.cli.main import COMMANDS, main
from wazn.errors import MissingExtra, Unsupported


class Ran:
    """What one call of the command line gave back."""

    def __init__(self, status: int, out: str, err: str) -> None:
        self.status, self.out, self.err = status, out, err


@pytest.fixture
def wazn(capsys: pytest.CaptureFixture[str]) -> object:
    """Run the command line in this process."""

    def run(*arguments: str) -> Ran:
        with pytest.raises(SystemExit) as caught:
            main(list(arguments))
        captured = capsys.readouterr()
        assert isinstance(caught.value.code, int)
        return Ran(caught.value.code, captured.out, captured.err)

    return run


TRAINING = ("calc", "training", "--params", "7B", "--bytes-per-param", "16")

WRONG = [
    (("esimate",), "error: unknown command `esimate`\nhint: did you mean `estimate`?\n"),
    (("xyzzy",), "error: unknown command `xyzzy`\nhint: `wazn --help` lists the commands\n"),
    (("calc", "trainig"), "error: unknown command `trainig`\nhint: did you mean `training`?\n"),
    (
        (*TRAINING, "--activation", "1GB"),
        "error: unknown option `--activation`\nhint: did you mean `--activations`",
    ),
    (
        ("calc", "training"),
        "error: the option `--params` is missing\nhint: `wazn calc training --help`",
    ),
    (("calc", "training", "--params"), "error: option `--params` requires an argument\nhint: "),
    (
        (*TRAINING, "--format", "jsn"),
        "error: `--format`: unknown name `jsn`\nhint: did you mean `json`?\n",
    ),
    ((*TRAINING, "surprise"), "error: got unexpected extra argument (surprise)\nhint: "),
    (
        ("calc", "training", "--params", "7Q", "--bytes-per-param", "16"),
        "error: `--params`: expected a whole number such as `7B`, `350M` or `4096`, found `7Q`\n",
    ),
    (
        ("calc", "training", "--params", "0", "--bytes-per-param", "16"),
        "error: `--params` must be positive, found `0`\n",
    ),
]


@pytest.mark.parametrize(("arguments", "said"), WRONG, ids=[" ".join(a) for a, _ in WRONG])
def test_a_wrong_question_is_answered_in_two_lines(wazn, arguments, said) -> None:  # type: ignore[no-untyped-def]
    """Status 2; stderr says what is wrong and what to write instead; stdout, the data, stays empty."""
    ran = wazn(*arguments)
    assert ran.status == 2
    assert ran.out == ""
    assert ran.err.startswith(said)
    assert ran.err.count("\n") <= 2


def test_the_version_and_the_help_are_answers(wazn) -> None:  # type: ignore[no-untyped-def]
    """Both go to stdout with status 0, and the help names every command."""
    ran = wazn("--version")
    assert (ran.status, ran.err) == (0, "")
    assert ran.out.startswith("wazn ")
    ran = wazn("--help")
    assert (ran.status, ran.err) == (0, "")
    for name, text in COMMANDS.items():
        assert name in ran.out
        assert text.split()[0] in ran.out


def test_without_a_command_the_help_is_shown_as_an_error(wazn) -> None:  # type: ignore[no-untyped-def]
    """Nothing was asked: status 2, and the help on stderr."""
    ran = wazn()
    assert (ran.status, ran.out) == (2, "")
    assert "Usage: wazn" in ran.err


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_of_the_table_exists(wazn, name) -> None:  # type: ignore[no-untyped-def]
    """The table is a promise: each line imports, and shows its options."""
    ran = wazn(name, "--help")
    assert ran.status == 0
    assert ran.out.startswith(f"Usage: wazn {name}")


@pytest.mark.parametrize(
    "error",
    [
        Unsupported("no such block", hint="take another"),
        MissingExtra("`wazn trace`", extra="trace"),
    ],
)
def test_what_cannot_be_answered_is_status_two(monkeypatch, wazn, error) -> None:  # type: ignore[no-untyped-def]
    """An unsupported question and a missing package are said like any wrong question."""
    monkeypatch.setattr(main_module.cli, "invoke", _raise(error))
    ran = wazn("estimate")
    assert ran.status == 2
    assert ran.err == f"error: {error.message}\nhint: {error.hint}\n"


def test_our_own_failure_is_status_one_without_a_traceback(monkeypatch, wazn) -> None:  # type: ignore[no-untyped-def]
    """A bug is said to be one; the traceback is for who sets WAZN_DEBUG."""
    monkeypatch.setattr(main_module.cli, "invoke", _raise(ZeroDivisionError("division by zero")))
    ran = wazn("estimate")
    assert ran.status == 1
    assert ran.err.startswith(
        "error: wazn itself failed: ZeroDivisionError: division by zero\nhint: "
    )
    assert "Traceback" not in ran.err
    monkeypatch.setenv("WAZN_DEBUG", "1")
    assert "Traceback" in wazn("estimate").err


def test_an_interrupt_ends_quietly(monkeypatch, wazn) -> None:  # type: ignore[no-untyped-def]
    """Ctrl-C is status 130, as shells write it, with one line."""
    monkeypatch.setattr(main_module.cli, "invoke", _raise(KeyboardInterrupt()))
    ran = wazn("estimate")
    assert (ran.status, ran.err) == (130, "error: interrupted\n")


def _raise(error: BaseException) -> object:
    def run(*_: object, **__: object) -> None:
        raise error

    return run


def process(*arguments: str, **environment: str) -> subprocess.Popen[bytes]:
    """Start the command line as a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "wazn", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, **environment},
    )


def test_python_dash_m_is_the_same_door() -> None:
    """`python -m wazn` answers like `wazn`."""
    run = process(*TRAINING, "--format", "json")
    out, err = run.communicate(timeout=60)
    assert (run.returncode, err) == (0, b"")
    assert json.loads(out)["result"]["peak_bytes"] == 112 * 10**9


def test_a_reader_that_leaves_is_no_error() -> None:
    """`wazn ... | head -0` ends with SIGPIPE's status and says nothing."""
    run = process(*TRAINING)
    assert run.stdout is not None
    assert run.stderr is not None
    run.stdout.close()
    err = run.stderr.read()
    run.stderr.close()
    assert run.wait(timeout=60) == 128 + signal.SIGPIPE
    assert err == b""


def test_a_full_disk_is_said(tmp_path: Path) -> None:
    """Data that could not be written is not a success."""
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("this system has no /dev/full")
    with full.open("wb") as out:
        run = subprocess.run(
            [sys.executable, "-m", "wazn", *TRAINING],
            stdout=out,
            stderr=subprocess.PIPE,
            check=False,
        )
    assert run.returncode == 1
    assert run.stderr.startswith(b"error: ")
    assert b"Traceback" not in run.stderr


def test_a_terminal_without_the_signs_gets_others() -> None:
    """Where the encoding has no `×` (ISO 8859-6, Arabic), a `?` is printed instead of a crash."""
    run = process(*TRAINING, PYTHONIOENCODING="iso8859-6", PYTHONUTF8="0")
    out, err = run.communicate(timeout=60)
    assert (run.returncode, err) == (0, b"")
    assert b"7,000,000,000 parameters ? 16 bytes" in out


def test_nothing_is_coloured_into_a_pipe() -> None:
    """Text in a pipe has no escape sequences, with NO_COLOR and without."""
    for environment in ({}, {"NO_COLOR": ""}, {"FORCE_COLOR": "1"}):
        out, _ = process("--help", **environment).communicate(timeout=60)
        assert b"\x1b" not in out


def test_nearest_names_are_near() -> None:
    """A slip finds its name whatever the case; a name from elsewhere finds none."""
    known = ["estimate", "calc", "models", "gpus"]
    assert nearest_names("Estmate", known)[0] == "estimate"
    assert nearest_names("zzzzzzzz", known) == ()
    assert nearest_names("e" * 100_000, known) == ()


def test_closed_output_leaves_the_status() -> None:
    """`wazn ... >&-` says nothing, crashes nowhere, and still ends with the answer's status."""
    command = f'"{sys.executable}" -m wazn {" ".join(TRAINING)} >&-'
    run = subprocess.run(["sh", "-c", command], stderr=subprocess.PIPE, check=False)
    assert (run.returncode, run.stderr) == (0, b"")


def test_an_error_never_commands_the_terminal(wazn) -> None:  # type: ignore[no-untyped-def]
    """What stderr repeats of a question has its control characters (here: red, bell, C1's CSI) written out."""
    ran = wazn("calc", "training", "--params", "\x1b[31m7\a\x9b1m", "--bytes-per-param", "16")
    assert ran.status == 2
    assert "found `\\x1b[31m7\\x07\\x9b1m`" in ran.err
