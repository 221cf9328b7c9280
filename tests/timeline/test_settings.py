"""What `PYTORCH_ALLOC_CONF` means: PyTorch's documentation, PyTorch's own parser, and what it lets pass."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import pytest

from wazn.errors import InputError, Unsupported
from wazn.timeline.settings import (
    DEFAULT_SETTINGS,
    AllocatorSettings,
    parse_allocator_settings,
)

MIB = 2**20
GIB = 2**30


def test_nothing_said_means_pytorchs_defaults() -> None:
    """An empty string changes nothing: no split limit, 20 MiB segments, no expandable segments."""
    assert parse_allocator_settings("") == DEFAULT_SETTINGS == AllocatorSettings()
    assert DEFAULT_SETTINGS.large_segment_bytes == 20 * MIB
    assert DEFAULT_SETTINGS.max_split_bytes is None


def test_every_key_is_read() -> None:
    """The example in AllocatorConfig.h:240, with the spelling of booleans that its parser accepts."""
    settings = parse_allocator_settings(
        "max_split_size_mb:100, max_non_split_rounding_mb:20, garbage_collection_threshold:0.5, "
        "roundup_power2_divisions:[64:8,256:4,1024:4,>:1], expandable_segments:True, "
        "pinned_use_background_threads:True"
    )
    assert settings.max_split_bytes == 100 * MIB
    assert settings.max_non_split_rounding_bytes == 20 * MIB
    assert settings.garbage_collection_threshold == 0.5
    # 1 to 32 MB and 64 MB: 8; 128 MB is skipped: 0; 256 MB: 4; 512 MB is skipped; 1 GB: 4; above: 1
    assert settings.roundup_power2_divisions == (8,) * 7 + (0, 4, 0, 4) + (1,) * 5
    assert settings.expandable_segments


@pytest.mark.parametrize(
    ("num_bytes", "divisions", "expected"),
    [
        (1, 0, 512),
        (511, 0, 512),
        (512, 0, 512),
        (513, 0, 1024),
        (1_048_577, 0, 1_049_088),
        # "if we need to round-up 1200 and number of divisions is 4 ... 1280": below 512 x 4 bytes plain rounding wins
        (1200, 4, 1536),
        (1200 * 1024, 4, 1280 * 1024),
        (2048, 4, 2048),
        (2049, 4, 2560),  # over 512 x 4: steps of 2048 / 4
        (5 * MIB, 2, 6 * MIB),
        (4 * MIB, 2, 4 * MIB),
        (5 * MIB, 1, 5 * MIB),  # one division is none
    ],
)
def test_sizes_round_up_to_512_bytes_or_to_a_division(
    num_bytes: int, divisions: int, expected: int
) -> None:
    """`round_size`, by pencil; the first power-of-two case is the example in the source's comment."""
    settings = AllocatorSettings(roundup_power2_divisions=(divisions,) * 16)
    assert settings.round_size(num_bytes) == expected


def test_each_interval_has_its_own_divisions() -> None:
    """With `[256:1,512:2,1024:4,>:8]` (the documentation's example) only sizes from 512 MB on take larger steps."""
    settings = parse_allocator_settings("roundup_power2_divisions:[256:1,512:2,1024:4,>:8]")
    assert settings.round_size(300 * MIB + 1) == 300 * MIB + 512
    assert settings.round_size(600 * MIB) == 768 * MIB
    assert settings.round_size(1100 * MIB) == 1280 * MIB
    assert settings.round_size(2100 * MIB) == 2304 * MIB
    assert (
        settings.round_size(100 * GIB) == 104 * GIB
    )  # sizes over 64 GB count as the last interval


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (512, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 512, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (10 * MIB + 512, 12 * MIB),
        (20 * MIB + 512, 22 * MIB),
    ],
)
def test_segments_are_2_or_20_mib_or_the_request_in_steps_of_2(size: int, expected: int) -> None:
    """`get_allocation_size`: up to 1 MiB, under 10 MiB, and from there on."""
    assert DEFAULT_SETTINGS.segment_bytes(size) == expected


REFUSED = (
    "max_split_size_mb:19",
    "large_segment_size_mb:10",
    "large_segment_size_mb:30,max_non_split_rounding_mb:20",
    "large_segment_size_mb:64,max_split_size_mb:32",
    "roundup_power2_divisions:3",
    "roundup_power2_divisions:[3:2]",
    "roundup_power2_divisions:[1:3]",
    "roundup_power2_divisions:[1]",
    "expandable_segments:true",
    "expandable_segments:1",
    "expandable_segments",
    "garbage_collection_threshold:0",
    "garbage_collection_threshold:1",
    "garbage_collection_threshold:-0.5",
    "max_split_size_mb:",
)


