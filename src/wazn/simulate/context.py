"""What every block of a forward pass sees: the tape, the sizes of the batch, the tables made once per pass."""

from __future__ import annotations

from dataclasses import dataclass

from wazn.recipe import Attention
from wazn.simulate.tape import Tape, Tensor

__all__ = ["Context"]


@dataclass(kw_only=True, slots=True)
class Context:
    """One micro-batch on its way through the model: B = micro_batch, S = seq_len.

    cos, sin: the rotary tables [B or 1, S, rotary_dim] of this pass; None without rotary.
    masks: the attention masks of this pass by window (None: causal over everything), empty where the kernel takes none.
    """

    tape: Tape
    micro_batch: int
    seq_len: int
    attention: Attention
    capability: tuple[int, int]
    cos: Tensor | None = None
    sin: Tensor | None = None
    masks: dict[int | None, Tensor]

    @property
    def num_tokens(self) -> int:
        """B x S."""
        return self.micro_batch * self.seq_len
