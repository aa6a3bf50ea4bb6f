"""The documentation against the code: links, commands, diagrams and tables of fields, and quoted errors."""

from __future__ import annotations

import ast
import dataclasses
import enum
import re
import shlex
import typing
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import typer.core
import typer.main

from penstock.cli.main import app, main
from penstock.core.cluster import ClusterSpec, DeviceSpec, KernelSpec, LinkSpec, SoftwareSpec
from penstock.core.cluster_profile import ClusterProfile, ClusterProfileSpec
from penstock.core.cost_table import CostRow
from penstock.core.invariants import prove
from penstock.core.job import JobSpec, Metadata, PipelineJob
from penstock.core.layout import SlotKind
from penstock.core.lifecycle import TRANSITIONS, Phase
from penstock.core.manifest import camel, declarations, write_dataclass
from penstock.core.model import ModelSpec
from penstock.core.schedule import ScheduleSpec
from penstock.core.serialization import yamltext
from penstock.planner.lowering import lower
from penstock.planner.schedules.inputs import ScheduleInputs
from penstock.planner.schedules.registry import BUILT_IN
from penstock.view.report import report
from tests.support.repository import ROOT, components, packages, source_files
from tests.support.sample_report import sample_report
from tools.dev.verbs import VERBS

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
ARCHITECTURE = ROOT / "docs" / "architecture.md"
GUIDES = ROOT / "docs" / "guides"
by_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())


# Links


def anchor(heading: str) -> str:
    """The anchor that GitHub gives a heading."""
    kept = re.sub(r"[^\w\- ]", "", heading.strip().lower())
    return kept.replace(" ", "-")


def anchors(page: Path) -> set[str]:
    return {anchor(heading) for heading in re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)}


def prose(text: str) -> str:
    """A page without its code blocks."""
    return re.sub(r"^( *)```.*?^\1```", "", text, flags=re.DOTALL | re.MULTILINE)


def broken_links(page: Path) -> Iterator[str]:
    """Relative links of a page that lead nowhere."""
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page.read_text())):
        if "://" in target:
            continue
        name, _, fragment = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        if not file.exists() or (fragment and fragment not in anchors(file)):
            yield target


@by_page
def test_every_link_leads_somewhere(page: Path) -> None:
    assert list(broken_links(page)) == []


def test_broken_links_are_found(tmp_path: Path) -> None:
    page = ROOT / "docs" / "nowhere.md"
    assert anchor("spec.data.tokenizer") == "specdatatokenizer"
    assert prose("a\n```\n[x](y)\n```\nb") == "a\n\nb"
    assert not page.exists()
    (tmp_path / "page.md").write_text("[gone](gone.md) [web](https://example.org) [no](#no)\n# Yes\n[yes](#yes)")
    assert list(broken_links(tmp_path / "page.md")) == ["gone.md", "#no"]


def test_every_decision_is_listed_by_its_title() -> None:
    decisions = sorted((ROOT / "docs" / "adr").glob("*.md"))
    titles = [path.read_text().splitlines()[0].removeprefix("# ").replace(".", "", 1) for path in decisions]
    lines = [f"- [{title}](adr/{path.name})" for title, path in zip(titles, decisions, strict=True)]
    listed = [line for line in ARCHITECTURE.read_text().splitlines() if line.startswith("- [00")]
    assert listed == lines


FOLDERS = sorted(path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith("."))
"""Folders of the repository, so that no component is left out of the checks of paths."""
PATHS = re.compile(rf"`((?:{'|'.join(FOLDERS)})/[\w./-]+\.(?:csv|json|md|py|sh|toml|tpl|yaml))(?::[\w.]+)?`")
MODULES = re.compile(r"`(penstock\.(?!dev\b)[\w.]*\w)\b")
ENTRY_POINTS = frozenset({"penstock.schedules"})
"""Groups of entry points, which look like modules."""


@by_page
def test_every_file_that_is_named_exists(page: Path) -> None:
    """`core/job.py` is short for the file below `penstock/`."""
    names = PATHS.findall(page.read_text())
    tails = {path.as_posix() for path in (file.relative_to(ROOT) for file in source_files())}
    missing = [
        name for name in names if not (ROOT / name).exists() and not any(tail.endswith(f"/{name}") for tail in tails)
    ]
    assert missing == []


