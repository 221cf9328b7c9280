"""A card that is not there: what `torch.cuda` and `torch.accelerator` answer inside a world.

Training code asks before it acts: is there a GPU, what can it do, how much memory is in use. Inside
`fake_card` these questions are answered as on a machine with one NVIDIA card, so that unmodified code goes the
way that it goes there: `accelerate` takes the device `cuda:0`, `Trainer` its optimizer and pinned memory for CUDA.
Tensors tell libraries that they are on `cuda:0`. Where such code names `cuda` as a device, `wazn.trace.habits` puts
the world's own device in its place.

Memory in use is what the tracker has seen, put through the model of the caching allocator: what
`torch.cuda.memory_allocated` would say at this point of the run. The card never runs out; what does not fit is
found when the timeline is replayed against a capacity.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Self

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from wazn.cluster import Gpu
from wazn.errors import InputError
from wazn.timeline.allocator import CachingAllocator
from wazn.trace.imports import patched
from wazn.trace.tracker import DEVICE, StorageTracker
from wazn.units import GIB

__all__ = ["Card", "fake_card"]

_CUDA_VERSION = "13.0"  # what the wheel of PyTorch 2.13 on PyPI is built for
_CUDA_0 = torch.device("cuda", 0)
_SEE_THE_STAND_IN = ("torch.", "wazn.")
_RNG_STATE_BYTES = 16  # seed and offset: `CUDAGeneratorImpl::get_state` in aten/src/ATen/cuda/

# Streaming multiprocessors by compute capability. Of cards of one capability those of the largest, as kernels that
# make a row per multiprocessor then hold the most. NVIDIA's data sheets: V100 80, T4 40, A100 108, RTX 3090 Ti 84,
# L40S 142, H100 SXM 132, B200 148, RTX PRO 6000 188.
_MULTIPROCESSORS = {
    (7, 0): 80,
    (7, 5): 40,
    (8, 0): 108,
    (8, 6): 84,
    (8, 9): 142,
    (9, 0): 132,
    (10, 0): 148,
    (12, 0): 188,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Card:
    """The card that code believes in.

    total_bytes: what `torch.cuda.mem_get_info()[1]` says.
    num_multiprocessors: some kernels make one row of a buffer for each.
    """

    name: str
    capability: tuple[int, int]
    total_bytes: int
    num_multiprocessors: int

    @classmethod
    def of_capability(cls, capability: tuple[int, int]) -> Self:
        """Return an unnamed card of this compute capability with room for everything."""
        return cls(
            name=f"NVIDIA card of compute capability {capability[0]}.{capability[1]}",
            capability=capability,
            total_bytes=1024 * GIB,
            num_multiprocessors=_multiprocessors(capability),
        )

    @classmethod
    def of_gpu(cls, gpu: Gpu) -> Self:
        """Return the card of a catalogue entry.

        Raises: InputError if it is not one of NVIDIA's.
        """
        capability = gpu.cuda_capability
        if capability is None:
            raise InputError(
                f"`{gpu.id}` has no CUDA", hint="a rehearsal is of a run on a card by NVIDIA"
            )
        return cls(
            name=f"NVIDIA {gpu.name}",
            capability=capability,
            total_bytes=gpu.usable_bytes,
            num_multiprocessors=_multiprocessors(capability),
        )


def _multiprocessors(capability: tuple[int, int]) -> int:
    """Return how many a card of this compute capability has; a newer one, as many as the newest known."""
    older = [known for known in _MULTIPROCESSORS if known <= capability]
    return _MULTIPROCESSORS[max(older, default=(7, 0))]


@contextmanager
def fake_card(card: Card, tracker: StorageTracker) -> Iterator[None]:
    """Answer for the card while the context lasts."""
    memory = _Memory(card, tracker)
    with ExitStack() as stack:
        for owner, replacements in _replacements(card, memory):
            stack.enter_context(patched(owner, replacements))
        stack.enter_context(patched(FakeTensor, {"device": _device_on_card(tracker)}))
        yield


def _device_on_card(tracker: StorageTracker) -> property:
    """Return what a fake tensor says of its device: `cuda:0`, to libraries, unless it is in host memory.

    Libraries choose kernels by it. PyTorch itself, and whatever runs inside an operation, sees the device that
    the tensor has.
    """
    own: Callable[[torch.Tensor], torch.device] = FakeTensor.device.fget

    def device(tensor: torch.Tensor) -> torch.device:
        found = own(tensor)
        asked_by = sys._getframe(1).f_globals.get("__name__", "")
        if asked_by.startswith(_SEE_THE_STAND_IN) or found.type != DEVICE.type:
            return found
        if tracker not in _get_current_dispatch_mode_stack() or tracker.is_on_host(tensor):
            return found
        return _CUDA_0

    return property(device)


class _Memory:
    """The counters of the card's allocator: events of the tracker, fed when somebody asks."""

    def __init__(self, card: Card, tracker: StorageTracker) -> None:
        self._card = card
        self._tracker = tracker
        self._allocator = CachingAllocator()
        self._num_seen = 0
        self._addresses: dict[int, int] = {}

    def _read(self) -> CachingAllocator:
        events = self._tracker.events
        for event in events[self._num_seen :]:
            if event.num_bytes > 0:
                address = self._allocator.malloc(event.num_bytes)
                assert address is not None  # there is no limit
                self._addresses[event.block_id] = address
            else:
                self._allocator.free(self._addresses.pop(event.block_id))
        self._num_seen = len(events)
        return self._allocator

    def stats(self, device: Any = None) -> dict[str, int]:
        """Return the sums that `torch.cuda.memory_stats` calls `all`, and the counts of retries; the rest is 0."""
        allocator = self._read()
        levels = {
            "allocated_bytes": (allocator.allocated_bytes, allocator.peak_allocated_bytes),
            "active_bytes": (allocator.allocated_bytes, allocator.peak_allocated_bytes),
            "requested_bytes": (allocator.requested_bytes, allocator.peak_requested_bytes),
            "reserved_bytes": (allocator.reserved_bytes, allocator.peak_reserved_bytes),
        }
        result: dict[str, int] = defaultdict(int)
        result |= {"num_alloc_retries": allocator.num_alloc_retries, "num_ooms": allocator.num_ooms}
        for name, (current, peak) in levels.items():
            result |= {f"{name}.all.current": current, f"{name}.all.peak": peak}
        return result

    def reset_peak(self, device: Any = None) -> None:
        allocator = self._read()
        allocator.peak_requested_bytes = allocator.requested_bytes
        allocator.peak_allocated_bytes = allocator.allocated_bytes
        allocator.peak_reserved_bytes = allocator.reserved_bytes

    def level(self, name: str) -> Callable[..., int]:
        def answer(device: Any = None) -> int:
            return self.stats()[name]

        return answer

    def empty_cache(self, device: Any = None) -> None:
        self._read().empty_cache()

    def info(self, device: Any = None) -> tuple[int, int]:
        """Return what is free and what there is, the context of the driver left out."""
        total_bytes = self._card.total_bytes
        return max(0, total_bytes - self._read().reserved_bytes), total_bytes


