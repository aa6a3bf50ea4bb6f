"""YAML text, read by version 1.2 rules (``1e-3`` is a number, ``no`` and a date are strings) and written for people.

kubectl reads by the rules of 1.1. Numbers that differ there are rejected, and strings are written so that both read the
same. The only module that handles YAML; all others use plain dictionaries.
"""

from __future__ import annotations

import io
import re
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.constructor import ConstructorError, SafeConstructor
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import ScalarNode
from ruamel.yaml.representer import SafeRepresenter
from ruamel.yaml.resolver import VersionedResolver, implicit_resolvers
from ruamel.yaml.tag import Tag

from penstock.core.errors import UserError

MOST_VALUES = 200_000
"""A few lines of aliases of aliases would stand for more than any memory holds."""


def load(text: str, where: str = "") -> Any:
    """Plain data from YAML (and so from JSON); raises `UserError` naming ``where`` and the line."""
    try:
        data = _yaml().load(text)
        _require_modest(data, where)
        return data
    except RecursionError:
        raise UserError(what="is nested too deeply", where=where, remedy="write it flatter") from None
    except MarkedYAMLError as error:
        mark = error.problem_mark
        place = f"{where}, line {mark.line + 1}" if mark else where
        raise UserError(what=f"is not YAML: {error.problem}", where=place, remedy="fix the line") from None
    except YAMLError as error:
        raise UserError(what=f"is not YAML: {error}", where=where, remedy="fix the file") from None
    except ValueError:  # Python rejects numbers of more digits, with its own message
        what = "holds a number of thousands of digits, or no number"
        raise UserError(what=what, where=where, remedy="write numbers as real models and devices have them") from None


def _require_modest(data: Any, where: str) -> None:
    """Raise `UserError` if ``data``, with aliases expanded, holds too many values."""
    waiting, num_values = [data], 0
    while waiting:
        value = waiting.pop()
        num_values += 1
        if num_values > MOST_VALUES:
            raise UserError(what=f"holds more than {MOST_VALUES:,} values", where=where, remedy="use fewer aliases")
        if isinstance(value, dict):
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value


def _yaml() -> YAML:
    yaml = YAML(typ="safe", pure=True)
    yaml.Resolver, yaml.Constructor, yaml.Representer = _Resolver, _Constructor, _Representer
    return yaml


_TEXT = "tag:yaml.org,2002:str"
_NOT_IN_CORE = {"tag:yaml.org,2002:timestamp", "tag:yaml.org,2002:value"}
_OCTAL_TO_SOME = re.compile(r"[-+]?0[0-9_]+")


class _Resolver(VersionedResolver):
    """The core schema of YAML 1.2, which has no dates and no ``=``."""

    def resolve(self, kind: Any, value: Any, implicit: Any) -> Any:
        """The tag of a scalar."""
        tag = super().resolve(kind, value, implicit)
        return Tag(suffix=_TEXT) if str(tag) in _NOT_IN_CORE else tag


class _Constructor(SafeConstructor):
    """Rejects numbers that YAML 1.1 reads differently."""

    def construct_whole(self, node: ScalarNode) -> Any:
        """``017`` is 17 by version 1.2 and 15 by version 1.1."""
        if _OCTAL_TO_SOME.fullmatch(node.value):
            problem = f"{node.value} begins with 0, which is octal to some: write it without, as 0o..., or in quotes"
            raise ConstructorError(None, None, problem, node.start_mark)
        return self.construct_yaml_int(node)


_Constructor.add_constructor("tag:yaml.org,2002:int", _Constructor.construct_whole)


class _Representer(SafeRepresenter):
    """Quotes strings that YAML 1.1 and 1.2 read differently, so that both read them unchanged."""

    def represent_text(self, text: str) -> Any:
        """A plain scalar if that is safe."""
        style = None if text.isprintable() and not _is_ambiguous(text) else '"'
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Representer.add_representer(str, _Representer.represent_text)


def _is_ambiguous(text: str) -> bool:
    """Whether it is not a string without quotes, by either version; Go also takes ``0X1F`` for a number."""
    return any(pattern.match(form) for *_, pattern, _ in implicit_resolvers for form in (text, text.lower()))


def dump(data: Any) -> str:
    """YAML text of plain data, block style, in the order given; `load` reads it back unchanged."""
    writer = _yaml()
    writer.default_flow_style = False
    writer.sort_base_mapping_type_on_output = False  # type: ignore[assignment]  # the stub says None
    text = io.StringIO()
    writer.dump(data, text)
    return text.getvalue()
