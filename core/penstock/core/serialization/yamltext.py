"""YAML text, read by version 1.2 rules (``1e-3`` is a number, ``no`` and a date are texts) and written for people.

kubectl reads by the rules of 1.1. What would be another number there is refused, and texts are written so that both
read the same. The only module that knows YAML; everything else sees plain dictionaries.
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
        raise UserError(what=f"is not YAML: {error.problem}", where=place, remedy="mend the line") from None
    except YAMLError as error:
        raise UserError(what=f"is not YAML: {error}", where=where, remedy="mend the file") from None
    except ValueError:  # Python reads no number of more digits, and says so in words of its own
        what = "holds a number of thousands of digits, or no number"
        raise UserError(what=what, where=where, remedy="write numbers as real models and devices have them") from None


def _require_modest(data: Any, where: str) -> None:
    """Raise `UserError` if ``data``, aliases written out, holds too many values."""
    waiting, seen = [data], 0
    while waiting:
        value = waiting.pop()
        seen += 1
        if seen > MOST_VALUES:
            raise UserError(what=f"holds more than {MOST_VALUES:,} values", where=where, remedy="use fewer aliases")
        if isinstance(value, dict):
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value


def _yaml() -> YAML:
    found = YAML(typ="safe", pure=True)
    found.Resolver, found.Constructor, found.Representer = _Resolver, _Constructor, _Representer
    return found


_TEXT = "tag:yaml.org,2002:str"
_NOT_IN_CORE = {"tag:yaml.org,2002:timestamp", "tag:yaml.org,2002:value"}
_OCTAL_TO_SOME = re.compile(r"[-+]?0[0-9_]+")


class _Resolver(VersionedResolver):
    """The core schema of YAML 1.2, which knows no dates and no ``=``."""

    def resolve(self, kind: Any, value: Any, implicit: Any) -> Any:
        """The tag of a scalar."""
        found = super().resolve(kind, value, implicit)
        return Tag(suffix=_TEXT) if str(found) in _NOT_IN_CORE else found


class _Constructor(SafeConstructor):
    """Refuses numbers that YAML 1.1 reads as others."""

    def construct_whole(self, node: ScalarNode) -> Any:
        """``017`` is 17 by version 1.2 and 15 by version 1.1."""
        if _OCTAL_TO_SOME.fullmatch(node.value):
            told = f"{node.value} begins with 0, which is octal to some: write it without, as 0o..., or in quotes"
            raise ConstructorError(None, None, told, node.start_mark)
        return self.construct_yaml_int(node)


_Constructor.add_constructor("tag:yaml.org,2002:int", _Constructor.construct_whole)


class _Representer(SafeRepresenter):
    """Quotes texts that YAML 1.1 and 1.2 read differently, so that they come back unchanged from both."""

    def represent_text(self, text: str) -> Any:
        """A plain scalar where that is safe."""
        style = None if text.isprintable() and not _means_something(text) else '"'
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Representer.add_representer(str, _Representer.represent_text)


def _means_something(text: str) -> bool:
    """Whether it is no text without quotes, by either version; Go takes ``0X1F`` for a number, too."""
    return any(pattern.match(form) for *_, pattern, _ in implicit_resolvers for form in (text, text.lower()))


def dump(data: Any) -> str:
    """YAML text of plain data, block style, in the order given; `load` reads it back unchanged."""
    writer = _yaml()
    writer.default_flow_style = False
    writer.sort_base_mapping_type_on_output = False  # type: ignore[assignment]  # the stub says None
    text = io.StringIO()
    writer.dump(data, text)
    return text.getvalue()
