"""A small autograd over sizes: tensors without data, freed by Python's own reference counting.

A `Tensor` here is an element count and a type; its `Storage` records an allocation when it is made and a free when the last
reference to it dies, as eager PyTorch does. A function that is written with the same variables as a model's code
therefore has the lifetimes of that code. A `Node` holds what its op saved for backward; `Tape.backward` runs the nodes in
the order of PyTorch's engine and lets go of what they saved when they are done. `Tape.checkpoint` runs a function again.

Facts about the engine that matter here, with their place in PyTorch 2.13:

- nodes run when all their gradients have arrived, the youngest first (torch/csrc/autograd/engine.cpp, `ReadyQueue`);
- a node's outgoing gradients are summed to the shape and cast to the type of its inputs while its incoming gradients are alive
  (`validate_outputs`); the incoming gradients die, then its saved tensors, then the next nodes get their gradients
  (`Engine::evaluate_function`: `call_function`, `release_variables`, `InputBuffer::add`);
- a second gradient for the same input is added in place when the buffer holds the last reference (`InputBuffer`,
  `can_accumulate_inplace`), into a new tensor otherwise; never in place for tensor subclasses such as fake tensors;
- a leaf steals the incoming gradient when nobody else holds it, copies it otherwise, and adds in place to one it already
  has (torch/csrc/autograd/functions/accumulate_grad.h).
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from heapq import heappop, heappush
from weakref import ref

from wazn.dtypes import FLOAT32, Dtype
from wazn.timeline.events import LAYER, PASS, Category, Phase, Segment, Tag

__all__ = ["SCALAR", "Node", "Parameter", "Storage", "Tape", "Tensor"]

_YOUNGEST = 1 << 60  # AccumulateGrad runs as soon as it is ready


class Storage:
    """A block of memory; making it allocates, losing the last reference frees."""

    __slots__ = ("_index", "_tags", "_tape", "block_id", "num_bytes", "tag")

    def __init__(self, tape: Tape, num_bytes: int, tag: Tag) -> None:
        self._tape = tape
        self.num_bytes = num_bytes
        self.tag = tag
        self.block_id = tape._next_id
        tape._next_id += 1
        self._tags = tags = tape._tags
        self._index = len(tags)
        tape._ids.append(self.block_id)
        tape._sizes.append(num_bytes)
        tags.append(tag)

    def __del__(self) -> None:
        tape = self._tape
        tape._ids.append(self.block_id)
        tape._sizes.append(-self.num_bytes)
        tape._tags.append(self.tag)

    def retag(self, tag: Tag) -> None:
        """Say what the block turned out to be for."""
        self.tag = tag
        self._tags[self._index] = tag


class Tensor:
    """`numel` elements of one type; several tensors may view one storage.

    `base` is the tensor that a gradient is a view of: PyTorch's views keep theirs alive, also inside backward.
    """

    __slots__ = ("base", "dtype", "node", "numel", "output_nr", "requires_grad", "storage")

    def __init__(
        self,
        storage: Storage | None,
        numel: int,
        dtype: Dtype,
        requires_grad: bool = False,
    ) -> None:
        self.storage = storage
        self.numel = numel
        self.dtype = dtype
        self.requires_grad = requires_grad
        self.node: Node | None = None
        self.output_nr = 0
        self.base: Tensor | None = None

    def detach(self) -> Tensor:
        """Return a view without history."""
        return Tensor(self.storage, self.numel, self.dtype)

    def view(self, numel: int) -> Tensor:
        """Return a view of `numel` elements without history."""
        return Tensor(self.storage, numel, self.dtype)

    def view_with_base(self) -> Tensor:
        """Return a gradient in another shape; nothing is added to it in place, as its storage has two holders."""
        view = Tensor(self.storage, self.numel, self.dtype)
        view.base = self
        return view


SCALAR = Tensor(
    None, 1, FLOAT32
)  # a Python number that an op saves: no memory, but it counts as saved


class Parameter(Tensor):
    """A leaf. `layer` is the index of its layer, or None outside the layers; `shape` is the weight's, as PyTorch has it."""

    __slots__ = ("accumulator", "grad", "layer", "name", "shape")

    def __init__(
        self,
        storage: Storage | None,
        numel: int,
        dtype: Dtype,
        *,
        name: str,
        layer: int | None,
        requires_grad: bool,
        shape: tuple[int, ...] = (),
    ) -> None:
        super().__init__(storage, numel, dtype, requires_grad)
        self.name = name
        self.layer = layer
        self.shape = shape
        self.grad: Tensor | None = None
        self.accumulator: Node | None = None


