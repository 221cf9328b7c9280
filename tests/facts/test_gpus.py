"""The names of GPUs as people write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wazn.errors import InputError, UnknownFact, WaznError
from wazn.facts.gpus import gpu_by_id, list_gpus, lowest_price, resolve_gpu, search_gpus

GIB = 2**30


@pytest.mark.parametrize(
    ("asked", "meant"),
    [
        # what people type
        ("4090", "rtx-4090-24gb"),
        ("rtx-4090", "rtx-4090-24gb"),
        ("RTX 4090", "rtx-4090-24gb"),
        ("rtx4090", "rtx-4090-24gb"),
        ("4090 laptop", "rtx-4090-16gb-laptop"),
        ("rtx-4090-48gb", "rtx-4090-48gb-modded"),
        ("3090", "rtx-3090-24gb"),
        ("3090ti", "rtx-3090-ti-24gb"),
        ("rtx 3060", "rtx-3060-12gb"),
        ("4060ti-16gb", "rtx-4060-ti-16gb"),
        ("5090", "rtx-5090-32gb"),
        ("2080 Ti", "rtx-2080-ti-11gb"),
        ("a100", "a100-sxm4-80gb"),
        ("a100-80gb", "a100-sxm4-80gb"),
        ("A100 40GB", "a100-sxm4-40gb"),
        ("a100-80gb-pcie", "a100-pcie-80gb"),
        ("h100", "h100-sxm5-80gb"),
        ("h100-80gb", "h100-sxm5-80gb"),
        ("h100 pcie", "h100-pcie-80gb"),
        ("h100-nvl", "h100-nvl-94gb"),
        ("H200", "h200-sxm-141gb"),
        ("b200", "b200-sxm-180gb"),
        ("b200-192gb", "b200-sxm-180gb"),
        ("t4", "t4-16gb"),
        ("l4", "l4-24gb"),
        ("l40s", "l40s-48gb"),
        ("a10", "a10-24gb"),
        ("a10g", "a10g-24gb"),
        ("v100", "v100-sxm2-16gb"),
        ("v100-32gb", "v100-sxm2-32gb"),
        ("a6000", "rtx-a6000-48gb"),
        ("rtx 6000 ada", "rtx-6000-ada-48gb"),
        ("rtx pro 6000", "rtx-pro-6000-blackwell-ws-96gb"),
        ("rtx pro 6000 max-q", "rtx-pro-6000-blackwell-maxq-96gb"),
        ("mi300x", "mi300x-192gb"),
        ("mi250x", "mi250x-128gb"),
        ("7900 xtx", "rx-7900-xtx-24gb"),
        ("dgx spark", "gb10-dgx-spark-128gb"),
        ("strix halo", "ryzen-ai-max-395-128gb"),
        ("gaudi2", "gaudi2-96gb"),
        ("m3 max", "apple-silicon-36gb"),
        ("m3-max-64gb", "apple-silicon-64gb"),
        ("M1 16GB", "apple-silicon-16gb"),
        # what nvidia-smi and PyTorch print
        ("NVIDIA GeForce RTX 4090", "rtx-4090-24gb"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "rtx-4090-16gb-laptop"),
        ("NVIDIA A100-SXM4-80GB", "a100-sxm4-80gb"),
        ("NVIDIA A100 80GB PCIe", "a100-pcie-80gb"),
        ("NVIDIA H100 80GB HBM3", "h100-sxm5-80gb"),
        ("Tesla T4", "t4-16gb"),
        ("Tesla V100-SXM2-16GB", "v100-sxm2-16gb"),
        ("NVIDIA L40S", "l40s-48gb"),
        ("NVIDIA RTX A6000", "rtx-a6000-48gb"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx-6000-ada-48gb"),
        ("NVIDIA H200", "h200-sxm-141gb"),
        ("AMD Instinct MI300X", "mi300x-192gb"),
    ],
)
def test_name(asked: str, meant: str) -> None:
    """A usual name means the card that people mean by it."""
    assert resolve_gpu(asked).gpu.id == meant


@pytest.mark.parametrize("gpu", list_gpus(), ids=lambda gpu: gpu.id)
def test_own_id_and_name(gpu: object) -> None:
    """Every GPU is found by its id, in any case, and its product name finds it or lists it among the candidates."""
    assert resolve_gpu(gpu.id.upper()).gpu == gpu  # type: ignore[attr-defined]
    if "(" not in gpu.name:  # type: ignore[attr-defined]
        choice = resolve_gpu(gpu.name)  # type: ignore[attr-defined]
        assert gpu.id in choice.candidates  # type: ignore[attr-defined]


def test_ambiguous_name_says_so() -> None:
    """`rtx-4090` is the 24 GB desktop card; the laptop's and the modified one are listed."""
    choice = resolve_gpu("rtx-4090")
    assert choice.gpu.memory_gb == 24
    assert choice.candidates == ("rtx-4090-24gb", "rtx-4090-16gb-laptop", "rtx-4090-48gb-modded")
    assert [note.code for note in choice.notes] == ["gpu-name-ambiguous"]
    assert choice.notes[0].params == {
        "asked": "rtx-4090",
        "taken": "rtx-4090-24gb",
        "others": "rtx-4090-16gb-laptop, rtx-4090-48gb-modded",
    }


