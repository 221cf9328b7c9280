"""Tensors without data: an element count, a type, and a storage that records its own birth and death."""

from __future__ import annotations

from typing import TYPE_CHECKING

from wazn.dtypes import FLOAT32, Dtype
from wazn.timeline.events import Category, Tag

if TYPE_CHECKING:
    from wazn.simulate.engine import Node
    from wazn.simulate.tape import Tape

__all__ = ["SCALAR", "Parameter", "Storage", "Tensor"]


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
        if self.block_id < tape.oldest_id and self.tag.category is Category.TEMPORARY:
            self.retag(tape.tag(Category.ACTIVATIONS, self.tag.label))  # it outlived its pass
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
    """A leaf. `layer` is the index of its layer, or None outside the layers; `shape` is the weight's in PyTorch.

    is_weight: else it is an activation that requires a gradient of its own (`Tape.leaf`).
    in_embedding: the weight of an `nn.Embedding`, which 8-bit optimizers keep in 32 bits.
    """

    __slots__ = ("accumulator", "grad", "in_embedding", "is_weight", "layer", "name", "shape")

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
        is_weight: bool = True,
        in_embedding: bool = False,
    ) -> None:
        super().__init__(storage, numel, dtype, requires_grad)
        self.name = name
        self.layer = layer
        self.shape = shape
        self.is_weight = is_weight
        self.in_embedding = in_embedding
        self.grad: Tensor | None = None
        self.accumulator: Node | None = None
