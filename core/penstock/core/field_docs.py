"""Meanings of the fields of a job, a ClusterProfile and described hardware: for schemas, editors, the guides' tables.

Parts of a job that are missing here are explained by their own types.
"""

from __future__ import annotations

from collections.abc import Mapping

from penstock.core.cluster import ClusterSpec, DeviceSpec, KernelSpec, LinkOverride, LinkSpec, SoftwareSpec
from penstock.core.cost_table import CostRow
from penstock.core.field_docs_cluster import CLUSTER_MEANINGS
from penstock.core.job import (
    CheckpointSpec,
    DataSpec,
    JobSpec,
    Metadata,
    OptimizerSpec,
    ParallelismSpec,
    ResourcesSpec,
    RunPolicySpec,
    TokenizerSpec,
    TrainingSpec,
)
from penstock.core.model import ModelSpec

MEANINGS: Mapping[type, Mapping[str, str]] = {
    **CLUSTER_MEANINGS,
    Metadata: {
        "name": "at most 63 lower-case letters, digits and dashes; on a cluster at most 40, a letter first",
        "namespace": (
            "owner of the job on a service: names are unique within a namespace, and tokens may be limited to it; "
            "ignored by `penstock run`"
        ),
        "labels": "free key-value pairs",
        "annotations": "free key-value pairs",
        "uid": "the job's identity, given by a service or cluster",
    },
    JobSpec: {
        "objective": "quantity that the planner minimises: `time` of a step, or `cost` (time x devices)",
        "pricePerDeviceHour": "needed by `objective: cost`; with it plans state their cost",
    },
    ModelSpec: {
        "family": (
            "`llama` (RMSNorm, rotary positions, SwiGLU, own head) or `gpt2` (LayerNorm, learned positions, GELU,"
            " head tied to the embedding)"
        ),
        "layers": "blocks",
        "hidden": "width of the hidden state",
        "heads": "query heads; must divide `hidden`",
        "vocab": "number of tokens in the vocabulary; if left out, the size to which the tokenizer is trained",
        "kvHeads": "key and value heads, a divisor of `heads`; 0 means as many as `heads`; llama only",
        "ffnHidden": "width of the MLP; 0 means 4 x hidden for gpt2 and 8/3 x hidden, rounded up to 64, for llama",
        "positions": "longest sequence of gpt2",
        "normEpsilon": "added to variances in norms",
        "ropeTheta": "base of the rotary frequencies",
    },
    DataSpec: {
        "source": (
            "`python-stdlib` (this Python's own sources), a folder of text (no links out of it), a text file, a "
            "`.jsonl` file, or a token file (`.bin` with its header, `.npy`)"
        ),
        "sequenceLength": "tokens of one sequence",
        "textField": "the field of a JSONL line that holds the text",
        "limitBytes": "read at most this many bytes of text",
    },
    TokenizerSpec: {
        "train": "`bpe`: train a byte-level BPE on the data; `bytes`: every byte is a token",
        "vocab": "size of the trained BPE, at least 257",
        "file": "a `tokenizer.json` made by the tokenizers or transformers library",
    },
    TrainingSpec: {
        "globalBatch": "sequences per step; never changes with the plan",
        "steps": "optimizer steps",
        "schedule": "how the learning rate falls: `cosine`, `wsd` (holds, then falls) or `constant`",
        "warmupSteps": "steps over which the learning rate rises",
        "minLearningRate": "final learning rate as a share of the peak, from 0 to 1",
        "decayShare": "the last share of steps in which `wsd` falls, from 0 to 1",
        "clip": "largest norm of the whole model's gradient",
        "precision": "`fp32` or `bf16` (master weights, gradients and reductions stay fp32); `fp64` is for proofs",
        "seed": "of parameters and of the order of data",
        "validateEvery": "steps between validation losses; 0: only at the end",
    },
    OptimizerSpec: {
        "kind": "the only one so far",
        "learningRate": "the peak",
        "betas": "decay of the two moments, each below 1",
        "epsilon": "added to the root of the second moment",
        "weightDecay": "applies to matrices, not to norms and biases",
    },
    ResourcesSpec: {
        "device": "`cpu` or `cuda`",
        "ranks": "processes; on cuda one device each",
        "minRanks": (
            "the fewest ranks that a plan may use, and on clusters the fewest that an elastic job shrinks to; "
            "none: `ranks`"
        ),
        "memoryPerRank": (
            "memory limit of a rank: plans that are estimated to need more are not considered; a rank computes "
            "the exact need of a plan with very many actions at its start, and refuses it beyond the limit; on "
            "cuda this is the device's memory"
        ),
        "threadsPerRank": "CPU threads of one rank",
    },
    ParallelismSpec: {
        "dp": "replicas of the pipeline",
        "tp": (
            "number of devices that share every layer of a pipeline rank: neighbours, on one host unless `tp` is pinned"
        ),
        "sequenceParallel": (
            "whether the `tp` devices also divide hidden states, norms and messages by tokens; `false`: each "
            "device has whole ones"
        ),
        "pp": "ranks of one pipeline",
        "headParts": (
            "number of parts that the head is divided into, by vocabulary: each part is a unit, so several stages "
            "can share the head; 1: the head is one unit"
        ),
        "zero": (
            "`1`: replicas divide the optimizer's state between them (ZeRO-1), `0`: each has all of it; left out, the "
            "planner chooses"
        ),
        "microBatch": "sequences in one micro-batch; the last one of a step has the remaining sequences",
        "slices": "number of slices, or their lengths in tokens (their sum is `sequenceLength`)",
        "schedule": "`1f1b`, `zb`, `zbv`, another built-in or installed one, or a CSV file",
        "stages": (
            "blocks per stage, halves allowed, such as `[4.5, 3.5]`; with `zbv` a rank has two or more stages, so "
            "the list is that much longer"
        ),
        "recompute": (
            "operations whose results are recomputed before the backward instead of kept: `none`, `selective` "
            "(norms and activation functions), `full`, or for pinned `stages` a list for each stage of `{unit, "
            "count, operations}`, as in `plan.json`; left out, the planner recomputes where memory requires it"
        ),
    },
    CheckpointSpec: {
        "everySteps": "steps between checkpoints; the last step always has one",
        "keep": "complete checkpoints that are kept",
        "resumeFrom": "a checkpoint's folder to begin from",
    },
    RunPolicySpec: {
        "suspend": "stop after a checkpoint and wait",
        "backoffLimit": "failed attempts that are tried again",
        "ttlSecondsAfterFinished": (
            "seconds after its end until a finished job is removed, by a service or a cluster; none: it is kept"
        ),
        "activeDeadlineSeconds": (
            "the job fails if it takes longer than this; time in a queue does not count, and the count starts at "
            "0 after a suspension; 0: no limit"
        ),
        "priority": "used by queues",
        "replanOnDrift": (
            "on a cluster: measure and plan again after half an hour of steps that differ from the prediction"
        ),
    },
    ClusterSpec: {
        "name": "for people",
        "device": "the one kind of device",
        "numNodes": "nodes",
        "devicesPerNode": "devices of each",
        "intraNode": (
            "link between devices of a node: the bandwidth of a device in a collective over all links of the node"
        ),
        "interNode": "link between nodes; with `nicsPerNode` one network card",
        "links": "exceptions: `{source, target, link}` between two nodes, by number",
        "nicsPerNode": (
            "network cards of a node, which its devices share evenly; none: all messages of a node share one card, and "
            "a reduction is one ring over single links"
        ),
        "intraNodePeer": "link of a message between two devices of a node, if it is slower than `intraNode`",
        "software": "properties of the trainer; the defaults describe penstock's own",
        "error": "relative error of predicted times: the interval of predictions",
        "costs": "rows measured elsewhere, which replace the device's kernels; `--costs` reads them from CSV",
    },
    KernelSpec: {
        "productShare": "share of `peakFlops` that a matrix product reaches if it is large in every dimension",
        "productEdge": "a product takes as long as an ideal one with this many more rows and columns",
        "productDepth": "a product takes as long as an ideal one with this much more depth",
        "productMemoryShare": "share of `memoryBandwidth` that the matrices of a product reach",
        "attentionShare": "share of `peakFlops` that the forward of fused attention reaches",
        "attentionBackwardShare": "share of `peakFlops` that the backward of fused attention reaches",
        "attentionEdge": "fused attention takes as long as ideal attention with this many more keys per query",
        "attentionDepth": "fused attention takes as long as ideal attention with heads that are this much wider",
        "attentionRows": (
            "fused attention takes as long as ideal attention with this many more rows of queries, over all heads"
        ),
        "streamShare": "share of `memoryBandwidth` that elementwise kernels reach",
        "rowShare": "share of `memoryBandwidth` that kernels reach that reduce rows: norms, softmax",
        "kernelSeconds": "least time of any kernel",
    },
    SoftwareSpec: {
        "attention": "`flash` keeps no scores, `unfused` keeps them for backward",
        "dropout": "whether hidden states and attention are masked",
        "fusion": (
            "`epilogue`: products add biases; `grouped`: one kernel each for (bias + activation), (bias + dropout "
            "+ residual) and (scaling + mask + softmax); `none`: one kernel per operation"
        ),
        "fusedGradients": (
            "whether the matrix products of W accumulate into the gradients directly; otherwise further kernels "
            "add their results"
        ),
        "gradientType": "type in which gradients are summed: `fp32` or `bf16`",
        "transfers": (
            "`overlapped`: ranks compute meanwhile; `exchanged`: they send and receive at once and wait; "
            "`blocking`: one after the other"
        ),
        "optimizerBarrier": "whether all ranks wait for the norm of the gradients before the next step",
        "allocatorSlack": "share of activations' bytes that the allocator loses",
        "launchSeconds": "time of the host to launch one kernel",
        "headInForward": "whether the head's F does its whole backward",
        "overlappedCollectives": (
            "whether the tensor-parallel collectives of a backward overlap its matrix products, as in "
            "Megatron-LM; the gather of the output's gradient never does"
        ),
        "recomputesOnDemand": (
            "whether recomputation runs inside of the backward that needs it, after its gradient has arrived, as in "
            "PyTorch's checkpointing"
        ),
    },
    CostRow: {
        "unit": "`embedding`, `attention`, `mlp` or `head`",
        "pass": "`F`, `I` (gradient of the input) or `W` (gradients of the weights)",
        "tokens": "number of tokens of all sequences of the micro-batch's slice",
        "pairs": "number of pairs of a query and a key that the query attends to, over all sequences",
        "seconds": "on one rank, collectives of tensor parallelism included",
    },
    DeviceSpec: {
        "name": "for people",
        "peakFlops": "largest number of FLOPs per second",
        "memoryBytes": "memory of one device; if the job's `memoryPerRank` is smaller, that is the limit",
        "efficiency": (
            "pairs `[tokens, share]`: the share of `peakFlops` that is achieved with so many tokens in one pass; "
            "interpolated in log2(tokens)"
        ),
        "memoryBandwidth": "bytes per second",
        "constantBytes": "memory of the process before any parameter",
        "actionOverheadSeconds": "fixed cost of one action",
        "pricePerHour": (
            "price of one device, by which plans state their cost; it does not influence the choice, since "
            "`objective: cost` counts device time"
        ),
        "kernels": "speed of kernels by the shape of their work; if given, `efficiency` is ignored",
    },
    LinkSpec: {
        "latencySeconds": "seconds to the first byte",
        "bytesPerSecond": "in each direction",
    },
    LinkOverride: {
        "source": "number of one node",
        "target": "number of the other",
        "link": "the link between them",
    },
}
"""By type and the field's name in manifests."""
