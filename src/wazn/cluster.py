"""The hardware of a run, as frozen nouns: one GPU, how many of them, and how the work is laid over them.

What a card cannot do is asked here too, because it follows from the card alone: `limitations` answers with codes, and
`report` speaks.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from wazn.errors import InputError

__all__ = [
    "AttentionKernel",
    "Cluster",
    "Gpu",
    "Layout",
    "Limitation",
    "Offload",
    "Parallel",
    "limitations",
    "sdpa_kernel",
    "supports_flash_attention",
]


class Parallel(StrEnum):
    """How replicas share the training state."""

    DDP = "ddp"
    ZERO1 = "zero1"
    ZERO2 = "zero2"
    ZERO3 = "zero3"
    FSDP = "fsdp"


class Offload(StrEnum):
    """What lives in the memory of the host between uses."""

    NONE = "none"
    OPTIMIZER = "optimizer"
    ALL = "all"


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """One device as PyTorch sees it.

    memory_gb: the size in the product's name; a name, not a number of bytes.
    usable_bytes: what PyTorch reports as the total of the device (`torch.cuda.mem_get_info()[1]`); `measured` is the
        lowest value seen on Linux, `assumed` the nominal size less the gap that `usable_reference`, another card of
        its kind, shows.
    compute_capability: `8.9` (NVIDIA), `gfx942` (AMD), `mps`, `xpu`, `hpu`.
    context_bytes: what the driver's context and the loaded kernels hold outside PyTorch's allocator; None where
        nothing is known (not NVIDIA). `context_source` says where the figure comes from.
    """

    id: str
    name: str
    vendor: str
    arch: str
    compute_capability: str
    memory_gb: int
    usable_bytes: int
    usable_basis: Literal["measured", "assumed"]
    usable_reference: str | None = None
    supports_bf16: bool
    supports_fp8: bool
    memory_bandwidth_gb_s: float | None = None
    max_per_node: int | None = None
    context_bytes: int | None = None
    context_basis: Literal["measured", "assumed"] | None = None
    context_source: str | None = None

    @property
    def cuda_capability(self) -> tuple[int, int] | None:
        """The compute capability as (major, minor); None where the device is not NVIDIA's.

        A tuple, so that 10.0 is newer than 9.0.
        """
        if self.vendor != "nvidia":
            return None
        major, minor = self.compute_capability.split(".")
        return int(major), int(minor)


def _refuse_non_positive(option: str, value: int) -> None:
    if value < 1:
        raise InputError(f"`{option}` must be a positive whole number, found `{value}`")


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """How the work is laid over the GPUs: degrees of model parallelism; what is left are replicas."""

    parallel: Parallel = Parallel.DDP
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    context_parallel: int = 1
    expert_parallel: int = 1
    offload: Offload = Offload.NONE

    def __post_init__(self) -> None:
        for option, degree in (
            ("--tp", self.tensor_parallel),
            ("--pp", self.pipeline_parallel),
            ("--cp", self.context_parallel),
            ("--ep", self.expert_parallel),
        ):
            _refuse_non_positive(option, degree)


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """Equal GPUs in equal nodes; `gpu` is None where the question names none."""

    gpu: Gpu | None = None
    gpus_per_node: int = 1
    num_nodes: int = 1
    layout: Layout = Layout()

    def __post_init__(self) -> None:
        _refuse_non_positive("--gpus", self.gpus_per_node)
        _refuse_non_positive("--nodes", self.num_nodes)
        model_parallel = self._model_parallel
        if self.num_gpus % model_parallel:
            raise InputError(
                f"tp x pp x cp = {model_parallel} does not divide the {self.num_gpus} GPU(s)",
                hint="choose degrees whose product divides --gpus times --nodes",
            )

    @property
    def num_gpus(self) -> int:
        """All GPUs of all nodes."""
        return self.gpus_per_node * self.num_nodes

    @property
    def data_parallel(self) -> int:
        """Replicas that see different samples: GPUs over (tp x pp x cp); expert parallelism reuses these ranks."""
        return self.num_gpus // self._model_parallel

    @property
    def _model_parallel(self) -> int:
        layout = self.layout
        return layout.tensor_parallel * layout.pipeline_parallel * layout.context_parallel


class AttentionKernel(StrEnum):
    """The kernels behind `torch.nn.functional.scaled_dot_product_attention`."""

    FLASH = "flash"
    MEMORY_EFFICIENT = "memory-efficient"
    MATH = "math"


_FLASH_SINCE = (8, 0)  # "FlashAttention only supports Ampere GPUs or newer" (flash_api.cpp)
_MEMORY_EFFICIENT_SINCE = (5, 0)  # sdp_utils.cpp: check_mem_efficient_hardware_support, sm50 up
_ROCM_FLASH = ("gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201")  # AOTriton's targets


def supports_flash_attention(gpu: Gpu) -> bool:
    """Return whether the flash kernel runs on this card: compute capability 8.0 up, or one of AOTriton's AMD targets.

    Source: `check_flash_attention_hardware_support` in aten/src/ATen/native/transformers/cuda/sdp_utils.cpp.
    """
    if gpu.vendor == "amd":
        return gpu.compute_capability in _ROCM_FLASH
    capability = gpu.cuda_capability
    return capability is not None and capability >= _FLASH_SINCE


def sdpa_kernel(gpu: Gpu) -> AttentionKernel:
    """Return the best kernel that `scaled_dot_product_attention` can take on this card in half precision.

    The shapes and the mask may rule it out; that is for the attention op to say.
    """
    if supports_flash_attention(gpu):
        return AttentionKernel.FLASH
    capability = gpu.cuda_capability
    if capability is not None and capability >= _MEMORY_EFFICIENT_SINCE:
        return AttentionKernel.MEMORY_EFFICIENT
    return AttentionKernel.MATH


@dataclass(frozen=True, kw_only=True, slots=True)
class Limitation:
    """Something asked for that the card does not have; `instead` is what the stack does or what to choose."""

    code: Literal["bf16-not-in-hardware", "fp8-not-in-hardware", "flash-not-on-this-gpu"]
    gpu: str
    compute_capability: str
    instead: str


def limitations(
    gpu: Gpu, *, bf16: bool = False, fp8: bool = False, flash: bool = False
) -> tuple[Limitation, ...]:
    """Return what of the asked-for the card lacks, with the fallback.

    bf16: before Ampere PyTorch stores bfloat16 and emulates the arithmetic, slowly; the bytes are the same; people
    take fp16.
    fp8: needs compute capability 8.9 (`torch._scaled_mm`) or AMD's gfx942 and later; bf16 runs instead.
    flash: `scaled_dot_product_attention` falls back to the memory-efficient or the math kernel.
    """
    found: list[Limitation] = []

    def lacks(
        code: Literal["bf16-not-in-hardware", "fp8-not-in-hardware", "flash-not-on-this-gpu"],
        instead: str,
    ) -> None:
        capability = gpu.compute_capability
        found.append(
            Limitation(code=code, gpu=gpu.name, compute_capability=capability, instead=instead)
        )

    if bf16 and not gpu.supports_bf16:
        lacks("bf16-not-in-hardware", "fp16")
    if fp8 and not gpu.supports_fp8:
        lacks("fp8-not-in-hardware", "bf16" if gpu.supports_bf16 else "fp16")
    if flash and not supports_flash_attention(gpu):
        lacks("flash-not-on-this-gpu", sdpa_kernel(gpu).value)
    return tuple(found)
