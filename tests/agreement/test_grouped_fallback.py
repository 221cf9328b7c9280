"""Grouped products on cards before compute capability 8.0: transformers' own operator."""

from __future__ import annotations

from typing import Any

import pytest

from wazn.simulate.moe import grouped_mm_fallback
from wazn.simulate.tape import Tape, Tensor

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.agreement.compare import assert_agree, run_on_tape  # noqa: E402
from wazn.trace.opcheck import Spec, measure_op  # noqa: E402

ROWS, EXPERTS, IN, OUT = 256, 8, 128, 384


def real(x: Any, weight: Any, offsets: Any) -> Any:
    import transformers.integrations.moe  # noqa: F401  # registers the operator

    return torch.ops.transformers.grouped_mm_fallback(x, weight, offsets)


def contract(tape: Tape, x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    return grouped_mm_fallback(tape, x, weight, offsets, rows=ROWS, out_features=OUT)


@pytest.mark.parametrize("trained", [True, False])
def test_fallback(trained: bool) -> None:
    """It makes a gradient of the whole stack of weights, frozen or not, and keeps both arguments."""
    specs = (
        Spec((ROWS, IN), requires_grad=True),
        Spec((EXPERTS, IN, OUT), requires_grad=trained),
        Spec((EXPERTS,), "int64"),
    )
    assert_agree(measure_op(real, *specs), run_on_tape(contract, *specs))
