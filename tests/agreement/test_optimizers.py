"""Each optimizer on the tape holds and allocates what the real one does on fake tensors, to the byte."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from wazn.recipe import Optimizer
from wazn.simulate.optimizers import make_optimizer
from wazn.simulate.tape import Parameter, Tape
from wazn.timeline.events import Category, Phase

torch = pytest.importorskip("torch")

from tests.agreement.compare import DTYPES, allocations  # noqa: E402
from tests.recipes import make_recipe  # noqa: E402
from wazn.trace.tracker import DEVICE  # noqa: E402
from wazn.trace.world import World  # noqa: E402

SHAPES = {
    "mlp.up_proj.weight": (768, 512),
    "norm.weight": (300,),
    "mlp.down_proj.weight": (128, 640),
}


def on_tape(optimizer: Optimizer, dtype: str) -> list[list[int]]:
    """Return what each of two steps allocates and frees."""
    tape = Tape()
    tape.enter_layer(0)
    parameters: list[Parameter] = []
    for name, shape in SHAPES.items():
        numel = shape[0] * shape[-1] if len(shape) == 2 else shape[0]
        parameter = tape.parameter(
            name=name, numel=numel, dtype=DTYPES[dtype], requires_grad=True, shape=shape
        )
        parameter.grad = tape.new_tagged(numel, DTYPES[dtype], Category.GRADIENTS, name)
        parameters.append(parameter)
    made = make_optimizer(tape, parameters, make_recipe(optimizer=optimizer))
    for step in (1, 2):
        tape.enter(Phase.OPTIMIZER, step=step)
        made.step()
    segments = tape.finish()
    return [
        [
            size
            for segment in segments
            if segment.phase is Phase.OPTIMIZER and segment.step == step
            for size in segment.sizes
        ]
        for step in (1, 2)
    ]


def for_real(make: Callable[[list[dict[str, Any]]], Any], dtype: str) -> list[list[int]]:
    """Return the same of a real optimizer over Trainer's two groups, on fake tensors."""
    with World() as world:
        tensors = []
        for shape in SHAPES.values():
            tensor = torch.nn.Parameter(
                torch.empty(shape, dtype=getattr(torch, dtype), device=DEVICE)
            )
            tensor.grad = torch.empty_like(tensor)
            tensors.append(tensor)
        optimizer = make(
            [{"params": [tensors[0], tensors[2]]}, {"params": [tensors[1]], "weight_decay": 0.0}]
        )
        changes = []
        for _ in range(2):
            before = len(world.tracker.events)
            with torch.device(DEVICE):  # Adafactor makes states on the host and moves them
                optimizer.step()
            changes.append([event.num_bytes for event in world.tracker.events[before:]])
        return changes


def levels(changes: list[int]) -> tuple[int, int]:
    """Return where the sum ends and its highest point."""
    current = peak = 0
    for size in changes:
        current += size
        peak = max(peak, current)
    return current, peak


def without_scalars(changes: list[int]) -> list[int]:
    """Leave out what has at most one element: norms and counts, whose order differs."""
    return [size for size in changes if abs(size) > 8]


def _adafactor(groups: list[dict[str, Any]]) -> Any:
    from transformers.optimization import Adafactor

    return Adafactor(groups, lr=1e-3, scale_parameter=False, relative_step=False)


