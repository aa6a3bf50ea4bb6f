"""Exports by real processes: one at a time, whole or not at all, ended with the service."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock.api.files import exporting
from penstock.api.files.exporting import Export, Exports, ExportState
from penstock.api.files.runfiles import artifacts

PATIENCE_SECONDS = 60.0
WRITES = """import pathlib, sys
folder = pathlib.Path(sys.argv[3])
folder.mkdir()
(folder / "model").write_text(" ".join(sys.argv[1:]))"""
FAILS = "import sys; sys.exit('error checkpoint: is corrupt')"
SLEEPS = "import pathlib, sys, time, os; pathlib.Path(sys.argv[1], 'pid').write_text(str(os.getpid())); time.sleep(600)"
DONE, FAILED = Export(state=ExportState.DONE), ExportState.FAILED

Make = Callable[..., Exports]


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes exports of a program, closed in the end."""
    made: list[Exports] = []

    def exports(program: str, most_seconds: float = PATIENCE_SECONDS) -> Exports:
        made.append(Exports((sys.executable, "-c", program), most_seconds))
        return made[-1]

    yield exports
    for each in made:
        each.close()


def ended(exports: Exports, root: Path, step: int = 4) -> Export:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while (found := exports.of(root, 1, step)) is None or found.state in exporting.WAITING:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found


def test_a_model_is_there_once_it_is_whole(make: Make, tmp_path: Path) -> None:
    exports = make(WRITES)
    assert exports.of(tmp_path, 1, 4) is None
    assert exports.start(tmp_path, 1, 4)
    assert ended(exports, tmp_path) == DONE
    assert [each.name for each in artifacts(tmp_path)] == ["exports/a1-step-4/model"]
    told = (tmp_path / "exports" / "a1-step-4" / "model").read_text().split()
    assert (told[0], told[3:]) == (str(tmp_path), ["--attempt", "1", "--step", "4"])
    assert make(FAILS).of(tmp_path, 1, 4) == DONE, "another service finds it"
    assert make(FAILS).start(tmp_path, 1, 4)


def test_why_it_failed_is_told_and_it_may_be_tried_again(make: Make, tmp_path: Path) -> None:
    exports = make(FAILS)
    for _ in range(2):
        assert exports.start(tmp_path, 1, 4)
        assert ended(exports, tmp_path) == Export(state=FAILED, message="error checkpoint: is corrupt")
    assert list((tmp_path / "exports").iterdir()) == []


def test_a_message_has_no_traceback(make: Make, tmp_path: Path) -> None:
    unforeseen = "import sys, traceback\ntry: 1 / 0\nexcept ZeroDivisionError as error: traceback.print_exc()\n"
    exports = make(f"{unforeseen}sys.exit('failed ZeroDivisionError: division by zero')")
    exports.start(tmp_path, 1, 4)
    assert ended(exports, tmp_path).message == "failed ZeroDivisionError: division by zero"


@pytest.mark.parametrize(("program", "why"), [("import os; os._exit(3)", "ended with code 3"), ("", "No such file")])
def test_a_process_that_says_nothing(make: Make, tmp_path: Path, program: str, why: str) -> None:
    """Nor does one that ends well and leaves no folder pass for a success."""
    exports = make(program)
    exports.start(tmp_path, 1, 4)
    found = ended(exports, tmp_path)
    assert found.state is FAILED
    assert why in found.message


def test_one_that_takes_too_long_is_ended(make: Make, tmp_path: Path) -> None:
    exports = make(SLEEPS, most_seconds=1.0)
    exports.start(tmp_path, 1, 4)
    assert ended(exports, tmp_path).message == "took longer than 1 s"
    assert_gone(tmp_path)


def assert_gone(root: Path) -> None:
    with pytest.raises(ProcessLookupError):
        os.kill(int((root / "pid").read_text()), 0)


def test_nothing_outlives_the_service(make: Make, tmp_path: Path) -> None:
    exports = make(SLEEPS)
    for step in (4, 8):
        exports.start(tmp_path, 1, step)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    waiting = exports.of(tmp_path, 1, 8)
    assert waiting is not None
    assert waiting.state is ExportState.QUEUED
    exports.close()
    assert_gone(tmp_path)
    assert not exports.start(tmp_path, 1, 12)


def test_only_so_many_wait(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporting, "MOST_WAITING", 2)
    exports = make(SLEEPS)
    assert [exports.start(tmp_path, 1, step) for step in (1, 2, 3, 1)] == [True, True, False, True]


def test_what_a_killed_service_left_is_cleared_away(make: Make, tmp_path: Path) -> None:
    left = tmp_path / "exports" / ".a1-step-4.1234"
    left.mkdir(parents=True)
    exports = make(WRITES)
    exports.start(tmp_path, 1, 4)
    ended(exports, tmp_path)
    assert [path.name for path in (tmp_path / "exports").iterdir()] == ["a1-step-4"]


def test_failures_are_not_remembered_without_end(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporting, "MOST_REMEMBERED", 2)
    exports = make("raise SystemExit(1)")
    for step in (1, 2, 3):
        exports.start(tmp_path, 1, step)
        ended(exports, tmp_path, step)
    assert exports.of(tmp_path, 1, 1) is None
    assert exports.of(tmp_path, 1, 3) is not None
