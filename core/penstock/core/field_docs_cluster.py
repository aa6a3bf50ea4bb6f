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
        "acceleratorResource": "the resource that a rank requests on cuda",
        "volumes": "by `out` or `data/NAME`: the storage of `out://` and `data://NAME`",
        "env": "variables of the ranks' environment, as in a pod",
    },
    Toleration: {
        "key": "the taint's key; empty with `Exists`: every taint",
        "operator": "`Equal` compares the value, `Exists` takes any",
        "value": "the taint's value",
        "effect": "`NoSchedule`, `PreferNoSchedule` or `NoExecute`; none: all of them",
        "tolerationSeconds": "how long `NoExecute` is tolerated; none: indefinitely",
    },
    EnvVar: {
        "name": "letters, digits, underscores, dashes and dots, a letter or an underscore first",
        "value": "the value as a string",
        "valueFrom": "another source of the value",
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
        "template": "a claim to create for the job",
        "reclaim": "treatment of a created claim: `Retain` keeps it, `Delete` deletes it with the job",
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
        "observedGeneration": "the generation of the spec that the rest of the status describes",
        "phase": "phase of the job",
        "reason": "reason of the phase, in one word",
        "message": "reason of the phase in a sentence, with a remedy",
        "attempt": "number of the newest attempt; 0: none yet",
        "launched": "the newest attempt whose JobSet was created",
        "ranks": "of the newest attempt",
        "failures": "attempts that ended without a stop request",
        "replans": "attempts that ended because steps had drifted; the next drift must last twice as long",
        "phaseEnteredAt": "start of the phase",
        "startedAt": "when its first attempt was launched",
        "failedAt": "when an attempt failed last",
        "finishedAt": "when it succeeded or failed",
        "checkpoint": "the newest complete checkpoint: `out://UID/ATTEMPT/STEP`",
        "feasibleRanks": "ranks for which an elastic job was found to have capacity",
        "profile": "the measurement on which the newest plan is based",
        "measurements": "measurements of its attempts, oldest first; they are used again on the same hosts",
        "plan": "the plan of the newest attempt",
        "conditions": "observations, one of each type",
        "progress": "reports of ranks, written by the service",
    },
    CheckpointName: {
        "attempt": "the attempt that wrote it",
        "step": "finished steps of this checkpoint",
    },
    ProfileStatus: {
        "ref": "the ConfigMap that holds it",
        "key": "digest of the hosts, image and work for which it is valid",
    },
    PlanStatus: {
        "digest": "of the plan",
        "summary": "the plan in a few words",
        "stepSeconds": "predicted length of a step",
        "speed": "of a step that takes as long",
        "peakBytes": "predicted memory of the fullest rank",
        "comparedSince": "time of the first comparison of its steps with the prediction",
        "mispredicted": "its steps were off from the first, on hardware that had just been measured",
    },
    Speed: {
        "tokensPerSecondPerDevice": "tokens of a step, divided by its seconds and its devices",
        "modelFlopsUtilization": "FLOPs of the model as a share of the devices' peak; none: the peak is unknown",
    },
    Condition: {
        "type": "the observed property",
        "status": "whether it holds",
        "reason": "reason in one word",
        "message": "reason in a sentence",
        "observedGeneration": "the generation of the observed spec",
        "lastTransitionTime": "when the status last changed",
    },
    JobProgress: {
        "attempt": "the attempt that reported",
        "epoch": "0 while it measures, 1 while it trains",
        "step": "steps done",
        "loss": "of that step, as a string: it may be no finite number",
        "stepSeconds": "median length of the steps last reported",
        "speed": "of a step that takes as long",
        "lastCheckpoint": "step of the newest complete checkpoint",
        "profileRef": "the ConfigMap that holds the measurement",
        "reportedAt": "when this was reported",
    },
    ClusterProfileSpec: {
        "model": "the model whose layers are measured",
        "sequenceLength": "tokens of one sequence",
        "precision": "`fp32` or `bf16`; `fp64` is for proofs",
        "device": "`cpu` or `cuda`",
        "ranks": "processes that are measured together; on cuda one device each",
        "ranksPerPod": "ranks that share a pod; must divide `ranks`",
        "memoryPerRank": "memory that a rank requests",
        "threadsPerRank": "CPU threads of one rank",
        "nodeSelector": "labels that a node must have, as in a pod",
        "tolerations": "taints that are tolerated, as in a pod",
        "acceleratorResource": "the resource that a rank requests on cuda",
        "image": "container image; empty: the one that the operator was installed with",
        "maxAgeSeconds": "older measurements are repeated; 0: never",
    },
    ClusterProfileStatus: {
        "observedGeneration": "the generation of the spec that was measured",
        "conditions": "observations, one of each type",
        "profileRef": "the ConfigMap that holds the profile, as namespace/name",
        "profileKey": "digest of all for which it is valid: hosts since their last start, image, model, resources",
        "measuredAt": "when it was measured",
        "links": "summary of the measured links",
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
