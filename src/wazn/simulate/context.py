"""What every block of a forward pass sees: the tape, the sizes of the batch, the tables made once
per pass.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field

from wazn.dtypes import BOOL
from wazn.facts.stacks import Habits
from wazn.recipe import Attention
from wazn.simulate.ops import cat
from wazn.simulate.tape import Tape, Tensor
from wazn.timeline.events import Phase

__all__ = ["Context"]


@dataclass(kw_only=True, slots=True)
class Context:
    """One micro-batch on its way through the model: B = micro_batch, S = seq_len.

    habits: of the training stack: how masks, tables and attention are written.
    attention: the implementation that was asked for; `scaled_dot_product_attention` chooses its kernel itself.
    cos, sin: the rotary tables [1, S, rotary_dim] of this pass; None without rotary.
    sliding_cos, sliding_sin: those of the layers with a window, where they have their own.
    masks: the attention masks [B, 1, S, S] of this pass by window (None: causal over everything),
        empty where the kernel takes none.
    alibi: the bias of BLOOM, Falcon and MPT.
    layer_weights: the attention weights in what the last layer returned, of families whose model
        keeps that until the next has run.
    position_ids: kept by the calls of the layers that are handed them.
    layer_tables: makes cos and sin for one layer, where each has its own.
    cache: keys and values of every layer with their layer, which the model's outputs hold; None where none are kept.
    checkpoint_attention: the attention function keeps its inputs only and is run again in backward.
    """

    tape: Tape
    habits: Habits
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
    layer_weights: list[Tensor | None] = field(default_factory=lambda: [None])
    position_ids: Tensor | None = None
    layer_tables: Callable[[Context], tuple[Tensor, Tensor]] | None = None
    cache: list[tuple[int | None, Tensor, Tensor]] | None = None
    checkpoint_attention: bool = False

    @property
    def num_tokens(self) -> int:
        """B x S."""
        return self.micro_batch * self.seq_len

    @property
    def cache_copies(self) -> bool:
        """Whether attention goes on with copies of keys and values that the cache made."""
        return self.cache is not None and self.habits.cache_copies

    @property
    def copies_keys(self) -> bool:
        """Whether attention makes its keys contiguous, or a cache did."""
        copies = self.habits.contiguous_qkv and self.attention is Attention.SDPA
        return self.cache_copies or copies

    def tables(self, window: int | None) -> tuple[Tensor, Tensor]:
        """Return cos and sin for a layer with this window."""
        if self.layer_tables is not None:
            return self.layer_tables(self)
        if window is not None and self.sliding_cos is not None and self.sliding_sin is not None:
            return self.sliding_cos, self.sliding_sin
        assert self.cos is not None
        assert self.sin is not None
        return self.cos, self.sin

    def for_layer(self, window: int | None) -> Context:
        """Return what a layer with this window is handed, which a checkpointed call keeps: its own
        tables and mask.
        """
        context = copy(self)
        if self.layer_tables is None and (self.cos is not None or self.sliding_cos is not None):
            context.cos, context.sin = self.tables(window)
        context.sliding_cos = context.sliding_sin = None
        context.masks = {window: self.masks[window]} if window in self.masks else {}
        return context

    def release(self) -> None:
        """Let go of what the model's forward made, at its end."""
        self.cos = self.sin = self.sliding_cos = self.sliding_sin = None
        self.masks = {}
        self.alibi = self.position_ids = self.layer_tables = None
        self.layer_weights[0] = None

    def mask(self, window: int | None) -> Tensor | None:
        """Return the mask for a layer with this window.

        Where the model makes one mask that knows no windows, each layer with a window makes its own
        of it (`torch.where`).
        """
        mask = self.masks.get(window)
        if mask is None or window is None or mask.dtype is BOOL or not self.habits.sdpa_mask:
            return mask
        tape = self.tape
        ones = tape.new(mask.numel, BOOL)
        outside = tape.new(mask.numel, BOOL)
        del ones
        own = tape.new(mask.numel, mask.dtype)
        del outside
        return own

    def remember(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Put a layer's keys and values into the cache; return those that attention goes on with.

        A cache that copies joins them to empty tensors of the keys' type: new ones, contiguous as [B, g, S, d].
        """
        if self.cache is None or self.tape.phase is Phase.BACKWARD:
            return key, value  # what runs again in backward hands its cache to nobody
        if self.cache_copies:
            empty = Tensor(None, 0, key.dtype)
            key, value = cat(self.tape, (empty, key)), cat(self.tape, (empty, value))
        self.cache.append((self.tape.layer, key, value))
        return key, value

    def handed_over(self) -> list[tuple[int | None, Tensor, Tensor]] | None:
        """Return the cache, now the model's outputs' alone: checkpointed calls keep this context."""
        if self.cache is None:
            return None
        cache = list(self.cache)
        self.cache.clear()
        return cache