def test_unambiguous_name_is_quiet() -> None:
    """A name that means one card with a measured size has no notes."""
    assert resolve_gpu("a100-sxm4-80gb").notes == ()
    assert resolve_gpu("t4").notes == ()


@pytest.mark.parametrize(
    ("asked", "usable_gib", "reference"),
    [
        # the lowest value seen on a desktop card of 24 GB: 23.51 on an RTX 4090 (R570 drivers)
        ("24GB", 23.51, "rtx-4090-24gb"),
        ("24 GiB", 23.51, "rtx-4090-24gb"),
        ("24g", 23.51, "rtx-4090-24gb"),
        # no desktop card of 80 GB: 79.097 on an H100
        ("80gb", 79.097, "h100-sxm5-80gb"),
        # no desktop card of 48 GB: the most is gone on an L40, which keeps its ECC in the memory
        ("48GB", 44.4, "l40-48gb"),
    ],
)
def test_size(asked: str, usable_gib: float, reference: str) -> None:
    """A size is a card of that size, with the gap that a card of its size shows, assumed and said."""
    choice = resolve_gpu(asked)
    assert choice.gpu.usable_bytes == pytest.approx(usable_gib * GIB, abs=1)
    assert choice.gpu.usable_basis == "assumed"
    assert choice.gpu.usable_reference == reference
    assert choice.candidates == ()
    assert [note.code for note in choice.notes] == ["gpu-is-a-size"]


def test_size_between() -> None:
    """A size that no card has takes the gap of the nearest: 100 GB is 96 GB of a GH200 (1.5 GiB gone) and a bit."""
    gpu = resolve_gpu("100GB").gpu
    assert gpu.usable_bytes == 100 * GIB - (96 * GIB - int(94.5 * GIB))
    assert gpu.usable_reference == "gh200-96gb"


