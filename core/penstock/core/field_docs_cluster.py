"""Meanings of the fields that concern Kubernetes: of a job's pods, of its status, and of a ClusterProfile."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.core.cluster_profile import ClusterProfileSpec, ClusterProfileStatus, LinksStatus, LinkStatus
from penstock.core.kubernetes_spec import (
    ClaimTemplate,
    EnvSource,
    EnvVar,
    FieldRef,
    KeyRef,
    KubernetesSpec,
    Toleration,
    VolumeSpec,
)
from penstock.core.pod import CheckpointName
from penstock.core.schedule import ScheduleSpec
from penstock.core.speed import Speed
from penstock.core.status import Condition, JobProgress, JobStatus, PlanStatus, ProfileStatus

CLUSTER_MEANINGS: Mapping[type, Mapping[str, str]] = {
    KubernetesSpec: {
        "image": "container image; empty: the one that the operator was installed with",
        "queueName": "Kueue queue; empty: the job waits for none",
        "ranksPerPod": "ranks that share a pod; must divide `ranks`",
        "nodeSelector": "labels that a node must have, as in a pod",
        "tolerations": "taints that are tolerated, as in a pod",
        "acceleratorResource": "the resource a rank asks for on cuda",
        "volumes": "by `out` or `data/NAME`: what stands behind `out://` and `data://NAME`",
        "env": "variables of the ranks' environment, as in a pod",
    },
    Toleration: {
        "key": "the taint's key; empty with `Exists`: every taint",
        "operator": "`Equal` compares the value, `Exists` takes any",
        "value": "the taint's value",
        "effect": "`NoSchedule`, `PreferNoSchedule` or `NoExecute`; none: all of them",
        "tolerationSeconds": "how long `NoExecute` is tolerated; none: for ever",
    },
    EnvVar: {
        "name": "letters, digits, underscores, dashes and dots, a letter or an underscore first",
        "value": "the text itself",
        "valueFrom": "where the text is read from instead",
    },
    EnvSource: {
        "secretKeyRef": "a key of a Secret",
        "configMapKeyRef": "a key of a ConfigMap",
        "fieldRef": "a field of the pod",
    },
    KeyRef: {
        "name": "of the Secret or ConfigMap",
        "key": "in it",
        "optional": "whether pods start without it",
    },
    FieldRef: {"fieldPath": "such as `metadata.name` or `status.podIP`"},
    VolumeSpec: {
        "claim": "a PersistentVolumeClaim of the job's namespace",
        "template": "a claim to be made for the job",
        "reclaim": "what becomes of a claim that was made: `Retain` keeps it, `Delete` deletes it with the job",
    },
    ClaimTemplate: {
        "size": "bytes, or a quantity such as `10Gi`",
        "storageClass": "empty: the cluster's default",
        "accessModes": "ranks on several nodes need `ReadWriteMany`",
    },
    ScheduleSpec: {
        "generator": "a schedule's name, or `csv`",
        "version": "of the generator",
        "text": "the actions of an imported schedule, as CSV",
    },
    JobStatus: {
        "observedGeneration": "the generation of the spec that the rest of the status is about",
        "phase": "where the job stands",
        "reason": "why it stands there, in one word",
        "message": "the same in a sentence, with what to do about it",
        "attempt": "number of the newest attempt; 0: none yet",
        "launched": "the newest attempt whose JobSet was made",
        "ranks": "of the newest attempt",
        "failures": "attempts that ended without being asked to",
        "replans": "attempts that ended because steps had drifted; the next drift must last twice as long",
        "phaseEnteredAt": "since when it stands there",
        "startedAt": "when its first attempt was launched",
        "failedAt": "when an attempt failed last",
        "finishedAt": "when it succeeded or failed",
        "checkpoint": "the newest complete checkpoint: `out://UID/ATTEMPT/STEP`",
        "feasibleRanks": "ranks that an elastic job was found to have room for",
        "profile": "the measurement that the newest plan was made from",
        "measurements": "what its attempts measured, oldest first; of the same hosts they are used again",
        "plan": "the plan of the newest attempt",
        "conditions": "what was observed, one of each type",
        "progress": "what ranks reported, written by the service",
    },
    CheckpointName: {
        "attempt": "the attempt that wrote it",
        "step": "steps that were done by then",
    },
    ProfileStatus: {
        "ref": "the ConfigMap that holds it",
        "key": "what it is valid for: hosts, image and work, as a digest",
    },
    PlanStatus: {
        "digest": "of the plan",
        "summary": "the plan in a few words",
        "stepSeconds": "predicted length of a step",
        "speed": "of a step that takes as long",
        "peakBytes": "predicted memory of the fullest rank",
        "comparedSince": "when its steps were first compared with the prediction",
        "mispredicted": "its steps were off from the first, on hardware that had just been measured",
    },
    Speed: {
        "tokensPerSecondPerDevice": "tokens of a step, divided by its seconds and its devices",
        "modelFlopsUtilization": "FLOPs of the model as a share of the devices' peak; none: that is not known",
    },
    Condition: {
        "type": "what is observed",
        "status": "whether it holds",
        "reason": "why, in one word",
        "message": "why, in a sentence",
        "observedGeneration": "the generation of the spec that was looked at",
        "lastTransitionTime": "when the status last changed",
    },
    JobProgress: {
        "attempt": "the attempt that reported",
        "epoch": "0 while it measures, 1 while it trains",
        "step": "steps done",
        "loss": "of that step, as text: it may be no finite number",
        "stepSeconds": "median length of the steps last reported",
        "speed": "of a step that takes as long",
        "lastCheckpoint": "step of the newest complete checkpoint",
        "profileRef": "the ConfigMap that holds what was measured",
        "reportedAt": "when this was reported",
    },
    ClusterProfileSpec: {
        "model": "the model whose layers are measured",
        "sequenceLength": "tokens of one sequence",
        "precision": "`fp32` or `bf16`; `fp64` is for proofs",
        "device": "`cpu` or `cuda`",
        "ranks": "processes that are measured together; on cuda one device each",
        "ranksPerPod": "ranks that share a pod; must divide `ranks`",
        "memoryPerRank": "memory that a rank asks for",
        "threadsPerRank": "CPU threads of one rank",
        "nodeSelector": "labels that a node must have, as in a pod",
        "tolerations": "taints that are tolerated, as in a pod",
        "acceleratorResource": "the resource a rank asks for on cuda",
        "image": "container image; empty: the one that the operator was installed with",
        "maxAgeSeconds": "older measurements are made again; 0: never",
    },
    ClusterProfileStatus: {
        "observedGeneration": "the generation of the spec that was measured",
        "conditions": "what was observed, one of each type",
        "profileRef": "the ConfigMap that holds the profile, as namespace/name",
        "profileKey": "what it is valid for, as one digest: hosts since they last started, image, model, resources",
        "measuredAt": "when it was measured",
        "links": "the measured links in short",
    },
    LinksStatus: {
        "numLinks": "directed links that were measured",
        "slowest": "the one with the fewest bytes per second",
        "fastest": "the one with the most bytes per second",
        "medianBytesPerSecond": "of all links",
    },
    LinkStatus: {
        "source": "rank that sends",
        "target": "rank that receives",
        "latencySeconds": "seconds to the first byte",
        "bytesPerSecond": "in this direction",
    },
}
"""By type and the field's name in manifests."""
