"""The autograd engine: which node runs next, what it holds meanwhile, where its gradients go.

Facts about PyTorch's engine, with their place in PyTorch 2.13:

- nodes run when all their gradients have arrived, the youngest first (torch/csrc/autograd/engine.cpp, `ReadyQueue`);
- a node's outgoing gradients are summed to the shape and cast to the type of its inputs while its incoming gradients
  are alive (`validate_outputs`); the incoming gradients die, then its saved tensors, then the next nodes get their
  gradients (`Engine::evaluate_function`: `call_function`, `release_variables`, `InputBuffer::add`);
- a second gradient for the same input is added in place when the buffer holds the last reference (`InputBuffer`,
  `can_accumulate_inplace`), into a new tensor otherwise; never in place for tensor subclasses such as fake tensors;
- a leaf steals the incoming gradient when nobody else holds it, copies it otherwise, and adds in place to one it
  already has (torch/csrc/autograd/functions/accumulate_grad.h).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from heapq import heappop, heappush
from typing import TYPE_CHECKING

from wazn.dtypes import FLOAT32, Dtype
from wazn.simulate.frames import Holder, Saved
from wazn.simulate.tensors import Parameter, Tensor
from wazn.timeline.events import Category

if TYPE_CHECKING:
    from wazn.simulate.tape import Tape

__all__ = ["YOUNGEST", "Backward", "Edge", "Node", "run_backward"]

YOUNGEST = 1 << 60  # AccumulateGrad runs as soon as it is ready

Edge = tuple["Node", int, int, Dtype]
Backward = Callable[..., "tuple[Tensor | None, ...]"]


class Node:
    """A recorded op: edges to the producers of its inputs, what it saved, and its backward function.

    `backward(*gradients)` takes one gradient (or None) per output and returns one (or None) per edge. An edge is the
    producing node, the number of its output, and the size and type that its gradient must have.
    """

    __slots__ = (
        "backward",
        "category",
        "edges",
        "gradients",
        "label",
        "layer",
        "parameter",
        "saved",
        "sequence",
        "waiting",
    )

    def __init__(
        self,
        *,
        sequence: int,
        layer: int | None,
        label: str,
        category: Category,
        edges: tuple[Edge | None, ...],
        saved: Saved,
        backward: Backward | None,
        num_outputs: int,
        parameter: Parameter | None = None,
    ) -> None:
        self.sequence = sequence
        self.layer = layer
        self.label = label
        self.category = category
        self.edges = edges
        self.saved = saved
        self.backward = backward
        self.parameter = parameter
        self.gradients: list[Tensor | None] = [None] * num_outputs
        self.waiting = 0

    def __lt__(self, other: Node) -> bool:
        return self.sequence > other.sequence


def run_backward(tape: Tape, root: Tensor, gradient: Tensor) -> None:
    """Run the graph from `root` backward; `gradient` is consumed."""
    node = root.node
    assert node is not None
    _count_waiting(node)
    node.gradients[root.output_nr] = gradient
    del gradient, root
    ready: list[Node] = [node]
    del node
    while ready:
        _run_node(tape, heappop(ready), ready)
    while tape._contexts:  # each in its layer, so that layers are alike in this too
        tape.enter_layer(tape._contexts[-1][0])
        tape._contexts.pop()


def _run_node(tape: Tape, node: Node, ready: list[Node]) -> None:
    if node.layer != tape.layer:
        tape.enter_layer(node.layer)
    if node.backward is None:
        if node.parameter is not None:
            _accumulate(tape, node, node.parameter)
        return
    before, tape.category = tape.category, node.category
    gradients, node.gradients = node.gradients, []
    saved = [_unpack(item) for item in node.saved]
    tape.label = node.label
    outputs = list(node.backward(*gradients))
    del saved  # a local of the formula: what checkpointing computed again dies with it
    for number, edge in enumerate(node.edges):
        outputs[number] = None if edge is None else _validate(tape, outputs[number], edge)
    del gradients
    node.backward, node.saved = None, ()
    for number, edge in enumerate(node.edges):
        if edge is None:
            continue
        target = edge[0]
        if outputs[number] is not None:
            held = target.gradients[edge[1]]
            if held is None:
                target.gradients[edge[1]] = outputs[number]
            else:
                _add_gradient(tape, target, edge[1], held)
            outputs[number] = None
            del held
        target.waiting -= 1
        if target.waiting == 0:
            heappush(ready, target)
    node.edges = ()
    tape.category = before


def _validate(tape: Tape, gradient: Tensor | None, edge: Edge) -> Tensor | None:
    if gradient is None:
        return None
    _, _, numel, dtype = edge
    if gradient.numel != numel:
        gradient = tape.new(numel, gradient.dtype)
    if gradient.dtype is not dtype:
        gradient = tape.new(numel, dtype)
    return gradient


def _unpack(item: Tensor | Holder) -> Tensor:
    if isinstance(item, Holder):
        return item.frame.unpack(item.index)
    return item


def _add_gradient(tape: Tape, target: Node, input_nr: int, held: Tensor) -> None:
    # references to `held`: the buffer, the caller's name, ours, and the argument of getrefcount
    alone = sys.getrefcount(held) <= _HELD_ALONE and _is_only_view(held)
    if not alone:
        target.gradients[input_nr] = tape.new(held.numel, held.dtype)


def _accumulate(tape: Tape, node: Node, parameter: Parameter) -> None:
    gradients, node.gradients = node.gradients, [None]
    parameter.accumulator = None
    gradient = gradients.pop()
    if gradient is None or parameter.grad is not None:
        return  # added in place to the gradient that is there
    alone = gradient.base is not None or _is_only_view(gradient)
    if not alone or sys.getrefcount(gradient) > _STOLEN_ALONE:
        tape.label = parameter.name
        gradient = tape.new(gradient.numel, gradient.dtype)
    if parameter.is_weight:
        assert gradient.storage is not None
        gradient.storage.retag(tape.tag(Category.GRADIENTS, parameter.name))
    parameter.grad = gradient


def _is_only_view(tensor: Tensor) -> bool:
    return sys.getrefcount(tensor.storage) <= _STORAGE_ALONE


def _reference_counts() -> tuple[int, int, int]:
    """Return what getrefcount says in `_add_gradient`, `_accumulate` and `_is_only_view` of a tensor nobody else holds.

    Interpreters differ in how many references a call holds by itself, so the count is taken, not assumed.
    """
    counts: list[int] = []

    def buffered(held: object) -> None:
        counts.append(sys.getrefcount(held))

    buffer: list[object] = [object()]
    held = buffer[0]
    buffered(held)

    popped: list[object] = [object()]
    gradient = popped.pop()
    counts.append(sys.getrefcount(gradient))

    tensor = Tensor(None, 0, FLOAT32)
    tensor.storage = object()  # type: ignore[assignment]
    counts.append(sys.getrefcount(tensor.storage))
    return counts[0], counts[1], counts[2]


_HELD_ALONE, _STOLEN_ALONE, _STORAGE_ALONE = _reference_counts()


def _count_waiting(root: Node) -> None:
    """Set for every reachable node how many edges lead to it."""
    stack = [root]
    seen = {id(root)}
    while stack:
        node = stack.pop()
        for edge in node.edges:
            if edge is None:
                continue
            target = edge[0]
            target.waiting += 1
            if id(target) not in seen:
                seen.add(id(target))
                stack.append(target)
