"""What stops a rehearsal is said as an answer: the operation, the line of code, what to do."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.recipes import make_recipe
from wazn.errors import InputError, Unsupported, WaznError
from wazn.trace.refusals import refusals
from wazn.trace.step import rehearse
from wazn.trace.world import World

_LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_hidden_layers": 1,
    "vocab_size": 100,
}


@pytest.fixture
def refused_in_llama(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that puts a call into the real Llama's forward and returns the error that comes of it."""
    from transformers.models.llama import modeling_llama

    original = modeling_llama.LlamaMLP.forward

    def refused(stop: Any) -> Unsupported:
        monkeypatch.setattr(
            modeling_llama.LlamaMLP,
            "forward",
            lambda self, x: original(self, _stopped(stop, x)),
        )
        with pytest.raises(Unsupported) as caught:
            rehearse(_LLAMA, make_recipe(micro_batch=1, seq_len=8))
        return caught.value

    return refused


def _stopped(stop: Any, x: torch.Tensor) -> torch.Tensor:
    stop(x)
    return x


def test_a_shape_that_depends_on_data(refused_in_llama: Any) -> None:
    """How many bins there are is a question of data: the operator and the line are named."""
    error = refused_in_llama(lambda x: torch.bincount((x * 100).long().flatten()))
    assert "`aten.bincount.default` depends on data at " in error.message
    assert "test_refusals.py" in error.message


def test_an_operator_without_a_fake_kernel(refused_in_llama: Any) -> None:
    """A custom operator that registers none is named, with what its package can do."""
    library = torch.library.Library("wazn_refusals", "DEF")
    library.define("opaque(Tensor x) -> Tensor")
    library.impl("opaque", lambda x: x.clone(), "CPU")
    error = refused_in_llama(torch.ops.wazn_refusals.opaque)
    assert "wazn_refusals" in error.message
    assert "has no fake kernel at " in error.message
    assert "register_fake" in str(error.hint)


def test_what_a_models_code_raises(refused_in_llama: Any) -> None:
    """The type, the words and the line of the library are there."""
    error = refused_in_llama(lambda x: x.view(3, 5, 7))
    assert error.message.startswith("the rehearsal stopped at ")
    assert "RuntimeError: shape '[3, 5, 7]' is invalid for input of size 512" in error.message


def test_a_models_code_that_leaves_the_program(refused_in_llama: Any) -> None:
    """`SystemExit` is no `Exception`, and an answer is due."""

    def leave(x: torch.Tensor) -> None:
        raise SystemExit(7)

    assert "SystemExit: 7" in refused_in_llama(leave).message


def test_a_missing_implementation_that_names_no_operator() -> None:
    """It is what a model's code raised."""
    with pytest.raises(Unsupported, match="NotImplementedError: not yet"), refusals():
        _library("raise NotImplementedError('not yet')")


def test_what_pytorch_raises_in_a_stand_in_of_ours() -> None:
    """Heads that do not fit stop in attention, which is called from wazn's code: an answer, not a defect."""
    config = {**_LLAMA, "model_type": "ernie4_5", "num_key_value_heads": 7, "head_dim": 16}
    with pytest.raises(WaznError):
        rehearse(config, make_recipe(micro_batch=1, seq_len=8))


def test_what_pytorch_refuses_of_a_call_that_is_handed_on() -> None:
    """A number that no C++ integer holds: `OverflowError`, without a frame of PyTorch's."""
    config = {**_LLAMA, "model_type": "granite", "residual_multiplier": -(10**20)}
    with pytest.raises(Unsupported, match=r"OverflowError.*"):
        rehearse(config, make_recipe(micro_batch=1, seq_len=8))


def test_errors_of_ours_pass() -> None:
    """An answer stays as it is, and a defect of wazn's own code is no answer."""
    with pytest.raises(InputError, match="the question"), refusals():
        raise InputError("the question")

    with pytest.raises(TypeError), refusals():
        World(capability=None).tracker.take("a lot", op="")  # type: ignore[arg-type]


def _library(code: str) -> None:
    exec(compile(code, "/site-packages/somewhere/modeling.py", "exec"), {})
