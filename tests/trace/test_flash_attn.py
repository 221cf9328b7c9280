"""The stand-in for flash-attn keeps and holds what the package does: flash_attn_interface.py, flash_api.cpp."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from wazn.trace.flash_attn import flash_attn_func, flash_attn_stand_in, flash_attn_varlen_func
from wazn.trace.opcheck import Spec, measure_op


def sizes(changes: list[int]) -> list[int]:
    return [size for size in changes if size > 0]


def test_dense_attention() -> None:
    """Saved: out, softmax_lse [B, H, S] fp32 and two int64; held in backward: softmax_d, dq_accum, dk, dv expanded."""
    q, kv = Spec((2, 500, 8, 128), requires_grad=True), Spec((2, 500, 2, 128), requires_grad=True)
    trace = measure_op(flash_attn_func, q, kv, kv, causal=True)
    out, lse = 2 * 500 * 8 * 128 * 2, 2 * 8 * 500 * 4
    assert trace.changes("forward") == [out, lse, 16]
    grad_kv = 2 * 500 * 2 * 128 * 2
    softmax_d, dq_accum = 2 * 8 * 512 * 4, 2 * 512 * 8 * 128 * 4
    assert sizes(trace.changes("backward")) == [
        *(out, grad_kv, grad_kv),
        *(softmax_d, dq_accum, out, out),
    ]


def test_sequences_laid_end_to_end() -> None:
    """1,000 tokens of 3 sequences: logsumexp is [H, T]; the accumulators have 128 rows more for each sequence."""
    q = Spec((1000, 8, 64), requires_grad=True)
    bounds = Spec((4,), "int32")
    trace = measure_op(flash_attn_varlen_func, q, q, q, bounds, bounds, 400, 400)
    out = 1000 * 8 * 64 * 2
    assert trace.changes("forward") == [out, 8 * 1000 * 4, 16]
    rows = 1000 + 3 * 128
    assert sizes(trace.changes("backward"))[3:] == [8 * rows * 4, rows * 8 * 64 * 4]


def test_heads_are_padded_to_a_multiple_of_eight() -> None:
    """`FlashAttnFunc` pads q, k and v and saves the padded ones."""
    q = Spec((2, 64, 4, 100), requires_grad=True)
    trace = measure_op(flash_attn_func, q, q, q)
    assert trace.changes("forward")[:4] == [2 * 64 * 4 * 104 * 2] * 4


def test_the_stand_in_is_there_only_inside_its_context() -> None:
    """`import flash_attn` and the question of transformers find it, and neither does afterwards."""
    import_utils = pytest.importorskip("transformers.utils.import_utils")
    before = import_utils.is_flash_attn_2_available
    with flash_attn_stand_in():
        import flash_attn  # type: ignore[import-not-found]

        assert flash_attn.flash_attn_func is flash_attn_func
        assert import_utils.is_flash_attn_2_available()
    assert "flash_attn" not in sys.modules
    assert import_utils.is_flash_attn_2_available is before


def test_modules_that_imported_nothing_get_the_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers 4.53 has None where it would have imported from flash-attn, 4.43 nothing at all; both come back."""
    pytest.importorskip("transformers.modeling_utils")
    name = "transformers.modeling_flash_attention_utils"
    module = ModuleType(name)
    module.__dict__.update(flash_attn_func=None, flash_attn_2_func=None, HAS_FA2=False)
    before = dict(vars(module))
    monkeypatch.setitem(sys.modules, name, module)
    with flash_attn_stand_in():
        found = vars(module)
        assert found["flash_attn_func"] is found["flash_attn_2_func"] is flash_attn_func
        assert found["flash_attn_varlen_func"] is flash_attn_varlen_func
        assert found["HAS_FA2"]
    assert vars(module) == before
