"""A stand-in for the package flash-attn: its memory without its kernels.

`transformers` calls it for `attn_implementation="flash_attention_2"`. It keeps for backward what
`FlashAttnFunc` keeps: q, k, v, the (padded) output, an fp32 log-sum-exp per head
and token, and the state of the random numbers;
backward makes dq, dk, dv and holds the buffers of `kernels.flash_backward`.

Shape legend: B batch, S queries, K keys, H heads, G key-value heads, D head size, T tokens of all sequences.
Source: flash_attn/flash_attn_interface.py and csrc/flash_attn/flash_api.cpp of flash-attn 2.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from wazn.errors import Unsupported
from wazn.trace.flash_attn_padding import index_first_axis, pad_input, unpad_input
from wazn.trace.kernels import Workspace, flash_backward, flash_varlen_backward
from wazn.trace.tracker import StorageTracker

__all__ = ["flash_attn_func", "flash_attn_stand_in", "flash_attn_varlen_func"]

_VERSION = "2.8.3"


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> torch.Tensor:
    """Attention over [B, S, H, D] queries and [B, K, G, D] keys and values; returns [B, S, H, D]."""
    return _FlashAttention.apply(q, k, v, None)


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention over sequences laid end to end: [T, H, D] queries, [T, G, D] keys and values."""
    return _FlashAttention.apply(q, k, v, cu_seqlens_q.numel() - 1)


class _FlashAttention(torch.autograd.Function):
    """`num_sequences` is None for the dense layout, else the number of sequences laid end to end."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, num_sequences: int | None
    ) -> torch.Tensor:
        head_dim = q.shape[-1]
        q, k, v = (_padded(tensor) for tensor in (q, k, v))
        out = torch.empty_like(q)
        heads_and_tokens = (
            (q.shape[0], q.shape[2], q.shape[1])
            if num_sequences is None
            else (q.shape[1], q.shape[0])
        )
        lse = torch.empty(heads_and_tokens, dtype=torch.float32, device=q.device)
        rng_state = torch.empty((2,), dtype=torch.int64, device=q.device)
        ctx.save_for_backward(q, k, v, out, lse, rng_state)
        ctx.num_sequences = num_sequences
        return out if out.shape[-1] == head_dim else out[..., :head_dim]

    @staticmethod
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[Any, ...]:
        q, k, v, _, _, _ = ctx.saved_tensors
        grads = [torch.empty_like(tensor) for tensor in (q, k, v)]
        head_dim = grad_out.shape[-1]
        grad_out = _padded(grad_out)
        if ctx.num_sequences is None:
            workspace = flash_backward(q, k)
        else:
            workspace = flash_varlen_backward(q, k, num_sequences=ctx.num_sequences)
        _hold(workspace)
        return (*(grad[..., :head_dim] for grad in grads), None)


def _padded(tensor: torch.Tensor) -> torch.Tensor:
    missing = -tensor.shape[-1] % 8
    return F.pad(tensor, (0, missing)) if missing else tensor


def _hold(workspace: Workspace) -> None:
    """Record buffers that live for the time of one kernel, in every tracker that is active."""
    for mode in _get_current_dispatch_mode_stack():
        if isinstance(mode, StorageTracker):
            held = [mode.take(size, op=f"flash_attn: {name}") for name, size in workspace.after]
            for block_id in reversed(held):
                mode.give_back(block_id)


@contextmanager
def flash_attn_stand_in() -> Iterator[None]:
    """Let `import flash_attn` find this stand-in, and `transformers` believe that it is there."""
    import_module("transformers.modeling_utils")  # what it imports must be there to be patched
    modules = _modules()
    hidden = {name: sys.modules.get(name) for name in modules}
    sys.modules.update(modules)
    names = [name for name in sys.modules if name.split(".")[0] == "transformers"]
    undo = [_patch_flag(sys.modules[name]) for name in names]
    undo += [_patch_imports(), _patch_distributions()]
    try:
        yield
    finally:
        for restore in undo:
            restore()
        for name, module in hidden.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


def _modules() -> dict[str, ModuleType]:
    package, padding = ModuleType("flash_attn"), ModuleType("flash_attn.bert_padding")
    for module in (package, padding):
        module.__spec__ = ModuleSpec(module.__name__, None)
    contents = {
        "__version__": _VERSION,
        "__path__": [],
        "flash_attn_func": flash_attn_func,
        "flash_attn_varlen_func": flash_attn_varlen_func,
        "flash_attn_with_kvcache": _not_in_training,
        "bert_padding": padding,
    }
    package.__dict__.update(contents)
    padding.__dict__.update(
        index_first_axis=index_first_axis, pad_input=pad_input, unpad_input=unpad_input
    )
    return {"flash_attn": package, "flash_attn.bert_padding": padding}


def _not_in_training(*args: Any, **kwargs: Any) -> Any:
    raise Unsupported("this part of flash-attn cannot be rehearsed", hint="use attention `sdpa`")


def _patch_flag(module: ModuleType) -> Callable[[], None]:
    """Answer yes to `is_flash_attn_2_available` in one module of transformers; return the way back."""
    names = ("is_flash_attn_2_available", "FLASH_ATTENTION_COMPATIBILITY_MATRIX")
    flag: Any = module.__dict__.get(names[0])
    matrix: Any = module.__dict__.get(names[1])

    def yes(*args: Any, **kwargs: Any) -> bool:
        return True

    if flag is not None:
        module.__dict__[names[0]] = yes
    check = matrix[2]["general_availability_check"] if isinstance(matrix, dict) else None
    if check is not None:
        matrix[2]["general_availability_check"] = yes

    def restore() -> None:
        if flag is not None:
            module.__dict__[names[0]] = flag
        if check is not None:
            matrix[2]["general_availability_check"] = check

    return restore


def _patch_distributions() -> Callable[[], None]:
    """Say of which distribution the package is, where transformers (5.4 to 5.9) looks that up; return the way back."""
    utils = sys.modules["transformers.utils.import_utils"]
    known: Any = utils.__dict__.get("PACKAGE_DISTRIBUTION_MAPPING")
    if not isinstance(known, dict) or "flash_attn" in known:
        return lambda: None
    known["flash_attn"] = ["flash-attn"]

    def restore() -> None:
        del known["flash_attn"]

    return restore


def _patch_imports() -> Callable[[], None]:
    """Put in what transformers 4.43 to 4.53 imports from flash-attn when it is itself imported; return the way back.

    4.52 and 4.53 have None in its place.
    """
    module = sys.modules.get("transformers.modeling_flash_attention_utils")
    missing = {
        "flash_attn_func": flash_attn_func,
        "flash_attn_varlen_func": flash_attn_varlen_func,
        "index_first_axis": index_first_axis,
        "pad_input": pad_input,
        "unpad_input": unpad_input,
        "_flash_supports_window_size": True,
        # the names of 4.53
        "flash_attn_2_func": flash_attn_func,
        "flash_attn_2_varlen_func": flash_attn_varlen_func,
        "pad_input_fa2": pad_input,
        "unpad_input_fa2": unpad_input,
        "HAS_FA2": True,
    }
    if module is None or hasattr(module, "lazy_import_flash_attention"):
        return lambda: None
    contents = module.__dict__
    names = [name for name in missing if not contents.get(name)]
    before = {name: contents[name] for name in names if name in contents}
    contents.update({name: missing[name] for name in names})

    def restore() -> None:
        for name in names:
            del contents[name]
        contents.update(before)

    return restore
