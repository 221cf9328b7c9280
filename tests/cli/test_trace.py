"""`wazn trace`: the options of `wazn estimate`, the same answer, and what only a rehearsal has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from wazn.cli.main import main

pytest.importorskip("torch")
pytest.importorskip("transformers")

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "vocab_size": 32000,
}


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Run the command line; its status, stdout and stderr."""
    with pytest.raises(SystemExit) as left:
        main(["trace", *arguments])
    captured = capsys.readouterr()
    return int(left.value.code or 0), captured.out, captured.err


@pytest.fixture
def llama(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return str(tmp_path)


def test_it_has_the_options_of_estimate_and_those_of_a_script() -> None:
    """Every option of a run, none but the engine's is missing; every field of `Script` that a person chooses."""
    from wazn.cli.estimate import command as estimate
    from wazn.cli.trace import command as trace
    from wazn.trace.script import Script

    of_estimate = {param.name for param in estimate.params} - {"engine"}
    own = {param.name for param in trace.params} - of_estimate
    # the rest is the card's, the plain loop's habits, or for those who compare with cut models
    not_asked = {
        "capability", "matmul_workspaces", "num_layers", "num_steps", "num_items", "attention_mask", "raise_outputs",
        "use_cache", "code_folder", "gpu",
    }  # fmt: skip
    assert own == set(Script.__dataclass_fields__) - not_asked | {"trust_remote_code"}


def test_text_and_json_say_the_same(capsys: pytest.CaptureFixture[str], llama: str) -> None:
    """stdout has the answer and nothing else, though libraries like to talk; the JSON is whole."""
    status, out, err = run(capsys, llama, "--seq-len", "64", "--format", "json")
    assert (status, err) == (0, "")
    document = json.loads(out)
    assert document["engine"] == "trace"
    assert document["rehearsed"]["loop"] == "trainer"
    assert set(document["rehearsed"]["libraries"]) >= {"torch", "transformers"}
    status, text, err = run(capsys, llama, "--seq-len", "64")
    assert (status, err) == (0, "")
    assert "Rehearsed in the trainer loop, on fake cpu tensors: torch 2." in text


@pytest.mark.parametrize(
    ("by", "row"),
    [
        ("module", "model.layers.*.mlp.up_proj.base_layer x 3"),
        ("line", "transformers/loss/loss_utils.py:"),
        ("op", "aten._log_softmax.default"),
        ("category", "logits-and-loss"),
    ],
)
def test_by_says_what_holds_the_peak(
    capsys: pytest.CaptureFixture[str], llama: str, by: str, row: str
) -> None:
    """The rows stand under a heading, layers summed."""
    status, out, _ = run(capsys, llama, "--seq-len", "512", "--by", by)
    assert status == 0
    table = out.partition(f"What holds the peak, by {by}:")[2]
    assert row in table


def test_what_does_not_fit_has_status_3(capsys: pytest.CaptureFixture[str], llama: str) -> None:
    """As with `wazn estimate`."""
    status, out, _ = run(capsys, llama, "--micro-batch", "512", "--gpu", "1GB")
    assert status == 3
    assert "does not fit" in out


WRONG = [
    (("--loop", "sfd"), "`--loop`: unknown name `sfd`\nhint: did you mean `sft`"),
    (("--image-size", "large"), "`--image-size`: expected a height and a width such as `1024x768`"),
    (("--image-size", "0x5"), "`--image-size`: expected"),
    (("--optim", "adamw_tarch"), "adamw_tarch"),
    (("--targets", "nope"), "`--targets`: peft refuses"),
    (("--master-dtype", "fp32"), "`--master-dtype` cannot be rehearsed"),
    (("--checkpointing", "selective-attention"), "`--engine simulate`"),
    (("--loss", "fused"), "`--loss fused`"),
    (("--gpus", "2"), "more than one GPU"),
    (("--stack", "hf@4.41"), "a rehearsal runs what is installed"),
    (("--method", "freeze", "--trainable", "nope*"), "`--trainable nope*` matches no parameter"),
    (("--engine", "trace"), "unknown option `--engine`"),
    (("--by", "layer"), "`--by`: unknown name `layer`"),
    (("--padding", "1.5"), "`--padding`"),
    (("--lang", "fa"), "`--lang fa`"),
    (("--loop", "plain", "--optim", "sgd"), "`--optim` is of `--loop` trainer, sft, dpo, reward and grpo, found"),
    (("--optim", "sgd", "--optimizer", "adamw"), "`--optim` takes the place of `--optimizer`"),
    (("--activation-offloading",), "`--activation-offloading` is of `--loop` sft, dpo, reward and grpo"),
    (("--reference", "model"), "`--reference` is of `--loop` dpo and grpo, found `--loop trainer`"),
    (("--loop", "dpo", "--generations", "8"), "`--generations` is of `--loop` grpo, found"),
    (("--loop", "sft", "--prompt-len", "8"), "`--prompt-len` is of `--loop` dpo and grpo"),
    (("--loop", "grpo", "--padding", "0.5"), "`--padding` is of"),
    (("--loop", "plain", "--packing", "2"), "`--packing` is of `--loop` trainer and sft"),
    (("--packing", "2", "--padding", "0.5"), "`--packing` leaves no padding"),
    (("--image-size", "64x64"), "`--image-size` is of images, and there are none"),
    (("--packing", "0"), "`--packing`: expected 1 or more, found `0`"),
    (("--loop", "grpo", "--generations", "0"), "`--generations`: expected 1 or more"),
    (("--target-len", "0"), "`--target-len`: expected 1 or more"),
    (("--target-len", "8"), "`--target-len` is of an encoder-decoder, and this is a model for causal-lm"),
    (("--images", "1"), "`llama` takes no images\nhint: leave `--images` out"),
    (("--optim", "adamw_8bits"), "hint: did you mean `adamw_8bit`"),
    (("--modules-to-save", "lmhead"), "`--modules-to-save lmhead` matches no module\nhint: for example `lm_head`"),
    (("--loop", "sft", "--modules-to-save", "none_here"), "`--modules-to-save none_here` matches no module"),
    (("--targets", "all-linear,q_proj"), "`all-linear` stands alone"),
    (("--optim", "nosuch"), "`--optim`: `TrainingArguments` knows no `nosuch`"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "said"), WRONG, ids=range(len(WRONG)))
def test_a_wrong_question_is_answered_in_two_lines(
    capsys: pytest.CaptureFixture[str], llama: str, arguments: tuple[str, ...], said: str
) -> None:
    """Status 2, nothing on stdout, no traceback; stderr says what is wrong."""
    status, out, err = run(capsys, llama, *arguments)
    assert (status, out) == (2, "")
    assert said in err
    assert err.startswith("error: ")
    assert len(err.splitlines()) <= 2


def test_the_code_of_a_model_is_run_from_a_folder_only(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Nothing is fetched to be run."""
    status, _, err = run(capsys, "smollm2-135m", "--trust-remote-code")
    assert status == 2
    assert "`smollm2-135m` is not a folder" in err
