"""torchrun, but ranks are forked from it, once it has loaded what they need.

``python -m penstock.trainer.worker_agent MODULE TORCHRUN_ARGUMENT...`` is ``python -m torch.distributed.run
TORCHRUN_ARGUMENT...``. A rank that is started anew loads torch and what trains for two seconds, after torchrun has done
the same to watch it; forked it begins at once, and shares the memory of what was loaded. The forking is that of torch's
own agent, which torchrun uses for functions alone.

What is loaded may ask nothing of CUDA and rely on no thread: neither outlives a fork.
"""

from __future__ import annotations

import gc
import importlib
import runpy
import sys
import tempfile
from collections.abc import Sequence

from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.launcher.api import elastic_launch
from torch.distributed.run import config_from_args, parse_args

from penstock.trainer.ports import ANY_PORT, EVERYWHERE, free_port


@record
def main(arguments: Sequence[str]) -> None:
    """Start the ranks and wait for them; raises what torchrun raises when one fails or a signal comes."""
    preloaded, *rest = arguments
    options = parse_args(["--start-method=fork", *rest])  # type: ignore[no-untyped-call]
    if preloaded:
        importlib.import_module(preloaded)
    if options.master_port == ANY_PORT:
        options.master_port = free_port(EVERYWHERE)
    config, _, _ = config_from_args(options)
    tempfile.tempdir = options.log_dir  # torch leaves a file there for a rank that a signal ended
    gc.freeze()  # or the first collection in every rank would write to what they share
    elastic_launch(config, run_module)(options.training_script, options.training_script_args)


def run_module(module: str, arguments: Sequence[str]) -> None:
    """Be ``python -m module arguments...``."""
    tempfile.tempdir = None
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1:])
