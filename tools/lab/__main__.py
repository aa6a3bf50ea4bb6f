"""The lab's command: `python -m tools.lab VERB`. See docs/guides/cluster-lab.md."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from tools.lab import build, lab, state
from tools.lab.console import LabError


def parser() -> argparse.ArgumentParser:
    """Every verb with its arguments."""
    whole = argparse.ArgumentParser(prog="./dev cluster", description="A real Kubernetes on this machine.")
    verbs = whole.add_subparsers(dest="verb", required=True)

    def verb(name: str, summary: str) -> argparse.ArgumentParser:
        made = verbs.add_parser(name, help=summary, description=summary)
        made.add_argument("--name", default=state.DEFAULT_NAME, help="which lab; default %(default)s")
        return made

    verb("build", "fill the cache with all that a lab may need")
    up = verb("up", "start a lab")
    up.add_argument("--nodes", type=int, default=2, help="how many; default %(default)s")
    up.add_argument("--kueue", action="store_true", help="with Kueue")
    up.add_argument("--kwok", action="store_true", help="with kwok, for nodes that only seem to be there")
    verb("down", "end a lab without a trace")
    verb("status", "say what runs")
    verb("kubeconfig", "print the path of its kubeconfig")
    shape = verb("shape", "limit a node's card")
    shape.add_argument("node")
    shape.add_argument("rate", help="such as 100mbit or 1gbit; none for no limit")
    cores = verb("cores", "let a node offer so many cores, whatever this machine has")
    cores.add_argument("node")
    cores.add_argument("count", type=_count, help="such as 8; none for those of this machine")
    verb("kill", "end a node's kubelet and containerd at once").add_argument("node")
    verb("return", "start them again").add_argument("node")
    link = verb("link", "pull a node's cable, or plug it in")
    link.add_argument("node")
    link.add_argument("state", choices=("up", "down"))
    verb("load", "give every node an image").add_argument("archive", type=Path, help="as docker save writes it")
    return whole


def _count(text: str) -> int | None:
    return None if text == "none" else int(text)


def carried_out(arguments: Sequence[str], do: Callable[[argparse.Namespace], None]) -> int:
    """Have done what the arguments say; the exit code is 2 where the user has to do something first."""
    said = parser().parse_args(arguments)
    try:
        do(said)
    except LabError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def do(said: argparse.Namespace) -> None:
    """Do it with the lab."""
    if said.verb == "build":
        lab.fill_cache(list(build.PARTS))
    elif said.verb == "up":
        lab.up(lab.Wanted(name=said.name, num_nodes=said.nodes, kueue=said.kueue, kwok=said.kwok))
    elif said.verb == "down":
        lab.down(said.name)
    else:
        _do_with(state.read(said.name), said)


def _do_with(found: state.State, said: argparse.Namespace) -> None:
    """The verbs that are about a lab that is up."""
    if said.verb == "status":
        print(lab.status(found))
    elif said.verb == "kubeconfig":
        print(found.kubeconfig)
    elif said.verb == "shape":
        lab.shape(found, said.node, said.rate)
    elif said.verb == "cores":
        lab.declare_cores(found, said.node, said.count)
    elif said.verb == "kill":
        lab.kill(found, said.node)
    elif said.verb == "return":
        lab.bring_back(found, said.node)
    elif said.verb == "link":
        lab.set_link(found, said.node, said.state)
    else:
        lab.load(found, said.archive)


if __name__ == "__main__":
    sys.exit(carried_out(sys.argv[1:], do))
