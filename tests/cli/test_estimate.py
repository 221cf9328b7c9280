"""`wazn estimate` at the door: statuses, the JSON, terminals and pipes, questions that are wrong."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
import time
from pathlib import Path

import pytest

import wazn
from wazn.cli.main import main
from wazn.report.json import to_json

QUESTION = ("llama-3.1-8b", "--gpu", "rtx-4090")


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Run the command in this process: exit status, stdout, stderr."""
    with pytest.raises(SystemExit) as caught:
        main(["estimate", *arguments])
    captured = capsys.readouterr()
    assert isinstance(caught.value.code, int)
    return caught.value.code, captured.out, captured.err


def process(*arguments: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    """Run the command as its own process, stdout and stderr in pipes."""
    command = [sys.executable, "-m", "wazn", "estimate", *arguments]
    return subprocess.run(
        command, capture_output=True, check=False, env={**os.environ, **environment}
    )


def on_terminal(columns: int, *arguments: str, **environment: str) -> str:
    """Return what the command prints on a terminal of so many columns."""
    kept = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    ours, theirs = pty.openpty()
    child = subprocess.Popen(
        [sys.executable, "-m", "wazn", "estimate", *arguments],
        stdout=theirs,
        stderr=subprocess.PIPE,
        env={**kept, "COLUMNS": str(columns), "LINES": "24", "TERM": "xterm", **environment},
    )
    os.close(theirs)
    read = b""
    while True:
        try:
            chunk = os.read(ours, 65536)
        except OSError:  # Linux says so when the other end is closed
            break
        if not chunk:
            break
        read += chunk
    os.close(ours)
    _, error = child.communicate(timeout=60)
    assert error == b""
    return read.decode("utf-8")


def test_a_run_that_fits_leaves_with_0(capsys: pytest.CaptureFixture[str]) -> None:
    """A small adapter on a small model fits a 4090, and the first word says so."""
    status, out, err = run(capsys, "smollm2-135m", "--gpu", "rtx-4090")
    assert status == 0
    assert out.startswith("It fits: ")
    assert err == ""


def test_a_run_that_does_not_fit_leaves_with_3(capsys: pytest.CaptureFixture[str]) -> None:
    """8.03 B parameters in bf16 with gradients and two states are 59.8 GiB before anything runs: not on a 4090."""
    status, out, err = run(capsys, *QUESTION, "--method", "full")
    assert status == 3
    assert out.startswith("It does not fit: ")
    assert "PyTorch stops in" in out
    assert err == ""


def test_without_a_card_there_is_no_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    """No GPU named: the need, and 0."""
    status, out, _ = run(capsys, "llama-3.1-8b", "--method", "full")
    assert status == 0
    assert out.startswith("It needs ")
    assert "--gpu" in out.splitlines()[0]


def test_json_is_what_the_library_answers(capsys: pytest.CaptureFixture[str]) -> None:
    """The command prints one document, and it is `wazn.estimate` written out."""
    status, out, err = run(
        capsys,
        *QUESTION,
        *("--rank", "8", "--targets", "q_proj,v_proj", "--lora-dropout", "0.05"),
        *("--seq-len", "1k", "--micro-batch", "2", "--format", "json"),
    )
    assert status == 0
    assert err == ""
    answer = wazn.estimate(
        "llama-3.1-8b",
        gpu="rtx-4090",
        rank=8,
        targets="q_proj,v_proj",
        lora_dropout=0.05,
        seq_len=1000,
        micro_batch=2,
    )
    assert json.loads(out) == json.loads(json.dumps(to_json(answer)))


def test_json_says_that_it_does_not_fit_too(capsys: pytest.CaptureFixture[str]) -> None:
    """Programs get the verdict both ways: in the document and as the status 3."""
    status, out, _ = run(capsys, *QUESTION, "--method", "full", "--format", "json")
    assert status == 3
    answer = json.loads(out)
    assert answer["fit"]["verdict"] == "does-not-fit"
    assert answer["fit"]["headroom_bytes"] < 0


WRONG = [
    (("llama-3.1-8",), "Llama-3.1-8B"),
    (("llama-3.1-8b", "--gpu", "rtx-4099"), "rtx-4090-24gb"),
    (("llama-3.1-8b", "--method", "qlor"), "--method`: unknown name `qlor`\nhint: did you mean `qlora`"),
    (("llama-3.1-8b", "--method", "qlora", "--quantization", "none"), "--quantization none` contradict"),
    (("llama-3.1-8b", "--method", "full", "--quantization", "nf4"), "--quantization nf4"),
    (("llama-3.1-8b", "--method", "full", "--rank", "8"), "`--rank` is for `--method lora`"),
    (("llama-3.1-8b", "--double-quant"), "`--double-quant` needs a quantised base"),
    (("llama-3.1-8b", "--quantization", "int8", "--double-quant"), "`--double-quant` is for 4 bits"),
    (("llama-3.1-8b", "--quantization", "nf5"), "--quantization`: unknown name `nf5`\nhint: did you mean `nf4`"),
    (("llama-3.1-8b", "--rank", "0"), "`--rank`: expected a number from 1"),
    (("llama-3.1-8b", "--rank", "-3"), "`--rank`: expected a whole number"),
    (("llama-3.1-8b", "--rank", "5000"), "`--rank` and `--targets`: a rank of 5000 is above"),
    (("llama-3.1-8b", "--targets", "nope"), "`--targets`: the targets `nope` match no linear"),
    (("llama-3.1-8b", "--targets", "("), "`--targets`: `(` is neither"),
    (("llama-3.1-8b", "--targets", ","), "`--targets` names nothing"),
    (("llama-3.1-8b", "--lora-dropout", "1.5"), "`--lora-dropout`: expected a number from 0"),
    (("llama-3.1-8b", "--seq-len", "0"), "`--seq-len`: expected a number from 1"),
    (("llama-3.1-8b", "--seq-len", "-1"), "`--seq-len`: expected a whole number such as `2048`"),
    (("gemma-3-12b", "--engine", "simulate"), "google/gemma-3-12b-it: the family `gemma3` (images and text) cannot be"),
    (("Qwen/Qwen3.5-9B", "--engine", "simulate"), "`Qwen/Qwen3-8B` has about its size"),
    (("llama-3.1-8b", "--seq-len", "1e18"), "`--seq-len`: expected a number from 1"),
    (("llama-3.1-8b", "--seq-len", "1e9"), "tensor of 513 TB\nhint: lower `--micro-batch`, `--seq-len`"),
    (("llama-3.1-8b", "--micro-batch", "1e6", "--seq-len", "1e6"), "`--seq-len` or `--grad-accum`"),
    (("llama-3.1-8b", "--attention", "eager", "--seq-len", "1e7"), "tensor of 400 TB"),
    (("llama-3.1-8b", "--grad-accum", "1e12"), "`--grad-accum`: expected a number from 1"),
    (("llama-3.1-8b", "--optimizer", "adam"), "--optimizer`: unknown name `adam`\nhint: did you mean `adamw`"),
    (("llama-3.1-8b", "--precision", "bf15"), "--precision`: unknown name `bf15`\nhint: did you mean `bf16`"),
    (("llama-3.1-8b", "--weight-dtype", "int8"), "`--weight-dtype`: expected a floating-point type"),
    (("llama-3.1-8b", "--autocast-dtype", "fp32"), "`--autocast-dtype`: expected"),
    (("llama-3.1-8b", "--checkpointing", "ful"), "--checkpointing`: unknown name `ful`\nhint: did you mean `full`"),
    (("llama-3.1-8b", "--checkpointing", "every-0"), "--checkpointing`: unknown name `every-0`"),
    (("llama-3.1-8b", "--attention", "fash"), "did you mean `flash`"),
    (("llama-3.1-8b", "--stack", "hf@4.12"), "hf@4.40"),
    (("llama-3.1-8b", "--stack", "unsloth"), "there are `hf` and its versions, `hf@4.40` to `hf@5.24`"),
    (("llama-3.1-8b", "--trainable", "x"), "`--trainable` needs `--method freeze`"),
    (("llama-3.1-8b", "--method", "freeze"), "`--method freeze` needs to know what is trained"),
    (("llama-3.1-8b", "--engine", "sim"), "--engine`: unknown name `sim`"),
    (("llama-3.1-8b", "--by", "line"), "`--by line`: a counted run knows no lines\nhint: `wazn trace`"),
    (("llama-3.1-8b", "--gpus", "8"), "`--gpus`: more than one GPU"),
    (("llama-3.1-8b", "--tp", "2"), "`--tp`: more than one GPU"),
    (("llama-3.1-8b", "--parallel", "zero4"), "did you mean `zero3`"),
    (("llama-3.1-8b", "--parallel", "zero3"), "`--parallel zero3`"),
    (("llama-3.1-8b", "--offload", "all"), "`--offload all`"),
    (("llama-3.1-8b", "--loss", "fused"), "`--loss fused`"),
    (("bigscience/bloom-560m", "--attention", "flash"), "`--attention eager`"),
    (("llama-3.1-8b", "--seqlen", "5"), "did you mean `--seq-len`"),
    ((), "the argument `MODEL` is missing"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "said"), WRONG, ids=range(len(WRONG)))
def test_a_wrong_question_is_answered_in_two_lines(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], said: str
) -> None:
    """Status 2, nothing on stdout, no traceback; stderr names the option and what to write instead."""
    status, out, err = run(capsys, *arguments)
    assert status == 2
    assert out == ""
    assert err.startswith("error: ")
    assert said in err
    assert len(err.splitlines()) <= 2


