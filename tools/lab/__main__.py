"""Command of the lab: `python -m tools.lab VERB`. See docs/guides/cluster-lab.md."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from tools.lab import build, lab, state
from tools.lab.console import LabError

EXAMPLES = """\
examples:
  ./dev cluster up --nodes 3              start a lab with three nodes
  export KUBECONFIG=$(./dev cluster kubeconfig)
  ./dev cluster shape node2 100mbit       limit the link of node2
  ./dev cluster kill node2                kill its kubelet and containerd; `return node2` restarts them
  ./dev cluster down                      stop the lab and remove all of it
"""


def parser() -> argparse.ArgumentParser:
    """Return the parser of all verbs."""
    main_parser = argparse.ArgumentParser(
        prog="./dev cluster",
        description="Run a real Kubernetes cluster on this machine.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verbs = main_parser.add_subparsers(dest="verb", required=True)

    def verb(name: str, summary: str) -> argparse.ArgumentParser:
        verb_parser = verbs.add_parser(name, help=summary, description=summary)
        verb_parser.add_argument("--name", default=state.DEFAULT_NAME, help="name of the lab; default %(default)s")
        return verb_parser

    verb("build", "build everything into the cache, including Kueue and kwok")
    up = verb("up", "start a lab")
    up.add_argument("--nodes", type=int, default=2, help="number of nodes; default %(default)s")
    up.add_argument("--kueue", action="store_true", help="install Kueue")
    up.add_argument("--kwok", action="store_true", help="run kwok, which simulates nodes")
    verb("down", "stop a lab and remove all of it")
    verb("status", "print the addresses of a lab and which nodes are ready")
    verb("kubeconfig", "print the path of the kubeconfig")
    shape = verb("shape", "limit the link of a node, in both directions")
    shape.add_argument("node")
    shape.add_argument("rate", help="for example 100mbit or 1gbit; none removes the limit")
    cores = verb("cores", "set the number of cores that a node offers to pods")
    cores.add_argument("node")
    cores.add_argument("count", type=_count, help="for example 8; none resets it to the cores of this machine")
    verb("kill", "kill the kubelet and containerd of a node").add_argument("node")
    verb("return", "restart the kubelet and containerd of a node").add_argument("node")
    link = verb("link", "disconnect or connect a node")
    link.add_argument("node")
    link.add_argument("state", choices=("up", "down"))
    verb("load", "import an image into every node").add_argument("archive", type=Path, help="file from docker save")
    return main_parser


def _count(text: str) -> int | None:
    return None if text == "none" else int(text)


def execute(arguments: Sequence[str], run_verb: Callable[[argparse.Namespace], None]) -> int:
    """Parse the arguments and run the verb; return the exit code, 2 if the user has to do something first."""
    options = parser().parse_args(arguments)
    try:
        run_verb(options)
    except LabError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def do(options: argparse.Namespace) -> None:
    """Run the verb with the lab; raises `LabError` if the user has to do something first."""
    if options.verb == "build":
        lab.fill_cache(list(build.PARTS))
    elif options.verb == "up":
        lab.up(lab.Spec(name=options.name, num_nodes=options.nodes, kueue=options.kueue, kwok=options.kwok))
    elif options.verb == "down":
        lab.down(options.name)
    else:
        _do_with(state.read(options.name), options)


def _do_with(running: state.State, options: argparse.Namespace) -> None:
    """Run a verb that needs a running lab."""
    if options.verb == "status":
        print(lab.status(running))
    elif options.verb == "kubeconfig":
        print(running.kubeconfig)
    elif options.verb == "shape":
        lab.shape(running, options.node, options.rate)
    elif options.verb == "cores":
        lab.declare_cores(running, options.node, options.count)
    elif options.verb == "kill":
        lab.kill(running, options.node)
    elif options.verb == "return":
        lab.bring_back(running, options.node)
    elif options.verb == "link":
        lab.set_link(running, options.node, options.state)
    else:
        lab.load(running, options.archive)


if __name__ == "__main__":
    sys.exit(execute(sys.argv[1:], do))
