"""Builds the fake CUDA runtime for the installed torch, once per version, and gives the environment that loads it."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch

from tests.support.not_run import missing

HERE = Path(__file__).parent
SOURCES = ("runtime.cpp", "nccl.cpp", "blas.cpp")
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "penstock-tests" / "fakecuda"
NEEDS = ("g++", "nm")

_PROVIDED = re.compile(r"(__cuda|cuda|cublas|cublasLt|nccl)[A-Z]\w*")
_DRIVER = re.compile(r"cu[A-Z]\w*")
_KERNEL = re.compile(r"cublas(?:Lt)?\w*(?:gemm|Gemm|Matmul|[Dd]ot|nrm2|Nrm2)(?:$|_|Ex|Batched|Strided)\w*")

SILENT = frozenset((HERE / "silent.txt").read_text().split())
"""Functions for which doing nothing and reporting success is right."""


def is_cuda_build() -> bool:
    """Whether the installed torch is built for CUDA."""
    return torch.version.cuda is not None


def library() -> Path:
    """The folder of the built runtime; the test is not run where it cannot be built, and says so."""
    if not is_cuda_build():
        missing("fakecuda", "torch is not its CUDA build, which the fake CUDA runtime is loaded under")
    lacking = [tool for tool in NEEDS if shutil.which(tool) is None]
    if lacking:
        missing("fakecuda", f"no {' and no '.join(lacking)}: the fake CUDA runtime cannot be built")
    folder = CACHE / _key()
    if not folder.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
            built = Path(scratch) / "built"
            _build(built)
            try:
                built.rename(folder)
            except OSError:  # another process was faster
                if not folder.exists():
                    raise
    return folder


def environment(
    *, devices: int, device_bytes: int, log: Path | None = None, capabilities: str = ""
) -> Mapping[str, str]:
    """Variables under which torch finds ``devices`` of ``device_bytes`` each; ``log`` is NCCL's folder.

    ``capabilities`` are those of the devices, tenfold and separated by commas.
    """
    folder = library()
    found = {
        "LD_PRELOAD": str(folder / "libfakecuda.so"),
        "LD_LIBRARY_PATH": str(folder),
        "FAKE_CUDA_DEVICES": str(devices),
        "TORCH_CUDNN_SDPA_DEPRIORITIZED": "1",  # there is no fake cuDNN
        "FAKE_CUDA_BYTES": str(device_bytes),
        "FAKE_CUDA_CAPABILITIES": capabilities,
    }
    return found if log is None else {**found, "FAKE_CUDA_LOG": str(log)}


def _key() -> str:
    parts = [torch.__version__.encode(), *(path.read_bytes() for path in sorted(HERE.iterdir()) if path.is_file())]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:20]


def _build(folder: Path) -> None:
    folder.mkdir()
    includes = _include_folders()
    objects = [_compile(folder, HERE / source, includes) for source in SOURCES]
    undefined = set(_undefined_symbols())
    known = set(_defined_symbols(objects))
    stubs = folder / "stubs.cpp"
    stubs.write_text(stub_source(name for name in undefined if _PROVIDED.fullmatch(name) and name not in known))
    objects.append(_compile(folder, stubs, includes))
    _run("g++", "-shared", "-o", folder / "libfakecuda.so", *objects)
    driver = _compile(folder, HERE / "driver.cpp", includes)
    known = set(_defined_symbols([driver]))
    rest = folder / "driver_stubs.cpp"
    rest.write_text(driver_source(name for name in undefined if _DRIVER.fullmatch(name) and name not in known))
    objects = [driver, _compile(folder, rest, includes)]
    _run("g++", "-shared", "-Wl,-soname,libcuda.so.1", "-o", folder / "libcuda.so.1", *objects)


def stub_source(names: Iterable[str]) -> str:
    """Functions for the rest of what torch links: silent ones, kernels that count, and those that abort by name."""
    silent = ", ".join(f'"{name}"' for name in sorted(SILENT))
    lines = [
        f'#include "{HERE}/fakecuda.h"',
        "#include <string.h>",
        f"static const char* const silent[] = {{{silent}}};",
        "bool fakecuda_is_silent(const char* name) {",
        "  for (auto* known : silent) if (!strcmp(known, name)) return true;",
        "  return false;",
        "}",
    ]
    for name in sorted(names):
        if name in SILENT:
            body = "return 0;"
        elif _KERNEL.fullmatch(name):
            body = "fakecuda_count_launch(); return 0;"
        else:
            body = f'fakecuda_refuse("{name}");'
        lines.append(f"FAKECUDA_API int {name}(...) {{ {body} }}")
    return "\n".join(lines) + "\n"


def driver_source(names: Iterable[str]) -> str:
    """The rest of ``libcuda.so.1``, so that what torch links is there; all that is not silent aborts by name."""
    lines = ["#include <cstdio>", "#include <cstdlib>"]
    for name in sorted(names):
        say = f'fprintf(stderr, "fakecuda: {name} of the driver was called\\n"); abort();'
        body = "return 0;" if name in SILENT else say
        lines.append(f'extern "C" __attribute__((visibility("default"))) int {name}(...) {{ {body} }}')
    return "\n".join(lines) + "\n"


def _torch_libraries() -> list[Path]:
    return sorted((Path(torch.__file__).parent / "lib").glob("*.so"))


def _undefined_symbols() -> Iterator[str]:
    for path in _torch_libraries():
        for line in _run("nm", "--dynamic", "--undefined-only", path).splitlines():
            yield line.split()[-1].partition("@")[0]


def _defined_symbols(objects: Iterable[Path]) -> Iterator[str]:
    for path in objects:
        for line in _run("nm", "--defined-only", path).splitlines():
            yield line.split()[-1]


def _include_folders() -> list[Path]:
    """Where the wheels that torch depends on have the headers of CUDA, cuBLAS and NCCL."""
    packages = Path(torch.__file__).parents[1]
    folders = []
    for header in ("cuda_runtime_api.h", "cublas_v2.h", "nccl.h", "crt/host_defines.h"):
        places = sorted(packages.glob(f"nvidia/*/include/{header}"))
        places = places or sorted(packages.glob(f"triton/backends/nvidia/include/{header}"))
        if not places:
            missing("fakecuda", f"{header} is not installed: the fake CUDA runtime cannot be built")
        folders.append(Path(str(places[-1]).removesuffix(f"/{header}")))
    return list(dict.fromkeys(folders))


def _compile(folder: Path, source: Path, includes: Iterable[Path]) -> Path:
    target = folder / f"{source.stem}.o"
    flags = ["-std=c++17", "-O1", "-fPIC", "-fvisibility=hidden", "-Wall", "-Werror"]
    _run("g++", *flags, *(f"-isystem{path}" for path in includes), "-c", source, "-o", target)
    return target


def _run(*command: str | Path) -> str:
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))} failed:\n{done.stderr}")
    return done.stdout
