"""JSON Schema of manifests, from the annotations that read them: for API documents, editors and clients.

It has what applies to single fields: names, types, choices, ranges, which are required, and defaults. Reading also
rejects everything that the schema rejects; constraints between fields are only checked by reading. A schema's title is
its type's name. See https://json-schema.org/draft/2020-12
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import types
import typing
from collections.abc import Mapping
from typing import Any

from penstock.core import cluster_profile, job
from penstock.core.cluster_profile import ClusterProfile
from penstock.core.job import API_VERSION, PipelineJob
from penstock.core.manifest import Declaration, declarations, write_value

JsonSchema = dict[str, Any]

_SCALARS = {int: "integer", float: "number", str: "string", bool: "boolean"}


def job_schema() -> JsonSchema:
    """The schema of a PipelineJob's manifest."""
    schema = _headed(PipelineJob, job.KIND)
    model = schema["properties"]["spec"]["properties"]["model"]
    model["required"].remove("vocab")  # the tokenizer may determine it
    return schema


def cluster_profile_schema() -> JsonSchema:
    """The schema of a ClusterProfile's manifest."""
    return _headed(ClusterProfile, cluster_profile.KIND)


def _headed(cls: type, kind: str) -> JsonSchema:
    schema = dataclass_schema(cls)
    head = {"apiVersion": {"const": API_VERSION}, "kind": {"const": kind}}
    schema["properties"] = {
        **head,
        **schema["properties"],
        "status": {"description": "Written by an operator; ignored in manifests."},
    }
    schema["required"] = [*head, *schema["required"]]
    return schema


def schema_of(annotation: Any) -> JsonSchema:
    """The schema of values that are read as ``annotation``."""
    if annotation is Any:
        return {}
    if dataclasses.is_dataclass(annotation):
        return dataclass_schema(typing.cast(type, annotation))
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (types.UnionType, typing.Union):
        return _union(arguments)
    if origin is typing.Literal:
        return {"enum": list(arguments)}
    if origin is tuple:
        return _tuple(arguments)
    if origin in (dict, Mapping):
        return {"type": "object", "additionalProperties": schema_of(arguments[1])}
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return {"type": "string", "enum": [member.value for member in annotation]}
    return {"type": _SCALARS[annotation]}


def dataclass_schema(cls: type) -> JsonSchema:
    """The schema of a dataclass's manifest form; a field's ``metadata["schema"]`` replaces its annotation's, and
    ``metadata["also"]`` has further accepted forms.
    """
    fields = declarations(cls)
    schema: JsonSchema = {
        "title": cls.__name__,
        "type": "object",
        "description": _sentences(cls),
        "properties": {name: _field(declaration) for name, declaration in fields.items()},
        "additionalProperties": False,
    }
    if required := [name for name, declaration in fields.items() if declaration.is_required]:
        schema["required"] = required
    return schema


def _field(declaration: Declaration) -> JsonSchema:
    metadata, default = declaration.declared.metadata, declaration.default
    schema = metadata.get("schema") or schema_of(declaration.annotation)
    if "also" in metadata:
        schema = {"anyOf": [*schema["anyOf"], *metadata["also"]]}
    described = _limited(schema, declaration.limit)
    if declaration.meaning:
        described["description"] = declaration.meaning
    if default is not dataclasses.MISSING and default is not None:
        described["default"] = metadata.get("write", write_value)(default)
    return described


def _limited(schema: Mapping[str, Any], limit: Mapping[str, Any]) -> JsonSchema:
    """``schema`` within ``limit``, which may also limit the items of lists and mappings."""
    limited = {**schema, **limit}
    for inner in ("items", "additionalProperties"):
        if inner in limit and isinstance(schema.get(inner), Mapping):
            limited[inner] = _limited(schema[inner], limit[inner])
    if "prefixItems" in limit and "prefixItems" in schema:
        pairs = zip(schema["prefixItems"], limit["prefixItems"], strict=True)
        limited["prefixItems"] = [_limited(*pair) for pair in pairs]
    return limited


def _union(options: tuple[Any, ...]) -> JsonSchema:
    return {"anyOf": [{"type": "null"} if option is types.NoneType else schema_of(option) for option in options]}


def _tuple(items: tuple[Any, ...]) -> JsonSchema:
    if len(items) == 2 and items[1] is ...:
        return {"type": "array", "items": schema_of(items[0])}
    return {
        "type": "array",
        "prefixItems": [schema_of(item) for item in items],
        "minItems": len(items),
        "maxItems": len(items),
    }


def _sentences(cls: type) -> str:
    return " ".join((inspect.getdoc(cls) or "").split())
