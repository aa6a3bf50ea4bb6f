"""A torchrun that forks CPU ranks from an agent process that has already imported their modules.

``python -m penstock.trainer.worker_agent MODULE TORCHRUN_ARGUMENT...`` does the same as ``python -m
torch.distributed.run TORCHRUN_ARGUMENT...``, except for ``--start-method``:

- ``fork``: the agent imports MODULE, and torch's own agent forks the ranks. A rank that starts as a new Python process
  imports torch and the trainer for two seconds, after the agent has imported torch as well. A forked rank starts
  immediately and shares the memory of the imported modules. Only CPU ranks may be forked: torch's ``LaunchConfig``
  queries accelerators in the agent, and CUDA does not work in a process that was forked after such a query. Threads do
  not survive a fork either.
  A lock that another thread holds at a fork stays locked in the new process. The agent's store has a thread that looks
  up the host name of every client, and glibc does that under a lock (``resolv_conf.c``). A rank that was forked while
  an earlier one connected waited forever for that lock when it connected itself. So every rank waits until the last
  one of its host is forked.
- ``spawn``: every rank is a new Python process, as under plain torchrun, and the agent imports nothing. CUDA ranks need
  it.
"""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import runpy
import sys
import tempfile
import time
from collections.abc import Sequence

from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.launcher.api import elastic_launch
from torch.distributed.run import config_from_args, parse_args

from penstock.core.host.ports import ANY_PORT, EVERYWHERE, free_port

POLL_SECONDS = 0.001
"""Interval at which a rank checks that all ranks are forked. Each fork takes a few milliseconds."""


@record
def main(arguments: Sequence[str]) -> None:
    """Start the ranks and wait for them. Raises torchrun's errors if a rank fails or a signal comes."""
    preloaded, *rest = arguments
    options = parse_args(rest)  # type: ignore[no-untyped-call]
    is_forking = options.start_method == "fork"
    if is_forking and preloaded:
        importlib.import_module(preloaded)
    if options.master_port == ANY_PORT:
        options.master_port = free_port(EVERYWHERE)
    config, python, python_arguments = config_from_args(options)
    # Ranks that torch binds to a device's cores would count fewer cores than `machine_key` did for the profile's key.
    config.numa_options = None
    tempfile.tempdir = options.log_dir  # torch leaves a temporary file for a rank that a signal ended
    if is_forking:
        gc.freeze()  # otherwise the first collection in every rank would write to the shared pages
        forked = multiprocessing.get_context("fork").Semaphore(0)

        def run_rank(module: str, arguments: Sequence[str]) -> None:
            forked.release()
            while forked.get_value() < config.nproc_per_node:
                time.sleep(POLL_SECONDS)
            run_module(module, arguments)

        elastic_launch(config, run_rank)(options.training_script, options.training_script_args)
    else:
        elastic_launch(config, python)(*python_arguments)


def run_module(module: str, arguments: Sequence[str]) -> None:
    """Do what ``python -m module arguments...`` does, in this process."""
    tempfile.tempdir = None
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1:])
