"""What libraries must believe inside a world. Each patch is undone when its context ends."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import optimizer
from torch.utils import _foreach_utils

from wazn.errors import Unsupported
from wazn.trace import fast_kernels, liger, peft_library
from wazn.trace.bnb_library import without_library
from wazn.trace.imports import Patch, patched, when_imported
from wazn.trace.outliers import one_outlier_column
from wazn.trace.tracker import StorageTracker

__all__ = ["libraries_on_cuda"]


@contextmanager
def libraries_on_cuda(tracker: StorageTracker) -> Iterator[None]:
    """Let PyTorch's Python code, transformers, accelerate and bitsandbytes take fake tensors for real ones on CUDA."""
    patches: dict[str, Patch] = {
        "transformers.utils.import_utils": _transformers,
        "accelerate.state": _accelerate,
        "bitsandbytes": partial(_bitsandbytes, tracker),
        "torchao.optim.adam": _torchao,
        **dict.fromkeys(_FLEX, _without_flex),
        **liger.patches(tracker),
        **fast_kernels.patches(),
        **peft_library.patches(),
    }
    executed_in: dict[str, Patch] = {"bitsandbytes": _without_card, **liger.EXECUTED_IN}
    with (
        patched(torch.nn.Module, {"_apply": _apply}),
        _foreach_by_default(),
        patched(torch.amp.GradScaler, {"_maybe_opt_step": _gradients_are_finite}),
        torch.compiler.set_stance("force_eager"),  # compilers need data
        when_imported(patches, executed_in=executed_in),
    ):
        yield


def _no(*args: Any, **kwargs: Any) -> bool:
    return False


def _without_card(package: ModuleType) -> AbstractContextManager[None]:
    """A package that sees a card loads the library for it, which is not there."""
    return patched(torch.cuda, {"is_available": _no})


# where the functions are, and where they are imported to
_FLEX = (
    "torch.nn.attention.flex_attention",
    "transformers.masking_utils",
    "transformers.integrations.flex_attention",
)


def _without_flex(module: ModuleType) -> AbstractContextManager[None]:
    """FlexAttention is a compiler's product; run eagerly it would write out the scores that it exists to avoid."""
    return patched(module, {"flex_attention": _no_flex, "create_block_mask": _no_flex})


def _no_flex(*args: Any, **kwargs: Any) -> Any:
    raise Unsupported(
        "FlexAttention is compiled when it runs, and compilers need data",
        hint="rehearse with attention `sdpa` or `flash`",
    )


def _do_nothing(*args: Any, **kwargs: Any) -> None:
    """Stand for a kernel that updates in place."""


def _gradients_are_finite(
    scaler: Any, optimizer: Any, optimizer_state: Any, *args: Any, **kwargs: Any
) -> Any:
    """Take the step that a scaler of losses takes when no gradient is infinite; it has no data to look at."""
    return optimizer.step(*args, **kwargs)


def _apply(module: torch.nn.Module, fn: Any, recurse: bool = True) -> torch.nn.Module:
    """Put new parameters into the modules, for `Module.to` and its kind.

    PyTorch swaps the tensors inside the old parameter objects, which fake tensors refuse: they have weak
    references.
    """
    made: dict[int, Any] = {}
    for owner in module.modules() if recurse else [module]:
        for table in (owner._parameters, owner._buffers):
            for name, tensor in table.items():
                if tensor is None:
                    continue
                if id(tensor) not in made:
                    made[id(tensor)] = _converted(tensor, fn)
                table[name] = made[id(tensor)]
    return module


def _converted(tensor: torch.Tensor, fn: Any) -> torch.Tensor:
    with torch.no_grad():
        moved: torch.Tensor = fn(tensor)
    if moved is tensor:
        return tensor
    if isinstance(tensor, torch.nn.Parameter):
        moved = torch.nn.Parameter(moved, requires_grad=tensor.requires_grad)
    moved.__dict__.update(tensor.__dict__)  # what libraries noted on it
    return moved


