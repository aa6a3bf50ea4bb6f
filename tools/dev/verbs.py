"""What `./dev` does, verb by verb. Most become another program in `.venv`."""

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
"""Workers of pytest. Tests of a group share one. A crashed worker ends the run, or xdist would wait forever."""
CACHES = (".hypothesis", ".import_linter_cache", ".mypy_cache", ".pytest_cache", ".ruff_cache")
CHECKS: dict[str, tuple[str, ...]] = {
    "lint": ("ruff", "check", "--quiet"),
    "format": ("ruff", "format", "--check", "--quiet"),
    "types": ("mypy", "--no-error-summary"),
    "imports": ("lint-imports",),
}


def work_environ(environment: Environment) -> dict[str, str]:
    """The process environment for work in an environment: its programs first, one thread per process.

    Compiled modules are kept, also where the user has none written: ranks, and pods of a cluster on this machine, load
    the same ones again and again.
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
    """Turn into the command, so that signals and the exit code are its own."""
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
    """The first free number of runs/demo, as every demo is a run of its own."""
    taken = [int(name) for name in existing if name.isdecimal()]
    return f"runs/demo/{max(taken, default=0) + 1}"


def demo(arguments: Sequence[str]) -> int:
    ensure(FULL)
    if "--cluster" in arguments:
        become(["python", "-m", "deploy.demonstration", *(each for each in arguments if each != "--cluster")])
    demos = ROOT / "runs" / "demo"
    folder = next_run_folder([path.name for path in demos.iterdir()] if demos.is_dir() else [])
    become(["penstock", "demo", "deploy/examples/stdlib-llama.yaml", "--folder", folder, *arguments])


def test(arguments: Sequence[str]) -> int:
    """Those of the smaller environments first, then everything else with all members."""
    ensure(FULL)
    pytest = ["python", "-m", "pytest"]
    if not all(argument.startswith("--") for argument in arguments):
        become([*pytest, *arguments])
    pytest += arguments
    for environment in SMALL:
        ensure(environment)
        say(f"{', '.join(environment.tests)}, with {', '.join(environment.members)} alone")
        code = run([*pytest, *TWO_WORKERS, *environment.tests], environment)
        if code != 0:
            return code
    say("everything else")
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
    """The benchmark modules of a folder, those with a `main`, and the first line of what each says of itself."""
    found = {}
    for path in sorted(folder.glob("*.py")):
        module = ast.parse(path.read_text())
        if any(isinstance(node, ast.FunctionDef) and node.name == "main" for node in module.body):
            found[path.stem] = (ast.get_docstring(module) or "").partition("\n")[0]
    return found


def bench(arguments: Sequence[str]) -> int:
    known = benchmarks(ROOT / "benchmarks")
    if "--list" in arguments:
        for name, summary in known.items():
            print(f"{name:24} {summary}")
        return 0
    unknown = [name for name in arguments if name not in known]
    if unknown:
        raise SetupError(f"no benchmark {', '.join(unknown)}: `./dev bench --list` shows those there are.")
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
    here = [each if each.startswith("-") else str(Path(each).absolute()) for each in arguments]
    become(["python", "-m", "tools.dev.wheels", *here])


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
        raise SetupError(f"./dev {verb} takes no arguments, not: {shlex.join(arguments)}")


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
