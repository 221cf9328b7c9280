"""Which of the expensive comparisons are made for real today: each of them once in every so many days.

What is compared with stored numbers of the real libraries is compared with the libraries themselves by turns.
`WAZN_SAMPLE=all` takes every turn at once, `WAZN_SAMPLE=3` every third; `WAZN_DAY=2026-11-29` takes the turns
of another day.
"""

from __future__ import annotations

import datetime
import os
import zlib

TURNS = 12

# Said once, so that all processes of a run, one of which may start past midnight, speak of one day.
DAY = os.environ.setdefault("WAZN_DAY", datetime.datetime.now(datetime.UTC).date().isoformat())


def is_due(case: str, *, turns: int = TURNS) -> bool:
    """Return whether it is this case's turn: on one day of `turns` days, other cases on other days."""
    asked = os.environ.get("WAZN_SAMPLE", "")
    if asked == "all":
        return True
    if asked:
        turns = int(asked)
    return (zlib.crc32(case.encode()) + datetime.date.fromisoformat(DAY).toordinal()) % turns == 0