def test_the_values_of_the_help_are_those_of_the_code() -> None:
    """Every name that `--help` lists for an option is one that the option takes, and none is left out."""
    from wazn.cli.estimate import command
    from wazn.cluster import Offload, Parallel
    from wazn.estimation.estimate import ENGINES
    from wazn.estimation.options import CHECKPOINTING, PRECISIONS
    from wazn.recipe import Attention, Loss, Method, Optimizer, QuantizationFormat

    names = {
        "method": [*Method],
        "quantization": [*QuantizationFormat, "none"],
        "precision": [*PRECISIONS],
        "optimizer": [*Optimizer],
        "checkpointing": [name.replace("every-2", "every-N") for name in CHECKPOINTING],
        "attention": [*Attention],
        "loss": [*Loss],
        "parallel": [*Parallel],
        "offload": [*Offload],
        "engine": list(ENGINES),
    }
    helps = {param.name: getattr(param, "help", "") for param in command.params}
    for option, listed in names.items():
        for name in listed:
            assert str(name) in helps[option], (option, name)


def test_every_option_of_the_core_is_at_the_door() -> None:
    """The command line has every field of `Options`, and no other but those of the door itself."""
    from wazn.cli.estimate import command
    from wazn.estimation.options import OPTION_NAMES

    own = {"model", "gpu", "engine", "by", "output_format", "lang"}
    assert {param.name for param in command.params} == own | set(OPTION_NAMES)