def resolves(name: str) -> bool:
    """Whether the dotted name is a package, a module, or something at the top of a module."""
    parts = name.split(".")
    for length in range(len(parts), 1, -1):
        path, rest = ROOT.joinpath(parts[1], *parts[:length]), parts[length:]
        if path.is_dir() and not rest:
            return True
        source = path.with_suffix(".py") if path.with_suffix(".py").exists() else path / "__init__.py"
        if source.exists():
            return (
                not rest
                or re.search(rf"(?m)^(?:\s*(?:def|class|async def) )?{rest[0]}\b", source.read_text()) is not None
            )
    return False


@pytest.mark.parametrize("component", components(), ids=lambda root: root.name)
def test_every_module_that_a_docstring_names_exists(component: Path) -> None:
    files = sorted(component.rglob("*.py"))
    named = {(file, name) for file in files for name in MODULES.findall(file.read_text())}
    assert [(str(file), name) for file, name in named if name not in ENTRY_POINTS and not resolves(name)] == []


HISTORY = [ROOT / "CHANGELOG.md", ROOT / "docs" / "log.md", *(ROOT / "docs" / "adr").glob("*.md")]
"""Pages about the past, whose names may be gone."""


@pytest.mark.parametrize("page", [page for page in PAGES if page not in HISTORY], ids=lambda page: page.name)
def test_every_module_that_a_page_names_exists(page: Path) -> None:
    names = set(MODULES.findall(page.read_text())) - ENTRY_POINTS
    assert [name for name in sorted(names) if not resolves(name)] == []


WAY = ROOT / "docs" / "way-of-a-job.md"


def definitions(tree: ast.AST, prefix: str = "") -> Iterator[str]:
    """The names of functions and classes, methods behind their class."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield prefix + node.name
            yield from definitions(node, f"{prefix}{node.name}.")


NAMED = re.compile(r"`([\w/]+\.py):([\w.]+)`")


def test_every_step_of_the_way_of_a_job_names_functions() -> None:
    steps = re.findall(r"^\d+\. .*?(?=^\d+\. |^## )", WAY.read_text(), re.MULTILINE | re.DOTALL)
    assert len(steps) == 10
    assert [step for step in steps if not NAMED.search(step)] == []


@pytest.mark.parametrize("page", [page for page in PAGES if page not in HISTORY], ids=lambda page: page.name)
def test_every_function_that_a_page_names_exists(page: Path) -> None:
    for path, name in sorted(set(NAMED.findall(page.read_text()))):
        assert name in set(definitions(ast.parse((ROOT / path).read_text()))), (path, name)


def test_the_readme_s_tree_is_there() -> None:
    (tree,) = re.findall(r"## The tree\n\n```\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    names = {line.split()[0] for line in tree.splitlines()}
    assert [name for name in sorted(names) if not (ROOT / name).exists()] == []
    assert {f"{path.relative_to(ROOT)}/" for path in packages().values()} <= names


# Commands


def spoken(page: Path) -> Iterator[list[str]]:
    """Every `penstock` and `./dev` command line that a page shows, as words."""
    text = page.read_text()
    blocks = re.findall(r"^ *```(\w*)\n(.*?)^ *```$", text, re.DOTALL | re.MULTILINE)
    shown = [line.strip() for language, block in blocks if language in ("", "console") for line in block.splitlines()]
    lines = [line.removeprefix("$ ") for line in shown if line.startswith(("$ ", "./dev"))]
    lines += re.findall(r"`([^`\n]+)`", prose(text))
    for line in lines:
        if re.match(r"(penstock|\./dev)( |$)", line):
            yield shlex.split(line, comments=True)


def misspoken(words: list[str]) -> str:
    """What does not exist in a command line; nothing if all does."""
    program, *rest = words
    if program == "./dev":
        return "" if not rest or rest[0] in VERBS else f"verb {rest[0]}"
    command = typer.main.get_command(app)
    while isinstance(command, typer.core.TyperGroup) and rest:
        if rest[0].startswith("-"):
            rest = rest[1:]
        elif rest[0].isupper():
            return ""
        elif rest[0] not in command.commands:
            return f"command {rest[0]}"
        else:
            command, rest = command.commands[rest[0]], rest[1:]
    known = {option for parameter in command.params for option in parameter.opts} | {"--help"}
    unknown = [word for word in rest if word.startswith("-") and word not in known]
    return f"option {unknown[0]}" if unknown else ""


@by_page
def test_every_command_exists(page: Path) -> None:
    wrong = {shlex.join(words): found for words in spoken(page) if (found := misspoken(words))}
    assert wrong == {}


def test_commands_are_seen() -> None:
    assert ["./dev", "demo"] in list(spoken(ROOT / "README.md"))
    assert any(words[:3] == ["penstock", "schedule", "show"] for words in spoken(ROOT / "README.md"))


@pytest.mark.parametrize(
    "line", ["penstock plant", "penstock plan --clutser x", "./dev tset", "penstock schedule sow x"]
)
def test_wrong_commands_are_found(line: str) -> None:
    assert misspoken(line.split())


def test_every_command_is_explained() -> None:
    text = "".join((GUIDES / name).read_text() for name in ("running-a-job.md", "schedules.md", "service.md"))
    group = typer.main.get_command(app)
    assert isinstance(group, typer.core.TyperGroup)
    shown = [name for name, command in group.commands.items() if not command.hidden]
    assert [name for name in shown if f"penstock {name}" not in text] == []


def test_every_built_in_schedule_is_explained() -> None:
    text = (GUIDES / "schedules.md").read_text()
    assert [name for name in BUILT_IN if f"| `{name}` |" not in text] == []


def test_the_example_of_a_schedule_runs() -> None:
    (example,) = re.findall(r"^```python\n(.*?)^```", (GUIDES / "schedules.md").read_text(), re.DOTALL | re.MULTILINE)
    names: dict[str, Any] = {}
    exec(example, names)
    schedule = names["backwards_first"](ScheduleInputs(num_ranks=3, num_microbatches=2, num_slices=2))
    program = lower(schedule, lambda kind, stage, tokens: tokens, slices=(3, 2), receive_ahead=2, dp=False)
    assert prove(program).num_transfers == 2 * 2 * 2 * 2


def test_the_grid_that_is_shown_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """Every `schedule show` whose output a page prints."""
    for page in PAGES:
        for block in re.findall(
            r"^```console\n\$ penstock (schedule show .*?)^```", page.read_text(), re.DOTALL | re.MULTILINE
        ):
            command, _, shown = block.partition("\n")
            if "$" in shown:
                continue
            assert main(shlex.split(command)) == 0
            assert capsys.readouterr().out.strip() == shown.strip()


def test_every_section_of_a_report_is_explained() -> None:
    """In the report's own order, by the titles it prints."""
    explained = re.findall(r"^\d+\. \*\*(.*?)\*\*", (GUIDES / "reading-a-report.md").read_text(), re.MULTILINE)
    shown = re.findall(r"<h2[^>]*>(.*?)</h2>", report(sample_report()))
    assert explained == shown


