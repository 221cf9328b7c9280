"""What one operation saves, holds and returns: the measure against which a shape-level contract is tested.

    trace = measure_op(torch.nn.functional.silu, Spec((2, 8, 64), "bfloat16", requires_grad=True))
    trace.saved_bytes, trace.forward_peak_bytes, trace.backward_peak_bytes

All numbers are bytes above the inputs, the parameters and the incoming gradient, which exist before; each
storage is rounded to 512 bytes as PyTorch's allocator counts it.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from wazn.trace.specs import OpTrace, Spec
from wazn.trace.tracker import StorageTracker, tensors_in
from wazn.trace.world import World

__all__ = ["OpTrace", "Spec", "measure_op"]


def measure_op(
    fn: Callable[..., Any],
    *inputs: Any,
    world: World | None = None,
    train_mode: bool = True,
    autocast: str | None = None,
    **options: Any,
) -> OpTrace:
    """Run `fn(*inputs, **options)` forward and backward on fake tensors and return what it held.

    Args:
        fn: a function of tensors, or a module built on the `meta` device (its parameters get fake storages
            first).
        inputs: a `Spec` becomes a tensor; anything else is handed on as it is.
        world: the context to run in; a new one by default.
        train_mode: whether a module is in training mode.
        autocast: the dtype to lower to, such as `bfloat16`, for a run under autocast.
        options: keyword arguments; a `Spec` among them becomes a tensor too.

    The result is the first tensor in what `fn` returns; backward starts there with a gradient that was
    allocated before, and the caller lets go of everything that `fn` returned before backward starts, as a
    model does.
    """
    with world or World() as inside:
        if isinstance(fn, torch.nn.Module):
            fn = inside.materialise(fn).train(train_mode)
        args = [item.make() if isinstance(item, Spec) else item for item in inputs]
        named = {
            name: item.make() if isinstance(item, Spec) else item for name, item in options.items()
        }
        grad = _gradient_for(fn, args, named, autocast)
        return _measure(inside.tracker, fn, args, named, grad, autocast)


def _call(
    fn: Callable[..., Any], args: Sequence[Any], named: dict[str, Any], autocast: str | None
) -> Any:
    if autocast is None:
        return fn(*args, **named)
    with torch.autocast("cpu", dtype=getattr(torch, autocast)):
        return fn(*args, **named)


def _first_tensor(result: Any) -> torch.Tensor:
    return next(iter(tensors_in(list(result) if isinstance(result, tuple) else result)))


def _gradient_for(
    fn: Callable[..., Any], args: Sequence[Any], named: dict[str, Any], autocast: str | None
) -> torch.Tensor | None:
    """Run once to learn the shape of the result, and allocate its gradient."""
    result = _first_tensor(_call(fn, args, named, autocast))
    return torch.empty_like(result) if result.requires_grad else None


def _measure(
    tracker: StorageTracker,
    fn: Callable[..., Any],
    args: Sequence[Any],
    named: dict[str, Any],
    grad: torch.Tensor | None,
    autocast: str | None,
) -> OpTrace:
    gc.collect()
    first_event = len(tracker.events)
    before_bytes = tracker.current_bytes
    tracker.reset_peak()
    tracker.phase = "forward"
    result = _call(fn, args, named, autocast)
    kept_bytes = tracker.current_bytes - before_bytes
    forward_peak_bytes = tracker.peak_bytes - before_bytes

    tracker.phase = "release"
    edge = get_gradient_edge(_first_tensor(result)) if grad is not None else None
    del result
    saved_bytes = tracker.current_bytes - before_bytes

    tracker.phase = "backward"
    tracker.reset_peak()
    if edge is not None:
        torch.autograd.backward((edge,), (grad,))
    del edge
    return OpTrace(
        kept_bytes=kept_bytes,
        saved_bytes=saved_bytes,
        forward_peak_bytes=forward_peak_bytes,
        backward_peak_bytes=tracker.peak_bytes - before_bytes,
        gradient_bytes=tracker.current_bytes - before_bytes,
        events=tuple(tracker.events[first_event:]),
    )
