"""The hardware as nouns, and what a card cannot do."""

from __future__ import annotations

import pytest

from wazn.cluster import (
    AttentionKernel,
    Cluster,
    Layout,
    limitations,
    sdpa_kernel,
    supports_flash_attention,
)
from wazn.errors import InputError
from wazn.facts.gpus import resolve_gpu


@pytest.mark.parametrize(
    ("name", "flash", "kernel"),
    [
        (
            "t4",
            False,
            AttentionKernel.MEMORY_EFFICIENT,
        ),  # Turing: "only supports Ampere GPUs or newer"
        ("v100", False, AttentionKernel.MEMORY_EFFICIENT),
        ("p100", False, AttentionKernel.MEMORY_EFFICIENT),
        ("a100", True, AttentionKernel.FLASH),
        ("rtx-3090", True, AttentionKernel.FLASH),
        (
            "b200",
            True,
            AttentionKernel.FLASH,
        ),  # 10.0 is newer than 8.0, though "10" sorts before "8"
        ("mi300x", True, AttentionKernel.FLASH),
        ("m2", False, AttentionKernel.MATH),
    ],
)
def test_flash_attention(name: str, flash: bool, kernel: AttentionKernel) -> None:
    """The flash kernel needs Ampere; before it the memory-efficient kernel of scaled_dot_product_attention runs."""
    gpu = resolve_gpu(name).gpu
    assert supports_flash_attention(gpu) is flash
    assert sdpa_kernel(gpu) is kernel


def test_limitations_of_a_t4() -> None:
    """A T4 has neither bf16, fp8 nor flash attention; each comes with what is there instead."""
    gpu = resolve_gpu("t4").gpu
    found = {lack.code: lack.instead for lack in limitations(gpu, bf16=True, fp8=True, flash=True)}
    assert found == {
        "bf16-not-in-hardware": "fp16",
        "fp8-not-in-hardware": "fp16",
        "flash-not-on-this-gpu": "memory-efficient",
    }
    assert limitations(gpu) == ()


def test_limitations_by_generation() -> None:
    """Ampere lacks only fp8, and bf16 runs instead; Ada, Hopper and Blackwell lack nothing."""
    ampere = limitations(resolve_gpu("a100").gpu, bf16=True, fp8=True, flash=True)
    assert [(lack.code, lack.instead) for lack in ampere] == [("fp8-not-in-hardware", "bf16")]
    for name in ("rtx-4090", "h100", "b200", "rtx-5090"):
        assert limitations(resolve_gpu(name).gpu, bf16=True, fp8=True, flash=True) == ()


def test_one_gpu_by_default() -> None:
    """A cluster of which nothing is said is one GPU of no name, one replica."""
    cluster = Cluster()
    assert cluster.gpu is None
    assert (cluster.num_gpus, cluster.data_parallel) == (1, 1)


def test_data_parallel() -> None:
    """16 GPUs with tp 4 and pp 2 are 2 replicas: 16 / (4 x 2)."""
    layout = Layout(tensor_parallel=4, pipeline_parallel=2)
    cluster = Cluster(gpus_per_node=8, num_nodes=2, layout=layout)
    assert (cluster.num_gpus, cluster.data_parallel) == (16, 2)


def test_refused() -> None:
    """Degrees are positive and divide the number of GPUs."""
    with pytest.raises(InputError, match="`--tp` must be a positive whole number, found `0`"):
        Layout(tensor_parallel=0)
    with pytest.raises(InputError, match="`--gpus`"):
        Cluster(gpus_per_node=0)
    with pytest.raises(InputError, match="does not divide the 4 GPU"):
        Cluster(gpus_per_node=4, layout=Layout(tensor_parallel=3))
