"""Manifests as request bodies, for the OpenAPI document: routes parse them without FastAPI."""

from __future__ import annotations

import functools
from typing import Any

from penstock.core.cluster import ClusterSpec
from penstock.core.job import API_VERSION, KIND
from penstock.core.manifest_schema import JsonSchema, dataclass_schema, job_schema

JOB = {"$ref": "#/components/schemas/PipelineJob"}
CLUSTER = {"$ref": "#/components/schemas/Cluster"}
EXAMPLE_JOB = {
    "apiVersion": API_VERSION,
    "kind": KIND,
    "metadata": {"name": "what-if"},
    "spec": {
        "model": {"family": "llama", "layers": 8, "hidden": 256, "heads": 8, "kvHeads": 4},
        "data": {"source": "python-stdlib", "sequenceLength": 1024},
        "training": {"globalBatch": 4, "steps": 200},
        "resources": {"ranks": 4},
    },
}
EXAMPLE_CLUSTER = {
    "name": "four",
    "device": {"name": "accelerator", "peakFlops": 1e13, "memoryBytes": "8Gi"},
    "numNodes": 2,
    "devicesPerNode": 2,
    "intraNode": {"latencySeconds": 1e-6, "bytesPerSecond": 1e10},
    "interNode": {"latencySeconds": 1e-5, "bytesPerSecond": 1e9},
}


@functools.cache
def schemas() -> dict[str, JsonSchema]:
    """Return the schemas that bodies refer to."""
    return {"PipelineJob": job_schema(), "Cluster": dataclass_schema(ClusterSpec)}


def body(schema: dict[str, Any], example: dict[str, Any]) -> dict[str, Any]:
    """Return a body in JSON or YAML, in the form of FastAPI's ``openapi_extra``."""
    form = {"schema": schema, "example": example}
    return {"requestBody": {"required": True, "content": {"application/json": form, "application/yaml": form}}}
