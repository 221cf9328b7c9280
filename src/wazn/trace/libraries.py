"""What libraries must believe while they run on fake tensors. Each patch is undone when its context ends."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["real_to_transformers"]


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
