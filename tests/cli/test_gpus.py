"""`wazn gpus`: list and search, on terminals and in pipes."""

from __future__ import annotations

import json

import pytest

from wazn.cli.main import main
from wazn.facts.gpus import list_gpus, lowest_price
from wazn.report.tables import Column, gpus_table, text_table


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Run the command line in this process: exit status, stdout, stderr."""
    with pytest.raises(SystemExit) as caught:
        main(list(arguments))
    captured = capsys.readouterr()
    assert isinstance(caught.value.code, int)
    return caught.value.code, captured.out, captured.err


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    """JSON has every key; a T4 reports 14.563 GiB at the lowest, has no bf16, and cost 0.526 USD in July 2026."""
    status, out, _ = run(capsys, "gpus", "t4", "--format", "json")
    assert status == 0
    answer = json.loads(out)
    assert answer["schema"] == "wazn.gpus/1"
    [gpu] = answer["gpus"]
    assert gpu["id"] == "t4-16gb"
    assert gpu["usable_bytes"] == int(14.563 * 2**30)
    assert gpu["usable_basis"] == "measured"
    assert gpu["usable_reference"] is None
    assert gpu["supports_bf16"] is False
    assert gpu["lowest_price"] == {
        "usd_per_gpu_hour": 0.526,
        "provider": "aws",
        "date": "2026-07-20",
    }


def test_text(capsys: pytest.CaptureFixture[str]) -> None:
    """In a pipe the table keeps every column, with the date of the price."""
    status, out, err = run(capsys, "gpus", "rtx", "4090")
    assert status == 0
    heading, first, *_ = out.splitlines()
    assert heading.split()[:3] == ["gpu", "name", "usable"]
    assert "23.51 GiB" in first
    assert "2026-" in first
    assert err == ""


def test_all(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a query all 127 GPUs are listed."""
    _, out, _ = run(capsys, "gpus")
    assert len(out.splitlines()) == 128


def test_unknown(capsys: pytest.CaptureFixture[str]) -> None:
    """An unknown name leaves with 2 and nothing on stdout."""
    status, out, err = run(capsys, "gpus", "rtx-4099")
    assert status == 2
    assert out == ""
    assert "rtx-4090-24gb" in err


@pytest.mark.parametrize("width", [40, 60, 80, 100])
def test_narrow_terminal(width: int) -> None:
    """On a narrow terminal columns go, lines do not wrap, and what a person came for stays: the card and its memory."""
    rows = [(gpu, lowest_price(gpu.id)) for gpu in list_gpus() if len(gpu.id) < 20]
    lines = gpus_table(rows, width=width).splitlines()
    assert max(len(line) for line in lines) <= width
    assert all("GiB" in line for line in lines[1:])


def test_table() -> None:
    """Columns align; the one with the highest rank goes first when there is no room."""
    columns = (Column(heading="a"), Column(heading="n", right=True), Column(heading="c", drop=1))
    rows = [("x", "1", "long"), ("yy", "23", "z")]
    assert text_table(columns, rows, width=None) == "a    n  c\nx    1  long\nyy  23  z"
    assert text_table(columns, rows, width=6) == "a    n\nx    1\nyy  23"
    assert text_table(columns, [], width=None) == "a  n  c"
