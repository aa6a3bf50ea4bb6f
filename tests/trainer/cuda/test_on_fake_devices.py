"""The trainer's CUDA seams on torch's own allocator and events, in a process under the fake CUDA runtime."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from penstock.trainer.comm import MAX_BLOCKS
from tests.support.fakecuda.build import environment
from tests.support.fakecuda.nccl_log import MADE, read_logs
from tests.support.training_run import make_run, tiny_job, tiny_plan, write_corpus

SCRIPT = """
import ctypes, json, time, torch
from penstock.trainer import memory
from penstock.trainer.recorder import CudaRecorder, make_recorder, waits_on
from penstock.trainer.worker import own_device

device = own_device(1, torch.cuda.device_count())
torch.cuda.set_device(device)
waits = ctypes.CDLL(None).fakecuda_waits
held = torch.empty(3 * 2**20, dtype=torch.uint8, device=device)
torch.empty(5 * 2**20, dtype=torch.uint8, device=device)
before_reset = memory.peak_tensor_bytes(device)
memory.reset_peak(device)

class Slow:
    def wait(self):
        time.sleep(0.02)

shard_waits = waits_on(device)
recorder = CudaRecorder(2, clock=lambda: 7_000_000_000, waits=shard_waits)
before = waits()
for step in range(2):
    shard_waits.wait(Slow())  # outside of a step
    for position in range(3):
        recorder.mark(position)
        if position < 2:
            shard_waits.wait(Slow())
            shard_waits.wait(Slow())
marked = waits() - before
try:
    torch.empty(2**30, dtype=torch.uint8, device=device)
    fits = True
except torch.OutOfMemoryError:
    fits = False
print(json.dumps({
    "device": str(device), "recorder": type(make_recorder(2, shard_waits)).__name__, "peaks": [before_reset,
    memory.peak_tensor_bytes(device)], "times": recorder.times_ns().tolist(), "waits": marked, "fits": fits,
    "shards": recorder.waits_ns().tolist(), "count": shard_waits.count,
}))
"""

SEAMS = """
import ctypes, functools, json, torch
from penstock.trainer import memory
from penstock.trainer.clock import CudaTimer, action_timer
from penstock.trainer.units.backends import build_backend

MIB = 2**20
runtime = ctypes.CDLL(None)
old, new = torch.device("cuda", 1), torch.device("cuda", 0)
chosen = [type(build_backend(device, torch.bfloat16, 64, 128)).__name__ for device in (old, new)]

timer, tensor = action_timer(new, is_recorded=False), torch.ones(4, device=new)
launches, waits, seen = runtime.fakecuda_launches(), runtime.fakecuda_waits(), []
def action(name):
    seen.append((name, runtime.fakecuda_waits() - waits))
    tensor.add_(1)
taken = timer([functools.partial(action, name) for name in "abc"])()
timing = {
    "timer": type(timer).__name__, "seen": seen, "launches": runtime.fakecuda_launches() - launches,
    "waits": runtime.fakecuda_waits() - waits, "device": [t.device for t in taken], "host": [t.host for t in taken],
}

torch.cuda.set_device(old)
memory.release_unused(old)
start = memory.held_bytes(old)
runtime.cudaMalloc(ctypes.byref(ctypes.c_void_p()), ctypes.c_size_t(5 * MIB))  # as the context and NCCL do
extra = memory.held_bytes(old) - start
memory.reset_peak(old)
large = torch.empty(64 * MIB, dtype=torch.uint8, device=old)
small = torch.empty(32 * MIB, dtype=torch.uint8, device=old)
del large
kept = memory.held_bytes(old) - start
memory.release_unused(old)
print(json.dumps({
    "chosen": chosen, "timing": timing, "extra": extra, "kept": kept, "held": memory.held_bytes(old) - start,
    "peak": memory.peak_bytes(old) - start, "tensors": memory.tensor_bytes(old),
    "peak_tensors": memory.peak_tensor_bytes(old),
}))
"""

GRAPHS = """
import ctypes, functools, gc, json, torch
from unittest import mock
from penstock.trainer import graphs as module
from penstock.trainer.clock import action_timer
from penstock.trainer.graphs import MEASURED_GRAPHS, Graphs, Recordable, graph_bytes, pool_bytes

