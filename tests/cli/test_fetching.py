"""What the command line brings from a service, against a real one."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock.api.auth.identity import Role
from penstock.api.service import Service
from penstock.api.settings import Limits
from penstock.api.store import attempts, jobs
from penstock.cli.fetching import INCOMPLETE_QUIET_POLLS, QUIET_POLLS, export_newest, local_name, show_logs
from penstock.cli.main import main
from penstock.cli.top import Board, apply_message
from penstock.client import Client, Message, Place, Target
from penstock.core.errors import RunError, UserError
from penstock.core.lifecycle import Launch, Phase
from tests.support.listening import answering, bearer
from tests.support.run_files import FILES, add_checkpoint, lay_out
from tests.support.service import NOW, Clock, add_job, new_service, send_lines

TINY = Place(name="tiny")


@pytest.fixture
def service(tmp_path: Path, clock: Clock) -> Iterator[Service]:
    (tmp_path / "service").mkdir()
    made = new_service(tmp_path / "service", clock=clock, limits=Limits(stream_seconds=0.3))
    yield made
    made.close()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def uid(service: Service) -> str:
    return add_job(service).uid


@pytest.fixture
def client(service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    """And commands find the service too."""
    monkeypatch.chdir(tmp_path)
    with answering(service) as url:
        token = bearer(service, Role.EDITOR)["Authorization"].removeprefix("Bearer ")
        monkeypatch.setenv("PENSTOCK_SERVER", url)
        monkeypatch.setenv("PENSTOCK_TOKEN", token)
        with Client(Target(server=url, token=token), pause=lambda seconds: None) as made:
            yield made


def end(service: Service, uid: str, phase: Phase = Phase.FAILED) -> None:
    service.write(uid, lambda c: jobs.enter_phase(c, uid, phase, "Because", "", NOW))


Captured = pytest.CaptureFixture[str]


@pytest.mark.usefixtures("client")
class TestLogs:
    def test_of_all_ranks_in_the_order_of_time(self, service: Service, uid: str, capsys: Captured) -> None:
        send_lines(service, uid, (1, "first"), (0, "second [bold]\x1b[31m"), (-1, "third"))
        assert main(["logs", "tiny"]) == 0
        assert capsys.readouterr().out.splitlines() == [
            "  1 | first", "  0 | second [bold]\N{REPLACEMENT CHARACTER}[31m", "run | third",
        ]  # fmt: skip

    def test_more_than_a_page(self, service: Service, uid: str, capsys: Captured) -> None:
        for rank in range(3):
            send_lines(service, uid, *((rank, f"{rank}.{i}") for i in range(1500)), first=rank * 1500)
        main(["logs", "tiny"])
        assert len(set(capsys.readouterr().out.splitlines())) == 4500

    def test_the_last_of_one_rank(self, service: Service, uid: str, capsys: Captured) -> None:
        send_lines(service, uid, *((i % 2, f"line {i}") for i in range(9)))
        main(["logs", "tiny", "--rank", "1", "--tail", "2"])
        assert capsys.readouterr().out.splitlines() == ["  1 | line 5", "  1 | line 7"]

    def test_of_no_job(self, capsys: Captured) -> None:
        for command in ("logs", "suspend", "resume", "delete"):
            assert main([command, "none"]) == 2
            told = capsys.readouterr().err
            assert "there is no job default/none" in told
            assert "list the jobs with penstock status" in told


def test_a_log_is_followed_until_its_last_lines_have_come(
    service: Service, uid: str, client: Client, capsys: Captured
) -> None:
    """The job ends first, and its lines arrive after that."""
    send_lines(service, uid, (0, "old"), (0, "new"))
    happenings: Iterator[Callable[[], None]] = iter(
        [
            lambda: send_lines(service, uid, (1, "newer"), first=2),
            lambda: end(service, uid),
            lambda: send_lines(service, uid, (0, "last"), first=3),
        ]
    )
    pauses = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        next(happenings, lambda: None)()

    show_logs(client, TINY, rank=None, tail=1, follow=True, pause=pause)
    assert capsys.readouterr().out.splitlines() == ["  0 | new", "  1 | newer", "  0 | last"]
    assert len(pauses) == 3 + QUIET_POLLS - 1


def test_a_log_is_followed_until_all_that_was_recorded_has_come(
    service: Service, uid: str, client: Client, capsys: Captured
) -> None:
    """However long that takes: a machine may be busy, and a shipper killed and started again."""
    launch(service, uid)
    end(service, uid)
    happenings: dict[int, Callable[[], object]] = {
        30: lambda: send_lines(service, uid, (0, "late")),
        60: lambda: send_lines(service, uid, (0, "last"), first=1),
        70: lambda: service.write(uid, lambda c: attempts.close(c, uid, 1, NOW)),
    }
    pauses = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        happenings.get(len(pauses), lambda: None)()

    show_logs(client, TINY, rank=None, tail=None, follow=True, pause=pause)
    shown = capsys.readouterr()
    assert (shown.out.splitlines(), shown.err) == (["  0 | late", "  0 | last"], "")
    assert len(pauses) <= 70 + QUIET_POLLS


def test_what_never_comes_is_waited_for_no_longer_than_is_said(
    service: Service, uid: str, client: Client, capsys: Captured
) -> None:
    launch(service, uid)
    end(service, uid)
    pauses: list[float] = []
    show_logs(client, TINY, rank=None, tail=None, follow=True, pause=pauses.append)
    assert len(pauses) == INCOMPLETE_QUIET_POLLS - 1
    assert "tiny: the service has not received all lines of the job yet" in capsys.readouterr().err


def launch(service: Service, uid: str) -> None:
    service.write(uid, lambda c: attempts.add(c, uid, Launch(1, 2, None), (), NOW))


@pytest.mark.usefixtures("client")
class TestDownload:
    @pytest.fixture(autouse=True)
    def files(self, service: Service, uid: str) -> None:
        lay_out(service.settings.runs / uid)

    def test_without_files_they_are_listed(self, capsys: Captured) -> None:
        assert main(["download", "tiny"]) == 0
        assert "exports/a1-step-4/model.safetensors" in capsys.readouterr().out
        main(["download", "tiny", "-o", "json"])
        assert [each["name"] for each in json.loads(capsys.readouterr().out)] == sorted(FILES)

    def test_by_pattern_into_a_folder(self, tmp_path: Path, capsys: Captured) -> None:
        assert main(["download", "tiny", "logs/*", "plan.json"]) == 0
        written = {path.relative_to(tmp_path / "tiny").as_posix() for path in (tmp_path / "tiny").rglob("*.*")}
        assert written == {"plan.json", *(name for name in FILES if name.startswith("logs/"))}
        assert len(capsys.readouterr().out.splitlines()) == len(written)

    def test_a_pattern_that_names_none(self, tmp_path: Path, capsys: Captured) -> None:
        assert main(["download", "tiny", "plan.json", "non*"]) == 2
        assert "penstock download tiny" in capsys.readouterr().err
        assert not (tmp_path / "tiny").exists()

    def test_a_folder_that_cannot_be_written(self, tmp_path: Path, capsys: Captured) -> None:
        (tmp_path / "file").write_text("")
        assert main(["download", "tiny", "plan.json", "--to", str(tmp_path / "file")]) == 2
        assert "--to" in capsys.readouterr().err

    def test_an_export(self, service: Service, uid: str, tmp_path: Path, capsys: Captured) -> None:
        assert main(["download", "tiny", "--export", "--to", str(tmp_path / "model")]) == 0
        model = tmp_path / "model" / "exports" / "a1-step-4" / "model.safetensors"
        assert model.read_bytes() == FILES["exports/a1-step-4/model.safetensors"]


def test_an_export_that_fails_says_why(service: Service, uid: str, client: Client) -> None:
    with pytest.raises(UserError, match="no checkpoint yet"):
        export_newest(client, TINY)
    add_checkpoint(service.settings.runs / uid, 1, 4)
    with pytest.raises(RunError, match="step 4 was not exported: error the run directory: has no prepared data"):
        export_newest(client, TINY)


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/../../x", "", ".."])
def test_no_service_writes_outside_of_the_folder(name: str) -> None:
    with pytest.raises(UserError, match="leads out"):
        local_name(name)


def test_a_retry(service: Service, uid: str, client: Client, capsys: Captured) -> None:
    assert main(["retry", "tiny"]) == 2
    assert "the job is Pending" in capsys.readouterr().err
    end(service, uid)
    assert main(["retry", "tiny", "--as", "mine", "-o", "json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["metadata"]["name"] == "mine"


def test_a_board_is_what_a_list_would_be(service: Service, client: Client) -> None:
    """Jobs come, change, end and are deleted while somebody looks."""
    board, messages = Board(), client.listen()

    def until(holds: Callable[[], bool]) -> None:
        while not holds():
            apply_message(board, client, next(messages), {})

    def phases() -> dict[str, Phase]:
        return {job.name: job.status.phase for job in board.jobs.values()}

    first = add_job(service, "first").uid
    until(lambda: phases() == {"first": Phase.PENDING})
    second = add_job(service, "second").uid
    until(lambda: "second" in phases())
    end(service, first)
    until(lambda: phases() == {"first": Phase.FAILED, "second": Phase.PENDING})
    assert [str(cell) for cell in board.table().columns[0].cells] == ["second", "first"], "what goes on comes first"
    service.write(second, lambda c: jobs.mark_deleted(c, second, NOW))
    until(lambda: list(phases()) == ["first"])
    assert not apply_message(board, client, Message("event", {}), {})
