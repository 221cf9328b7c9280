"""What stops a rehearsal, said in one place: which operation, where in whose code, and what to do about it."""

from __future__ import annotations

import os
import re
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)

from wazn.errors import Unsupported, WaznError

__all__ = ["library_place", "refusals"]

_WAZN = str(Path(__file__).parents[1])
_TORCH = str(Path(torch.__file__).parent)
_STDLIB = sysconfig.get_path("stdlib")
_OPERATOR = re.compile(r"\b([a-z_]\w*::\w+(?:\.\w+)?)")


@contextmanager
def refusals() -> Iterator[None]:
    """Turn what libraries raise on fake tensors into `Unsupported`, naming the operation and the line of code.

    An error of wazn's own code passes: it is a defect, not an answer.
    """
    try:
        yield
    except WaznError:
        raise
    except (DynamicOutputShapeException, DataDependentOutputException) as error:
        raise Unsupported(
            f"the result of `{error.func}` depends on data{library_place(error)}",
            hint="a rehearsal has shapes and no data; " + _ELSEWHERE,
        ) from error
    except UnsupportedOperatorException as error:
        raise _without_kernel(str(error.func), error) from error
    except NotImplementedError as error:
        operator = _OPERATOR.search(str(error))
        if operator is None:
            raise _stopped(error) from error
        raise _without_kernel(operator[1], error) from error
    except (Exception, SystemExit) as error:  # whatever a model's code raises
        if _raised_by_wazn(error):
            raise
        raise _stopped(error) from error


_ELSEWHERE = "another `--attention`, or `wazn measure` on a GPU, may take another path"


def _without_kernel(operator: str, error: Exception) -> Unsupported:
    return Unsupported(
        f"`{operator}` has no fake kernel{library_place(error)}",
        hint="its package can register one with `torch.library.register_fake`; " + _ELSEWHERE,
    )


def _stopped(error: BaseException) -> Unsupported:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = f": {lines[-1][:200]}" if lines else ""
    return Unsupported(
        f"the rehearsal stopped{library_place(error)}: {type(error).__name__}{said}",
        hint="if the same code runs on a GPU, this is a limit of the rehearsal; please report it",
    )


def library_place(error: BaseException) -> str:
    """Return ` at FILE:LINE (CODE)` for the innermost line that is neither PyTorch's nor Python's nor wazn's own, or an
    empty text.
    """
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not _is_within(frame.filename, _WAZN, _TORCH) and not _is_stdlib(frame.filename):
            code = f" (`{frame.line.strip()[:100]}`)" if frame.line else ""
            return f" at {_short(frame.filename)}:{frame.lineno}{code}"
    return ""


def _raised_by_wazn(error: BaseException) -> bool:
    """Say whether our own code stopped, rather than PyTorch's C++, which has no frames: a `RuntimeError` is always its,
    and so is what comes of a line that hands a call on.
    """
    frames = traceback.extract_tb(error.__traceback__)
    if not frames or not _is_within(frames[-1].filename, _WAZN):
        return False
    return not isinstance(error, RuntimeError) and "func(" not in (frames[-1].line or "")


def _is_within(filename: str, *folders: str) -> bool:
    return any(filename.startswith(folder + os.sep) for folder in folders)


def _is_stdlib(filename: str) -> bool:
    inside = _is_within(filename, _STDLIB) and "site-packages" not in filename
    return inside or filename.startswith("<")


def _short(filename: str) -> str:
    """Return a path from its package on: `transformers/models/blt/modeling_blt.py`."""
    _, found, inside = filename.rpartition(os.sep + "site-packages" + os.sep)
    return inside if found else filename
