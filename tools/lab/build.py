"""Build the programs of the lab from Go modules. `go/` has a module for each part, which pins versions and checksums.

The modules are one workspace, in which a shared dependency has one version and is compiled once. Kubernetes' libraries
are five sixths of Kueue.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tools.lab import cache
from tools.lab.console import LabError, run, say
from tools.lab.images import DOMAIN, PAUSE, architecture, layer_of_files, write_image
from tools.lab.toolchain import go

MODULES = Path(__file__).parent / "go"
NONROOT = "65532:65532"
"""User and group of images, as of distroless ones."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """Part of the lab: a module of `go/`, the programs built from it, and its image.

    ``programs`` maps each program to its package. If ``image`` is not empty, it contains one program, at the path
    ``entrypoint`` that the chart expects. ``copies`` maps the name of a copied folder to its path in the main module.
    ``links`` are further names of the first program.
    """

    name: str
    programs: Mapping[str, str]
    minutes: float
    module: str
    image: str = ""
    entrypoint: str = ""
    copies: Mapping[str, str] = field(default_factory=dict)
    links: tuple[str, ...] = field(default=())

    @property
    def folder(self) -> Path:
        return MODULES / self.name

    @property
    def version(self) -> str:
        """Version of the main module, as `go.mod` pins it."""
        return pinned((self.folder / "go.mod").read_text(), self.module)

    @property
    def key(self) -> str:
        """Cache key: it changes with the architecture, the outputs and every file of the modules."""
        files = sorted(path for path in MODULES.rglob("*") if path.is_file())
        paths = [str(path.relative_to(MODULES)) for path in files]
        outputs = repr((self.programs, self.image, self.entrypoint, self.copies, self.links))
        return cache.key_of(architecture(), outputs, *paths, *(path.read_bytes() for path in files))


COMPONENTS = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-proxy", "kube-scheduler", "kubectl", "kubelet")
KUBERNETES = Part(
    name="kubernetes",
    programs={"kubernetes": ".", "pause": "./pause"},
    minutes=4,
    module="k8s.io/kubernetes",
    image=PAUSE,
    entrypoint="/pause",
    links=COMPONENTS,
)
HELM = Part(name="helm", programs={"helm": "helm.sh/helm/v3/cmd/helm"}, minutes=1, module="helm.sh/helm/v3")
JOBSET = Part(
    name="jobset",
    programs={"manager": "sigs.k8s.io/jobset"},
    minutes=1,
    module="sigs.k8s.io/jobset",
    image=f"{DOMAIN}/jobset",
    entrypoint="/manager",
    copies={"chart": "charts/jobset"},
)
KUEUE = Part(
    name="kueue",
    programs={"manager": "sigs.k8s.io/kueue/cmd/kueue"},
    minutes=2,
    module="sigs.k8s.io/kueue",
    image=f"{DOMAIN}/kueue",
    entrypoint="/manager",
    copies={"chart": "charts/kueue"},
)
KWOK = Part(
    name="kwok",
    programs={"kwok": "sigs.k8s.io/kwok/cmd/kwok"},
    minutes=1,
    module="sigs.k8s.io/kwok",
    copies={"stages": "kustomize/stage"},
)
PARTS = (KUBERNETES, HELM, JOBSET, KUEUE, KWOK)
NO_DEBUGGING = "-gcflags=all=-dwarf=false"
"""The linker drops debugging information (`-s -w`), so the compiler does not create it, which saves 5 % of its time."""


def pinned(go_mod: str, module: str) -> str:
    """Return the version of a module that a `go.mod` requires; raises `LabError` if it does not require the module."""
    match = re.search(rf"^(?:require )?\s*{re.escape(module)} (v\S+)", go_mod, re.MULTILINE)
    if match is None:
        raise LabError(f"go.mod does not require {module}: add it by `go get {module}`")
    return match[1]


def version_flags(version: str) -> str:
    """Return linker flags that set the version of Kubernetes' programs, which other programs compare with their own."""
    major, minor = version.removeprefix("v").split(".")[:2]
    values = {"gitVersion": version, "gitMajor": major, "gitMinor": minor, "gitTreeState": "clean"}
    packages = ("k8s.io/component-base/version", "k8s.io/client-go/pkg/version")
    settings = [f"-X {package}.{name}={value}" for package in packages for name, value in values.items()]
    return " ".join(["-s -w", *settings])


def go_environ() -> dict[str, str]:
    """Return Go's environment: static programs, and Go's caches below the lab's cache."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("GOFLAGS", "GOWORK"))}
    caches = {"GOCACHE": str(cache.folder() / "gocache"), "GOMODCACHE": str(cache.folder() / "gomodcache")}
    return {
        **environ,
        **caches,
        "CGO_ENABLED": "0",
        "GOFLAGS": "-modcacherw -buildvcs=false -trimpath",
        "GOWORK": str(MODULES / "go.work"),
    }


def built(part: Part) -> Path:
    """Return the folder of a part with its programs, chart and image. The part is built unless it is in the cache."""
    return cache.get_or_build(part.name, part.key, lambda target: _build(part, target))


def is_built(part: Part) -> bool:
    return (cache.folder() / f"{part.name}-{part.key}").exists()


def _build(part: Part, target: Path) -> None:
    say(f"building {part.name} {part.version}, about {part.minutes:g} min on two cores")
    compiler, environ = go(), go_environ()
    flags = version_flags(part.version) if part is KUBERNETES else "-s -w"
    for program, package in part.programs.items():
        command = (compiler, "build", NO_DEBUGGING, "-ldflags", flags, "-o", target / program, package)
        run(*command, cwd=part.folder, environ=environ)
    for link in part.links:
        (target / link).symlink_to(next(iter(part.programs)))
    for name, source in part.copies.items():
        module = run(compiler, "list", "-m", "-f", "{{.Dir}}", part.module, cwd=part.folder, environ=environ).strip()
        shutil.copytree(Path(module) / source, target / name)
    if part.image:
        _write_image(part, target)


def image_name(part: Part) -> str:
    """Return the name of a part's image with its tag."""
    return part.image if ":" in part.image else f"{part.image}:{part.version}"


def _write_image(part: Part, target: Path) -> None:
    layer = target / "layer.tar"
    layer_of_files(layer, {part.entrypoint: target / part.entrypoint.lstrip("/")})
    config = {"Entrypoint": [part.entrypoint], "User": NONROOT, "WorkingDir": "/"}
    write_image(target / "image.tar", image_name(part), layer, config)
    layer.unlink()


def remove_go_caches() -> None:
    """Remove Go's caches and its toolchain, several gigabytes that only a build needs."""
    for path in (cache.folder() / "gocache", cache.folder() / "gomodcache", *cache.folder().glob("go-*")):
        shutil.rmtree(path, ignore_errors=True)