# Diagrams and tables


def state_diagram(text: str) -> set[tuple[str, str]]:
    (diagram,) = re.findall(r"```mermaid\nstateDiagram-v2\n(.*?)```", text, re.DOTALL)
    return {(source, target) for source, target in re.findall(r"^\s*(\S+) --> (\S+)$", diagram, re.MULTILINE)}


def test_the_state_diagram_is_the_table() -> None:
    edges = {(phase.value, following.value) for phase, ends in TRANSITIONS.items() for following in ends}
    edges |= {("[*]", Phase.PENDING.value)} | {(phase.value, "[*]") for phase in Phase if phase.terminal}
    assert state_diagram(ARCHITECTURE.read_text()) == edges


def test_every_slot_is_explained() -> None:
    (table,) = re.findall(r"^\| slot \| holds .*?\n\n", ARCHITECTURE.read_text(), re.DOTALL | re.MULTILINE)
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == [kind.value for kind in SlotKind]


def field_tables(page: Path) -> dict[str, dict[str, tuple[str, str]]]:
    """Heading -> field -> default and meaning, of every table of fields."""
    found = {}
    for section in re.split(r"^#+ ", page.read_text(), flags=re.MULTILINE)[1:]:
        rows = re.findall(r"^\| `(\w+)` \| (.*?) \| (.*) \|$", section, re.MULTILINE)
        if "| field | default | meaning |" in section:
            found[section.partition("\n")[0]] = {name: (default, meaning) for name, default, meaning in rows}
    return found


def written_default(field: dataclasses.Field[Any]) -> str:
    """A field's default as the tables write it."""
    if field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
    elif field.default is dataclasses.MISSING:
        return "required"
    else:
        value = field.default
    if value is None:
        return "none"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _flow(write_dataclass(value))
    if "write" in field.metadata:
        value = field.metadata["write"](value)
    if isinstance(value, tuple):
        value = [list(item) if isinstance(item, tuple) else item for item in value]
        if any(isinstance(item, enum.Enum) for item in value):
            return f"`[{', '.join(value)}]`"
    return f"`{value}`" if value != "" else '`""`'


