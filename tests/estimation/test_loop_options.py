"""What a loop of one's own does otherwise than Trainer: it keeps the outputs, it fills gradients with zeros."""

from __future__ import annotations

from typing import Any

import pytest
from click.testing import CliRunner

import wazn
from wazn.cli.main import cli
from wazn.errors import InputError

MODEL = "llama-3.2-1b"
LOGITS = 1 * 2048 * 128_256  # one sample, 2,048 tokens, the vocabulary of Llama 3
PARAMETERS = 1_235_814_400


def peaks(**options: Any) -> dict[tuple[int, str], int]:
    """The highest level of each phase."""
    answer = wazn.estimate(MODEL, **options)
    return {(item.step, item.phase): item.peak_allocated_bytes for item in answer.phases}


def test_outputs_that_are_kept_are_there_in_backward() -> None:
    """Under autocast they hold fp32 logits, without it those of the model: 4 or 2 bytes each."""
    for precision, logit_bytes in (("bf16-autocast", 4), ("bf16", 2)):
        kept, let_go = (
            wazn.peak(wazn.estimate(MODEL, precision=precision, keep_outputs=keep).timeline)
            for keep in (True, False)
        )
        assert kept.peak_bytes - let_go.peak_bytes == LOGITS * logit_bytes


def test_gradients_that_are_not_set_to_none_stay() -> None:
    """In the second step's forward pass all gradients are there, in the type of the weights."""
    options = {"method": "full", "precision": "bf16", "optimizer": "sgd"}
    kept = peaks(**options, zero_grad_to_none=False)
    none = peaks(**options)
    assert kept[1, "forward"] == none[1, "forward"]
    assert kept[2, "forward"] - none[2, "forward"] == pytest.approx(2 * PARAMETERS, abs=512 * 200)


def test_the_stack_says_what_is_not_said() -> None:
    """Trainer lets go of both; the answer names it as the stack's choice."""
    answer = wazn.estimate(MODEL)
    assert not answer.recipe.keep_outputs
    assert answer.recipe.zero_grad_set_to_none
    assert answer.defaults["keep-outputs"] == "stack"
    assert answer.defaults["zero-grad-to-none"] == "stack"
    said = wazn.estimate(MODEL, keep_outputs=True, zero_grad_to_none=False)
    assert said.recipe.keep_outputs
    assert not said.recipe.zero_grad_set_to_none
    assert not {"keep-outputs", "zero-grad-to-none"} & set(said.defaults)


def test_the_command_line_has_both() -> None:
    """`--keep-outputs` and `--no-zero-grad-to-none` are shown in the question."""
    arguments = ["estimate", MODEL, "--keep-outputs", "--no-zero-grad-to-none"]
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == 0
    words = " ".join(result.stdout.split())
    assert "outputs kept, gradients kept between steps" in words


def test_a_switch_is_true_or_false() -> None:
    """Anything else is refused by name."""
    with pytest.raises(InputError, match="--keep-outputs"):
        wazn.estimate(MODEL, keep_outputs="yes")
