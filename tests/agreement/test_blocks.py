"""The layer of the tape is the real decoder layer of each family under fake tensors, to the byte."""

from __future__ import annotations

from typing import Any

import pytest

from tests.agreement.compare import assert_agree
from tests.agreement.families import CONFIGS, WITH_EXPERTS
from tests.agreement.golden import Golden
from tests.agreement.layers import real_layer, tape_layer

EAGER_ONLY = {"bloom", "gemma2", "gpt_neo", "mpt"}
ALL = tuple(CONFIGS)
SDPA = tuple(name for name in CONFIGS if name not in EAGER_ONLY)
FLASH = tuple(name for name in CONFIGS if name not in {"bloom", "falcon, alibi", "mpt"})
# layers of two kinds alternate: with and without rotary embedding, with and without a window
ALTERNATING = (
    "cohere2",
    "exaone4",
    "gemma3",
    "gemma3, short window",
    "olmo3",
    "smollm3",
)


def check(golden: Golden, name: str, **how: Any) -> None:
    """Run both and compare."""
    config = CONFIGS.get(name) or WITH_EXPERTS[name]
    assert_agree(golden.op(lambda: real_layer(config, **how)), tape_layer(config, **how))


@pytest.mark.parametrize("name", SDPA)
def test_sdpa(name: str, golden: Golden) -> None:
    """In bf16, with all weights trained, attention by scaled dot product."""
    check(golden, name)


@pytest.mark.parametrize("name", SDPA)
def test_sdpa_in_fp32(name: str, golden: Golden) -> None:
    """In fp32, which the flash kernel does not take."""
    check(golden, name, dtype="float32")


@pytest.mark.parametrize("name", ALL)
def test_eager(name: str, golden: Golden) -> None:
    """In bf16, with all weights trained, attention written out."""
    check(golden, name, attention="eager")


@pytest.mark.parametrize("name", FLASH)
@pytest.mark.parametrize("batch", [2, 1])
def test_flash(name: str, batch: int, golden: Golden) -> None:
    """The package flash-attn under transformers' flash_attention_2; with one sample it looks for packed sequences."""
    check(golden, name, attention="flash", batch=batch)


@pytest.mark.parametrize("name", FLASH)
def test_flash_under_autocast(name: str, golden: Golden) -> None:
    """fp32 queries, keys and values are cast for flash-attn."""
    check(golden, name, attention="flash", autocast="bfloat16", dtype="float32")


@pytest.mark.parametrize("name", ALL)
def test_frozen(name: str, golden: Golden) -> None:
    """With frozen weights only the gradient of the hidden states is computed, and less is saved."""
    check(golden, name, trained=False, attention="eager" if name in EAGER_ONLY else "sdpa")


@pytest.mark.parametrize("name", ALL)
def test_autocast(name: str, golden: Golden) -> None:
    """fp32 weights under bf16 autocast: casts of inputs and weights are saved too."""
    attention = "eager" if name in EAGER_ONLY else "sdpa"
    check(golden, name, autocast="bfloat16", dtype="float32", attention=attention)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_one_sample(name: str, attention: str, golden: Golden) -> None:
    """One sample, of a length that is no multiple of 8 x 32: heads can be merged with the batch by a view."""
    if attention == "sdpa" and name in EAGER_ONLY:
        pytest.skip("the class knows no scaled dot product attention")
    check(golden, name, batch=1, length=200, attention=attention)


@pytest.mark.parametrize("name", ALTERNATING)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_second_kind(name: str, attention: str, golden: Golden) -> None:
    """The second layer, where it is of another kind than the first."""
    check(golden, name, index=1, attention=attention)


@pytest.mark.parametrize("name", WITH_EXPERTS)
@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_layer_with_experts(name: str, index: int, attention: str, golden: Golden) -> None:
    """A whole layer whose feed-forward is a mixture; GPT-OSS joins sinks to its scores, in windows and without."""
    if attention == "sdpa" and name == "gpt_oss":
        pytest.skip("the class knows no scaled dot product attention")
    check(golden, name, index=index, attention=attention)
