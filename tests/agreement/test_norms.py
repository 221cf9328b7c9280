"""Norms, activations and rotary embeddings on the tape are the modules and functions of transformers, to the byte."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.agreement.compare import DTYPES, assert_agree, leaf, run_on_tape
from tests.agreement.golden import Golden
from wazn.dtypes import BFLOAT16
from wazn.model.spec import Activation, NormKind
from wazn.simulate.activations import ACTIVATIONS
from wazn.simulate.norms import NORMS
from wazn.simulate.tape import Tape, Tensor
from wazn.trace.specs import OpTrace, Spec

SIZE = 256
KINDS = sorted(set(NormKind) - {NormKind.LAYER_PER_HEAD})
WITH_BIAS = {NormKind.LAYER, NormKind.LAYER_1P}


def class_of(kind: NormKind) -> Callable[[int], Any]:
    """The class of a norm in transformers or PyTorch."""
    from torch.nn import LayerNorm
    from transformers.models.cohere.modeling_cohere import CohereLayerNorm
    from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
    from transformers.models.helium.modeling_helium import HeliumRMSNorm
    from transformers.models.llama.modeling_llama import LlamaRMSNorm
    from transformers.models.nemotron.modeling_nemotron import NemotronLayerNorm1P
    from transformers.models.olmo.modeling_olmo import OlmoLayerNorm
    from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

    classes: dict[NormKind, Callable[[int], Any]] = {
        NormKind.RMS: LlamaRMSNorm,
        NormKind.RMS_GEMMA: GemmaRMSNorm,
        NormKind.RMS_CAST_LAST: Olmo2RMSNorm,
        NormKind.RMS_FP32: HeliumRMSNorm,
        NormKind.LAYER: LayerNorm,
        NormKind.LAYER_FP32: OlmoLayerNorm,
        NormKind.LAYER_COHERE: CohereLayerNorm,
        NormKind.LAYER_1P: NemotronLayerNorm1P,
    }
    return classes[kind]


def real_norm(kind: NormKind, x: Spec, *, trained: bool, autocast: str | None) -> OpTrace:
    """Measure the class."""
    import torch

    from wazn.trace.opcheck import measure_op

    with torch.device("meta"):
        module = class_of(kind)(SIZE).to(getattr(torch, x.dtype)).requires_grad_(trained)
    return measure_op(module, x, autocast=autocast)


def real_activation(activation: Activation, x: Spec, *, autocast: str | None) -> OpTrace:
    """Measure the code in transformers."""
    from transformers.activations import ACT2FN
    from transformers.models.bloom.modeling_bloom import GeLUFunction

    from wazn.trace.opcheck import measure_op

    is_bloom = activation is Activation.GELU_BLOOM
    return measure_op(
        GeLUFunction.apply if is_bloom else ACT2FN[str(activation)], x, autocast=autocast
    )


def test_every_kind() -> None:
    """Every kind of norm is a function, but the one that is a list of modules (proved with StableLM's layer)."""
    assert set(NORMS) == set(KINDS)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("autocast", [None, "bfloat16"])
def test_norm(
    kind: NormKind, dtype: str, trained: bool, autocast: str | None, golden: Golden
) -> None:
    """A norm and its class hold the same, trained or frozen, with autocast or without."""
    x = Spec((2, 512, SIZE), dtype, requires_grad=True)

    def prepare(tape: Tape) -> tuple[Tensor | None, Tensor | None]:
        names = [] if kind is NormKind.LAYER_FP32 else ["weight"]
        names += ["bias"] if kind in WITH_BIAS else []
        made = {
            name: leaf(tape, Spec((SIZE,), dtype, requires_grad=trained), name) for name in names
        }
        return made.get("weight"), made.get("bias")

    def contract(tape: Tape, weights: tuple[Tensor | None, Tensor | None], x: Tensor) -> Tensor:
        return NORMS[kind](tape, x, *weights, SIZE)

    lower = None if autocast is None else DTYPES[autocast]
    assert_agree(
        golden.op(lambda: real_norm(kind, x, trained=trained, autocast=autocast)),
        run_on_tape(contract, x, prepare=prepare, autocast=lower),
    )


def test_every_activation() -> None:
    """Every activation is a function."""
    assert set(ACTIVATIONS) == set(Activation)


@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize("autocast", [None, "bfloat16"])
def test_activation(activation: Activation, autocast: str | None, golden: Golden) -> None:
    """An activation holds what its code in transformers holds."""
    x = Spec((2, 512, SIZE), requires_grad=True)
    lower = None if autocast is None else BFLOAT16
    assert_agree(
        golden.op(lambda: real_activation(activation, x, autocast=autocast)),
        run_on_tape(ACTIVATIONS[activation], x, autocast=lower),
    )
