"""Hands every test its stored numbers, and gathers the new ones when they are written."""

from __future__ import annotations

from typing import Any

import pytest

from tests.agreement import golden as stored

_new: dict[str, dict[str, Any]] = {}


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> stored.Golden:
    """What the real libraries were seen to do in this test."""
    file, case = request.path.stem, request.node.name

    def record(seen: Any) -> None:
        # properties travel with the report, from whichever process runs the test
        request.node.user_properties.append(("golden", [file, case, seen]))

    return stored.Golden(file=file, case=case, record=record)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Take what a test has seen out of its report."""
    if report.when == "call":
        for key, value in report.user_properties:
            if key == "golden":
                file, case, seen = value
                _new.setdefault(file, {})[case] = seen


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write what was seen, once: where the reports of all processes come together."""
    if not hasattr(session.config, "workerinput"):
        for file, seen in _new.items():
            stored.store(file, seen)
