"""How flash-attn takes padding out of a batch and puts it back: `flash_attn.bert_padding`, written anew.

Shape legend: B batch, S tokens of a row, T tokens that count, N = B * S. Each function keeps for backward the positions
alone, and its gradient is a tensor of its input's shape.
Source: flash_attn/bert_padding.py of flash-attn 2: `IndexFirstAxis`, `IndexPutFirstAxis`, `unpad_input`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

__all__ = ["index_first_axis", "pad_input", "unpad_input"]


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(positions)
        ctx.num_rows = rows.shape[0]
        flat = rows.flatten(1)
        taken = torch.gather(flat, 0, positions.unsqueeze(1).expand(-1, flat.shape[1]))
        return taken.reshape(-1, *rows.shape[1:])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (positions,) = ctx.saved_tensors
        flat = grad.flatten(1)
        whole = torch.zeros((ctx.num_rows, flat.shape[1]), device=grad.device, dtype=grad.dtype)
        whole.scatter_(0, positions.unsqueeze(1).expand(-1, flat.shape[1]), flat)
        return whole.reshape(ctx.num_rows, *grad.shape[1:]), None


class _Put(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, taken: torch.Tensor, positions: torch.Tensor, num_rows: int
    ) -> torch.Tensor:
        ctx.save_for_backward(positions)
        whole = torch.zeros((num_rows, *taken.shape[1:]), device=taken.device, dtype=taken.dtype)
        whole[positions] = taken
        return whole

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (positions,) = ctx.saved_tensors
        return grad[positions], None, None


def index_first_axis(rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return the rows at `positions`: [N, ...] and [T] make [T, ...]."""
    taken: torch.Tensor = _Take.apply(rows, positions)
    return taken


def pad_input(
    taken: torch.Tensor, positions: torch.Tensor, batch: int, seq_len: int
) -> torch.Tensor:
    """Put [T, ...] back into zeros: [B, S, ...]."""
    whole: torch.Tensor = _Put.apply(taken, positions, batch * seq_len)
    return whole.unflatten(0, (batch, seq_len))


def unpad_input(
    hidden: torch.Tensor, mask: torch.Tensor, unused_mask: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Any, torch.Tensor]:
    """Take what the mask [B, S] marks out of [B, S, ...].

    Returns: [T, ...], the positions [T], where each row begins [B + 1], the longest row, the tokens of each row [B].
    """
    marked = mask if unused_mask is None else mask + unused_mask
    in_rows = marked.sum(dim=-1, dtype=torch.int32)
    used = mask.sum(dim=-1, dtype=torch.int32)
    positions = torch.nonzero(marked.flatten()).flatten()
    longest = in_rows.max().item()
    begins = F.pad(torch.cumsum(in_rows, dim=0, dtype=torch.int32), (1, 0))
    return index_first_axis(hidden.flatten(0, 1), positions), positions, begins, longest, used
