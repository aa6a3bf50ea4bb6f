"""The design's example manifest, to be changed by tests."""

from __future__ import annotations

from typing import Any

from penstock.core.serialization import yamltext

EXAMPLE = """
apiVersion: penstock.dev/v1alpha1
kind: PipelineJob
metadata: {name: stdlib-llama}
spec:
  model: {family: llama, layers: 8, hidden: 256, heads: 8, kvHeads: 4}
  data: {source: python-stdlib, tokenizer: {train: bpe, vocab: 4096}, sequenceLength: 1024}
  training: {globalBatch: 4, steps: 200, optimizer: {kind: adamw, learningRate: 1e-3}, schedule: cosine,
             clip: 1.0, precision: fp32, seed: 0}
  resources: {device: cpu, ranks: 2, memoryPerRank: 4Gi}
  parallelism: {}
  objective: time
  checkpoint: {everySteps: 50, keep: 2}
  runPolicy: {suspend: false, backoffLimit: 3, ttlSecondsAfterFinished: 86400, activeDeadlineSeconds: 0, priority: 0}
  kubernetes: {image: "", queueName: "", nodeSelector: {}, tolerations: [], acceleratorResource: nvidia.com/gpu,
               volumes: {}, env: []}
"""


def example(**changes: Any) -> dict[str, Any]:
    """The example's manifest with values replaced at dotted paths below ``spec``."""
    manifest: dict[str, Any] = yamltext.load(EXAMPLE)
    for path, value in changes.items():
        place = manifest["spec"]
        *parents, name = path.split("__")
        for parent in parents:
            place = place[parent]
        place[name] = value
    return manifest


FULL = """
apiVersion: penstock.dev/v1alpha1
kind: PipelineJob
metadata: {name: full, namespace: team, labels: {a: b}, annotations: {c: d}}
spec:
  model: {family: llama, layers: 8, hidden: 256, heads: 8, vocab: 4096, kvHeads: 4, ffnHidden: 512, positions: 2048,
          normEpsilon: 1e-6, ropeTheta: 5e5}
  data: {source: "data://corpus/train", sequenceLength: 1024, tokenizer: {train: bpe, vocab: 4096}, textField: body,
         limitBytes: 10Mi}
  training: {globalBatch: 8, steps: 200, optimizer: {kind: adamw, learningRate: 1e-3, betas: [0.9, 0.99],
             epsilon: 1e-9, weightDecay: 0}, schedule: wsd, warmupSteps: 5, minLearningRate: 0, decayShare: 1,
             clip: 2, precision: bf16, seed: -3, validateEvery: 20}
  resources: {device: cuda, ranks: 4, minRanks: 2, memoryPerRank: 8Gi, threadsPerRank: 3,
              spot: true}
  parallelism: {dp: 2, tp: 1, pp: 2, headParts: 1, zero: 1, microBatch: 2, slices: [512, 512], schedule: zb,
                stages: [4.5, 3.5], recompute: false}
  objective: cost
  deadlineSeconds: 86400
  budget: 1000.5
  pricePerDeviceHour: 2.5
  checkpoint: {everySteps: 20, keep: 3, resumeFrom: "out://7b0c/1/40"}
  runPolicy: {suspend: true, backoffLimit: 0, ttlSecondsAfterFinished: 60, activeDeadlineSeconds: 3600, priority: -1}
  kubernetes:
    image: registry.example/penstock/trainer:1
    queueName: team
    ranksPerPod: 2
    nodeSelector: {example.com/pool: gpu}
    tolerations: [{key: example.com/gpu, operator: Exists, effect: NoExecute, tolerationSeconds: 60},
                  {key: k, value: v, effect: NoSchedule}]
    acceleratorResource: example.com/gpu
    volumes: {out: {template: {size: 20Gi, storageClass: shared, accessModes: [ReadWriteMany]}, reclaim: Delete},
              data/corpus: {claim: corpus}}
    env: [{name: A, value: b}, {name: S, valueFrom: {secretKeyRef: {name: s, key: token, optional: true}}},
          {name: C, valueFrom: {configMapKeyRef: {name: c, key: k}}},
          {name: F, valueFrom: {fieldRef: {fieldPath: metadata.name}}}]
"""
"""A job that says everything there is to say."""