class _Stream:
    """A stream on which everything is done already."""

    device = _CUDA_0
    device_index = 0
    stream_id = cuda_stream = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        """Do not wait."""

    wait_stream = wait_event

    def synchronize(self) -> None:
        """Have nothing to wait for."""

    def record_event(self, event: Any = None) -> Any:
        return event or _Event()

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *args: object) -> None:
        pass


class _Event:
    """An event that has happened; any two are a millisecond apart, so that a rate can be computed."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record(self, stream: Any = None) -> None:
        """Happen."""

    wait = record

    def synchronize(self) -> None:
        """Have nothing to wait for."""

    def query(self) -> bool:
        return True

    def elapsed_time(self, end_event: Any) -> float:
        return 1.0


class _IsGenerator(type):
    """Answers `isinstance` for the class that stands for `torch.Generator`."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, _OWN_GENERATOR)


class _Generator(metaclass=_IsGenerator):
    """A generator of random numbers for any device; its state is on the host, as that of a card's is."""

    def __new__(cls, device: Any = "cpu") -> Any:
        del device
        return _OWN_GENERATOR("cpu")


_OWN_GENERATOR = torch.Generator


def _answers(value: Any) -> Callable[..., Any]:
    def answer(*args: Any, **kwargs: Any) -> Any:
        return value

    return answer


