"""A small autograd over sizes: tensors without data, freed by Python's own reference counting.

A `Tensor` here is an element count and a type; its `Storage` records an allocation when it is made and a free when the
last reference to it dies, as eager PyTorch does. A function that is written with the same variables as a model's code
therefore has the lifetimes of that code. A `Node` holds what its op saved for backward; `Tape.backward` runs the nodes
in the order of PyTorch's engine and lets go of what they saved when they are done. `Tape.checkpoint` runs a function
again.

The parts: `tensors` (what lives and dies), `engine` (backward), `frames` (checkpointed calls).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from wazn.dtypes import Dtype
from wazn.simulate.engine import YOUNGEST, Backward, Edge, Node, run_backward
from wazn.simulate.frames import Frame, Holder, Saved, StopRecomputation
from wazn.simulate.tensors import SCALAR, Parameter, Storage, Tensor
from wazn.timeline.events import LAYER, PASS, Category, Phase, Segment, Tag

__all__ = ["SCALAR", "Node", "Parameter", "Storage", "Tape", "Tensor"]


class Tape:
    """Records allocations, builds the graph, runs it backward.

    copies: how many layers of the whole model a layer that is run stands for, where that is not one.
    """

    def __init__(self) -> None:
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
        self._contexts: list[tuple[int | None, object]] = []
        self._packing: Frame | None = None
        self._recomputing: Frame | None = None
        self._sequence = 0
        self._pass = 0
        self.oldest_id = 0  # of what was allocated in this pass; forward and the loss are one
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
        if phase is not Phase.LOSS:
            self.oldest_id = self._pass * PASS
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
        """Allocate a tensor of the current category and label; an empty one takes no memory."""
        if not numel:
            return Tensor(None, 0, dtype)
        tag = self._tag_cache.get((self.category, self.label)) or self.tag(
            self.category, self.label
        )
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
        in_embedding: bool = False,
    ) -> Parameter:
        """Allocate a leaf in the current layer; `storage_bytes` where it is not stored in its type (4 bits)."""
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
            in_embedding=in_embedding,
        )

    def leaf(self, x: Tensor) -> Parameter:
        """Make a tensor without history require a gradient, which it then keeps (`requires_grad_(True)`)."""
        return Parameter(
            x.storage,
            x.numel,
            x.dtype,
            name=self.label,
            layer=self.layer,
            requires_grad=True,
            is_weight=False,
        )

    # -- recording ops

    def save(self, *tensors: Tensor | None) -> Saved:
        """Keep tensors for backward; None is left out.

        Call it where PyTorch does: before the op allocates for inputs, after for results.
        """
        if not self.grad_enabled:
            return ()
        packing, recomputing = self._packing, self._recomputing
        if packing is None and recomputing is None:
            for tensor in tensors:
                if tensor is not None:
                    self._mark_saved(tensor)
            return tuple(tensor for tensor in tensors if tensor is not None)
        saved: list[Tensor | Holder] = []
        for tensor in tensors:
            if tensor is None:
                continue
            if packing is not None:
                saved.append(Holder(packing))
            else:
                assert recomputing is not None
                assert recomputing.recomputed is not None
                self._mark_saved(tensor)
                kept = tensor.detach()
                if recomputing.holders[recomputing.counter]() is not None:  # else nobody will ask
                    recomputing.recomputed[recomputing.counter] = kept
                recomputing.counter += 1
                if recomputing.counter == len(recomputing.holders):
                    raise StopRecomputation
                saved.append(kept)
        return tuple(saved)

    def save_result(self, tensor: Tensor) -> Saved:
        """Keep an op's own output for backward, without a cycle."""
        return self.save(tensor.detach()) if self.grad_enabled else ()

    def hold(self, attribute: object) -> None:
        """Keep an attribute of a Python autograd function: checkpointing does not see it, and it lives until the graph
        dies, which is when all of backward is done.
        """
        if self.grad_enabled:
            if isinstance(attribute, Tensor):
                self._mark_saved(attribute)
                attribute = attribute.detach()
            self._contexts.append((self.layer, attribute))

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
            edges=tuple([self._edge(x) if x.requires_grad else None for x in inputs]),
            saved=saved,
            backward=backward,
            num_outputs=len(outputs),
        )
        for number, output in enumerate(outputs):
            output.requires_grad = True
            output.node = node
            output.output_nr = number

    def _edge(self, tensor: Tensor) -> Edge | None:
        if tensor.node is not None:
            return tensor.node, tensor.output_nr, tensor.numel, tensor.dtype
        if isinstance(tensor, Parameter):
            if tensor.accumulator is None:
                tensor.accumulator = Node(
                    sequence=YOUNGEST,
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

    def backward(self, root: Tensor, gradient: Tensor) -> None:
        """Run the graph from `root` backward; `gradient` is consumed."""
        run_backward(self, root, gradient)

    # -- checkpointing

    def checkpoint(
        self,
        function: Callable[..., Tensor],
        *inputs: Tensor,
        keep_products: bool = False,
    ) -> Tensor:
        """Run `function(*inputs)` keeping only the inputs; what it saves is computed again when backward asks for it.

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
        frame = Frame(self, lambda: function(*kept), keep_products=keep_products)
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
        self, frame: Frame, make: Callable[[], tuple[Tensor, ...]]
    ) -> tuple[Tensor, ...]:
        if frame is self._packing:
            made = make()
            for tensor in made:
                self._mark_saved(tensor)
            frame.results.append(tuple([tensor.detach() for tensor in made]))
            return made
        return frame.results.popleft()

    def recompute(self, frame: Frame) -> None:
        """Run a checkpointed call again, keeping what it saves in its frame."""
        packing, self._packing = self._packing, None
        recomputing, self._recomputing = self._recomputing, frame
        category, self.category = self.category, Category.TEMPORARY
        grad_enabled, self.grad_enabled = self.grad_enabled, True
        contexts, self._contexts = self._contexts, []
        frame.num_products = 0
        try:
            with self.autocast(frame.autocast_dtype):
                frame.run()
        except StopRecomputation:
            pass
        finally:
            self._contexts = contexts
            self._packing, self._recomputing = packing, recomputing
            self.category, self.grad_enabled = category, grad_enabled

    def checkpoint_reentrant(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Run `function(x)` without a graph, keeping x; backward runs it again with a graph of its own, to the end.

        torch.utils.checkpoint.CheckpointFunction. Without an input that requires a gradient there is no backward.
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
            self._mark_saved(again)
            self.category = category
            self.backward(again, gradient)
            self._contexts = contexts
            return (collector.gradients[0],)

        return self.record(output, (x,), saved, backward)