CLUSTER_PROFILE = """
apiVersion: penstock.dev/v1alpha1
kind: ClusterProfile
metadata: {name: pool}
spec:
  model: {family: gpt2, layers: 2, hidden: 64, heads: 2, vocab: 257}
  sequenceLength: 128
  precision: fp32
  device: cpu
  ranks: 4
  ranksPerPod: 2
  memoryPerRank: 1Gi
  threadsPerRank: 1
  nodeSelector: {pool: a}
  tolerations: [{operator: Exists}]
  acceleratorResource: nvidia.com/gpu
  image: ""
  maxAgeSeconds: 60
"""

CLUSTER = """
name: lab
device: {name: card, peakFlops: 1e14, memoryBytes: 16Gi, efficiency: [[1, 0.02], [256, 0.4]], memoryBandwidth: 1e12,
         constantBytes: 1Gi, actionOverheadSeconds: 1e-5, pricePerHour: 2,
         spotPricePerHour: 0.5, interruptionsPerHour: 0.05,
         kernels: {productShare: 0.7, productEdge: 64, productDepth: 32, productMemoryShare: 0.8, attentionShare: 0.5,
                   attentionBackwardShare: 0.4, attentionEdge: 100, attentionDepth: 16, attentionRows: 1000,
                   streamShare: 0.9, rowShare: 0.6, kernelSeconds: 5e-6}}
numNodes: 2
devicesPerNode: 4
nicsPerNode: 2
error: 0.1
restartSeconds: 120
software: {allocatorSlack: 0.05, launchSeconds: 1e-5}
costs: [{unit: mlp, pass: F, tokens: 64, pairs: 2080, seconds: 1e-3}]
intraNode: {latencySeconds: 1e-6, bytesPerSecond: 1e11}
interNode: {latencySeconds: 1e-5, bytesPerSecond: 1e9}
links: [{source: 0, target: 1, link: {latencySeconds: 1e-5, bytesPerSecond: 1e8}}]
"""
MIXED_CLUSTER = """
name: lab
device: {name: card, peakFlops: 1e14, memoryBytes: 16Gi}
numNodes: 3
devicesPerNode: 4
intraNode: {latencySeconds: 1e-6, bytesPerSecond: 1e11}
interNode: {latencySeconds: 1e-5, bytesPerSecond: 1e9}
otherDevices: [{numNodes: 2, device: {name: old card, peakFlops: 3e13, memoryBytes: 12Gi}}]
"""
"""Without costs, which are of one kind of device."""
PLAN = """
model: {family: gpt2, layers: 1, hidden: 64, heads: 2, vocab: 257}
precision: fp32
dp: 2
tp: 1
pp: 2
microbatch: 2
numMicrobatches: 2
slices: [64, 64]
remainder: 1
remainderSlices: [128]
stages: [[0, 2], [2, 4]]
recompute: [[{unit: attention, count: 1, operations: [norm]}], []]
recomputeAhead: 2
recomputeInside: true
schedule: {generator: zb, version: 1, text: x}
receiveAhead: 3
placement: [0, 1, 2, 3]
prediction: {stepSeconds: 1, computeSeconds: 1, bubbleSeconds: 0, communicationSeconds: 0, reductionSeconds: 0,
             optimizerSeconds: 0, peakBytes: [1, 2], slotBytes: [1, 2]}
reasons: [because]
alternatives: [{label: other, stepSeconds: 2, peakBytes: 3, reason: slower}]
"""
AGENT_REPORT = """
podUid: u
jobUid: j
attempt: 1
state: ready
done: 1
total: 2
checkpoint: {attempt: 1, step: 20}
"""

BINDING = """
podUid: u
attempt: 1
epoch: 1
nodeRank: 0
numNodes: 1
ranksPerPod: 2
master: m
port: 1
"""


def loaded(text: str) -> dict[str, Any]:
    """A manifest as plain data."""
    manifest: dict[str, Any] = yamltext.load(text)
    return manifest
