"""YAML text, read by version 1.2 rules (``1e-3`` is a number, ``no`` is a text) and written for people.

The only module that knows YAML; everything else sees plain dictionaries.
"""

from __future__ import annotations

import io
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.representer import SafeRepresenter

from penstock.core.errors import UserError

MOST_VALUES = 200_000
"""A few lines of aliases of aliases would stand for more than any memory holds."""


def load(text: str, where: str = "") -> Any:
    """Plain data from YAML (and so from JSON); raises `UserError` naming ``where`` and the line."""
    try:
        data = YAML(typ="safe", pure=True).load(text)
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


class _Representer(SafeRepresenter):
    """Quotes texts with line breaks that YAML 1.1 and 1.2 read differently, so that they come back unchanged."""

    def represent_text(self, text: str) -> Any:
        """A plain scalar where that is safe."""
        style = '"' if not text.isprintable() else None
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Representer.add_representer(str, _Representer.represent_text)


def dump(data: Any) -> str:
    """YAML text of plain data, block style, in the order given; `load` reads it back unchanged."""
    writer = YAML(typ="safe", pure=True)
    writer.Representer = _Representer
    writer.default_flow_style = False
    writer.sort_base_mapping_type_on_output = False  # type: ignore[assignment]  # the stub says None
    text = io.StringIO()
    writer.dump(data, text)
    return text.getvalue()
