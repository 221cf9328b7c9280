"""The record of other versions of transformers belongs to this code: cases of the installed one
are measured again by turns.
"""

from __future__ import annotations

import json

import pytest
import transformers

from tests.sampling import is_due
from tests.trace.versions import CASES, RECORD, measure

CHECKED = [case for case in sorted(CASES) if is_due(case)]


@pytest.mark.parametrize("case", CHECKED)
def test_the_record_is_what_a_rehearsal_gives(case: str) -> None:
    """Peaks of every phase, to the byte; a case without a record is one that this version cannot run."""
    record = json.loads(RECORD.read_text())
    if transformers.__version__ not in record:
        pytest.skip(f"transformers {transformers.__version__} is not recorded")
    recorded = record[transformers.__version__]
    if case not in recorded:
        pytest.skip("this version cannot run it")
    assert measure(case) == recorded[case]


def test_the_logits_get_a_shifted_copy_until_4_48() -> None:
    """Up to 4.48 the fp32 logits were shifted into a copy, [2, 511, 32000]; since 4.49 the labels are
    padded instead.

    The product over 512 instead of 511 rows then costs one row of each sample more: 2 x 32000 x 4 bytes;
    the labels' own copies and the rounding to 512 bytes are below 16 KiB.
    """
    record = json.loads(RECORD.read_text())
    before, after = (record[v]["mistral: full"]["1 loss"] for v in ("4.48.3", "4.49.0"))
    shifted, rows = 2 * 511 * 32000 * 4, 2 * 32000 * 4
    assert abs(before - after - (shifted - rows)) < 2**14
