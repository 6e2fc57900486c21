"""No exception of kvtier's reaches vLLM."""

from __future__ import annotations

import pytest

from kvtier import guard


class Manager:
    def halve(self, number: int) -> int:
        return number // 2

    def fail(self) -> None:
        raise KeyError("of a test")


def test_an_object_whose_methods_raise_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(guard, "caught", 0)
    manager = Manager()
    guarded = guard.never_raising(manager)
    assert guarded.halve(8) == 4
    assert not caplog.records
    assert guarded.fail() is None
    assert guarded.missing() is None  # type: ignore[attr-defined]
    monkeypatch.setattr(manager, "halve", lambda number: -number)
    assert guarded.halve(8) == -8, "found by its name in each call"
    assert guard.caught == 2
    assert ["of a test" in (record.exc_text or "") for record in caplog.records] == [True, False]
