"""Each allocation knows its module and its line, in forward, in backward and in what is computed again."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from wazn.trace.places import Place, Places
from wazn.trace.tracker import DEVICE, StorageEvent
from wazn.trace.world import World


class Inner(torch.nn.Module):
    """A product and a non-linearity that each make a tensor, in forward and in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(8, 8, device="meta"))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden @ self.weight
        return torch.nn.functional.gelu(hidden)


class Outer(torch.nn.Module):
    """Two of them; the second is run again in backward."""

    def __init__(self, again: Callable[..., Any] | None) -> None:
        super().__init__()
        self.first = Inner()
        self.second = Inner()
        self.again = again

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = self.first(hidden)
        hidden = self.second(hidden) if self.again is None else self.again(self.second, hidden)
        return hidden * 2


def line_of(function: Any, text: str) -> str:
    """The file and the number of the line of a function that has this text."""
    lines, start = inspect.getsourcelines(function)
    number = next(start + i for i, line in enumerate(lines) if text in line)
    return f"test_places.py:{number}"


def events_of(again: Callable[..., Any] | None) -> list[StorageEvent]:
    """Run a forward and a backward; the events, with where each was made."""
    model = Outer(again)
    world = World()
    places = world.tracker.places = Places()
    places.of_model(model)
    with places.watching(), world:
        world.materialise(model)
        hidden = torch.empty(4, 8, device=DEVICE, requires_grad=True)
        world.tracker.phase = "forward"
        result = model(hidden)
        world.tracker.phase = "backward"
        result.sum().backward()
    return [event for event in world.tracker.events if event.num_bytes > 0]


def places_of(events: list[StorageEvent], phase: str, op: str) -> list[Place]:
    found = [event.place for event in events if event.phase == phase and event.op.startswith(op)]
    return [Place(place.module, place.line.rpartition("/")[2]) for place in found]


GELU = line_of(Inner.forward, "gelu")
PRODUCT = line_of(Inner.forward, "@ self.weight")
DOUBLE = line_of(Outer.forward, "hidden * 2")


def test_forward_knows_the_module_that_runs_and_its_line() -> None:
    """The product and the non-linearity belong to their module, what stands around them to the one around."""
    events = events_of(None)
    assert places_of(events, "forward", "aten.gelu.") == [
        Place("first", GELU),
        Place("second", GELU),
    ]
    products = [Place("first", PRODUCT), Place("second", PRODUCT)]
    assert places_of(events, "forward", "aten.mm.") == products
    assert places_of(events, "forward", "aten.mul.") == [Place("", DOUBLE)]


def test_backward_knows_the_module_and_the_line_that_made_its_node() -> None:
    """The gradients come in the reverse order; a product makes two."""
    events = events_of(None)
    back = [Place("second", GELU), Place("first", GELU)]
    assert places_of(events, "backward", "aten.gelu_backward") == back
    products = [Place("second", PRODUCT)] * 2 + [Place("first", PRODUCT)] * 2
    assert places_of(events, "backward", "aten.mm.") == products
    assert places_of(events, "backward", "aten.mul.") == [Place("", DOUBLE)]


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_is_computed_again_belongs_where_it_did(reentrant: bool) -> None:
    """In backward the second module runs again: its product and non-linearity are its own a second time.

    Without reentry the run stops with the last tensor that backward needs, here before the result of gelu.
    """
    events = events_of(lambda module, x: checkpoint(module, x, use_reentrant=reentrant))
    again = places_of(events, "backward", "aten.mm.")
    assert again == [Place("second", PRODUCT)] * 3 + [Place("first", PRODUCT)] * 2
    assert places_of(events, "backward", "aten.gelu_backward") == [
        Place("second", GELU),
        Place("first", GELU),
    ]


def test_the_places_of_backward_do_not_outlive_an_error() -> None:
    """A module that raises is left: what runs afterwards is outside of it."""
    places = Places()

    class Broken(torch.nn.Module):
        def forward(self) -> None:
            raise RuntimeError("broken")

    module = torch.nn.Sequential(Broken())
    places.of_model(module)
    with places.watching():
        with pytest.raises(RuntimeError, match="broken"):
            module[0]()
        assert places.here().module == ""
