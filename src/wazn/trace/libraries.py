"""What libraries must believe while they run on fake tensors. Each patch is undone when its context ends."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import optimizer
from torch.utils import _foreach_utils

__all__ = ["bitsandbytes_on_cuda", "foreach_by_default", "modules_can_move", "real_to_transformers"]


@contextmanager
def modules_can_move() -> Iterator[None]:
    """Let `Module.to` and its kind put new parameters into their modules.

    PyTorch swaps the tensors inside the old parameter objects, which fake tensors refuse: they have weak
    references.
    """
    original = torch.nn.Module._apply
    torch.nn.Module._apply = _apply
    try:
        yield
    finally:
        torch.nn.Module._apply = original


def _apply(module: torch.nn.Module, fn: Any, recurse: bool = True) -> torch.nn.Module:
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
def real_to_transformers() -> Iterator[None]:
    """Let `transformers` take fake tensors for real ones.

    It looks for fake tensors to find out whether it is being traced, and then builds masks that it skips
    in a real run.
    """
    module = sys.modules.get("transformers.utils.import_utils")
    original = getattr(module, "is_fake_tensor", None)
    if module is None or original is None:
        yield
        return

    def no(tensor: object) -> bool:
        return False

    module.__dict__["is_fake_tensor"] = no
    try:
        yield
    finally:
        module.__dict__["is_fake_tensor"] = original


@contextmanager
def foreach_by_default() -> Iterator[None]:
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
def bitsandbytes_on_cuda() -> Iterator[None]:
    """Let 8-bit layers in training take the product that they take on CUDA; on the CPU they dequantise
    their weight.
    """
    functions = sys.modules.get("bitsandbytes.autograd._functions")
    original = getattr(functions, "MatMul8bitFp", None)
    if functions is None or original is None:
        yield
        return
    functions.__dict__["MatMul8bitFp"] = functions.__dict__["MatMul8bitLt"]
    try:
        yield
    finally:
        functions.__dict__["MatMul8bitFp"] = original