@pytest.mark.parametrize("columns", [20, 40, 60, 80, 100, 200])
def test_no_line_is_wider_than_the_terminal(columns: int) -> None:
    """On a terminal every line fits, down to 40 columns; a bar that has no room is left out."""
    out = on_terminal(columns, *QUESTION, "--method", "full", NO_COLOR="1")
    widest = max(len(line) for line in out.splitlines())
    assert widest <= max(columns, 40)
    assert ("█" in out) == (columns >= 50)


def test_colours_only_on_a_terminal_that_wants_them() -> None:
    """Colours on a terminal; none with NO_COLOR (even empty), with TERM=dumb, or in a pipe."""
    assert "\x1b[" in on_terminal(80, *QUESTION)
    assert "\x1b[" not in on_terminal(80, *QUESTION, NO_COLOR="")
    assert "\x1b[" not in on_terminal(80, *QUESTION, TERM="dumb")
    assert b"\x1b[" not in process(*QUESTION, FORCE_COLOR="1", TERM="xterm").stdout


def test_a_pipe_is_80_columns_wide() -> None:
    """In a pipe nothing depends on the terminal that happens to stand behind it."""
    narrow, wide = process(*QUESTION, COLUMNS="30"), process(*QUESTION, COLUMNS="300")
    assert narrow.stdout == wide.stdout
    assert max(len(line) for line in narrow.stdout.decode().splitlines()) <= 80


