"""Verbs of `./dev`. Most execute another program of `.venv`."""

from __future__ import annotations

import ast
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from tools.dev.console import SetupError, say
from tools.dev.environments import FULL, ROOT, SMALL, Environment
from tools.dev.installation import clean_environ, ensure, setup_lock

TWO_WORKERS = ("-n", "2", "--dist", "loadgroup", "--max-worker-restart", "0")
"""Options of pytest: two workers, and tests of a group share one. A crashed worker ends the run; otherwise xdist would
wait forever.
"""
CACHES = (".hypothesis", ".import_linter_cache", ".mypy_cache", ".pytest_cache", ".ruff_cache")
CHECKS: dict[str, tuple[str, ...]] = {
    "lint": ("ruff", "check", "--quiet"),
    "format": ("ruff", "format", "--check", "--quiet"),
    "types": ("mypy", "--no-error-summary"),
    "imports": ("lint-imports",),
}


def work_environ(environment: Environment) -> dict[str, str]:
    """Return the process environment of an environment's programs: they are first on PATH, with one thread per process.

    Bytecode is always cached, even if the user disabled it: each rank, and each pod of a cluster on this machine, loads
    the same modules.
    """
    environ = clean_environ()
    environ.pop("PYTHONDONTWRITEBYTECODE", None)
    environ["VIRTUAL_ENV"] = str(environment.path)
    environ["PATH"] = f"{environment.path / 'bin'}{os.pathsep}{environ.get('PATH', os.defpath)}"
    environ.setdefault("OMP_NUM_THREADS", "1")
    return environ


def run(command: Sequence[str], environment: Environment = FULL) -> int:
    process = [str(environment.path / "bin" / command[0]), *command[1:]]
    return subprocess.run(process, cwd=ROOT, env=work_environ(environment), check=False).returncode


def become(command: Sequence[str]) -> NoReturn:
    """Replace this process by the command, which then receives the signals and determines the exit code."""
    program = str(FULL.path / "bin" / command[0])
    sys.stdout.flush()
    os.chdir(ROOT)
    os.execve(program, [program, *command[1:]], work_environ(FULL))


def setup(arguments: Sequence[str]) -> int:
    refuse_arguments("setup", arguments)
    ensure(FULL)
    say(f"ready: {FULL.folder}/bin/penstock")
    return 0


def next_run_folder(existing: Sequence[str]) -> str:
    """Return the folder in runs/demo with the next number, since every demo is a separate run."""
    taken = [int(name) for name in existing if name.isdecimal()]
    return f"runs/demo/{max(taken, default=0) + 1}"


def demo(arguments: Sequence[str]) -> int:
    ensure(FULL)
    if "--cluster" in arguments:
        become(
            ["python", "-m", "deploy.demonstration", *(argument for argument in arguments if argument != "--cluster")]
        )
    demos = ROOT / "runs" / "demo"
    folder = next_run_folder([path.name for path in demos.iterdir()] if demos.is_dir() else [])
    become(["penstock", "demo", "deploy/examples/stdlib-llama.yaml", "--folder", folder, *arguments])


def test(arguments: Sequence[str]) -> int:
    """Run the tests of the smaller environments first, then all other tests with all members."""
    ensure(FULL)
    pytest = ["python", "-m", "pytest"]
    if not all(argument.startswith("--") for argument in arguments):
        become([*pytest, *arguments])
    pytest += arguments
    for environment in SMALL:
        ensure(environment)
        say(f"{', '.join(environment.tests)}, with {', '.join(environment.members)} only")
        code = run([*pytest, *TWO_WORKERS, *environment.tests], environment)
        if code != 0:
            return code
    say("all other tests")
    become([*pytest, *TWO_WORKERS, *(f"--ignore={folder}" for small in SMALL for folder in small.tests)])


def check(arguments: Sequence[str]) -> int:
    refuse_arguments("check", arguments)
    ensure(FULL)
    failed = []
    for name, command in CHECKS.items():
        say(f"{name}: {shlex.join(command)}")
        if run(command) != 0:
            failed.append(name)
    say(f"failed: {', '.join(failed)}" if failed else "all clean")
    return 1 if failed else 0


def cluster(arguments: Sequence[str]) -> int:
    ensure(FULL)
    become(["python", "-m", "deploy.cluster", *(arguments or ["--help"])])


def benchmarks(folder: Path) -> dict[str, str]:
    """Return the modules of a folder that have a `main`, with the first line of their docstring."""
    summaries = {}
    for path in sorted(folder.glob("*.py")):
        module = ast.parse(path.read_text())
        if any(isinstance(node, ast.FunctionDef) and node.name == "main" for node in module.body):
            summaries[path.stem] = (ast.get_docstring(module) or "").partition("\n")[0]
    return summaries


def bench(arguments: Sequence[str]) -> int:
    known = benchmarks(ROOT / "benchmarks")
    if "--list" in arguments:
        for name, summary in known.items():
            print(f"{name:24} {summary}")
        return 0
    unknown = [name for name in arguments if name not in known]
    if unknown:
        raise SetupError(f"unknown benchmark {', '.join(unknown)}: `./dev bench --list` lists all benchmarks")
    ensure(FULL)
    failed = []
    for name in arguments or known:
        say(f"benchmark {name}")
        program = f"import sys, benchmarks.{name} as benchmark; sys.exit(benchmark.main())"
        if run(["python", "-c", program]) != 0:
            failed.append(name)
    if failed:
        say(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


def wheels(arguments: Sequence[str]) -> int:
    ensure(FULL)
    absolute = [argument if argument.startswith("-") else str(Path(argument).absolute()) for argument in arguments]
    become(["python", "-m", "tools.dev.wheels", *absolute])


def release(arguments: Sequence[str]) -> int:
    ensure(FULL)
    become(["python", "-m", "tools.dev.release", *arguments])


def gpu(arguments: Sequence[str]) -> int:
    ensure(FULL)
    become(["python", "-m", "benchmarks.gpu", *arguments])


def soak(arguments: Sequence[str]) -> int:
    ensure(FULL)
    become(["python", "-m", "benchmarks.soak", *arguments])


def clean(arguments: Sequence[str]) -> int:
    refuse_arguments("clean", arguments)
    with setup_lock():
        for name in (FULL.folder, *(small.folder for small in SMALL), *CACHES):
            shutil.rmtree(ROOT / name, ignore_errors=True)
        for path in ROOT.rglob("__pycache__"):
            shutil.rmtree(path, ignore_errors=True)
    return 0


def refuse_arguments(verb: str, arguments: Sequence[str]) -> None:
    if arguments:
        raise SetupError(f"./dev {verb} takes no arguments, got: {shlex.join(arguments)}")


VERBS: dict[str, Callable[[Sequence[str]], int]] = {
    "setup": setup,
    "demo": demo,
    "test": test,
    "check": check,
    "cluster": cluster,
    "bench": bench,
    "wheels": wheels,
    "release": release,
    "gpu": gpu,
    "soak": soak,
    "clean": clean,
}
