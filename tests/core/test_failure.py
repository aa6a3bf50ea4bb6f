"""First line of a failure's report: the line of a rank's output that shows the cause."""

from __future__ import annotations

import pytest

from penstock.core.failure import Failure, read_failure

KILLED = "rank 1 (process 71) was killed in step 5 at 1F3.2"
TRACEBACK = (
    "step 4 of 10: checkpoint written",
    "Traceback (most recent call last):",
    '  File "train.py", line 3, in step',
    "    raise MemoryError",
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
    "",
    "During handling of the above exception, another exception occurred:",
    "RuntimeError: the arena is gone",
)


def test_a_message_alone_is_the_failure() -> None:
    assert read_failure(KILLED) == Failure(what=KILLED, rank=1)


def test_a_message_may_bring_its_remedy() -> None:
    found = read_failure("data.source: is empty\n  line 3\n  remedy: name a file\n  remedy: or leave it out")
    assert (found.what, found.more) == ("data.source: is empty", ("line 3",))
    assert found.remedies == ("name a file", "or leave it out")
    assert found.rank is None


def test_the_line_that_failed_first_is_the_evidence() -> None:
    assert read_failure(KILLED, TRACEBACK).evidence == TRACEBACK[4]


@pytest.mark.parametrize(
    "line",
    [
        "MemoryError",
        "[rank1]: RuntimeError: no",
        "Fatal Python error: Segmentation fault",
        "terminate called after throwing an instance of 'c10::Error'",
        "ERROR the disk is full",
        "slurmstepd: Out Of Memory",
        "KeyboardInterrupt",
    ],
)
def test_lines_that_show_a_failure(line: str) -> None:
    assert read_failure(KILLED, ["step 4", f"  {line}", "MemoryError: later"]).evidence == line


@pytest.mark.parametrize("line", ["step 4 of 10", "UserWarning: slow", "0 errors", "the killer feature", ""])
def test_lines_that_show_no_failure(line: str) -> None:
    assert read_failure(KILLED, [line]).evidence == ""


def test_evidence_that_the_message_contains_is_left_out() -> None:
    message = "rank 0 failed in step 2 at 0F1.0: OutOfMemoryError: CUDA out of memory"
    assert read_failure(message, ["torch.OutOfMemoryError: CUDA out of memory"]).evidence == ""


def test_an_empty_message_without_lines_is_an_empty_failure() -> None:
    assert read_failure("", ()) == Failure(what="")
