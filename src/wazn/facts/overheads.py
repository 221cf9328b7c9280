"""What stands around the tensors of a run: the driver's context outside the allocator, BLAS workspaces inside it.

The figures and their sources are in `overheads.toml` and, per card, in `gpus.toml`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from wazn.cluster import Gpu
from wazn.facts.store import gpu_index

__all__ = ["BLAS_HANDLES", "Overhead", "blas_workspace", "cuda_context"]

# "Handles come from a thread-local pool": the thread of the forward pass and autograd's thread
# (aten/src/ATen/cuda/CublasHandlePool.cpp, `DeviceThreadHandlePool`)
BLAS_HANDLES = 2

_NEWEST_TORCH = (99, 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Overhead:
    """Bytes that no tensor of the run asks for, with where the figure comes from."""

    num_bytes: int
    basis: Literal["counted", "measured", "assumed"]
    source: str


def cuda_context(gpu: Gpu) -> Overhead | None:
    """Return what the CUDA context and the lazily loaded kernels hold on this card, outside PyTorch's allocator.

    `measured` on this very card, else `assumed`: the highest figure seen on its generation. None where nothing is
    known: makers other than NVIDIA. Collective communication (NCCL) is not in it.
    """
    if gpu.context_bytes is None or gpu.context_basis is None or gpu.context_source is None:
        return None
    return Overhead(num_bytes=gpu.context_bytes, basis=gpu.context_basis, source=gpu.context_source)


def blas_workspace(gpu: Gpu | None, *, torch_version: tuple[int, int] | None = None) -> Overhead:
    """Return the workspace of one (handle, stream); a training step has `BLAS_HANDLES` of them once backward has run.

    Inside the caching allocator: it counts as allocated, and lives as long as the process.

    Args:
        gpu: None where no card is named: NVIDIA's usual size, and `assumed`.
        torch_version: (major, minor); None for the newest release.

    Shape: a plain buffer of 8,519,680 bytes before Hopper, 33,554,432 on Hopper. Makers that use neither cuBLAS nor
    hipBLAS have none.
    """
    vendor = "nvidia" if gpu is None else gpu.vendor
    capability = "" if gpu is None else gpu.compute_capability
    for row_vendor, prefix, since, num_bytes, source in gpu_index()["blas_workspaces"]:
        fits = row_vendor == vendor and capability.startswith(prefix)
        if fits and tuple(since) <= (torch_version or _NEWEST_TORCH):
            basis: Literal["counted", "assumed"] = "assumed" if gpu is None else "counted"
            return Overhead(num_bytes=num_bytes, basis=basis, source=source)
    return Overhead(num_bytes=0, basis="assumed", source="no BLAS workspace is known for this card")
