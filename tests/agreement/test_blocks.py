"""The layer of the tape is the real decoder layer of each family under fake tensors, to the byte."""

from __future__ import annotations

from typing import Any

import pytest

from tests.agreement.families import CONFIGS

pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.agreement.compare import assert_agree  # noqa: E402
from tests.agreement.layers import real_layer, tape_layer  # noqa: E402

EAGER_ONLY = {"bloom", "gemma2", "gpt_neo", "mpt"}
ALL = tuple(CONFIGS)
SDPA = tuple(name for name in CONFIGS if name not in EAGER_ONLY)
# layers of two kinds alternate: with and without rotary embedding, with and without a window
ALTERNATING = (
    "cohere2",
    "exaone4",
    "gemma3",
    "gemma3, short window",
    "olmo3",
    "smollm3",
)


def check(name: str, **how: Any) -> None:
    """Run both and compare."""
    config = CONFIGS[name]
    assert_agree(real_layer(config, **how), tape_layer(config, **how))


@pytest.mark.parametrize("name", SDPA)
def test_sdpa(name: str) -> None:
    """In bf16, with all weights trained, attention by scaled dot product."""
    check(name)


@pytest.mark.parametrize("name", SDPA)
def test_sdpa_in_fp32(name: str) -> None:
    """In fp32, which the flash kernel does not take."""
    check(name, dtype="float32")


@pytest.mark.parametrize("name", ALL)
def test_eager(name: str) -> None:
    """In bf16, with all weights trained, attention written out."""
    check(name, attention="eager")


@pytest.mark.parametrize("name", ALL)
def test_frozen(name: str) -> None:
    """With frozen weights only the gradient of the hidden states is computed, and less is saved."""
    check(name, trained=False, attention="eager" if name in EAGER_ONLY else "sdpa")


@pytest.mark.parametrize("name", ALL)
def test_autocast(name: str) -> None:
    """fp32 weights under bf16 autocast: casts of inputs and weights are saved too."""
    attention = "eager" if name in EAGER_ONLY else "sdpa"
    check(name, autocast="bfloat16", dtype="float32", attention=attention)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_one_sample(name: str, attention: str) -> None:
    """One sample, of a length that is no multiple of 8 x 32: heads can be merged with the batch by a view."""
    if attention == "sdpa" and name in EAGER_ONLY:
        pytest.skip("the class knows no scaled dot product attention")
    check(name, batch=1, length=200, attention=attention)


@pytest.mark.parametrize("name", ALTERNATING)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_second_kind(name: str, attention: str) -> None:
    """The second layer, where it is of another kind than the first."""
    check(name, index=1, attention=attention)
