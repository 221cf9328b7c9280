"""A rehearsal starts without searches for garbage and without a compiler, and leaves the process as it was."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Iterator

import pytest

from wazn.trace.starting import objects_frozen, uncollected


@pytest.fixture
def _nothing_frozen() -> Iterator[None]:
    """The test run itself froze what its imports made."""
    gc.unfreeze()
    yield
    gc.freeze()


def test_the_collector_rests_and_comes_back() -> None:
    """Inside it is off; afterwards it is as it was, also where it was off before."""
    assert gc.isenabled()
    with uncollected():
        assert not gc.isenabled()
        with uncollected():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()


@pytest.mark.usefixtures("_nothing_frozen")
def test_garbage_made_inside_is_found() -> None:
    """What was there before is passed over, a cycle made inside is collected, and afterwards nothing is frozen."""
    with uncollected(), objects_frozen():
        assert gc.isenabled()
        assert gc.get_freeze_count() > 1000
        cycle: list[object] = []
        cycle.append(cycle)
        del cycle
        assert gc.collect() >= 1
    assert gc.get_freeze_count() == 0


@pytest.mark.usefixtures("_nothing_frozen")
def test_objects_that_somebody_else_froze_stay_frozen() -> None:
    """A server that froze its objects before it forked keeps them so."""
    gc.freeze()
    with objects_frozen():
        pass
    assert gc.get_freeze_count() > 1000


_IMPORT = """
import sys, torch
from wazn.trace.starting import nothing_compiled
compile = torch.compile
with nothing_compiled():
    import bitsandbytes
assert torch.compile is compile
assert hasattr(torch.ops.bitsandbytes, "gemm_4bit")
print("torch._inductor.compile_fx" in sys.modules)
"""


def test_bitsandbytes_is_imported_without_the_compiler() -> None:
    """Its operators are there, Inductor is not, and `torch.compile` is PyTorch's own again."""
    command = [sys.executable, "-c", _IMPORT]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"