MIB, runtime, device = 2**20, ctypes.CDLL(None), torch.device("cuda", 0)
torch.cuda.set_device(device)
tensor = torch.ones(4 * MIB, device=device)

def counts():
    return [runtime.fakecuda_launches(), runtime.fakecuda_graph_launches(), runtime.fakecuda_waits()]

def since(before):
    return [now - earlier for now, earlier in zip(counts(), before)]

def action(num_kernels=2):
    for _ in range(num_kernels):
        torch.mm((tensor * 2).view(2048, 2048), tensor.view(2048, 2048))

graphs, before = Graphs(device), counts()
graphs.warm_up(action)
warmed, before = since(before), counts()
replay = graphs.record(action)
recorded, pool = since(before), torch.cuda.memory_reserved(device)
others = [graphs.record(functools.partial(action, count)) for count in (1, 3)]
shared, before = torch.cuda.memory_reserved(device) - pool, counts()
replay()
replayed = since(before)

def refused(what):
    try:
        Graphs(device).record(what)
    except RuntimeError:
        return True
    return False

take, before = action_timer(device)([functools.partial(action, count) for count in (5, 1, 5)]), counts()
taken = [take() for _ in range(2)]
timed = since(before)

with mock.patch.object(module, "bytes_outside_allocator", side_effect=[MIB * count for count in (0, 0, 4, 8, 9)]):
    actions = [Recordable(action, num_tokens) for num_tokens in (1, 4, 3, 2, 5)]
    Graphs(device).record_all(actions)