@pytest.mark.parametrize(
    ("gpu_id", "reference", "usable_gib"),
    [
        ("a100-pcie-40gb", "a100-sxm4-40gb", 39.494),  # same chip, same size: same gap
        ("rtx-4090-16gb-laptop", "rtx-4070-ti-super-16gb", 15.561),  # nearest Ada card of 16 GB
        ("h200-nvl-141gb", "h200-sxm-141gb", 139.7),
        ("a16-16gb", "a10-24gb", 16 * 15 / 16 - (24 * 15 / 16 - 22.06)),  # 1/16 to ECC, then 0.44
        ("apple-silicon-128gb", "apple-silicon-64gb", 96.0),  # three quarters
        ("jetson-agx-orin-64gb", "jetson-agx-orin-32gb", 2 * 29.98),  # the same fraction
    ],
)
def test_assumed_usable(gpu_id: str, reference: str, usable_gib: float) -> None:
    """Where nobody has seen the usable size it is the nominal one less the gap of the nearest card of its kind."""
    choice = resolve_gpu(gpu_id)
    assert choice.gpu.usable_basis == "assumed"
    assert choice.gpu.usable_reference == reference
    assert choice.gpu.usable_bytes == pytest.approx(usable_gib * GIB, abs=2)
    assert [note.code for note in choice.notes] == ["gpu-usable-memory-assumed"]


def test_unknown_name() -> None:
    """An unknown name is answered with the nearest ones."""
    with pytest.raises(UnknownFact) as caught:
        resolve_gpu("rtx-4099")
    assert "rtx-4090-24gb" in caught.value.nearest


def test_unknown_version() -> None:
    """A card that was not made in that size is answered with the sizes that were."""
    with pytest.raises(UnknownFact) as caught:
        resolve_gpu("h100-40gb")
    assert caught.value.nearest == ("h100-sxm5-80gb", "h100-pcie-80gb", "h100-nvl-94gb")
    with pytest.raises(UnknownFact, match="was not made with that memory"):
        resolve_gpu("m3-max-24gb")


def test_nothing_like_it() -> None:
    """Where nothing is near, the hint says what to do."""
    with pytest.raises(UnknownFact) as caught:
        resolve_gpu("zzz")
    assert caught.value.nearest == ()
    assert "wazn gpus" in str(caught.value.hint)


@pytest.mark.parametrize("asked", ["8xh100", "8 x h100", "8\N{MULTIPLICATION SIGN}h100"])
def test_counted_name(asked: str) -> None:
    """`8xh100` is two answers in one: how to write it is said."""
    with pytest.raises(InputError) as caught:
        resolve_gpu(asked)
    assert caught.value.hint == "write --gpu h100 --gpus 8"


def test_bare_number() -> None:
    """`24` is a size without its unit, not a misspelt L4."""
    with pytest.raises(InputError) as caught:
        resolve_gpu("24")
    assert caught.value.hint == "a card of that size is `24GB`"


@pytest.mark.parametrize("asked", ["", "   ", "x" * 101, "0gb", "-8GB", "4096GB", "999999999gb"])
def test_no_name_at_all(asked: str) -> None:
    """What cannot be a card is refused in words."""
    with pytest.raises(InputError):
        resolve_gpu(asked)


@given(st.text(max_size=120))
def test_any_text(text: str) -> None:
    """Whatever is typed gives a GPU or an error of ours, never a traceback."""
    try:
        choice = resolve_gpu(text)
    except WaznError:
        return
    assert choice.gpu.usable_bytes > 0


def test_search() -> None:
    """A search finds by words of id and name, and else as `resolve_gpu` does; without words it lists all."""
    assert len(search_gpus("")) == 127
    assert [gpu.id for gpu in search_gpus("rtx 3060")] == [
        "rtx-3060-12gb",
        "rtx-3060-8gb",
        "rtx-3060-6gb-laptop",
        "rtx-3060-ti-8gb",
    ]
    assert [gpu.id for gpu in search_gpus("m2 ultra 192gb")] == ["apple-silicon-192gb"]
    with pytest.raises(UnknownFact):
        search_gpus("zzz")


def test_price() -> None:
    """A price has a date; a card without a row has none."""
    price = lowest_price("h100-sxm5-80gb")
    assert price is not None
    assert price.date == "2026-05-24"
    assert lowest_price("titan-rtx-24gb") is None


def test_by_id() -> None:
    """A GPU by its exact id."""
    assert gpu_by_id("t4-16gb").name == "Tesla T4"
