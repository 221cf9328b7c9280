"""Inside a world code finds one NVIDIA card, and names it as a device; outside it does not."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from wazn.errors import InputError
from wazn.facts.gpus import gpu_by_id
from wazn.trace.card import Card
from wazn.trace.imports import patched, when_imported
from wazn.trace.tracker import DEVICE
from wazn.trace.world import World

RTX_4090 = Card(
    name="NVIDIA GeForce RTX 4090",
    capability=(8, 9),
    total_bytes=25_250_627_584,
    num_multiprocessors=128,
)


def test_the_card_is_described() -> None:
    """What `torch.cuda` is asked is answered from the card: name, capability, memory, multiprocessors."""
    with World(card=RTX_4090) as world:
        assert torch.cuda.is_available()
        assert torch.accelerator.is_available()
        assert (torch.cuda.device_count(), torch.cuda.current_device()) == (1, 0)
        assert torch.accelerator.current_accelerator() == torch.device("cuda")
        assert torch.cuda.get_device_name() == "NVIDIA GeForce RTX 4090"
        assert torch.cuda.get_device_capability() == world.capability == (8, 9)
        assert torch.cuda.is_bf16_supported()
        properties = torch.cuda.get_device_properties("cuda:0")
        assert (properties.total_memory, properties.multi_processor_count) == (25_250_627_584, 128)
    assert not torch.cuda.is_available()
    assert torch.version.cuda is None


def test_a_card_of_the_catalogue() -> None:
    """An entry of NVIDIA becomes a card; another maker's is refused."""
    card = Card.of_gpu(gpu_by_id("a100-sxm4-80gb"))
    assert (card.capability, card.num_multiprocessors) == ((8, 0), 108)
    with pytest.raises(InputError, match="no CUDA"):
        Card.of_gpu(gpu_by_id("mi300x-192gb"))


def test_memory_is_what_the_caching_allocator_would_say() -> None:
    """1,000 bytes are a block of 1,024 in a segment of 2 MiB; what is free is the rest of the card.

    Source: kMinBlockSize and kSmallBuffer in c10/cuda/CUDACachingAllocator.cpp.
    """
    with World(card=RTX_4090):
        first = torch.empty(1000, dtype=torch.uint8, device="cuda")
        second = torch.empty(1000, dtype=torch.uint8, device="cuda")
        del second
        assert (torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()) == (1024, 2048)
        assert torch.cuda.memory_reserved() == 2 << 20
        assert torch.cuda.mem_get_info() == (RTX_4090.total_bytes - (2 << 20), RTX_4090.total_bytes)
        assert "2048 KiB" in torch.cuda.memory_summary()
        torch.cuda.reset_peak_memory_stats()
        assert torch.cuda.memory_stats()["allocated_bytes.all.peak"] == 1024
        del first
        torch.cuda.empty_cache()
        assert torch.accelerator.memory_reserved() == 0


def test_naming_the_card_as_a_device_means_the_device_of_the_world() -> None:
    """`cuda` as a text, an object or a number, in factories and in moves; `cpu` is host memory and is not counted."""
    with World() as world:
        tracker = world.tracker
        made = [
            torch.empty(256, dtype=torch.uint8, device="cuda"),
            torch.empty(256, dtype=torch.uint8, device=torch.device("cuda", 0)),
            torch.empty(256, dtype=torch.uint8, device=torch.cuda.current_device()),
            torch.empty(256, dtype=torch.uint8, device=DEVICE),
        ]
        with torch.device("cuda"):
            made.append(torch.empty(256, dtype=torch.uint8))
        assert tracker.current_bytes == 5 * 512
        on_host = torch.empty(256, dtype=torch.uint8, device="cpu")
        assert not on_host.is_cuda
        moved = [on_host.to("cuda"), on_host.cuda(), on_host.to(0), on_host.to(made[0])]
        assert all(tensor.is_cuda for tensor in moved)
        assert tracker.current_bytes == 9 * 512
        assert made[0].to("cuda") is made[0]
        assert not made[0].cpu().is_cuda