_nothing = _answers(None)


def _rng_state(device: Any = None) -> torch.Tensor:
    """Return the state of the card's random numbers, which is kept in host memory."""
    return torch.empty(_RNG_STATE_BYTES, dtype=torch.uint8, device="cpu")


def _rng_states() -> list[torch.Tensor]:
    return [_rng_state()]


def _replacements(card: Card, memory: _Memory) -> list[tuple[Any, dict[str, Any]]]:
    """Return, by module, what stands for its functions."""
    major, minor = card.capability
    properties = SimpleNamespace(
        name=card.name,
        major=major,
        minor=minor,
        total_memory=card.total_bytes,
        multi_processor_count=card.num_multiprocessors,
        warp_size=32,
        is_integrated=False,
        is_multi_gpu_board=False,
        gcnArchName="",
    )
    levels = {
        "memory_allocated": memory.level("allocated_bytes.all.current"),
        "max_memory_allocated": memory.level("allocated_bytes.all.peak"),
        "memory_reserved": memory.level("reserved_bytes.all.current"),
        "max_memory_reserved": memory.level("reserved_bytes.all.peak"),
        "memory_stats": memory.stats,
        "reset_peak_memory_stats": memory.reset_peak,
        "reset_accumulated_memory_stats": _nothing,
        "empty_cache": memory.empty_cache,
    }
    of_memory = {
        **levels,
        "reset_max_memory_allocated": memory.reset_peak,
        "mem_get_info": memory.info,
        "set_per_process_memory_fraction": _nothing,
        "_record_memory_history": _nothing,
    }
    of_random = {
        "get_rng_state": _rng_state,
        "get_rng_state_all": _rng_states,
        **dict.fromkeys(
            (
                "set_rng_state",
                "set_rng_state_all",
                "manual_seed",
                "manual_seed_all",
                "seed",
                "seed_all",
            ),
            _nothing,
        ),
    }
    of_cuda = {
        "is_available": _answers(True),
        "is_initialized": _answers(True),
        "_is_compiled": _answers(True),
        "_lazy_init": _nothing,
        "init": _nothing,
        "_exchange_device": _answers(0),
        "_maybe_exchange_device": _answers(0),
        "_get_device_index": _answers(0),
        "set_device": _nothing,
        "device_count": _answers(1),
        "current_device": _answers(0),
        "get_device_name": _answers(card.name),
        "get_device_capability": _answers(card.capability),
        "get_device_properties": _answers(properties),
        "is_bf16_supported": _answers(True),  # emulated before 8.0
        "is_tf32_supported": _answers(major >= 8),
        "get_arch_list": _answers([f"sm_{major}{minor}"]),
        "is_current_stream_capturing": _answers(False),
        "synchronize": _nothing,
        "ipc_collect": _nothing,
        "Stream": _Stream,
        "Event": _Event,
        "current_stream": _answers(_Stream()),
        "default_stream": _answers(_Stream()),
        "set_stream": _nothing,
        "stream": _answers(nullcontext()),
    }
    of_accelerator = {
        "is_available": _answers(True),
        "device_count": _answers(1),
        "current_accelerator": _answers(torch.device("cuda")),
        "current_device_index": _answers(0),
        "set_device_index": _nothing,
        "current_stream": _answers(_Stream()),
        "synchronize": _nothing,
        "get_memory_info": memory.info,
        **levels,
    }
    memory_of_accelerator = getattr(
        torch.accelerator, "memory", torch.accelerator
    )  # a module since 2.9
    return [
        (torch, {"Generator": _Generator}),
        (torch.version, {"cuda": _CUDA_VERSION}),
        (torch.cuda, {**of_cuda, **of_memory, **of_random}),
        (torch.cuda.memory, of_memory),
        (torch.cuda.random, of_random),
        (torch.accelerator, of_accelerator),
        (memory_of_accelerator, {**levels, "get_memory_info": memory.info}),
    ]
