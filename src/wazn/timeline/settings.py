"""What `PYTORCH_ALLOC_CONF` (once `PYTORCH_CUDA_ALLOC_CONF`) says to the caching allocator.

Source: PyTorch v2.13.0 (cf30153c4c13). Lines of `AllocatorConfig.h` are those of `torch/include/c10/core/` in its
wheel; the parser is `c10/core/AllocatorConfig.cpp` and `c10/cuda/CUDAAllocatorConfig.cpp`. Where PyTorch's parser reads
`64abc` as 64, or takes any token for a colon, this one refuses: a setting that was not understood must not look as if
it had been tried.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from wazn.errors import InputError, Unsupported

__all__ = ["DEFAULT_SETTINGS", "AllocatorSettings", "parse_allocator_settings"]

MIB = 2**20

# AllocatorConfig.h:17, kSmallBuffer: "small" allocations are packed in 2 MiB blocks
SMALL_SEGMENT_BYTES = 2_097_152
# AllocatorConfig.h:19, kMinBlockSize: all sizes are rounded to at least 512 bytes
MIN_BLOCK_BYTES = 512
# AllocatorConfig.h:21, kSmallSize: largest "small" allocation is 1 MiB
SMALL_BYTES = 1_048_576
# AllocatorConfig.h:23, kMinLargeAlloc: from here on a request gets a segment of its own size
MIN_LARGE_BYTES = 10_485_760
# AllocatorConfig.h:25, kRoundLarge: ... rounded up to 2 MiB
ROUND_LARGE_BYTES = 2_097_152
# AllocatorConfig.h:340, large_segment_size_: smaller ones may be packed in blocks of this size
LARGE_SEGMENT_BYTES = 20_971_520

# AllocatorConfig.cpp: kRoundUpPowerOfTwoIntervals, from 1 MB to 64 GB
NUM_INTERVALS = 16
FIRST_INTERVAL_LOG2 = 20

# AllocatorConfig.cpp, getMutableKeys, and CUDAAllocatorConfig.h:158-177, getKeys: known to PyTorch, without influence
# on how much device memory one stream takes.
_WITHOUT_INFLUENCE = frozenset(
    {
        "graph_capture_record_stream_reuse",
        "pinned_free_catch_all",
        "pinned_max_cached_size_mb",
        "pinned_max_round_threshold_mb",
        "pinned_num_register_threads",
        "pinned_reserve_segment_size_mb",
        "pinned_use_background_threads",
        "pinned_use_cuda_host_register",
        "pinned_use_hip_host_register",
        "release_lock_on_cudamalloc",
        "release_lock_on_hipmalloc",
        "throw_on_cudamalloc_oom",
    }
)
_WITH_INFLUENCE = (
    "backend",
    "expandable_segments",
    "garbage_collection_threshold",
    "large_segment_size_mb",
    "max_non_split_rounding_mb",
    "max_split_size_mb",
    "per_process_memory_fraction",
    "roundup_power2_divisions",
)
_PAIR = re.compile(r"([^,:\[\]]+):(\[[^\[\]]*\]|[^,:\[\]]+)(?:,|$)")
_MAX_LENGTH = 4096
_MAX_MB = (
    2**44 - 1
)  # AllocatorConfig.cpp: numeric_limits<size_t>::max() / kMB; larger values are capped


@dataclass(frozen=True, kw_only=True, slots=True)
class AllocatorSettings:
    """The settings that decide how much memory the allocator takes; the defaults are PyTorch's.

    `roundup_power2_divisions` has one number for each power of two from 1 MiB to 32 GiB: into how many steps the way to
    the next power is divided when a request is rounded; 0 rounds to 512 bytes. With a
    `per_process_memory_fraction` of 1 only the device limits, and garbage collection never runs: it needs a limit of
    its own to count from.
    """

    large_segment_bytes: int = LARGE_SEGMENT_BYTES
    max_split_bytes: int | None = None
    max_non_split_rounding_bytes: int = LARGE_SEGMENT_BYTES
    roundup_power2_divisions: tuple[int, ...] = (0,) * NUM_INTERVALS
    garbage_collection_threshold: float = 0.0
    expandable_segments: bool = False
    per_process_memory_fraction: float = 1.0

    def __post_init__(self) -> None:
        """Refuse what PyTorch refuses."""
        if self.large_segment_bytes <= MIN_LARGE_BYTES:
            raise InputError("`large_segment_size_mb` must be over 10")
        if self.max_split_bytes is not None and self.max_split_bytes < self.large_segment_bytes:
            raise InputError(
                f"`max_split_size_mb` must be at least {self.large_segment_bytes // MIB}, "
                f"found `{self.max_split_bytes // MIB}`",
                hint="a block smaller than a large segment may always be split",
            )
        if self.max_non_split_rounding_bytes < self.large_segment_bytes:
            raise InputError(
                f"`max_non_split_rounding_mb` must be at least {self.large_segment_bytes // MIB}, "
                f"found `{self.max_non_split_rounding_bytes // MIB}`"
            )
        if len(self.roundup_power2_divisions) != NUM_INTERVALS:
            raise InputError(f"`roundup_power2_divisions` needs {NUM_INTERVALS} numbers")
        for divisions in self.roundup_power2_divisions:
            if divisions < 0 or divisions & (divisions - 1):
                raise InputError(
                    f"`roundup_power2_divisions` must be powers of two or 0, found `{divisions}`"
                )
        if not 0.0 <= self.garbage_collection_threshold < 1.0:
            raise InputError(
                "`garbage_collection_threshold` must lie between 0 and 1, "
                f"found `{self.garbage_collection_threshold}`"
            )
        if not 0.0 <= self.per_process_memory_fraction <= 1.0:
            raise InputError(
                "`per_process_memory_fraction` must lie between 0 and 1, "
                f"found `{self.per_process_memory_fraction}`"
            )

    def round_size(self, num_bytes: int) -> int:
        """Return the bytes that a request of `num_bytes` (over 0) takes: CUDACachingAllocator.cpp, `round_size`.

        >>> DEFAULT_SETTINGS.round_size(513)
        1024
        """
        if num_bytes < MIN_BLOCK_BYTES:
            return MIN_BLOCK_BYTES
        interval = num_bytes.bit_length() - 1 - FIRST_INTERVAL_LOG2
        divisions = self.roundup_power2_divisions[min(max(interval, 0), NUM_INTERVALS - 1)]
        if divisions > 1 and num_bytes > MIN_BLOCK_BYTES * divisions:
            return _next_division(num_bytes, divisions)
        return -(-num_bytes // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES

    def segment_bytes(self, size: int) -> int:
        """Return the bytes of the segment made for a rounded `size`: CUDACachingAllocator.cpp, `get_allocation_size`.

        >>> [DEFAULT_SETTINGS.segment_bytes(mib * MIB) // MIB for mib in (1, 2, 10, 11)]
        [2, 20, 10, 12]
        """
        if size <= SMALL_BYTES:
            return SMALL_SEGMENT_BYTES
        if size < MIN_LARGE_BYTES:
            return self.large_segment_bytes
        return -(-size // ROUND_LARGE_BYTES) * ROUND_LARGE_BYTES


DEFAULT_SETTINGS = AllocatorSettings()


def _next_division(num_bytes: int, divisions: int) -> int:
    """Round up to the next of `divisions` steps between two powers of two: `roundup_power2_next_division`.

    The source's own example: 1200 with 4 divisions lies between 1024 and 1280, and becomes 1280.
    """
    floor = 1 << (num_bytes.bit_length() - 1)
    if floor == num_bytes:
        return num_bytes
    step = floor >> (divisions.bit_length() - 1)
    return -(-num_bytes // step) * step


def parse_allocator_settings(text: str) -> AllocatorSettings:
    """Return what `PYTORCH_ALLOC_CONF=text` asks for.

    Keys without influence on the memory of one stream (`pinned_*`, `release_lock_on_cudamalloc`, ...) are accepted.

    Raises: InputError for an unknown key or a value out of range; Unsupported for `backend:cudaMallocAsync`.
    Source: see the module.

    >>> parse_allocator_settings("expandable_segments:True,max_split_size_mb:128").max_split_bytes
    134217728
    """
    if len(text) > _MAX_LENGTH:
        raise InputError(f"allocator settings longer than {_MAX_LENGTH} characters")
    values = dict(_pairs("".join(text.split())))
    if values.get("backend", "native") != "native":
        if values["backend"] == "cudaMallocAsync":
            raise Unsupported(
                "the allocator behind `backend:cudaMallocAsync` is CUDA's own, and is not modelled",
                hint="use `backend:native`, PyTorch's default",
            )
        raise InputError(f"`backend` must be `native`, found `{values['backend']}`")
    large_segment_bytes = _mebibytes(values, "large_segment_size_mb", LARGE_SEGMENT_BYTES)
    split = values.get("max_split_size_mb")
    return AllocatorSettings(
        large_segment_bytes=large_segment_bytes,
        max_split_bytes=None if split is None else _mebibytes(values, "max_split_size_mb", 0),
        max_non_split_rounding_bytes=_mebibytes(
            values, "max_non_split_rounding_mb", large_segment_bytes
        ),
        roundup_power2_divisions=_divisions(values.get("roundup_power2_divisions", "0")),
        garbage_collection_threshold=_threshold(values),
        expandable_segments=_boolean(values, "expandable_segments"),
        per_process_memory_fraction=_fraction(values, "per_process_memory_fraction", 1.0),
    )


def _pairs(text: str) -> list[tuple[str, str]]:
    """Split `key:value,key:[a:b,c:d]` into pairs."""
    pairs = []
    position = 0
    while position < len(text):
        found = _PAIR.match(text, position)
        if found is None:
            raise InputError(
                f"allocator settings: cannot read `{text[position : position + 60]}`",
                hint="write `key:value,key:value`, for example `expandable_segments:True`",
            )
        key, value = found.groups()
        if key not in _WITH_INFLUENCE and key not in _WITHOUT_INFLUENCE:
            raise InputError(
                f"allocator settings: unknown key `{key[:60]}`",
                hint="known: " + ", ".join(_WITH_INFLUENCE),
            )
        pairs.append((key, value))
        position = found.end()
    return pairs


def _integer(text: str, key: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 20:
        raise InputError(f"`{key}` must be a whole number, found `{text[:60]}`")
    return int(text)


def _mebibytes(values: dict[str, str], key: str, default: int) -> int:
    if key not in values:
        return default
    return min(_integer(values[key], key), _MAX_MB) * MIB


def _boolean(values: dict[str, str], key: str) -> bool:
    text = values.get(key, "False")
    if text not in ("True", "False"):
        raise InputError(f"`{key}` must be `True` or `False`, found `{text[:60]}`")
    return text == "True"


def _fraction(values: dict[str, str], key: str, default: float) -> float:
    text = values.get(key)
    if text is None:
        return default
    if len(text) > 40 or re.fullmatch(r"\d*\.?\d+(e-?\d{1,3})?|\d+\.", text, re.ASCII) is None:
        raise InputError(f"`{key}` must be a number between 0 and 1, found `{text[:60]}`")
    return float(text)


def _threshold(values: dict[str, str]) -> float:
    key = "garbage_collection_threshold"
    threshold = _fraction(values, key, 0.0)
    if key in values and threshold == 0.0:
        raise InputError(f"`{key}` must lie between 0 and 1, found `0`")
    return threshold


def _divisions(text: str) -> tuple[int, ...]:
    """Read `4`, or `[256:1,512:2,1024:4,>:8]`: for sizes from 256 MB on no steps, from 512 MB on two ...

    AllocatorConfig.cpp, parseRoundUpPower2Divisions: what lies below the first interval takes its value; `>` fills what
    lies above the last one (above 1 MB where none was named); an interval that is skipped in between keeps 0.
    """
    key = "roundup_power2_divisions"
    if not text.startswith("["):
        return (_integer(text, key),) * NUM_INTERVALS
    table = [0] * NUM_INTERVALS
    last = 0
    first = True
    for pair in filter(None, text[1:-1].split(",")):
        boundary, colon, value = pair.partition(":")
        if not colon:
            raise InputError(f"`{key}` needs `size:divisions`, found `{pair[:60]}`")
        divisions = _integer(value, key)
        if boundary == ">":
            table[last + 1 :] = [divisions] * (NUM_INTERVALS - last - 1)
            continue
        size_mb = _integer(boundary, key)
        if size_mb == 0 or size_mb & (size_mb - 1):
            raise InputError(f"`{key}`: sizes must be powers of two, found `{boundary}`")
        index = min(size_mb.bit_length() - 1, NUM_INTERVALS - 1)
        if first:
            first = False
            table[:index] = [divisions] * index
        table[index] = divisions
        last = index
    return tuple(table)
