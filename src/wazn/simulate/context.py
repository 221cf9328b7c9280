"""What every block of a forward pass sees: the tape, the sizes of the batch, the tables made once per pass."""

from __future__ import annotations

from dataclasses import dataclass, field

from wazn.recipe import Attention
from wazn.simulate.tape import Tape, Tensor

__all__ = ["Context"]


@dataclass(kw_only=True, slots=True)
class Context:
    """One micro-batch on its way through the model: B = micro_batch, S = seq_len.

    attention: the implementation that was asked for; `scaled_dot_product_attention` chooses its kernel itself.
    cos, sin: the rotary tables [1, S, rotary_dim] of this pass; None without rotary.
    sliding_cos, sliding_sin: those of the layers with a window, where they have their own.
    masks: the attention masks [B, 1, S, S] of this pass by window (None: causal over everything), empty where the kernel takes none.
    alibi: the bias of BLOOM, Falcon and MPT.
    """

    tape: Tape
    micro_batch: int
    seq_len: int
    attention: Attention
    capability: tuple[int, int]
    cos: Tensor | None = None
    sin: Tensor | None = None
    sliding_cos: Tensor | None = None
    sliding_sin: Tensor | None = None
    masks: dict[int | None, Tensor] = field(default_factory=dict)
    alibi: Tensor | None = None

    @property
    def num_tokens(self) -> int:
        """B x S."""
        return self.micro_batch * self.seq_len

    def tables(self, window: int | None) -> tuple[Tensor, Tensor]:
        """Return cos and sin for a layer with this window."""
        if window is not None and self.sliding_cos is not None and self.sliding_sin is not None:
            return self.sliding_cos, self.sliding_sin
        assert self.cos is not None
        assert self.sin is not None
        return self.cos, self.sin
