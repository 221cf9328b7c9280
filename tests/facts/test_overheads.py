"""What stands around the tensors: contexts outside the allocator, BLAS workspaces inside it."""

from __future__ import annotations

import pytest

from wazn.facts.gpus import list_gpus, resolve_gpu
from wazn.facts.overheads import blas_workspace, cuda_context

MIB = 2**20


@pytest.mark.parametrize(
    ("name", "mib"),
    [
        ("a100-sxm4-80gb", 481),  # ml-engineering: mem_get_info after a 4-byte tensor, torch 2.1.1
        ("rtx-3090", 256),  # invoke-ai/InvokeAI#9413: nvidia-smi, torch 2.7.1
        ("rtx-6000-ada", 426),  # unslothai/unsloth-zoo#1053: torch 2.10.0
    ],
)
def test_measured_context(name: str, mib: int) -> None:
    """Where a card's context was measured before any tensor, that figure is taken."""
    context = cuda_context(resolve_gpu(name).gpu)
    assert context is not None
    assert (context.num_bytes, context.basis) == (mib * MIB, "measured")


def test_assumed_context() -> None:
    """Elsewhere the highest of the generation: an H100 takes the H200's 139.80 - 139 GiB - 289.25 MiB, 530 MiB."""
    context = cuda_context(resolve_gpu("h100").gpu)
    assert context is not None
    assert (context.num_bytes, context.basis) == (530 * MIB, "assumed")
    assert "H200" in context.source
    assert pytest.approx(530, abs=0.1) == (139.80 - 139) * 1024 - 289.25


def test_every_nvidia_card_has_a_context() -> None:
    """Every NVIDIA card has a figure with a source; for other makers nothing is known, and nothing is said."""
    for gpu in list_gpus():
        context = cuda_context(gpu)
        if gpu.vendor == "nvidia":
            assert context is not None
            assert 100 * MIB < context.num_bytes < 1024 * MIB
            assert context.source
        else:
            assert context is None


@pytest.mark.parametrize(
    ("name", "torch_version", "num_bytes"),
    [
        # `:4096:2:16:8`: 2 x 4096 KiB + 8 x 16 KiB (CublasHandlePool.cpp)
        ("a100", (2, 13), (2 * 4096 + 8 * 16) * 1024),
        ("t4", (2, 0), (2 * 4096 + 8 * 16) * 1024),
        ("rtx-4090", None, (2 * 4096 + 8 * 16) * 1024),
        # 8 x 4096 KiB on Hopper
        ("h100", (2, 0), 8 * 4096 * 1024),
        ("h200", None, 8 * 4096 * 1024),
        # Blackwell since pytorch#175344
        ("b200", (2, 11), (2 * 4096 + 8 * 16) * 1024),
        ("b200", (2, 13), 8 * 4096 * 1024),
        ("rtx-5090", (2, 13), 8 * 4096 * 1024),
        # ROCm: 32 MiB, 128 MiB on gfx94x and gfx95x
        ("mi250x", None, 32 * MIB),
        ("mi300x", None, 128 * MIB),
        # neither cuBLAS nor hipBLAS
        ("m1", None, 0),
        ("gaudi2", None, 0),
    ],
)
def test_workspace(name: str, torch_version: tuple[int, int] | None, num_bytes: int) -> None:
    """The workspace of one handle follows from the compute capability and the torch release."""
    workspace = blas_workspace(resolve_gpu(name).gpu, torch_version=torch_version)
    assert workspace.num_bytes == num_bytes


def test_workspace_without_a_card() -> None:
    """Where no card is named it is NVIDIA's usual size, and assumed."""
    workspace = blas_workspace(None)
    assert (workspace.num_bytes, workspace.basis) == (8_519_680, "assumed")
    assert blas_workspace(resolve_gpu("a100").gpu).basis == "counted"
