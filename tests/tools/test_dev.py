"""The `dev` script: its decisions, and its errors if the machine lacks a requirement."""

from __future__ import annotations

import fcntl
import importlib.util
import itertools
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.members import IMAGES
from tests.support.repository import ROOT
from tools.dev import environments, installation, machine, verbs
from tools.dev.console import SetupError
from tools.dev.main import main

DEBIAN = 'PRETTY_NAME="Debian GNU/Linux 12 (bookworm)"\nID=debian\n'
UBUNTU = "ID=ubuntu\nID_LIKE=debian\n"
MINT = 'ID=linuxmint\nID_LIKE="ubuntu debian"\n'
FEDORA = "ID=fedora\n"
VENV_PACKAGE = f"python{sys.version_info.major}.{sys.version_info.minor}-venv"


def run_dev(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "dev"), *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)


def member(name: str, *dependencies: str, **more: Any) -> dict[str, Any]:
    return {"project": {"name": f"penstock-{name}", "version": "1", "dependencies": list(dependencies), **more}}


def workspace() -> Any:
    root = {
        "tool": {"ruff": {"line-length": 120}},
        "dependency-groups": {"test": ["pytest"], "dev": [{"include-group": "test"}, "ruff"]},
    }
    extras = {"run": ["penstock-trainer==1"], "serve": ["penstock-api==1"], "cluster": ["penstock-api==1"]}
    members = {
        "core": member("core", "ruamel.yaml>=0.18"),
        "planner": member("planner", "penstock-core==1", "numpy>=2"),
        "trainer": member("trainer", "penstock-planner==1", "torch>=2.11"),
        "operator": member("operator", "penstock-core==1", "kopf"),
        "api": member("api", "penstock-core==1", "psycopg[binary]>=3"),
        "cli": member("cli", "penstock-planner==1", "typer", **{"optional-dependencies": extras}),
        "unused": member("unused", "penstock-core==1"),
    }
    return environments.Workspace(root=root, members=members)


