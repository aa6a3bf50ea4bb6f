"""Compute actions as CUDA graphs: the host replays an action with one call, instead of launching each of its kernels.

Problem. A pass of a block launches about 20 kernels forward and 35 backward. Each launch takes the host 5 to 15
microseconds in PyTorch. On an H100 that is 0.4 ms per unit and pass, whatever the length of the slice: an action of
eight llama layers took the host 7 to 10 ms. For one slice of 2,048 tokens at a width of 2,048 the device takes as long.
With 16 slices it was idle for nine tenths of a step, so slicing could not pay off.

Idea. An action is the same in every step: the same kernels on the same addresses, since slots, tokens, labels, losses,
weights and the workspace never move. CUDA can record the launches on a stream instead of running them, and launch all
of them later with one call of 10 to 20 microseconds. Every compute action is recorded once, in the warm-up
(`penstock.trainer.executor.StageExecutor.warm_up`), and replayed in each step.

To be recordable, a pass must not:

- wait for the device, or read a value from it: no ``item``, ``nonzero``, or indexing by a boolean tensor;
- use a host number that changes from step to step. The only such number, the scale of the gradient, is stored on the
  device (`penstock.trainer.units.cross_entropy.Scale`);
- copy from host memory;
- draw random numbers: PyTorch would launch two more kernels before every replay, to copy the generator's state to the
  device. FlashAttention without dropout needs no such state;
- destroy another graph: Python's garbage collector is disabled during a recording;
- keep memory that it allocated. Kernels allocate temporaries during a recording as usual, but from a pool that belongs
  to the graphs permanently. All graphs of a rank share the pool: they run one after the other, and nothing outlives an
  action except in slots, so each action reuses the memory of the one before. The pool is therefore as large as the
  action that needs most, plus fragmentation between pieces of different sizes. Large actions are recorded first, and
  small ones fit into the memory that is there.

An action must have run on the same stream before it is recorded. The first run loads kernels, for which the driver may
wait for the device, and gives cuBLAS its workspace, which would otherwise be allocated in the pool. A recording runs no
kernel and changes nothing but the pool. Each graph is replayed once afterwards, because the driver uploads it at its
first launch.

Still launched kernel by kernel: passes of several shards, which communicate in the middle, through NCCL or the host;
evaluation and sampling, which are outside of steps; reductions and the optimizer, which are few. An overlapped pair of
one shard is recorded like any other action. Marks between actions (`penstock.trainer.recorder`) are events on the
stream of the replays. Marks that time parts of one graph (`penstock.trainer.clock`) are external events: nodes of the
graph.

Memory. Besides the pool, a graph uses device memory that the driver keeps per kernel; how much depends on the driver. A
rank with 256 actions of 300 kernels has 77,000 kernels. So graphs may use a limited part of the device (`most_bytes`),
which profiles count as constant memory of every rank. Actions beyond that limit are launched kernel by kernel. Profiles
also measure what the graph of a pass takes (`graph_bytes`) and how long its launches take, from which the planner
counts the actions without a graph by the same rule (`penstock.core.graphs`) and charges their launches.

Rejected: one graph for all actions that use the same slots. Take a rank in the middle of four, with 32 micro-batches of
4 slices and 256 actions: 74 to 87 of these are different in 1f1b, but in zbv it is 668 of 768, and all of them in gpipe
and at both ends of the model, where micro-batches have their own tokens or labels. Rejected: one graph of a whole step.
Messages would be nodes of the graph, ordered by their dependencies alone and no longer by the time when the host
launches them (`penstock.core.residency`).
"""

from __future__ import annotations

import contextlib
import functools
import gc
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from penstock.core.graphs import most_graph_bytes, recording_order
from penstock.trainer.interpreter import Operation
from penstock.trainer.memory import bytes_outside_allocator

MEASURED_GRAPHS = 32
"""Graphs of a pass whose memory is measured together: drivers allocate it in blocks of megabytes."""


def can_record(device: torch.device) -> bool:
    """Whether ``device`` supports graphs."""
    return device.type == "cuda"


def most_bytes(device: torch.device) -> int:
    """The most bytes of ``device`` that graphs may use besides their pool; 0 on the CPU."""
    return most_graph_bytes(torch.cuda.get_device_properties(device).total_memory) if can_record(device) else 0


def pool_bytes(action: Operation, device: torch.device) -> int:
    """Bytes of the graph pool that the action needs by itself."""
    graphs = Graphs(device)
    graphs.warm_up(action)
    torch.cuda.empty_cache()
    reserved_before = torch.cuda.memory_reserved(device)
    recorded = graphs.record(action)
    num_bytes = torch.cuda.memory_reserved(device) - reserved_before
    del recorded
    return num_bytes


def graph_bytes(action: Operation, device: torch.device) -> int:
    """Bytes of one graph of the action in addition to the pool: the mean growth over several graphs."""
    graphs, recorded, taken = Graphs(device), list[Recorded](), list[int]()
    graphs.warm_up(action)
    for _ in range(MEASURED_GRAPHS + 1):
        recorded.append(graphs.record(action))
        recorded[-1]()  # the first launch uploads the graph
        torch.cuda.synchronize(device)
        taken.append(bytes_outside_allocator(device))
    return max(-(-(taken[-1] - taken[0]) // MEASURED_GRAPHS), 0)


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of all recordings: cuBLAS keeps a workspace per stream, and the default stream cannot be recorded."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class Recordable:
    """An action of ``num_tokens`` tokens that is launched kernel by kernel until it is recorded."""

    def __init__(self, run: Operation, num_tokens: int) -> None:
        self.run, self.num_tokens = run, num_tokens

    def __call__(self) -> None:
        self.run()


@dataclass(frozen=True, slots=True, eq=False)
class Recorded:
    """A graph of ``action``. Keeping ``action`` keeps the tensors that the graph uses."""

    graph: torch.cuda.CUDAGraph
    action: Operation

    def __call__(self) -> None:
        self.graph.replay()


@contextlib.contextmanager
def _nothing_collected() -> Iterator[None]:
    """Disable Python's garbage collector: if it destroyed an unused graph, the recording under way would fail."""
    is_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_enabled:
            gc.enable()


class Graphs:
    """Records actions on ``device`` into one memory pool. Its recordings keep the pool alive."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = _stream(device)

    def warm_up(self, action: Operation) -> None:
        """Run an action on the recording stream, ordered after earlier and before later work on the current stream."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            action()
        current.wait_stream(self._stream)

    def record(self, action: Operation) -> Recorded:
        """Record an action without running it; calling the result replays it on the current stream."""
        graph = torch.cuda.CUDAGraph()
        with _nothing_collected(), torch.cuda.stream(self._stream):
            # NCCL's threads query events meanwhile, which the default mode forbids
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                action()
            except BaseException:
                with contextlib.suppress(RuntimeError):  # it only repeats that the recording failed
                    graph.capture_end()
                raise
            with warnings.catch_warnings():  # the backward of a stage with only the head launches nothing
                warnings.filterwarnings("ignore", "The CUDA Graph is empty")
                graph.capture_end()
        return Recorded(graph, action)

    def record_all(self, actions: Iterable[Recordable]) -> None:
        """Record all actions in `recording_order`, and replay each once, until graphs use `most_bytes`."""
        torch.cuda.empty_cache()  # frees what eager runs cached, for the pool
        limit_bytes = most_bytes(self._device) + bytes_outside_allocator(self._device)
        for action in recording_order(actions, lambda action: action.num_tokens):
            if bytes_outside_allocator(self._device) > limit_bytes:
                break
            action.run = self.record(action.run)
            action.run()