@contextmanager
def _foreach_by_default() -> Iterator[None]:
    """Let optimizers and gradient clipping take the foreach implementation when nobody chooses, as they do
    on CUDA.

    PyTorch decides by device and by exact type: `_default_to_fused_or_foreach` in torch/optim/optimizer.py and
    `_has_foreach_support` in torch/utils/_foreach_utils.py.
    """
    types = [_foreach_utils._foreach_supported_types, optimizer._foreach_supported_types]
    original = optimizer._get_foreach_kernels_supported_devices

    def devices() -> list[str]:
        return [*original(), "cpu"]

    for names in types:
        names.append(FakeTensor)
    optimizer._get_foreach_kernels_supported_devices = devices
    try:
        yield
    finally:
        optimizer._get_foreach_kernels_supported_devices = original
        for names in types:
            names.remove(FakeTensor)


@contextmanager
def _transformers(import_utils: ModuleType) -> Iterator[None]:
    """It looks for fake tensors to find out whether it is being traced, and then builds masks that it skips in a
    real run; and it remembers what it once found out about the card.
    """
    _forget_answers(import_utils)
    try:
        with patched(import_utils, {"is_fake_tensor": _no}):
            yield
    finally:
        _forget_answers(import_utils)


def _forget_answers(import_utils: ModuleType) -> None:
    for name, function in vars(import_utils).items():
        if name.startswith("is_") and hasattr(function, "cache_clear"):
            function.cache_clear()


@contextmanager
def _accelerate(state: ModuleType) -> Iterator[None]:
    """It notes for the life of the process which device it found: it looks anew inside and again after."""
    owners = (state.PartialState, state.AcceleratorState, state.GradientState)
    before = [dict(owner._shared_state) for owner in owners]
    for owner in owners:
        owner._shared_state.clear()
    try:
        yield
    finally:
        for owner, original in zip(owners, before, strict=True):
            owner._shared_state.clear()
            owner._shared_state.update(original)


@contextmanager
def _bitsandbytes(tracker: StorageTracker, package: ModuleType) -> Iterator[None]:
    """8-bit layers in training take the product that they take on CUDA (on the CPU they dequantise their weight);
    the optimizers' kernels, which update in place and return nothing, are skipped; paged states, which live in
    managed memory outside PyTorch's allocator, are made in host memory. Settings of single parameters are
    those of one world: they are known by the address of a Python object, and another model's may have the same.
    """
    functional = sys.modules["bitsandbytes.functional"]
    functions = sys.modules["bitsandbytes.autograd._functions"]
    kernels = ("optimizer_update_32bit", "optimizer_update_8bit_blockwise")
    with (
        without_library(functional),
        patched(functional, dict.fromkeys(kernels, _do_nothing)),
        one_outlier_column(functional),
        patched(functions, {"MatMul8bitFp": getattr(functions, "MatMul8bitLt", None)}),
        _buffers_on_host("optimizer.Optimizer8bit", "get_state_buffer", tracker),
        _buffers_on_host("ademamix.AdEMAMix", "_get_state_double_buffer", tracker),
        patched(
            sys.modules["bitsandbytes.optim.optimizer"].GlobalOptimManager, {"_instance": None}
        ),
    ):
        yield


def _torchao(adam: ModuleType) -> AbstractContextManager[None]:
    """Its update is compiled into one kernel per parameter, which holds nothing beside the states."""
    return patched(adam, {"single_param_adam": _do_nothing})


_SMALLEST_PAGED = 100_000  # elements: `get_state_buffer` in bitsandbytes/optim/optimizer.py


@contextmanager
def _buffers_on_host(owner: str, name: str, tracker: StorageTracker) -> Iterator[None]:
    """Make what a method of an optimizer in bitsandbytes returns in host memory where it would be paged."""
    module, _, kind = owner.partition(".")
    cls = getattr(sys.modules.get(f"bitsandbytes.optim.{module}"), kind, None)
    if cls is None:  # AdEMAMix is there since 0.44
        yield
        return
    original: Callable[..., torch.Tensor] = getattr(cls, name)

    def make(optimizer: Any, p: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        is_paged, optimizer.is_paged = optimizer.is_paged, False
        pages = is_paged and p.numel() >= _SMALLEST_PAGED
        try:
            with tracker.going_to("host") if pages else nullcontext():
                return original(optimizer, p, dtype)
        finally:
            optimizer.is_paged = is_paged

    with patched(cls, {name: make}):
        yield
