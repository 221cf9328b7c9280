"""`wazn calc` as people and programs meet it: the formula with its numbers, and the JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest

from wazn.cli.main import main
from wazn.report.calc import answer, as_text


@pytest.fixture
def wazn(capsys: pytest.CaptureFixture[str]) -> Any:
    """Run `wazn calc ...` and return what it printed."""

    def run(*arguments: str, status: int = 0) -> str:
        with pytest.raises(SystemExit) as caught:
            main(["calc", *arguments])
        assert caught.value.code == status
        out, err = capsys.readouterr()
        return out if status == 0 else err

    return run


LORA = ("lora", "--layers", "32", "--hidden", "4096", "--rank", "8", "--modules", "q,v")
CACHE = ("--layers", "32", "--kv-heads", "8", "--head-dim", "128", "--tokens", "8192")
ACCUMULATION = ("accumulation", "--micro-batch", "4", "--steps", "8", "--activation-per-sample")

SAID = [
    (
        ("training", "--params", "7B", "--bytes-per-param", "16", "--activations", "20GB"),
        [
            "7,000,000,000 parameters × 16 bytes",
            "= 112 GB",
            "112 GB + 20 GB",
            "= 132 GB (122.93 GiB)",
        ],
    ),
    (
        ("training", "--params", "7B", "--optimizer", "adam"),
        [
            "7,000,000,000 × (2 + 2 + 4 + 4 + 4 = 16) bytes  = 112 GB",
            "7,000,000,000 × 12 bytes",
            "= 84 GB",
        ],
    ),
    (
        ("training", "--params", "1.5B", "--optimizer", "adam"),
        ["(2 + 2 + 4 + 4 + 4 = 16) bytes  = 24 GB", "1,500,000,000 × 2 bytes", "= 3 GB"],
    ),
    (
        ("training", "--params", "7B", "--optimizer", "adam-8bit"),
        [
            "parameters × 12 bytes",
            "= 84 GB",
            "(2 + 2 + 4 + 1 + 1 + 0.03125 = 10.03125) bytes  = 70.219 GB",
        ],
    ),
    (
        ("training", "--params", "7B", "--optimizer", "sgd-momentum"),
        ["parameters × 8 bytes", "(2 + 2 + 4 = 8) bytes", "(2 + 2 + 4 + 4 = 12) bytes  = 84 GB"],
    ),
    (
        (*ACCUMULATION, "0.5GB"),
        [
            "4 per micro-batch × 8 steps × 1 replica  = 32",
            "4 per micro-batch × 0.5 GB per sample",
            "= 2 GB",
        ],
    ),
    ((*ACCUMULATION, "0.5GB", "--replicas", "4"), ["× 8 steps × 4 replicas  = 128", "= 2 GB"]),
    (
        (*LORA, "--params", "7B"),
        [
            "8 × (4,096 + 4,096)        = 65,536",
            "32 × (65,536 + 65,536)     = 4,194,304",
            "4,194,304 / 7,000,000,000  = 0.06 %",
        ],
    ),
    (
        ("lora", "--model", "llama-2-7b", "--rank", "8"),
        ["8 × (4,096 + 4,096)", "= 4,194,304\n", "4,194,304 / 6,738,415,616", "= 0.06 %"],
    ),
    (
        ("qlora", "--params", "7B"),
        [
            "7,000,000,000 parameters × 4 bits / 8  = 3.5 GB",
            "32 / 64                                = 0.5 bit",
            "8 / 64 + 32 / (64 × 256)               = 0.127 bit",
        ],
    ),
    (
        ("inference", "--params", "7B", "--bits", "16"),
        ["7,000,000,000 parameters × 16 bits / 8  = 14 GB", "Plus the KV cache"],
    ),
    (
        ("inference", "--params", "7B", "--bits", "16", *CACHE, "--sequences", "4"),
        [
            "= 14 GB\n",
            "131,072 bytes × 8,192 tokens × 4 sequences",
            "= 4.295 GB (4.00 GiB)",
            "14 GB + 4.295 GB",
        ],
    ),
    (
        ("inference", "--model", "llama-3.1-8b", "--tokens", "8192"),
        # 8,030,261,248 parameters: the published count of the checkpoint
        ["8,030,261,248 parameters × 16 bits / 8", "= 16.061 GB", "= 1.074 GB (1.00 GiB)"],
    ),
    (
        ("kv-cache", *CACHE, "--sequences", "4", "--bits", "16"),
        [
            "2 × 32 layers × 8 KV heads × 128 × 16 bits / 8",
            "= 131,072 bytes",
            "= 4.295 GB (4.00 GiB)",
        ],
    ),
]


@pytest.mark.parametrize(("arguments", "parts"), SAID, ids=[" ".join(a) for a, _ in SAID])
def test_the_formula_is_shown_with_its_numbers(
    wazn: Any, arguments: tuple[str, ...], parts: list[str]
) -> None:
    """Each line can be checked with a pencil: what goes in, what comes out, in the textbook's units."""
    out = wazn(*arguments)
    for part in parts:
        assert part in out


