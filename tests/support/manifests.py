"""The design's example manifest, to be changed by tests."""

from __future__ import annotations

from typing import Any

from penstock.planner import yamltext

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