def test_tensors_say_that_they_are_on_the_card() -> None:
    """Libraries choose kernels by `tensor.device`; PyTorch's own Python code sees the device that the tensor has."""
    with World() as world:
        on_card = torch.empty(256, dtype=torch.uint8, device="cuda")
        on_host = torch.empty(256, dtype=torch.uint8, device="cpu")
        assert on_card.device == torch.device("cuda", 0)
        assert on_host.device == torch.device("cpu")
        assert (on_card.get_device(), on_host.get_device()) == (0, -1)
        layer = torch.nn.Linear(8, 8, device="cuda")
        assert layer.weight.device.type == "cuda"
        made = torch.empty(256, dtype=torch.uint8, device=on_card.device)
        assert world.tracker.block_id(made) is not None
        seen_by_torch = torch.utils._foreach_utils._group_tensors_by_device_and_dtype([[on_card]])
        assert [device.type for device, _ in seen_by_torch] == ["cpu"]
    assert on_card.device == DEVICE


def test_addresses_tell_whether_memory_is_shared() -> None:
    """A fake tensor has none: views differ by their offset, blocks begin at multiples of 512 as the allocator's do."""
    with World():
        tensor = torch.empty(8, 8, device="cuda")
        assert tensor.data_ptr() % 512 == 0
        assert tensor[2:].data_ptr() - tensor.data_ptr() == 2 * 8 * 4
        assert tensor.data_ptr() != torch.empty(8, 8, device="cuda").data_ptr()


def test_a_gradient_of_one_is_one() -> None:
    """`torch.equal` is asked of a gradient that nobody knows: it is as in a healthy run; known values are compared."""
    with World():
        unknown = torch.empty((), device="cuda")
        assert torch.equal(unknown, torch.tensor(1.0, device="cuda"))
        assert not torch.equal(torch.zeros(2, device="cuda"), torch.ones(2, device="cuda"))


def test_modules_move_to_the_card() -> None:
    """`Module.cuda()` and `Module.to("cuda")` move what is in host memory: 64 x 32 fp32; and back."""
    with World() as world:
        for move in (lambda m: m.cuda(), lambda m: m.to("cuda"), lambda m: m.to(0)):
            layer = torch.nn.Linear(64, 32, bias=False)
            assert world.tracker.current_bytes == 0
            move(layer)
            assert world.tracker.current_bytes == 64 * 32 * 4
            layer.to("cpu")
            assert world.tracker.current_bytes == 0


def test_modules_are_copied() -> None:
    """`copy.deepcopy` gives each parameter a block of its own, 64 x 64 fp32, once where it has two names."""
    with World() as world:
        model = torch.nn.ModuleList(torch.nn.Linear(64, 64, False, device="cuda") for _ in range(2))
        model[1].weight = model[0].weight
        model[0].weight.note = ["kept"]
        before = world.tracker.current_bytes
        made = copy.deepcopy(model)
        assert world.tracker.current_bytes - before == 64 * 64 * 4
        assert made[0].weight is made[1].weight
        assert isinstance(made[0].weight, torch.nn.Parameter)
        assert made[0].weight.note == ["kept"]
        assert made[0].weight.note is not model[0].weight.note
        assert not copy.deepcopy(torch.empty(2, device="cpu")).is_cuda


def test_pinned_memory_is_on_the_host() -> None:
    """A pinned copy is not counted, and moving it to the card is."""
    with World() as world:
        pinned = torch.empty(1024, dtype=torch.uint8, device="cpu").pin_memory()
        assert world.tracker.current_bytes == 0
        moved = pinned.to("cuda", non_blocking=True)
        assert world.tracker.current_bytes == moved.numel()


def test_autocast_of_cuda_is_on() -> None:
    """`torch.autocast("cuda")` lowers to fp16 by default, to what is asked otherwise; the CPU's default is bf16."""
    with World():
        weight = torch.empty(8, 8, device="cuda", requires_grad=True)
        with torch.autocast("cuda"):
            assert (weight @ weight).dtype is torch.float16
            assert torch.is_autocast_enabled("cuda")
            with torch.autocast("cuda", enabled=False):
                assert (weight @ weight).dtype is torch.float32
        with torch.autocast("cuda", dtype=torch.bfloat16):
            assert (weight @ weight).dtype is torch.bfloat16
        with torch.amp.autocast_mode.autocast("cpu"):
            assert (weight @ weight).dtype is torch.bfloat16


