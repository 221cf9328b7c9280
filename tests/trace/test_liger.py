"""Liger kernels run with their own Python code; where the package is absent its mechanism is shown on one like it.

    pip install --no-deps liger-kernel

runs the tests of the real package too; the sums are those of 0.8.
"""

from __future__ import annotations

import importlib.util
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch

from wazn.errors import Unsupported
from wazn.trace.liger import apply_liger
from wazn.trace.opcheck import Spec, measure_op
from wazn.trace.tracker import DEVICE
from wazn.trace.world import World

INSTALLED = importlib.util.find_spec("liger_kernel") is not None
IS_READ = INSTALLED and metadata.version("liger-kernel").startswith("0.8.")
needs_liger = pytest.mark.skipif(not IS_READ, reason="liger-kernel 0.8 is not installed")

LIKE_LIGER = """
import importlib

import torch
import triton
import triton.language as tl

MODE: tl.constexpr = tl.constexpr(3)


@triton.jit
def kernel(x_ptr, n: tl.constexpr):
    tl.store(x_ptr, tl.arange(0, n))


@triton.autotune(configs=[triton.Config({"N": 8})], key=["n"])
@triton.jit(do_not_specialize=["n"])
def tuned(x_ptr, n):
    pass


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        out = torch.empty_like(x)
        kernel[(triton.cdiv(x.shape[0], 3),)](x, n=triton.next_power_of_2(x.shape[0]))
        tuned[lambda meta: (1,)](x, 5)
        assert importlib.import_module("triton").language.float32 is tl.float32
        return out

    @staticmethod
    def backward(ctx, grad):
        return grad
"""


def test_kernels_of_triton_are_not_launched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inside a world, and there alone, the package sees a Triton whose kernels do nothing; nobody else sees it."""
    if INSTALLED:
        pytest.skip("the real package is there")
    (tmp_path / "liger_kernel.py").write_text(LIKE_LIGER)
    monkeypatch.syspath_prepend(tmp_path)
    with World():
        import liger_kernel

        assert "triton" not in sys.modules
        assert liger_kernel.MODE.value == 3
        x = torch.empty(8, device=DEVICE, requires_grad=True)
        liger_kernel.Double.apply(x).sum().backward()
        assert x.grad is not None
    del sys.modules["liger_kernel"]


@pytest.mark.skipif(INSTALLED, reason="liger-kernel is installed")
def test_without_the_package_it_is_named() -> None:
    """Nothing stands for the package: what it holds depends on its version. It needs no Triton and no GPU here."""
    with World(), pytest.raises(Unsupported, match="liger-kernel") as caught:
        apply_liger(torch.nn.Linear(2, 2))
    assert "pip install --no-deps liger-kernel" in str(caught.value.hint)


@needs_liger
def test_rms_norm_keeps_its_input_and_a_number_per_row() -> None:
    """By pencil: out [16, 64] bf16 and rstd [16] fp32; backward writes over the gradient, and a row of the weight's
    gradient for each of the 108 multiprocessors of an A100 is summed and cast.

    Source: liger_kernel/ops/rms_norm.py, `rms_norm_forward` and `rms_norm_backward`.
    """
    with World() as world:
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction

        trace = measure_op(
            lambda x, w: LigerRMSNormFunction.apply(x, w, 1e-6, 0.0, "llama", True),
            Spec((16, 64), requires_grad=True),
            Spec((64,), requires_grad=True),
            world=world,
        )
    assert trace.changes("forward") == [16 * 64 * 2, 16 * 4]
    made = [size for size in trace.changes("backward") if size > 0]
    assert made == [108 * 64 * 4, 64 * 4, 64 * 2]


@needs_liger
def test_the_loss_is_computed_by_chunks_of_the_logits() -> None:
    """By pencil: 512 tokens, hidden 64, vocabulary 4,096: cdiv(4096, 64) = 64 chunks of 8 tokens, one buffer of
    8 x 4,096 bf16 instead of 512 x 4,096; the gradients of input and head are made in forward.

    Source: liger_kernel/ops/fused_linear_cross_entropy.py (the transient logits are no larger than the input).
    """
    with World() as world:
        from liger_kernel.ops.fused_linear_cross_entropy import (
            LigerFusedLinearCrossEntropyFunction,
        )

        trace = measure_op(
            lambda x, w, target: LigerFusedLinearCrossEntropyFunction.apply(x, w, target)[0],
            Spec((512, 64), requires_grad=True),
            Spec((4096, 64), requires_grad=True),
            Spec((512,), "int64"),
            world=world,
        )
    made = [size for size in trace.changes("loss") if size > 2048]
    assert made == [512 * 64 * 2, 4096 * 64 * 2, 8 * 4096 * 2]
    assert trace.saved_bytes - (512 * 64 * 2 + 4096 * 64 * 2) < 4096


@needs_liger
@pytest.mark.filterwarnings(
    "ignore::FutureWarning"
)  # what it calls in transformers is on its way out
def test_a_model_is_changed_back_when_the_world_ends() -> None:
    """The package replaces functions in the modules of transformers for good; the next rehearsal must not see them."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.models.llama import modeling_llama

    before = dict(vars(modeling_llama))
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=1, vocab_size=4096))
    with World() as world:
        world.materialise(model)
        apply_liger(model)
        assert modeling_llama.apply_rotary_pos_emb is not before["apply_rotary_pos_emb"]
        tokens = torch.empty((2, 256), dtype=torch.int64, device=DEVICE)
        first = len(world.tracker.events)
        model(input_ids=tokens, labels=tokens).loss.backward()
        largest = max(event.num_bytes for event in world.tracker.events[first:])
    assert dict(vars(modeling_llama)) == before
    assert (
        largest == 4096 * 64 * 4
    )  # a gradient of the embeddings; all logits were 2 x 256 x 4096 x 4
