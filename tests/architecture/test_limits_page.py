"""The guide's tables of limits are made from the one declaration of them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from penstock.core.manifest import declarations
from tests.support.manifest_strategies import manifest_types
from tests.support.repository import ROOT

PAGE = ROOT / "docs" / "guides" / "limits.md"
RENEW = "PENSTOCK_RENEW"
MARK = "<!-- what follows is made from the types of penstock.core: PENSTOCK_RENEW=1 ./dev test {} -->\n"
TYPES = {cls.__name__: cls for cls in manifest_types()}
BELOW = MARK.format("tests/architecture/test_limits_page.py")

PLACES = {
    "Metadata": "metadata",
    "JobSpec": "spec",
    "ModelSpec": "spec.model",
    "DataSpec": "spec.data",
    "TokenizerSpec": "spec.data.tokenizer",
    "TrainingSpec": "spec.training",
    "OptimizerSpec": "spec.training.optimizer",
    "ResourcesSpec": "spec.resources",
    "ParallelismSpec": "spec.parallelism",
    "CheckpointSpec": "spec.checkpoint",
    "RunPolicySpec": "spec.runPolicy",
    "KubernetesSpec": "spec.kubernetes",
    "ClusterProfileSpec": "spec of a ClusterProfile",
    "ClusterSpec": "described hardware",
    "OtherDevices": "`otherDevices`",
    "DeviceSpec": "device of described hardware",
    "LinkSpec": "link of described hardware",
    "Plan": "a plan",
    "ScheduleSpec": "schedule of a plan",
}


def number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def numbers(limit: Mapping[str, Any]) -> str:
    """The range of a number, or nothing."""
    most = limit.get("maximum", limit.get("exclusiveMaximum"))
    if most is None:
        return ""
    below = "below " if "exclusiveMaximum" in limit else ""
    if "exclusiveMinimum" in limit:
        return f"above {number(limit['exclusiveMinimum'])}, up to {below}{number(most)}"
    return f"{number(limit['minimum'])} to {below}{number(most)}"


def words(limit: Mapping[str, Any]) -> Iterator[str]:
    """What a limit says, in words."""
    if text := numbers(limit):
        yield text
    for word, unit in (("maxLength", "characters"), ("maxItems", "items"), ("maxProperties", "entries")):
        if word in limit:
            yield f"at most {number(limit[word])} {unit}"
    for items in (limit.get("items", {}), *limit.get("prefixItems", ())[:1]):
        if text := numbers(items):
            yield f"each {text}"
    if "additionalProperties" in limit:
        yield f"each {', '.join(words(limit['additionalProperties']))}"


def tables() -> Iterator[str]:
    for title, place in PLACES.items():
        told = {name: "; ".join(words(field.limit)) for name, field in declarations(TYPES[title]).items()}
        rows = [f"| `{field}` | {text} |\n" for field, text in told.items() if text]
        yield f"\n## {place[0].upper()}{place[1:]}\n\n| field of {place} | range |\n|---|---|\n{''.join(rows)}"


def test_the_page_is_made_from_the_declaration() -> None:
    """``PENSTOCK_RENEW=1`` writes it again."""
    head, _, _ = PAGE.read_text().partition(BELOW)
    text = head + BELOW + "".join(tables())
    if os.environ.get(RENEW):
        PAGE.write_text(text)
    assert PAGE.read_text() == text