def _flow(value: Mapping[str, Any]) -> str:
    """A mapping in YAML's flow form."""
    return f"`{{{', '.join(f'{name}: {item}' for name, item in value.items())}}}`" if value else "all defaults"


EXPLAINED_ELSEWHERE = {ScheduleSpec}


def documented(cls: type[Any], heading: str) -> Iterator[tuple[str, type[Any]]]:
    """Headings below ``heading`` and the types they describe; the items of a list or mapping stand under its name."""
    yield heading, cls
    for name, hint in typing.get_type_hints(cls).items():
        for part in (hint, *typing.get_args(hint)):
            if isinstance(part, type) and dataclasses.is_dataclass(part) and part not in EXPLAINED_ELSEWHERE:
                yield from documented(part, f"{heading}.{camel(name)}")


def once(found: Iterable[tuple[str, type[Any]]]) -> list[tuple[str, type[Any]]]:
    """Each type at its first heading."""
    return [(heading, cls) for cls, heading in {cls: heading for heading, cls in reversed([*found])}.items()]


LEFT_OUT = {ModelSpec: {"vocab": "the tokenizer's"}}
"""Fields that a type requires and a manifest may leave out (`penstock.core.manifest_schema`), with their defaults."""

JOB_TYPES = once([*documented(Metadata, "metadata"), *documented(JobSpec, "spec")])
CLUSTER_TYPES = [
    ("Fields of the cluster", ClusterSpec),
    ("Fields of the device", DeviceSpec),
    ("Fields of the kernels", KernelSpec),
    ("Fields of the software", SoftwareSpec),
    ("Fields of a row of costs", CostRow),
    ("Fields of a link", LinkSpec),
]
TABLES = [
    *((GUIDES / "running-a-job.md", heading, cls) for heading, cls in JOB_TYPES),
    *((GUIDES / "described-hardware.md", heading, cls) for heading, cls in CLUSTER_TYPES),
    (GUIDES / "kubernetes.md", "Fields of a ClusterProfile", ClusterProfileSpec),
]


@pytest.mark.parametrize(("page", "heading", "cls"), TABLES, ids=[heading for _, heading, _ in TABLES])
def test_every_field_and_its_default_is_documented(page: Path, heading: str, cls: type[Any]) -> None:
    expected = {camel(field.name): written_default(field) for field in dataclasses.fields(cls)}
    expected |= LEFT_OUT.get(cls, {})
    assert {name: default for name, (default, _) in field_tables(page)[heading].items()} == expected


@pytest.mark.parametrize(("page", "heading", "cls"), TABLES, ids=[heading for _, heading, _ in TABLES])
def test_a_field_means_the_same_in_guides_and_schemas(page: Path, heading: str, cls: type[Any]) -> None:
    """A table may refer to another instead, and to other pages."""
    for name, (_, told) in field_tables(page)[heading].items():
        if not told.startswith("see ["):
            assert re.sub(r"; see \[.*?\]\(.*?\)", "", told) == declarations(cls)[name].meaning


def test_no_table_of_fields_is_left_over() -> None:
    for page in sorted({page for page, _, _ in TABLES}):
        assert set(field_tables(page)) == {heading for other, heading, _ in TABLES if other == page}


def yaml_blocks(page: Path) -> list[str]:
    return re.findall(r"^```yaml\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


@by_page
def test_every_manifest_can_be_read(page: Path) -> None:
    """Whole jobs and clusters; a block that is a part of one is only parsed."""
    for block in yaml_blocks(page):
        manifest = yamltext.load(block, page.name)
        if manifest.get("kind") == "ClusterProfile":
            ClusterProfile.from_manifest(manifest)
        elif "apiVersion" in manifest:
            PipelineJob.from_manifest(manifest)
        elif "device" in manifest:
            ClusterSpec.from_manifest(manifest)


# Errors

ERRORS = re.findall(r"^### (.*)$", (GUIDES / "troubleshooting.md").read_text(), re.MULTILINE)


def literal_parts(message: str) -> list[str]:
    """What a quoted message says apart from values."""
    return [part for part in message.split("…") if len(part.strip(" '(),;:.")) > 2]


@pytest.mark.parametrize("message", ERRORS)
def test_every_quoted_error_is_in_the_code(message: str) -> None:
    sources = "\n".join(
        path.read_text() for path in [*source_files(), *(ROOT / "tools" / "dev").rglob("*.py"), ROOT / "dev"]
    )
    joined = re.sub(r'"\s*\n\s*f?"', "", sources)
    assert [part for part in literal_parts(message) if part.strip() not in joined] == []
