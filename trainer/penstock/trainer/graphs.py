"""Actions recorded as CUDA graphs: the host replays one by a single call, in place of launching each of its kernels.

The problem. A pass of a block launches about 20 kernels forward and 35 backward, for each of which the host takes 5 to
15 microseconds in PyTorch. On an H100 that is 0.4 ms per unit and pass, whatever the slice's length: an action of eight
llama layers took the host 7 to 10 ms. In one slice of 2,048 tokens at a width of 2,048 the device is as slow; in 16
slices it was idle for nine tenths of a step, so that slices could not pay.

The idea. An action is the same in every step: the same kernels at the same addresses, since slots, tokens, labels,
losses, weights and the workspace never move. CUDA can record what is launched on a stream, instead of running it, and
launch all of it later by one call, which takes the host 10 to 20 microseconds. Every compute action is recorded once,
in the warm-up (`penstock.trainer.executor.StageExecutor.warm_up`), and replayed in each step.

What a pass must not do, so that it can be recorded:

- wait for the device, or read a value of it: no ``item``, ``nonzero``, or indexing by a boolean tensor;
- take a number of the host that changes from step to step. The one there is, the scale of the gradient, lies on the
  device (`penstock.trainer.units.cross_entropy.Scale`);
- copy from memory of the host;
- draw random numbers. PyTorch would launch two kernels more before every replay to bring its generator's state to the
  device. FlashAttention without dropout asks for no such state;
- destroy another graph: Python's collector stands still meanwhile;
- leave behind memory that it allocated. Kernels allocate their temporaries while they are recorded, as ever, but from a
  pool that belongs to the graphs and stays theirs. All graphs of a rank share it, because they run one after the other
  and nothing outlives an action but what lies in slots: the next one finds the last one's memory free again. So the
  pool is as large as the action that needs most, plus what pieces of different sizes leave between them. Large actions
  are recorded first, and small ones find their pieces in what is there.

What is recorded has to have run before, on the same stream: the first run loads kernels, for which the driver may wait
for the device, and gives cuBLAS its workspace, which otherwise would lie in the pool. To record changes nothing but the
pool: no kernel runs. Each graph is then replayed once, because the driver brings it to the device at its first launch.

Still launched kernel by kernel: passes of several shards, which meet in the middle, through NCCL or the host;
evaluation and sampling, which are no part of a step; reductions and the optimizer, which are few. An overlapped pair of
one shard is recorded like any other action. Marks between actions (`penstock.trainer.recorder`) are events on the
stream of the replays. Those that time parts of one graph (`penstock.trainer.clock`) are external: nodes of the graph.

Memory. Besides the pool a graph takes of the device what the driver keeps of every kernel, which depends on its
version; a rank with 256 actions of 300 kernels has 77,000 of them. So graphs may take at most ``1 / SHARE`` of the
device (`most_bytes`), which profiles count as part of what every rank holds. Actions beyond that are launched kernel by
kernel, as if there were no graphs.

Rejected: one graph for actions that use the same slots. Of the 256 actions of a rank in the middle of four, with 32
micro-batches of 4 slices, 74 to 87 are different in 1f1b; but 668 of 768 in zbv, and all in gpipe and at both ends of
the model, where micro-batches have tokens or labels of their own. One graph of a whole step: messages would be nodes in
it, ordered by what they depend on alone, and no longer by when the host launches them (`penstock.core.residency`).
"""

from __future__ import annotations

import contextlib
import functools
import gc
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from penstock.trainer.interpreter import Operation
from penstock.trainer.memory import held_bytes

SHARE = 128
"""Of a device's memory, graphs of a rank take at most this part, besides their pool."""


def can_record(device: torch.device) -> bool:
    """Whether ``device`` has graphs."""
    return device.type == "cuda"


def most_bytes(device: torch.device) -> int:
    """What graphs may take of ``device`` besides their pool; nothing on the CPU, which has none."""
    return torch.cuda.get_device_properties(device).total_memory // SHARE if can_record(device) else 0


def pool_bytes(action: Operation, device: torch.device) -> int:
    """Bytes of the pool that the action needs by itself."""
    graphs = Graphs(device)
    graphs.warm_up(action)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved(device)
    recorded = graphs.record(action)
    num_bytes = torch.cuda.memory_reserved(device) - before
    del recorded
    return num_bytes


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of all recordings, since cuBLAS keeps a workspace per stream; the default one cannot be recorded."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class Recordable:
    """An action that runs kernel by kernel until it is recorded. ``size`` orders actions by the memory they need."""

    def __init__(self, run: Operation, size: int) -> None:
        self.run, self.size = run, size

    def __call__(self) -> None:
        self.run()


@dataclass(frozen=True, slots=True, eq=False)
class Recorded:
    """A graph of ``action``, which keeps the tensors that the graph uses."""

    graph: torch.cuda.CUDAGraph
    action: Operation

    def __call__(self) -> None:
        self.graph.replay()


@contextlib.contextmanager
def _nothing_collected() -> Iterator[None]:
    """Python's collector stands still: where it finds a graph that is no longer used, to destroy it ends the recording
    that is under way.
    """
    is_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_enabled:
            gc.enable()


class Graphs:
    """Records actions on ``device``, into one pool of memory. What it recorded keeps the pool."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = _stream(device)

    def warm_up(self, action: Operation) -> None:
        """Run an action on the stream on which it will be recorded, between what was launched before and after."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            action()
        current.wait_stream(self._stream)

    def record(self, action: Operation) -> Recorded:
        """What replays the action on the current stream; nothing runs before that."""
        graph = torch.cuda.CUDAGraph()
        with _nothing_collected(), torch.cuda.stream(self._stream):
            # Threads of NCCL ask for the state of events meanwhile, which only this mode lets them
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                action()
            except BaseException:
                with contextlib.suppress(RuntimeError):  # it says no more than that the recording failed
                    graph.capture_end()
                raise
            with warnings.catch_warnings():  # of a stage that is only the head, backward launches nothing
                warnings.filterwarnings("ignore", "The CUDA Graph is empty")
                graph.capture_end()
        return Recorded(graph, action)

    def record_all(self, actions: Iterable[Recordable]) -> None:
        """Record actions and replay each once, the largest first, until graphs take `most_bytes`."""
        torch.cuda.empty_cache()  # what eager runs kept: the pool takes its place
        most = most_bytes(self._device) + self._bytes_beside_tensors()
        for action in sorted(actions, key=lambda action: -action.size):
            if self._bytes_beside_tensors() > most:
                break
            action.run = self.record(action.run)
            action.run()

    def _bytes_beside_tensors(self) -> int:
        """What is taken of the device and not by the allocator, in whose bytes the pool is."""
        return held_bytes(self._device) - torch.cuda.memory_reserved(self._device)