@pytest.mark.parametrize("text", REFUSED)
def test_what_pytorch_refuses_is_refused(text: str) -> None:
    """Each of these raises in PyTorch 2.13 too (the real parser is asked where torch is installed)."""
    with pytest.raises(InputError):
        parse_allocator_settings(text)
    torch = pytest.importorskip("torch")
    try:
        with pytest.raises((ValueError, RuntimeError)):
            torch._C._accelerator_setAllocatorSettings(text)
    finally:
        torch._C._accelerator_setAllocatorSettings("")


@pytest.mark.parametrize(
    "text",
    [
        "max_split_size_mb:64abc",  # PyTorch reads 64
        "max_split_size_mb=64",  # PyTorch: an unknown key, ignored where no CUDA is built in
        "expandable_segment:True",
        "max_split_size_mb:64,,",
        "[",
        ":",
        "roundup_power2_divisions:[[1:2]]",
        "max_split_size_mb:" + "9" * 4000,
        "max_split_size_mb:" + "9" * 5000,
        "garbage_collection_threshold:nan",
        "garbage_collection_threshold:1e400",
        "per_process_memory_fraction:1.5",
        "backend:magic",
        "max_split_size_mb:٦٤",
    ],
)
def test_what_was_not_understood_is_said(text: str) -> None:
    """A misspelt setting is an error that names the place, never a default in silence."""
    with pytest.raises(InputError):
        parse_allocator_settings(text)


def test_an_unknown_key_lists_the_known_ones() -> None:
    """The way out stands beside the error."""
    with pytest.raises(InputError, match="unknown key `expandable_segment`") as caught:
        parse_allocator_settings("expandable_segment:True")
    assert "expandable_segments" in str(caught.value.hint)


def test_cudas_own_allocator_is_not_modelled() -> None:
    """`backend:cudaMallocAsync` replaces the caching allocator: we say so."""
    assert parse_allocator_settings("backend:native") == DEFAULT_SETTINGS
    with pytest.raises(Unsupported, match="cudaMallocAsync"):
        parse_allocator_settings("backend:cudaMallocAsync")


@pytest.mark.parametrize(
    "text",
    [
        "roundup_power2_divisions:4",
        "roundup_power2_divisions:1",
        "roundup_power2_divisions:[64:8,256:4,1024:4,>:1]",
        "roundup_power2_divisions:[256:1,512:2,1024:4,>:8]",
        "roundup_power2_divisions:[>:2]",
        "roundup_power2_divisions:[256:1,512:2,>:8,1024:4]",
        "roundup_power2_divisions:[65536:2]",
        "roundup_power2_divisions:[131072:2]",
        "roundup_power2_divisions:[1024:4,64:2]",
        "roundup_power2_divisions:[1024:4,64:2,>:1]",
        "roundup_power2_divisions:[1:2,64:0]",
        "roundup_power2_divisions:[]",
    ],
)
def test_divisions_are_read_as_pytorch_reads_them(text: str) -> None:
    """PyTorch's own parser, asked in its own library for each power of two, gives the same table."""
    torch = pytest.importorskip("torch")
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    name = "_ZN3c1016CachingAllocator26AcceleratorAllocatorConfig24roundup_power2_divisionsEm"
    ask = getattr(library, name)
    ask.restype, ask.argtypes = ctypes.c_size_t, [ctypes.c_size_t]
    try:
        torch._C._accelerator_setAllocatorSettings(text)
        expected = tuple(ask(2**power) for power in range(20, 36))
    finally:
        torch._C._accelerator_setAllocatorSettings("")
    assert parse_allocator_settings(text).roundup_power2_divisions == expected


def test_the_constants_are_those_of_the_installed_header() -> None:
    """The header that torch ships says the same numbers, on the lines that we cite (those of 2.13.0)."""
    torch = pytest.importorskip("torch")
    from wazn.timeline import settings

    header = Path(torch.__file__).parent / "include/c10/core/AllocatorConfig.h"
    found = dict(re.findall(r"constexpr size_t (k\w+) = (\d+);", header.read_text()))
    found |= dict(re.findall(r"(large_segment_size_)\{(\d+)\}", header.read_text()))
    lines = header.read_text().splitlines()
    cited = re.findall(r"AllocatorConfig\.h:(\d+), (\w+)", Path(settings.__file__).read_text())
    assert len(cited) == 6
    if torch.__version__.startswith("2.13."):
        assert all(name in lines[int(line) - 1] for line, name in cited)
    assert {name: int(value) for name, value in found.items()} == {
        "kSmallBuffer": settings.SMALL_SEGMENT_BYTES,
        "kMinBlockSize": settings.MIN_BLOCK_BYTES,
        "kSmallSize": settings.SMALL_BYTES,
        "kMinLargeAlloc": settings.MIN_LARGE_BYTES,
        "kRoundLarge": settings.ROUND_LARGE_BYTES,
        "large_segment_size_": settings.LARGE_SEGMENT_BYTES,
    }