class TestMembers:
    def test_a_member_needs_its_dependencies(self) -> None:
        assert environments.needed_members(["penstock-trainer"], workspace().members) == ["core", "planner", "trainer"]

    def test_an_extra_adds_dependencies(self) -> None:
        members = workspace().members
        assert environments.needed_members(["penstock-cli"], members) == ["core", "planner", "cli"]
        assert environments.needed_members(["penstock-cli", "penstock-cli[serve]"], members) == [
            "core",
            "planner",
            "api",
            "cli",
        ]

    def test_environments(self) -> None:
        members = environments.read_workspace().members
        assert environments.needed_members(environments.FULL.members, members) == list(members)
        assert environments.needed_members(environments.CORE.members, members) == ["core", "planner"]
        operator = environments.OPERATOR.members
        assert environments.needed_members(operator, members) == ["core", "planner", "kube", "operator"]
        assert IMAGES["operator"] == operator

    def test_every_member_is_installed_by_its_folder(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Otherwise the installer would download it from an index, where another project may have its name."""
        calls: list[list[str]] = []

        def install(environment: object, arguments: list[str]) -> bool:
            calls.append(arguments)
            return True

        monkeypatch.setattr(installation, "install", install)
        installation.install_packages(environments.CORE, workspace())
        assert calls == [["--editable", "./core", "--editable", "./planner", "pytest"]]


class TestKey:
    def test_is_stable(self) -> None:
        keys = {environments.environment_key(environments.FULL, workspace(), b"a==1") for _ in range(2)}
        assert len(keys) == 1

    def test_changes_with_everything_that_is_installed(self) -> None:
        changed = [workspace() for _ in range(5)]
        changed[0].members["core"]["project"]["dependencies"].append("scipy")
        changed[1].members["trainer"]["project"]["dependencies"].append("tokenizers")
        changed[2].members["planner"]["project"]["version"] = "2"
        changed[3].members["cli"]["project"]["scripts"] = {"penstock": "penstock.cli.main:main"}
        changed[4].root["dependency-groups"]["test"].append("hypothesis")
        keys = [environments.environment_key(environments.FULL, other, b"a==1") for other in [workspace(), *changed]]
        keys.append(environments.environment_key(environments.FULL, workspace(), b"a==2"))
        keys.append(environments.environment_key(environments.CORE, workspace(), b"a==1"))
        assert len(set(keys)) == len(keys)

    def test_changes_with_the_interpreter_and_the_path(self, monkeypatch: pytest.MonkeyPatch) -> None:
        keys = {environments.environment_key(environments.FULL, workspace(), b"")}
        for owner, attribute in ((sys, "base_prefix"), (environments, "ROOT")):
            with monkeypatch.context() as patch:
                patch.setattr(owner, attribute, "/elsewhere")
                keys.add(environments.environment_key(environments.FULL, workspace(), b""))
        with monkeypatch.context() as patch:
            patch.setattr(platform, "python_version", lambda: "3.99.0")
            keys.add(environments.environment_key(environments.FULL, workspace(), b""))
        assert len(keys) == 4

    def test_ignores_what_is_not_installed(self) -> None:
        changed = workspace()
        changed.root["tool"]["ruff"]["line-length"] = 80
        changed.members["unused"]["project"]["dependencies"].append("sphinx")
        assert environments.environment_key(environments.FULL, changed, b"") == environments.environment_key(
            environments.FULL, workspace(), b""
        )

    @pytest.mark.parametrize(
        ("marker", "nvidia", "current"),
        [
            (None, False, False),
            ("", False, False),
            ("key cuda\n", False, True),
            ("key cuda\n", True, True),
            ("key cpu\n", False, True),
            ("key cpu\n", True, False),
            ("key\n", True, True),
            ("other cuda\n", False, False),
        ],
    )
    def test_finished_environment(self, marker: str | None, nvidia: bool, current: bool) -> None:
        assert environments.is_current(marker, "key", nvidia) is current


def test_groups_include_groups() -> None:
    groups: dict[str, list[Any]] = {"a": ["x"], "b": [{"include-group": "a"}, "y"], "c": ["z", {"include-group": "b"}]}
    assert environments.group_requirements(groups, "c") == ["z", "x", "y"]


class TestMissingVenvPackage:
    @pytest.mark.parametrize("release", [DEBIAN, UBUNTU, MINT])
    def test_root_installs_the_package_of_this_python(self, release: str) -> None:
        command = machine.venv_package_command("/usr/bin/python3.11", release, is_root=True)
        assert command == ["apt-get", "install", "-y", VENV_PACKAGE]

    def test_other_users_get_a_command_with_sudo(self) -> None:
        command = machine.venv_package_command("/usr/bin/python3", DEBIAN, is_root=False)
        assert command == ["sudo", "apt-get", "install", "-y", VENV_PACKAGE]

    @pytest.mark.parametrize(
        ("executable", "release"),
        [("/usr/bin/python3", FEDORA), ("/usr/bin/python3", ""), ("/opt/bin/python3", DEBIAN)],
    )
    def test_other_pythons_have_no_package(self, executable: str, release: str) -> None:
        with pytest.raises(SetupError, match="has no ensurepip") as caught:
            machine.venv_package_command(executable, release, is_root=True)
        assert caught.value.exit_code == 2

    def test_a_user_sees_one_line_and_exit_code_2(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(machine, "has_ensurepip", lambda: False)
        monkeypatch.setattr(
            machine, "venv_package_command", lambda *_: ["sudo", "apt-get", "install", "-y", "python3-venv"]
        )
        monkeypatch.setattr(os, "geteuid", lambda: 1000)
        monkeypatch.setattr(verbs, "ensure", lambda _: machine.require_ensurepip())
        assert main(["setup"]) == 2
        assert capsys.readouterr() == ("", "sudo apt-get install -y python3-venv\n")

    def test_root_refreshes_the_package_lists_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A new container has empty package lists: the first installation fails, the one after the update succeeds."""
        commands: list[str] = []

        def fake_run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
            commands.append(" ".join(command))
            return subprocess.CompletedProcess(command, returncode=100 if len(commands) == 1 else 0)

        monkeypatch.setattr(machine, "has_ensurepip", lambda: len(commands) == 3)
        monkeypatch.setattr(machine, "venv_package_command", lambda *_: ["apt-get", "install", "-y", "python3-venv"])
        monkeypatch.setattr(os, "geteuid", lambda: 0)
        monkeypatch.setattr(subprocess, "run", fake_run)
        machine.require_ensurepip()
        assert commands == ["apt-get install -y python3-venv", "apt-get update", "apt-get install -y python3-venv"]


class TestDisk:
    def test_enough(self) -> None:
        assert machine.disk_message(8 * machine.GIGABYTE, 8 * machine.GIGABYTE, Path("/home")) is None

    def test_the_error_has_the_folder_the_sizes_and_a_remedy(self) -> None:
        message = machine.disk_message(8 * machine.GIGABYTE, int(1.26 * machine.GIGABYTE), Path("/home/me"))
        assert message is not None
        assert "/home/me has 1.3 GB free" in message
        assert "about 8 GB" in message
        assert "UV_CACHE_DIR" in message

    def test_a_full_disk_ends_setup_with_exit_code_2(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        full = shutil.disk_usage(ROOT)._replace(free=10**6)
        monkeypatch.setattr(shutil, "disk_usage", lambda _: full)
        monkeypatch.setattr(verbs, "ensure", lambda _: machine.require_disk_space(installation.DISK_BYTES["cpu"]))
        assert main(["setup"]) == 2
        assert "about 2 GB" in capsys.readouterr().err

    @pytest.mark.parametrize("variable", ["UV_CACHE_DIR", "XDG_CACHE_HOME"])
    def test_cache_folder_that_does_not_exist_yet(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
    ) -> None:
        monkeypatch.delenv("UV_CACHE_DIR", raising=False)
        monkeypatch.setenv(variable, str(tmp_path / "not" / "yet"))
        assert machine.cache_folder() == tmp_path


class TestTorchBuild:
    @pytest.mark.parametrize(
        ("nvidia", "answering", "build"),
        [(True, True, "cuda"), (True, False, "cuda"), (False, True, "cpu"), (False, False, "cuda")],
    )
    def test_choice(
        self,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
        nvidia: bool,
        answering: bool,
        build: str,
    ) -> None:
        monkeypatch.setattr(installation, "answers", lambda _: answering)
        assert installation.choose_torch(nvidia) == build
        assert "PyTorch" in capsys.readouterr().err

    def test_an_unreachable_index_does_not_answer(self) -> None:
        assert machine.answers("http://127.0.0.1:9") is False


class TestDemoFolder:
    def test_numbers_continue_from_the_highest(self) -> None:
        assert verbs.next_run_folder([]) == "runs/demo/1"
        assert verbs.next_run_folder(["1", "2", "10", "notes"]) == "runs/demo/11"

    def test_names_are_never_repeated(self) -> None:
        taken: list[str] = []
        for _ in itertools.repeat(None, 12):
            taken.append(Path(verbs.next_run_folder(taken)).name)
        assert len(set(taken)) == 12


class TestDemoOnACluster:
    def test_is_another_program(self, monkeypatch: pytest.MonkeyPatch) -> None:
        executed: list[list[str]] = []

        def become(command: list[str]) -> None:
            executed.append(command)
            sys.exit(0)

        monkeypatch.setattr(verbs, "ensure", lambda _: None)
        monkeypatch.setattr(verbs, "become", become)
        for arguments in (["--cluster"], ["--fast"]):
            with pytest.raises(SystemExit):
                main(["demo", *arguments])
        assert executed[0] == ["python", "-m", "deploy.demonstration"]
        assert executed[1][:2] == ["penstock", "demo"]
        assert executed[1][-1] == "--fast"

    def test_takes_no_further_arguments(self) -> None:
        done = subprocess.run(
            [sys.executable, "-m", "deploy.demonstration", "--steps"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith("./dev demo --cluster takes no further arguments")


class TestTests:
    @pytest.fixture
    def commands(self, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
        """Record the started commands; the last one replaces this process."""
        commands: list[list[str]] = []
        monkeypatch.setattr(verbs, "ensure", lambda environment: None)

        def run(command: list[str], environment: object) -> int:
            commands.append(command)
            return 0

        def become(command: list[str]) -> None:
            commands.append(command)
            raise SystemExit

        monkeypatch.setattr(verbs, "run", run)
        monkeypatch.setattr(verbs, "become", become)
        return commands

    @pytest.mark.parametrize("arguments", [[], ["--random-order-seed=7", "--exitfirst"]])
    def test_options_alone_run_all_tests(self, arguments: list[str], commands: list[list[str]]) -> None:
        with pytest.raises(SystemExit):
            main(["test", *arguments])
        *small, rest = commands
        prefix = ["python", "-m", "pytest", *arguments]
        assert all(command[: len(prefix)] == prefix for command in commands)
        folders = [environment.tests for environment in environments.SMALL]
        assert [tuple(command[-2:]) for command in small] == folders
        assert rest[-4:] == [f"--ignore={folder}" for pair in folders for folder in pair]

    @pytest.mark.parametrize("arguments", [["tests/core"], ["-k", "slices"], ["--exitfirst", "tests/core"]])
    def test_arguments_select_tests(self, arguments: list[str], commands: list[list[str]]) -> None:
        with pytest.raises(SystemExit):
            main(["test", *arguments])
        assert commands == [["python", "-m", "pytest", *arguments]]


class TestBenchmarks:
    def test_only_modules_with_a_main(self, tmp_path: Path) -> None:
        (tmp_path / "speed.py").write_text('"""How fast.\n\nMore."""\ndef main() -> int:\n    return 0\n')
        (tmp_path / "tables.py").write_text('"""A helper."""\ndef write() -> None: ...\n')
        (tmp_path / "README.md").write_text("not Python")
        assert verbs.benchmarks(tmp_path) == {"speed": "How fast."}

    def test_no_folder(self, tmp_path: Path) -> None:
        assert verbs.benchmarks(tmp_path / "absent") == {}

    def test_unknown_name(self) -> None:
        done = run_dev("bench", "no_such_benchmark")
        assert done.returncode == 2
        assert done.stderr == "unknown benchmark no_such_benchmark: `./dev bench --list` lists all benchmarks\n"

    def test_list_needs_no_environment(self) -> None:
        done = run_dev("bench", "--list")
        assert done.returncode == 0
        assert done.stdout.splitlines() == [
            f"{name:24} {summary}" for name, summary in verbs.benchmarks(ROOT / "benchmarks").items()
        ]


class TestCommandLine:
    @pytest.mark.parametrize(("arguments", "code"), [(["--help"], 0), ([], 2)])
    def test_help_names_every_verb(self, arguments: list[str], code: int) -> None:
        done = run_dev(*arguments)
        assert done.returncode == code
        assert all(f"./dev {verb} " in done.stdout for verb in verbs.VERBS)

    def test_unknown_verb(self) -> None:
        done = run_dev("tset")
        assert done.returncode == 2
        assert done.stderr == f"unknown verb tset: use one of {', '.join(verbs.VERBS)}\n"

    @pytest.mark.parametrize("verb", ["setup", "check", "clean"])
    def test_unwanted_arguments_are_refused(self, verb: str) -> None:
        done = run_dev(verb, "--fast", "a b")
        assert done.returncode == 2
        assert done.stderr == f"./dev {verb} takes no arguments, got: --fast 'a b'\n"

    def test_works_from_any_folder(self, tmp_path: Path) -> None:
        assert run_dev("bench", "--list", cwd=tmp_path).returncode == 0

    def test_needs_the_standard_library_only(self) -> None:
        command = [sys.executable, "-I", "-S", str(ROOT / "dev"), "--help"]
        assert subprocess.run(command, capture_output=True, check=False).returncode == 0


class TestProcesses:
    def test_an_activated_environment_does_not_rebuild_itself(self) -> None:
        assert sys.prefix != sys.base_prefix
        assert not Path(machine.INTERPRETER).is_relative_to(sys.prefix)

    def test_environment_of_work(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("PYTHONPATH", "PYTHONHOME", "PIP_TARGET"):
            monkeypatch.setenv(name, "/elsewhere")
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
        environ = verbs.work_environ(environments.FULL)
        assert "PYTHONDONTWRITEBYTECODE" not in environ
        assert "/elsewhere" not in environ.values()
        assert environ["OMP_NUM_THREADS"] == "1"
        assert environ["PATH"].split(os.pathsep)[0] == str(ROOT / ".venv" / "bin")

    def test_installed_packages_have_bytecode(self) -> None:
        """Otherwise every process that imports torch would compile it, and take three times as long to start."""
        import torch

        assert Path(importlib.util.cache_from_source(torch.__file__)).exists()

    def test_a_second_setup_waits_for_the_first(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(installation, "ROOT", tmp_path)
        operations: list[int] = []

        def flock(_: object, operation: int) -> None:
            operations.append(operation)
            if operation & fcntl.LOCK_NB:
                raise BlockingIOError

        monkeypatch.setattr(fcntl, "flock", flock)
        with installation.setup_lock():
            assert operations == [fcntl.LOCK_EX | fcntl.LOCK_NB, fcntl.LOCK_EX]
        assert "another ./dev" in capsys.readouterr().err

    def test_the_lock_is_held_and_released(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(installation, "ROOT", tmp_path)
        with installation.setup_lock(), (tmp_path / ".venv.lock").open("w") as other, pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with (tmp_path / ".venv.lock").open("w") as other:
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def test_pip_is_used_if_uv_fails(self, monkeypatch: pytest.MonkeyPatch) -> None:
        programs: list[str] = []

        def fake_run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
            programs.append(Path(command[0]).name)
            if len(programs) == 1:
                raise FileNotFoundError
            return subprocess.CompletedProcess(command, returncode=0)

        monkeypatch.setattr(subprocess, "run", fake_run)
        assert installation.install(environments.FULL, ["numpy"])
        assert programs == ["uv", "python"]

    def test_clean_keeps_runs(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        for module in (installation, verbs):
            monkeypatch.setattr(module, "ROOT", tmp_path)
        for folder in (".venv/bin", ".venv-core", ".mypy_cache", "view/penstock/__pycache__", "runs/demo/1"):
            (tmp_path / folder).mkdir(parents=True)
        assert main(["clean"]) == 0
        remaining = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_dir())
        assert remaining == ["runs", "runs/demo", "runs/demo/1", "view", "view/penstock"]


def run_of_two_workers(folder: Path, tests: str) -> str:
    """Return the output of pytest with two workers for the given tests."""
    (folder / "test_these.py").write_text(tests)
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", *verbs.TWO_WORKERS, "."]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False).stdout


def test_tests_of_a_group_share_a_worker(tmp_path: Path) -> None:
    """They share expensive fixtures; some versions of xdist and pytest silently ignore the groups."""
    marked = (
        "import pytest\n@pytest.mark.xdist_group('one')\n@pytest.mark.parametrize('n', range(3))\ndef test(n): pass\n"
    )
    output = run_of_two_workers(tmp_path, marked)
    assert "test_these.py::test[2]@one" in output, output


CRASHING = """
import os, pytest

@pytest.mark.parametrize("n", range(60))
def test(n):
    if n == 17:
        os.kill(os.getpid(), 9)
"""


def test_a_worker_that_crashes_ends_the_run(tmp_path: Path) -> None:
    output = run_of_two_workers(tmp_path, CRASHING)
    assert "crashed while running 'test_these.py::test[17]'" in output, output