@pytest.mark.parametrize("fused", [False, True])
def test_a_scaler_of_fp16_lets_the_optimizer_step(fused: bool) -> None:
    """A healthy run has no infinite gradient: the states are made, 8 x 8 fp32 twice."""
    with World() as world:
        weight = torch.empty(8, 8, device="cuda", requires_grad=True)
        optimizer = torch.optim.AdamW([weight], fused=fused)
        scaler = torch.amp.GradScaler("cuda")
        with torch.autocast("cuda"):
            loss = (weight @ weight).sum()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        states = optimizer.state[weight]
        made = [world.tracker.block_id(states[name]) for name in ("exp_avg", "exp_avg_sq")]
        assert None not in made


def test_streams_and_events_do_nothing() -> None:
    """Code that orders its work or takes the time runs through."""
    with World():
        stream, start, end = (
            torch.cuda.Stream(),
            torch.cuda.Event(enable_timing=True),
            torch.cuda.Event(),
        )
        with torch.cuda.stream(stream):
            start.record()
        torch.cuda.current_stream().wait_stream(stream)
        end.record()
        end.synchronize()
        assert start.elapsed_time(end) == 1.0
        with torch.cuda.device(0), torch.cuda.device_of(torch.empty(1, device="cuda")):
            torch.cuda.synchronize()
        torch.cuda.manual_seed_all(1)
        assert len(torch.cuda.get_rng_state_all()) == 1


def test_accelerate_finds_the_card_inside_and_not_outside() -> None:
    """Its device is `cuda:0`; what it knew before is as it was afterwards."""
    accelerate = pytest.importorskip("accelerate")
    before = dict(accelerate.PartialState._shared_state)
    with World():
        assert accelerate.Accelerator().device.type == "cuda"
    assert accelerate.PartialState._shared_state == before


def test_transformers_forgets_the_card() -> None:
    """`is_torch_bf16_gpu_available` remembers its answer for good, so it is asked anew after the world."""
    from transformers.utils import is_torch_bf16_gpu_available

    assert not is_torch_bf16_gpu_available()
    with World():
        assert is_torch_bf16_gpu_available()
    assert not is_torch_bf16_gpu_available()


def test_a_module_is_patched_when_it_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library imported only inside is changed there, executed in the context that it wants, and restored."""
    (tmp_path / "late_library.py").write_text(
        "import wazn.trace.tracker as t\nseen = t.FLAG\nvalue = 1\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    tracker = sys.modules["wazn.trace.tracker"]
    monkeypatch.setattr(tracker, "FLAG", "outside", raising=False)
    patches = {"late_library": lambda module: patched(module, {"value": 2, "unknown": 3})}
    executed_in = {"late_library": lambda _: patched(tracker, {"FLAG": "inside"})}
    with when_imported(patches, executed_in=executed_in):
        import late_library  # type: ignore[import-not-found]

        assert (late_library.seen, late_library.value) == ("inside", 2)
        assert not hasattr(late_library, "unknown")
    assert late_library.value == 1
    del sys.modules["late_library"]


def test_patches_are_undone_when_something_fails() -> None:
    """An error inside leaves nothing behind."""
    owner = SimpleNamespace(value=1)
    with pytest.raises(ZeroDivisionError), patched(owner, {"value": 2}):
        raise ZeroDivisionError
    assert owner.value == 1


def test_an_ordinary_script_runs_as_on_a_gpu() -> None:
    """A data loader with pinned memory, autocast, a scaler, clipping, the fused optimizer: none of it knows of wazn.

    What stays is by pencil: a weight of 256 x 256 fp32 and its two states; the step, the scale and its growth
    tracker are blocks of 512 bytes.
    """
    functional = torch.nn.functional
    with World():
        device = "cuda" if torch.cuda.is_available() else "cpu"
        model = torch.nn.Linear(256, 256, bias=False).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        samples = torch.utils.data.TensorDataset(torch.randn(16, 256))
        loader = torch.utils.data.DataLoader(samples, batch_size=4, shuffle=True, pin_memory=True)
        scaler = torch.amp.GradScaler(device)
        for (batch,) in loader:
            inputs = batch.to(device, non_blocking=True)
            with torch.autocast(device, dtype=torch.float16):
                loss = functional.mse_loss(model(inputs), inputs)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            assert loss.item() == 1.0
        del batch, inputs, loss
        assert torch.cuda.memory_allocated() == 3 * 256 * 256 * 4 + 3 * 512
