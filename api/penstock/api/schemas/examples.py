"""Examples for the OpenAPI document, by the names of its schemas, all about one job. A test validates each.

Schemas with a whole plan, profile or timeline have none, because these documents are long.
"""

from __future__ import annotations

from typing import Any

from penstock.api.schemas.bodies import EXAMPLE_JOB

UID, DIGEST = "7c9e6679-7425-40de-944b-e07fc1f90ae7", "5f0c1e9a" * 8
BEGAN, NOW = "2026-03-01T12:00:00Z", "2026-03-01T12:04:00Z"

EXAMPLE_RECORD: dict[str, Any] = {
    "uid": UID,
    "attempt": 1,
    "source": "rank-0",
    "sequence": 0,
    "recordedAt": 1772366640.0,
    "kind": "log",
    "log": {"rank": 0, "level": "info", "message": "step 120: loss 3.214"},
}
_SPEED = {"tokensPerSecondPerDevice": 2155.8, "modelFlopsUtilization": 0.41}
_STATUS = {
    "phase": "Running",
    "reason": "Launched",
    "message": "",
    "enteredAt": BEGAN,
    "attempt": 1,
    "failures": 0,
    "startedAt": BEGAN,
    "finishedAt": None,
    "planDigest": DIGEST,
    "progress": {
        "step": 120,
        "numSteps": 200,
        "loss": 3.214,
        "stepSeconds": 1.9,
        "speed": _SPEED,
        "lastCheckpoint": 100,
        "reportedAt": NOW,
    },
}
_JOB = {
    **EXAMPLE_JOB,
    "metadata": {
        "name": "what-if",
        "namespace": "default",
        "uid": UID,
        "generation": 1,
        "resourceVersion": "7",
        "creationTimestamp": BEGAN,
    },
    "status": _STATUS,
}
_CHECKPOINT = {
    "step": 100,
    "attempt": 1,
    "complete": True,
    "bytes": 94371840,
    "createdAt": NOW,
    "uri": f"out://{UID}/1/100",
    "export": {"state": "done", "message": "", "folder": "exports/a1-step-100"},
}
_REQUEST_ROW = {
    "id": "0b8f3c52-6a5e-4b57-9a43-3f6f0d0c7a11",
    "namespace": "default",
    "name": "what-if",
    "state": "Working",
    "createdBy": "ci",
    "createdAt": BEGAN,
    "finishedAt": None,
    "progress": {
        "divisions": 6,
        "candidates": 240,
        "best": "pp 4, 8 slices, zb",
        "bestStepSeconds": 1.8,
        "bestSpeed": _SPEED,
        "change": "",
    },
    "error": None,
    "planDigest": None,
}
_PROFILE_ROW = {
    "digest": DIGEST,
    "key": "a41d7f20" * 8,
    "host": "train-1",
    "device": "cpu",
    "modelDigest": "c0ffee12" * 8,
    "precision": "fp32",
    "numRanks": 4,
    "method": "measured",
    "measuredAt": BEGAN,
    "ageSeconds": 240.0,
    "fresh": True,
}
_TOKEN = {
    "id": "4f1b2a",
    "name": "ci",
    "role": "editor",
    "namespace": "default",
    "createdAt": BEGAN,
    "expiresAt": "2026-03-31T12:00:00Z",
    "revokedAt": None,
}
_SESSION = {
    "id": "9d31c7",
    "name": "ci",
    "role": "editor",
    "namespace": "default",
    "token": "4f1b2a",
    "address": "127.0.0.1",
    "createdAt": BEGAN,
    "expiresAt": "2026-03-02T00:00:00Z",
}

EXAMPLES: dict[str, Any] = {
    "PipelineJob": EXAMPLE_JOB,
    "JobView": _JOB,
    "JobPage": {"items": [_JOB], "next": None},
    "EventPage": {"items": [{"number": 1, "at": BEGAN, "kind": "created", "body": {"by": "ci"}}]},
    "MetricsView": {
        "series": [
            {
                "name": "loss",
                "rank": None,
                "count": 16,
                "first": {"step": 0, "value": 6.2},
                "last": {"step": 15, "value": 5.7},
                "min": 5.7,
                "max": 6.2,
                "points": [{"step": 0, "attempt": 1, "min": 5.7, "mean": 5.9, "max": 6.2, "last": 5.7, "count": 16}],
            }
        ]
    },
    "LogPage": {
        "items": [{"rank": 0, "number": 1, "attempt": 1, "at": NOW, "level": "info", "message": "step 120: loss 3.2"}],
        "next": "0:1",
        "complete": True,
    },
    "CheckpointView": _CHECKPOINT,
    "CheckpointPage": {"items": [_CHECKPOINT]},
    "ArtifactPage": {"items": [{"name": "metrics.jsonl", "bytes": 20480, "modifiedAt": NOW}]},
    "RetryRequest": {"name": "what-if-2"},
    "ReproductionView": {
        "manifest": EXAMPLE_JOB,
        "planDigest": None,
        "versions": {"penstock": "0.1.0", "torch": "2.9.1"},
        "commands": ["penstock submit what-if.yaml --server http://127.0.0.1:8470"],
    },
    "PlanRequestView": {
        **_REQUEST_ROW,
        "job": EXAMPLE_JOB,
        "profile": DIGEST,
        "cluster": None,
        "plan": None,
        "runTime": None,
        "cost": None,
    },
    "PlanRequestPage": {"items": [_REQUEST_ROW]},
    "ProfilePage": {"items": [_PROFILE_ROW]},
    "TokenRequest": {"name": "ci", "role": "editor", "namespace": "default", "lifetimeSeconds": 2592000},
    "TokenView": _TOKEN,
    "TokenPage": {"items": [_TOKEN]},
    "NewToken": {**_TOKEN, "token": "pst_..."},
    "MeView": {"name": "ci", "role": "editor", "namespace": "default", "session": None, "until": None},
    "NewLoginLink": {"path": "/login#psl_...", "expiresAt": NOW},
    "SessionView": _SESSION,
    "SessionPage": {"items": [_SESSION]},
    "AuditPage": {
        "items": [
            {
                "number": 42,
                "at": BEGAN,
                "identity": "ci",
                "action": "createJob",
                "method": "POST",
                "path": "/v1/jobs/default/what-if",
                "namespace": "default",
                "status": 201,
                "address": "127.0.0.1",
            }
        ],
        "next": None,
    },
    "Acknowledged": {"sequence": 0},
    "Health": {"status": "ok"},
    "VersionView": {"version": "0.1.0", "api": "v1", "schemaRevision": "0001"},
    "ProblemDocument": {
        "type": "https://penstock.dev/problems/not-found",
        "title": "Not found",
        "status": 404,
        "detail": "there is no job default/what-if",
        "where": "",
        "remedy": "list the jobs: GET /v1/jobs",
    },
}
