"""What docs/accuracy.md says of simulate and trace."""

from __future__ import annotations

from pathlib import Path

from tests.agreement.table import text

PAGE = Path(__file__).parents[2] / "docs" / "accuracy.md"


def test_the_page_has_the_tables_of_today() -> None:
    """The section holds what `scripts/agreement` prints, figure by figure."""
    assert text() in PAGE.read_text("utf-8")