_Edge = tuple["Node", int, int, Dtype]
Backward = Callable[..., "tuple[Tensor | None, ...]"]
Saved = tuple["Tensor | _Holder", ...]


class Node:
    """A recorded op: edges to the producers of its inputs, what it saved, and its backward function.

    `backward(*gradients)` takes one gradient (or None) per output and returns one (or None) per edge. An edge is the producing node,
    the number of its output, and the size and type that its gradient must have.
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
        edges: tuple[_Edge | None, ...],
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


class _StopRecomputation(Exception):
    """All that was saved has been computed again (torch.utils.checkpoint, early stop)."""


class _Frame:
    """One checkpointed call: how to run it again, and what the second run has saved."""

    __slots__ = (
        "autocast_dtype",
        "counter",
        "holders",
        "keep_products",
        "num_products",
        "recomputed",
        "results",
        "run",
        "tape",
    )

    def __init__(
        self, tape: Tape, run: Callable[[], object], *, keep_products: bool = False
    ) -> None:
        self.tape = tape
        self.run = run
        self.keep_products = keep_products
        self.num_products = 0
        self.results: deque[tuple[Tensor, ...]] = deque()
        self.holders: list[ref[_Holder]] = []
        self.counter = 0
        self.recomputed: dict[int, Tensor] | None = None
        self.autocast_dtype = tape.autocast_dtype

    def unpack(self, index: int) -> Tensor:
        if self.recomputed is None:
            self.recomputed = {}
            self.tape._recompute(self)
        return self.recomputed.pop(index)


class _Holder:
    """Stands in a node for a tensor that checkpointing did not keep."""

    __slots__ = ("__weakref__", "frame", "index")

    def __init__(self, frame: _Frame) -> None:
        self.frame = frame
        self.index = len(frame.holders)
        frame.holders.append(ref(self))


class Tape:
    """Records allocations, builds the graph, runs it backward.

    accumulate_in_place: as on a GPU; False as PyTorch does with fake tensors, to compare with a rehearsal.
    copies: how many layers of the whole model a layer that is run stands for, where that is not one.
    """

    def __init__(self, *, accumulate_in_place: bool = True) -> None:
        self.accumulate_in_place = accumulate_in_place
        self.segments: list[Segment] = []
        self.step = 0
        self.grad_enabled = True
        self.autocast_dtype: Dtype | None = None
        self.rows_are_flat = False
        self.label = ""
        self.category = Category.TEMPORARY
        self.layer: int | None = None
        self.phase = Phase.LOAD
        self.copies: dict[int | None, int] = {}
        self._autocast_cache: dict[int, Tensor] | None = None
        self._contexts: list[object] = []
        self._packing: _Frame | None = None
        self._recomputing: _Frame | None = None
        self._sequence = 0
        self._pass = 0
        self._next_ids: dict[int | None, int] = {}
        self._next_id = 0
        self._ids: list[int] = []
        self._sizes: list[int] = []
        self._tags: list[Tag] = []
        self._tag_cache: dict[tuple[Category, str], Tag] = {}
        self.enter(Phase.LOAD)

    # -- where we are

    def enter(self, phase: Phase, *, step: int | None = None) -> None:
        """Begin a pass: a phase of a step, outside the layers."""
        self.phase = phase
        if step is not None:
            self.step = step
        self._pass += 1
        self._next_ids = {}
        self._begin_segment(None)

    def enter_layer(self, layer: int | None) -> None:
        """Go on in another layer of the same pass, or outside the layers."""
        if layer != self.layer:
            self._next_ids[self.layer] = self._next_id
            self._begin_segment(layer)

    def _begin_segment(self, layer: int | None) -> None:
        self.layer = layer
        self._ids, self._sizes, self._tags = [], [], []
        self.segments.append(
            Segment(
                phase=self.phase,
                step=self.step,
                layer=layer,
                block_ids=self._ids,
                sizes=self._sizes,
                tags=self._tags,
            )
        )
        first_id = self._pass * PASS + (0 if layer is None else layer + 1) * LAYER
        self._next_id = self._next_ids.get(layer, first_id)

    def cut(self) -> list[Segment]:
        """Return what was recorded since the last cut, without empty segments, and begin a new pass."""
        segments = [segment for segment in self.segments if segment.sizes]
        self.segments = []
        self.enter(self.phase)
        return segments

    @property
    def num_passes(self) -> int:
        """How many passes have begun."""
        return self._pass

    def finish(self) -> list[Segment]:
        """Stop recording and return what was recorded, without empty segments."""
        segments = [segment for segment in self.segments if segment.sizes]
        self._ids, self._sizes, self._tags = [], [], []
        return segments

    # -- memory

    def tag(self, category: Category, label: str) -> Tag:
        """Return the one tag of this category and label."""
        key = (category, label)
        tag = self._tag_cache.get(key)
        if tag is None:
            tag = self._tag_cache[key] = Tag(category, label)
        return tag

    def new(self, numel: int, dtype: Dtype) -> Tensor:
        """Allocate a tensor of the current category and label."""
        tag = self.tag(self.category, self.label)
        return Tensor(Storage(self, numel * dtype.itemsize, tag), numel, dtype)

    def new_tagged(self, numel: int, dtype: Dtype, category: Category, label: str) -> Tensor:
        """Allocate a tensor that is known to be for `category`."""
        storage = Storage(self, numel * dtype.itemsize, self.tag(category, label))
        return Tensor(storage, numel, dtype)

    def parameter(
        self,
        *,
        name: str,
        numel: int,
        dtype: Dtype,
        requires_grad: bool,
        category: Category = Category.WEIGHTS,
        storage_bytes: int | None = None,
        shape: tuple[int, ...] = (),
    ) -> Parameter:
        """Allocate a leaf in the current layer; `storage_bytes` where it is stored in fewer bytes than its type (4 bits)."""
        num_bytes = numel * dtype.itemsize if storage_bytes is None else storage_bytes
        storage = Storage(self, num_bytes, self.tag(category, name))
        return Parameter(
            storage,
            numel,
            dtype,
            name=name,
            layer=self.layer,
            requires_grad=requires_grad,
            shape=shape,
        )

    def leaf(self, x: Tensor) -> Parameter:
        """Make a tensor without history require a gradient, which it then keeps (`requires_grad_(True)`)."""
        return Parameter(
            x.storage, x.numel, x.dtype, name=self.label, layer=self.layer, requires_grad=True
        )

    # -- recording ops

    def save(self, *tensors: Tensor | None) -> Saved:
        """Keep tensors for backward; None is left out. Call it where PyTorch does: before the op allocates for inputs, after for results."""
        if not self.grad_enabled:
            return ()
        packing, recomputing = self._packing, self._recomputing
        if packing is None and recomputing is None:
            for tensor in tensors:
                if tensor is not None:
                    self._mark_saved(tensor)
            return tuple(tensor for tensor in tensors if tensor is not None)
        saved: list[Tensor | _Holder] = []
        for tensor in tensors:
            if tensor is None:
                continue
            if packing is not None:
                saved.append(_Holder(packing))
            else:
                assert recomputing is not None and recomputing.recomputed is not None
                self._mark_saved(tensor)
                kept = tensor.detach()
                if recomputing.holders[recomputing.counter]() is not None:  # else nobody will ask
                    recomputing.recomputed[recomputing.counter] = kept
                recomputing.counter += 1
                if recomputing.counter == len(recomputing.holders):
                    raise _StopRecomputation
                saved.append(kept)
        return tuple(saved)

    def save_result(self, tensor: Tensor) -> Saved:
        """Keep an op's own output for backward, without a cycle."""
        return self.save(tensor.detach()) if self.grad_enabled else ()

    def hold(self, attribute: object) -> None:
        """Keep an attribute of a Python autograd function: checkpointing does not see it, and it lives until the graph dies, which
        is when all of backward is done.
        """
        if self.grad_enabled:
            if isinstance(attribute, Tensor):
                self._mark_saved(attribute)
                attribute = attribute.detach()
            self._contexts.append(attribute)

    def _mark_saved(self, tensor: Tensor) -> None:
        storage = tensor.storage
        if storage is not None and storage.tag.category is Category.TEMPORARY:
            storage.retag(self.tag(Category.ACTIVATIONS, storage.tag.label))

    def record(
        self,
        output: Tensor,
        inputs: Sequence[Tensor],
        saved: Saved,
        backward: Backward,
    ) -> Tensor:
        """Give `output` its history when one of the inputs has one; return it."""
        self.record_many((output,), inputs, saved, backward)
        return output

    def record_many(
        self,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        saved: Saved,
        backward: Backward,
    ) -> None:
        """As `record`, for an op with several outputs."""
        if not self.grad_enabled:
            return
        for tensor in inputs:
            if tensor.requires_grad:
                break
        else:
            return
        self._sequence += 1
        node = Node(
            sequence=self._sequence,
            layer=self.layer,
            label=self.label,
            category=self.category,
            edges=tuple([self._edge(tensor) for tensor in inputs]),
            saved=saved,
            backward=backward,
            num_outputs=len(outputs),
        )
        for number, output in enumerate(outputs):
            output.requires_grad = True
            output.node = node
            output.output_nr = number

    def _edge(self, tensor: Tensor) -> _Edge | None:
        if not tensor.requires_grad:
            return None
        if tensor.node is not None:
            return tensor.node, tensor.output_nr, tensor.numel, tensor.dtype
        if isinstance(tensor, Parameter):
            if tensor.accumulator is None:
                tensor.accumulator = Node(
                    sequence=_YOUNGEST,
                    layer=tensor.layer,
                    label=tensor.name,
                    category=Category.TEMPORARY,
                    edges=(),
                    saved=(),
                    backward=None,
                    num_outputs=1,
                    parameter=tensor,
                )
            return tensor.accumulator, 0, tensor.numel, tensor.dtype
        return None  # a detached input of a checkpointed call: its gradient is collected by whoever detached it

    @contextmanager
    def no_grad(self) -> Iterator[None]:
        """Build no graph inside."""
        before, self.grad_enabled = self.grad_enabled, False
        try:
            yield
        finally:
            self.grad_enabled = before

    @contextmanager
    def flat_rows(self) -> Iterator[None]:
        """Say that tokens come as [T, H] inside, not as [B, S, H]: linears reshape neither them nor their gradients."""
        before, self.rows_are_flat = self.rows_are_flat, True
        try:
            yield
        finally:
            self.rows_are_flat = before

    @contextmanager
    def autocast(self, dtype: Dtype | None) -> Iterator[None]:
        """Compute matrix products in `dtype`; casts of trainable fp32 weights are cached until the outermost exit."""
        before, self.autocast_dtype = self.autocast_dtype, dtype
        outermost = self._autocast_cache is None
        if outermost:
            self._autocast_cache = {}
        try:
            yield
        finally:
            self.autocast_dtype = before
            if outermost:
                self._autocast_cache = None

    def cached_cast(self, parameter: Parameter) -> Tensor | None:
        """Return autocast's cast of this leaf, if it made one in this region."""
        return None if self._autocast_cache is None else self._autocast_cache.get(id(parameter))

    def remember_cast(self, parameter: Parameter, cast: Tensor) -> None:
        """Keep autocast's cast of this leaf until the outermost region ends."""
        if self._autocast_cache is not None:
            self._autocast_cache[id(parameter)] = cast

    # -- backward

    def backward(self, root: Tensor, gradient: Tensor) -> None:
        """Run the graph from `root` backward; `gradient` is consumed."""
        node = root.node
        assert node is not None
        _count_waiting(node)
        node.gradients[root.output_nr] = gradient
        del gradient, root
        ready: list[Node] = [node]
        del node
        while ready:
            self._run_node(heappop(ready), ready)
        self._contexts.clear()

    def _run_node(self, node: Node, ready: list[Node]) -> None:
        if node.layer != self.layer:
            self.enter_layer(node.layer)
        if node.backward is None:
            if node.parameter is not None:
                self._accumulate(node, node.parameter)
            return
        before, self.category = self.category, node.category
        gradients, node.gradients = node.gradients, []
        saved = [self._unpack(item) for item in node.saved]
        self.label = node.label
        outputs = list(node.backward(*gradients))
        for number, edge in enumerate(node.edges):
            outputs[number] = None if edge is None else self._validate(outputs[number], edge)
        del gradients
        node.backward, node.saved = None, ()
        del saved
        for number, edge in enumerate(node.edges):
            if edge is None:
                continue
            target = edge[0]
            if outputs[number] is not None:
                held = target.gradients[edge[1]]
                if held is None:
                    target.gradients[edge[1]] = outputs[number]
                else:
                    self._add_gradient(target, edge[1], held)
                outputs[number] = None
                del held
            target.waiting -= 1
            if target.waiting == 0:
                heappush(ready, target)
        node.edges = ()
        self.category = before

    def _validate(self, gradient: Tensor | None, edge: _Edge) -> Tensor | None:
        if gradient is None:
            return None
        _, _, numel, dtype = edge
        if gradient.numel != numel:
            gradient = self.new(numel, gradient.dtype)
        if gradient.dtype is not dtype:
            gradient = self.new(numel, dtype)
        return gradient

    def _unpack(self, item: Tensor | _Holder) -> Tensor:
        if isinstance(item, _Holder):
            return item.frame.unpack(item.index)
        return item

    def _add_gradient(self, target: Node, input_nr: int, held: Tensor) -> None:
        # references to `held`: the buffer, the caller's name, ours, and the argument of getrefcount
        alone = sys.getrefcount(held) <= _HELD_ALONE and _is_only_view(held)
        if not (self.accumulate_in_place and alone):
            target.gradients[input_nr] = self.new(held.numel, held.dtype)

    def _accumulate(self, node: Node, parameter: Parameter) -> None:
        gradients, node.gradients = node.gradients, [None]
        parameter.accumulator = None
        gradient = gradients.pop()
        if gradient is None or parameter.grad is not None:
            return  # added in place to the gradient that is there
        alone = gradient.base is not None or _is_only_view(gradient)
        if not alone or sys.getrefcount(gradient) > _STOLEN_ALONE:
            self.label = parameter.name
            gradient = self.new(gradient.numel, gradient.dtype)
        assert gradient.storage is not None
        gradient.storage.retag(self.tag(Category.GRADIENTS, parameter.name))
        parameter.grad = gradient

    # -- checkpointing

    def checkpoint(
        self,
        function: Callable[..., Tensor],
        *inputs: Tensor,
        keep_products: bool = False,
    ) -> Tensor:
        """Run `function(*inputs)` keeping only the inputs; what it saves is computed again when backward first asks for it.

        torch.utils.checkpoint without reentry, with its early stop: the second run ends at the last tensor that was
        saved. The inputs are kept until the last node of the call is done (`_NoopSaveInputs`).

        Args:
            keep_products: selective checkpointing as torchtitan does it: results of attention, and of every other
                matrix product, are kept and not computed again.
        """
        if not self.grad_enabled:
            return function(*inputs)
        kept = []
        for x in inputs:
            self._mark_saved(x)
            view = x.detach()
            view.requires_grad = x.requires_grad
            kept.append(view)
        frame = _Frame(self, lambda: function(*kept), keep_products=keep_products)
        before, self._packing = self._packing, frame
        try:
            return function(*inputs)
        finally:
            self._packing = before

    def product(self, numel: int, dtype: Dtype) -> Tensor:
        """Allocate the result of a matrix product; a selective checkpoint keeps every other one of them.

        Source: torchtitan, `_apply_op_sac`: of `aten.mm` the second, fourth, ... in a layer is computed again.
        """
        frame = self._packing or self._recomputing
        if frame is None or not frame.keep_products:
            return self.new(numel, dtype)
        frame.num_products += 1
        if frame.num_products % 2 == 0:
            return self.new(numel, dtype)
        return self._kept_results(frame, lambda: (self.new(numel, dtype),))[0]

    def results(self, make: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """Allocate the results of an attention kernel with `make`; a selective checkpoint keeps them."""
        frame = self._packing or self._recomputing
        if frame is None or not frame.keep_products:
            return make()
        return self._kept_results(frame, make)

    def _kept_results(
        self, frame: _Frame, make: Callable[[], tuple[Tensor, ...]]
    ) -> tuple[Tensor, ...]:
        if frame is self._packing:
            made = make()
            for tensor in made:
                self._mark_saved(tensor)
            frame.results.append(tuple([tensor.detach() for tensor in made]))
            return made
        return frame.results.popleft()

    def _recompute(self, frame: _Frame) -> None:
        packing, self._packing = self._packing, None
        recomputing, self._recomputing = self._recomputing, frame
        category, self.category = self.category, Category.TEMPORARY
        grad_enabled, self.grad_enabled = self.grad_enabled, True
        contexts, self._contexts = self._contexts, []
        frame.num_products = 0
        try:
            with self.autocast(frame.autocast_dtype):
                frame.run()
        except _StopRecomputation:
            pass
        finally:
            self._contexts = contexts
            self._packing, self._recomputing = packing, recomputing
            self.category, self.grad_enabled = category, grad_enabled

    def checkpoint_reentrant(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Run `function(x)` without a graph, keeping x; backward runs it again with a graph of its own, to the end.

        torch.utils.checkpoint.CheckpointFunction. Without an input that requires a gradient there is no backward at all.
        """
        if not (self.grad_enabled and x.requires_grad):
            with self.no_grad():
                return function(x)
        saved = self.save(x)
        with self.no_grad():
            output = function(x)
        autocast_dtype = self.autocast_dtype
        kept = x.detach()
        self.hold(function)

        def backward(gradient: Tensor) -> tuple[Tensor | None]:
            inner = kept.detach()
            inner.requires_grad = True
            inner.node = collector = Node(
                sequence=-1,
                layer=self.layer,
                label="",
                category=Category.TEMPORARY,
                edges=(),
                saved=(),
                backward=None,
                num_outputs=1,
            )
            category, self.category = self.category, Category.TEMPORARY
            contexts, self._contexts = self._contexts, []
            with self.autocast(autocast_dtype):
                again = function(inner)
            self.category = category
            self.backward(again, gradient)
            self._contexts = contexts
            return (collector.gradients[0],)

        return self.record(output, (x,), saved, backward)


def _is_only_view(tensor: Tensor) -> bool:
    return sys.getrefcount(tensor.storage) <= _STORAGE_ALONE


def _reference_counts() -> tuple[int, int, int]:
    """Return what getrefcount says in `_add_gradient`, `_accumulate` and `_is_only_view` when nobody else holds the tensor.

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