REAL: dict[Optimizer, Callable[[list[dict[str, Any]]], Any]] = {
    Optimizer.ADAMW: lambda groups: torch.optim.AdamW(groups, foreach=True),
    Optimizer.SGD: lambda groups: torch.optim.SGD(groups, lr=0.1, foreach=True),
    Optimizer.SGD_MOMENTUM: lambda groups: torch.optim.SGD(
        groups, lr=0.1, momentum=0.9, foreach=True
    ),
    Optimizer.ADAFACTOR: _adafactor,
}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("optimizer", REAL)
def test_torch_optimizers(optimizer: Optimizer, dtype: str) -> None:
    """States and temporaries of two steps are those of the real optimizer."""
    real = [without_scalars(changes) for changes in for_real(REAL[optimizer], dtype)]
    tape = [without_scalars(changes) for changes in on_tape(optimizer, dtype)]
    for step in (0, 1):
        assert allocations(tape[step]) == allocations(real[step])
        assert levels(tape[step]) == levels(real[step])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_muon(dtype: str) -> None:
    """A step of torch.optim.Muon on one matrix allocates what the tape says."""

    def make(groups: list[dict[str, Any]]) -> Any:
        return torch.optim.Muon([groups[0]["params"][0]])

    real = [without_scalars(changes) for changes in for_real(make, dtype)]
    tape = Tape()
    tape.enter_layer(0)
    parameter = tape.parameter(
        name="mlp.up_proj.weight",
        numel=768 * 512,
        dtype=DTYPES[dtype],
        requires_grad=True,
        shape=(768, 512),
    )
    parameter.grad = tape.new_tagged(768 * 512, DTYPES[dtype], Category.GRADIENTS, "g")
    made = make_optimizer(tape, [parameter], make_recipe(optimizer=Optimizer.MUON))
    found = []
    for step in (1, 2):
        tape.enter(Phase.OPTIMIZER, step=step)
        made.step()
        found.append([s for seg in tape.cut() if seg.phase is Phase.OPTIMIZER for s in seg.sizes])
    for step in (0, 1):
        assert allocations(without_scalars(found[step])) == allocations(real[step])
        assert levels(without_scalars(found[step])) == levels(real[step])


BITSANDBYTES = {
    Optimizer.ADAMW_8BIT: "AdamW8bit",
    Optimizer.LION: "Lion32bit",
    Optimizer.LION_8BIT: "Lion8bit",
}


@pytest.mark.parametrize("optimizer", BITSANDBYTES)
def test_bitsandbytes_states(optimizer: Optimizer) -> None:
    """The states that bitsandbytes makes for each tensor have the sizes on the tape; its tables are shared."""
    optim = pytest.importorskip("bitsandbytes.optim")
    with World() as world:
        tensors = [
            torch.nn.Parameter(torch.empty(shape, dtype=torch.bfloat16, device=DEVICE))
            for shape in (SHAPES["mlp.up_proj.weight"], SHAPES["mlp.down_proj.weight"], (300,))
        ]
        real = getattr(optim, BITSANDBYTES[optimizer])(tensors, lr=1e-3)
        group = real.param_groups[0]
        sizes = []
        for index, tensor in enumerate(tensors):
            before = len(world.tracker.events)
            real.init_state(group, tensor, 0, index)
            sizes += [e.num_bytes for e in world.tracker.events[before:] if e.num_bytes > 0]
    tape = allocations(on_tape(optimizer, "bfloat16")[0])
    tables = 1024
    assert sorted(s for s in tape if s != tables) == sorted(s for s in sizes if s != tables)


def test_paged_states_are_outside() -> None:
    """Paged AdamW keeps states of 100,000 elements and more in managed memory: two bytes per element in 8 bits."""
    tape = Tape()
    made = make_optimizer(
        tape,
        [
            tape.parameter(
                name="a.weight", numel=200_000, dtype=DTYPES["bfloat16"], requires_grad=True
            ),
            tape.parameter(
                name="b.weight", numel=50_000, dtype=DTYPES["bfloat16"], requires_grad=True
            ),
        ],
        make_recipe(optimizer=Optimizer.PAGED_ADAMW_8BIT),
    )
    made.step()
    assert made.managed_bytes == 2 * 200_000


def test_fused_adamw_counts_steps_on_the_gpu() -> None:
    """Fused AdamW makes a step count on the device for each tensor, and nothing for a moment (torch/optim/adam.py)."""
    first, second = on_tape(Optimizer.ADAMW_FUSED, "bfloat16")
    assert sorted(first) == sorted(
        [4] * 3 + [2 * n for n in (768 * 512, 300, 128 * 640) for _ in "mv"]
    )
    assert second == []