@pytest.mark.parametrize(("arguments", "parts"), SAID, ids=[" ".join(a) for a, _ in SAID])
def test_json_has_every_key(wazn: Any, arguments: tuple[str, ...], parts: list[str]) -> None:
    """The schema's keys are always present, and no line that people see is missing from it."""
    data = json.loads(wazn(*arguments, "--format", "json"))
    assert list(data) == ["schema", "calc", "inputs", "result", "formulas", "notes"]
    assert data["schema"] == "wazn.calc/1"
    assert data["calc"] == arguments[0]
    assert all(set(f) == {"section", "code", "label", "formula", "value"} for f in data["formulas"])
    assert all(set(n) == {"code", "params", "text"} for n in data["notes"])


def test_json_bytes_are_exact(wazn: Any) -> None:
    """Where the text rounds to three decimals, the JSON has the bytes."""
    data = json.loads(
        wazn("training", "--params", "7B", "--optimizer", "adam-8bit", "--format", "json")
    )
    assert data["result"]["peak_bytes"] == 84_000_000_000
    (counted,) = data["result"]["counted"]
    assert counted["bytes_per_parameter"] == 10.03125
    assert counted["states_bytes"] == 70_218_750_000
    assert sum(part["bytes"] for part in counted["parts"]) == counted["states_bytes"]


def test_a_narrow_terminal_gets_stacked_lines() -> None:
    """Every line of a formula fits 60 columns where the table would not."""
    from wazn import calc

    spoken = answer(
        calc.training(num_parameters=7 * 10**9, optimizer="adam", activation_bytes=10**9)
    )
    assert max(map(len, as_text(spoken).splitlines())) > 60
    assert max(map(len, as_text(spoken, width=60).splitlines())) <= 60


@pytest.mark.parametrize("lang", ["ar", "fa"])
def test_a_language_without_words_yet_is_refused_and_says_what_works(wazn: Any, lang: str) -> None:
    """Nobody gets English after asking for another language."""
    err = wazn("qlora", "--params", "7B", "--lang", lang, status=2)
    assert err.startswith(f"error: `--lang {lang}`")
    assert "hint: `--lang en`" in err


@pytest.mark.parametrize(
    "arguments",
    [
        ("training", "--params", "7B"),
        ("training", "--params", "7B", "--bytes-per-param", "16", "--optimizer", "adam"),
        ("training", "--params", "-7B", "--bytes-per-param", "16"),
        ("training", "--params", "1e18", "--bytes-per-param", "16"),
        ("training", "--params", "7B", "--optimizer", "shampoo"),
        ("accumulation", "--micro-batch", "0", "--steps", "8", "--activation-per-sample", "1GB"),
        ("accumulation", "--micro-batch", "4", "--steps", "8", "--activation-per-sample", "1G"),
        ("lora", "--layers", "32", "--hidden", "4096", "--rank", "5000"),
        ("lora", "--layers", "32", "--hidden", "4096", "--rank", "8", "--modules", ""),
        ("lora", "--layers", "32", "--hidden", "4096", "--rank", "8", "--modules", "gate"),
        ("lora", "--rank", "8", "--hidden", "4096"),
        ("lora", "--rank", "8", "--model", "llama-3.1-8b", "--layers", "32"),
        ("lora", "--rank", "8", "--model", "llama-3.1-8b", "--modules", "q,nonsense"),
        ("qlora", "--params", "7B", "--block", "0"),
        ("inference", "--params", "7B", "--bits", "0"),
        ("inference", "--bits", "16"),
        ("inference", "--params", "7B", "--layers", "32"),
        ("inference", "--params", "7B", "--model", "llama-3.1-8b"),
        ("inference", "--model", "llama-3.1-8b", "--tokens", "8192", "--layers", "32"),
        ("inference", "--model", "llama-3.1-8b", "--tokens", "1" + 18 * "0"),
        (
            "kv-cache",
            "--layers",
            "32",
            "--kv-heads",
            "8",
            "--head-dim",
            "128",
            "--tokens",
            "1" + 18 * "0",
        ),
    ],
    ids=" ".join,
)
def test_a_question_without_an_answer_names_the_option(
    wazn: Any, arguments: tuple[str, ...]
) -> None:
    """Status 2, and the message speaks of options as they are typed, not of names inside the code."""
    err = wazn(*arguments, status=2)
    assert err.startswith("error: ")
    assert "`--" in err
    assert "_" not in err


def test_a_few_bytes_without_a_unit_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """`20` where 20 GB were meant is not read as 20 bytes; 0, and 20 with a unit or the zeros, are what they say."""
    with pytest.raises(SystemExit) as left:
        main(["calc", "training", "--params", "7B", "--optimizer", "adam", "--activations", "20"])
    assert left.value.code == 2
    err = capsys.readouterr().err
    assert "`--activations`: expected a size with its unit, found `20`" in err
    assert "hint: `20GB`" in err
    for size in ("0", "20 B", "20_000_000_000"):
        with pytest.raises(SystemExit) as left:
            main(
                ["calc", "training", "--params", "7B", "--optimizer", "adam", "--activations", size]
            )
        assert left.value.code == 0