sizes = [each.num_tokens for each in actions if each.run is not action]
blocks = [2 * MIB * (count // 4) for count in range(MEASURED_GRAPHS + 1)]  # a block for every fourth graph
with mock.patch.object(module, "bytes_outside_allocator", side_effect=blocks):
    graph = graph_bytes(action, device)
pool = pool_bytes(functools.partial(action, 1), device)

garbage, thresholds = [graphs.record(action)], gc.get_threshold()
garbage.append(garbage)
del garbage  # which the collector alone finds, at its next turn
graphs.record(lambda: (gc.set_threshold(1), action(), [[] for _ in range(1000)]))
gc.set_threshold(*thresholds)
collects = gc.isenabled()
refusals = [refused(what) for what in (
    lambda: tensor.sum().item(), lambda: tensor.cpu(), lambda: tensor[tensor > 1], torch.cuda.synchronize)]
print(json.dumps({
    "warmed": warmed, "recorded": recorded, "shared": shared, "replayed": replayed, "refusals": refusals, "pool": pool,
    "sizes": sizes, "timed": timed, "seconds": [[each.device for each in one] for one in taken],
    "collects": collects, "launching": [[each.host for each in one] for one in taken], "graph": graph,
}))
"""

STEPPING = """
import ctypes, json, os, sys, torch, torch.distributed as dist
from itertools import pairwise
from pathlib import Path
from penstock.trainer.comm import ProcessGroups
from penstock.trainer.loop import Stopwatch
from penstock.core.run.folder import RunDir
from penstock.trainer.session import Session
from penstock.core.run.rank_status import StatusFile
from penstock.trainer.worker import Worker, set_precision

run = RunDir(Path(sys.argv[1]))
runtime = ctypes.CDLL(None)
counts = [runtime.fakecuda_waits, runtime.fakecuda_slow_uploads, runtime.fakecuda_allocations,
          runtime.fakecuda_launches, runtime.fakecuda_graph_launches]
device = torch.device("cuda", 0)
torch.cuda.set_device(device)
set_precision()
dist.init_process_group("cpu:gloo,cuda:nccl", init_method=f"file://{run.root}/store", rank=0, world_size=1)
with torch.no_grad():
    worker = Worker(rank=0, num_ranks=1, device=device, groups=ProcessGroups(device),
                    status=StatusFile(run.root / "status-0", os.getpid()), stop_requested=lambda: False)
    session = Session(run, worker)
    session.restore()
    before = runtime.fakecuda_launches()
    session.warm_up()
    warmed = runtime.fakecuda_launches() - before
    stopwatch, steps = Stopwatch(session), []
    for step in range(5):
        before = [count() for count in counts]
        stopwatch.step(step)
        steps.append([count() - earlier for count, earlier in zip(counts, before)])

    class Tally:
        marks = []

        def mark(self, position):
            self.marks.append([runtime.fakecuda_launches(), runtime.fakecuda_graph_launches()])

    session.runtime.train_step(5, session.batch(5), Tally())
    launched = [[later - earlier for earlier, later in zip(*pair)] for pair in pairwise(Tally.marks)]
    is_compute = [each.action.is_compute for each in session.program.ranks[0].instructions]
print(json.dumps({
    "compute": [each for each, computes in zip(launched, is_compute) if computes],
    "graphs_of_others": sum(graphs for (_, graphs), computes in zip(launched, is_compute) if not computes),
    "warmed": warmed, "steps": steps, "precision": torch.get_float32_matmul_precision(),
    "tf32": torch.backends.cuda.matmul.allow_tf32,
}))
"""

JOINING = """
import os, torch, torch.distributed as dist
from penstock.core.mesh import Mesh
from penstock.core.model import Family
from penstock.planner.compile import program_of
from penstock.trainer.comm import ProcessGroups, open_transport
from tests.support.small_plans import small_plan

rank = int(os.environ["RANK"])
device = torch.device("cuda", rank)
torch.cuda.set_device(device)
backend, store = "cpu:gloo,cuda:nccl", os.environ["STORE"]
dist.init_process_group(backend, init_method=store, rank=rank, world_size=2, device_id=device)
open_transport(program_of(small_plan(family=Family.GPT2, pp=2)), Mesh(dp=1, pp=2), rank, ProcessGroups(device))
dist.barrier()
dist.destroy_process_group()
"""


def test_a_channel_has_a_separate_stream_and_a_communicator_with_few_thread_blocks(tmp_path: Path) -> None:
    variables = {**os.environ, **environment(devices=2, device_bytes=2**29, log=tmp_path)}
    variables["STORE"] = f"file://{tmp_path}/store"
    ranks = [
        subprocess.Popen([sys.executable, "-c", JOINING], env={**variables, "RANK": str(rank)}, stderr=subprocess.PIPE)
        for rank in range(2)
    ]
    for rank in ranks:
        _, errors = rank.communicate()
        assert rank.returncode == 0, errors.decode()
    for log in read_logs(tmp_path):
        channels = {line.communicator for line in log.messages}
        assert len(channels) == 2, "activations one way, gradients the other"
        assert len({line.stream for line in log.messages}) == 2
        for line in log.lines:
            if line.operation == MADE:
                assert line.max_ctas == (MAX_BLOCKS if line.communicator in channels else 0)


def test_memory_kernels_and_times_are_those_of_the_device() -> None:
    """Device 0 is of capability 9.0, device 1 of 7.5, which has no FlashAttention-2."""
    seen = _run(SEAMS, environment(devices=2, device_bytes=2**29, capabilities="90,75"))
    assert seen["chosen"] == ["PlainAttention", "CudaFlash"]
    timing = seen["timing"]
    assert timing["timer"] == "CudaTimer"
    assert timing["seen"] == [["a", 0], ["b", 0], ["c", 0]], "no pass waits for the one before"
    assert (timing["launches"], timing["waits"]) == (4, 1), "a head start and three passes, and one wait at the end"
    assert len(timing["device"]) == 3
    assert min(timing["device"]) >= 0
    assert all(0 < host < 1 for host in timing["host"])
    mebibytes = {name: count / 2**20 for name, count in seen.items() if name not in ("chosen", "timing")}
    assert mebibytes == {
        "extra": 5,
        "kept": 5 + 64 + 32,  # what the allocator keeps is taken of the device
        "held": 5 + 32,
        "peak": 5 + 64 + 32,
        "tensors": 32,
        "peak_tensors": 64 + 32,
    }


def _run(script: str, variables: Mapping[str, str], *arguments: str) -> Any:
    """Run the script in a separate process and return its output."""
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_step_waits_once_and_does_nothing_for_the_first_time(
    precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Step 4 is sampled for a timeline, which takes two waits more."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    job = tiny_job(write_corpus(tmp_path / "corpus"), precision=precision, steps=40)
    run = make_run(tmp_path / "run", job, tiny_plan(job, pp=1, schedule="zb-h1"))
    seen = _run(STEPPING, environment(devices=1, device_bytes=2**30), str(run.root))
    assert (seen["precision"], seen["tf32"]) == ("highest", False)
    waits, slow_uploads, allocations, launches, graphs = zip(*seen["steps"], strict=True)
    assert waits == (1, 1, 1, 1, 3)
    assert slow_uploads == (0,) * 5, "batches come from pinned memory"
    assert allocations == (0,) * 5, "what a step takes of the device was allocated by the warm-up"
    assert len(set(launches)) == 1
    assert seen["compute"] == [[1, 1]] * graphs[0], "each action launches one graph and nothing else"
    assert set(graphs) == {len(seen["compute"])}
    assert seen["graphs_of_others"] == 0
    assert seen["warmed"] > launches[0], "each shape kernel by kernel, then every graph, and the end of a step"


def test_actions_are_recorded_into_one_pool_and_replayed_by_one_launch() -> None:
    seen = _run(GRAPHS, environment(devices=1, device_bytes=2**30))
    assert seen["warmed"] == [4, 0, 0], "two passes over the tensor and two products"
    launches, *others = seen["recorded"]
    assert launches in (0, 2), "nothing runs; torch 2.11 clears its generator's state, which no pass reads"
    assert others == [0, 0]
    assert seen["shared"] == 0, "the second graph finds the memory of the first one"
    assert seen["replayed"] == [1, 1, 0]
    assert seen["refusals"] == [True] * 4, "what waits for the device cannot be recorded"
    assert seen["timed"] == [2, 2, 2], "a visit is one graph, and one wait"
    assert [len(one) for one in seen["seconds"]] == [3, 3]
    assert min(map(min, seen["seconds"])) >= 0
    first, second = seen["launching"]
    assert first == second, "launches are timed once, before the visit is recorded"
    assert 0 < first[1] < min(first[0], first[2]), "five products take longer to launch than one"
    assert seen["graph"] == 2**19, "a quarter of a block"
    assert seen["collects"], "no graph was destroyed while another was recorded, and the collector goes on"
    assert seen["pool"] == 32 * 2**20, "two temporaries of 16 MiB"
    assert seen["sizes"] == [4, 3, 5], "the largest first, until graphs take 8 MiB, a 128th of the device"


def test_memory_and_times_come_from_torch_itself() -> None:
    seen = _run(SCRIPT, environment(devices=2, device_bytes=2**29))
    assert (seen["device"], seen["recorder"]) == ("cuda:1", "CudaRecorder")
    assert seen["peaks"] == [8 * 2**20, 3 * 2**20], "what torch allocated, since the last reset"
    first, *later = seen["times"]
    assert first == 7_000_000_000, "the first mark is at the host's clock"
    assert later == sorted(later)
    assert later[0] >= first
    assert seen["waits"] == 2, "only the first mark of a step waits for the device"
    at_start, after_first, after_second = seen["shards"]
    assert at_start == 0
    assert after_first >= 40_000_000, "two waits of 20 ms each"
    assert after_second - after_first >= 40_000_000
    assert seen["count"] == 4, "of the newest step alone"
    assert not seen["fits"], "a device has no more memory than it was given"


def test_a_function_that_is_not_implemented_aborts_with_its_name() -> None:
    variables = environment(devices=1, device_bytes=2**29)
    script = "import torch\ntorch.zeros(1, device='cuda')\ntorch.cuda.cudart().cudaProfilerStart()"
    done = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, **variables}, capture_output=True, text=True, check=False
    )
    assert done.returncode < 0
    assert re.search(r"fakecuda: cuda\w+ was called, and tests/support/fakecuda does not implement it", done.stderr)