def test_an_encoding_without_blocks_gets_letters() -> None:
    """ASCII output has `#` for bars and no question marks for what could not be written."""
    out = process(*QUESTION, PYTHONIOENCODING="ascii").stdout.decode("ascii")
    assert "###" in out
    assert "?" not in out


def test_one_screen() -> None:
    """The answer about one card and one common run has at most 30 lines of 80 columns."""
    for more in ((), ("--method", "full"), ("--micro-batch", "8", "--checkpointing", "none")):
        assert len(process(*QUESTION, *more).stdout.decode().splitlines()) <= 30


def test_json_in_a_pipe_is_the_same_everywhere() -> None:
    """JSON is plain UTF-8 text and knows nothing of terminals."""
    first = process(*QUESTION, "--format", "json", COLUMNS="30").stdout
    assert json.loads(first)["schema"] == "wazn.estimate/1"
    assert first == process(*QUESTION, "--format", "json", COLUMNS="200").stdout


def test_the_command_loads_nothing_that_it_does_not_need() -> None:
    """Neither a heavy library nor the families of other models nor the Hub is imported for a catalogue model."""
    code = (
        "import contextlib, sys\nfrom wazn.cli.main import main\n"
        "with contextlib.suppress(SystemExit):\n"
        f"    main(['estimate', {QUESTION[0]!r}, '--format', 'json'])\n"
        "print('\\n'.join(sys.modules), file=sys.stderr)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(run.stderr.split())
    heavy = {"torch", "transformers", "pydantic", "fastapi", "numpy", "rich", "huggingface_hub"}
    assert {name.partition(".")[0] for name in loaded} & heavy == set()
    families = {name for name in loaded if name.startswith("wazn.model.families.")}
    assert families <= {"wazn.model.families.llama", "wazn.model.families.common"}
    assert {"wazn.facts.hub", "wazn.calc", "wazn.trace", "tomllib", "csv"} & loaded == set()


def test_who_waits_hears_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A second of silence about a model of the Hub is broken on a terminal, and only there."""
    from wazn.cli import estimate as door

    monkeypatch.setattr(door, "_SECONDS_OF_SILENCE", 0.01)
    for model, on_a_terminal in (("org/model", True), ("org/model", False), ("llama", True)):
        monkeypatch.setattr(sys.stderr, "isatty", lambda answer=on_a_terminal: answer)
        with door._talking(model):
            time.sleep(0.3)
        said = "asking for org/model ...\n" if "/" in model and on_a_terminal else ""
        assert capsys.readouterr().err == said


def test_a_name_that_stdout_cannot_encode_comes_through_whole(tmp_path: Path) -> None:
    """The folder's Arabic name reads back from the JSON also where stdout is ASCII."""
    folder = tmp_path / "نموذج"
    folder.mkdir()
    config = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128}
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 257}
    (folder / "config.json").write_text(json.dumps({**config, **sizes}))
    ran = process(str(folder), "--format", "json", PYTHONIOENCODING="ascii")
    assert ran.returncode == 0
    assert json.loads(ran.stdout)["model"]["id"] == str(folder)
