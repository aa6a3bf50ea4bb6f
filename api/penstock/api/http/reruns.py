"""Retry and reproduction of a job: the manifest of a retry, and the commands that repeat a run."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Collection, Sequence

from penstock.core.job import ParallelismSpec, PipelineJob
from penstock.core.plan import Plan
from penstock.core.schedule import CSV, ScheduleSpec
from penstock.core.serialization import yamltext
from penstock.planner.compile import schedule_of

LONGEST_NAME = 63
OF_PENSTOCK = {"penstock": ("penstock-cli", "penstock-agent", "penstock-trainer")}
"""Packages to install for a recorded version."""

_NUMBERED = re.compile(r"(.+)-\d+")


def next_name(name: str, taken: Collection[str]) -> str:
    """Return the first free name with a number: for ``tiny`` it is ``tiny-2``, or ``tiny-3`` if that is taken.

    For ``tiny-2`` it is ``tiny-3`` if the name ``tiny`` is taken too, and ``tiny-2-2`` otherwise.
    """
    match = _NUMBERED.fullmatch(name)
    base = match[1] if match and match[1] in taken else name
    for number in itertools.count(2):
        end = f"-{number}"
        candidate = base[: LONGEST_NAME - len(end)].rstrip("-") + end
        if candidate not in taken:
            return candidate
    raise AssertionError("numbers do not end")


def name_stem(name: str) -> str:
    """Return the prefix of the taken names that `next_name` needs."""
    match = _NUMBERED.fullmatch(name)
    return (match[1] if match else name)[: LONGEST_NAME - 8]


def retried(job: PipelineJob, name: str, resume_from: str | None) -> PipelineJob:
    """Return the job under another name, from the checkpoint ``resume_from``, or from its original start."""
    begin = resume_from or job.spec.checkpoint.resume_from
    renamed = dataclasses.replace(job, metadata=dataclasses.replace(job.metadata, name=name, uid=""))
    return renamed.with_spec(
        checkpoint=dataclasses.replace(job.spec.checkpoint, resume_from=begin),
        run_policy=dataclasses.replace(job.spec.run_policy, suspend=False),
    )


def pinned(job: PipelineJob, plan: Plan) -> PipelineJob:
    """Return the job with all decisions of ``plan`` pinned, so that planning makes the same decisions again.

    Not pinned are stages that a job cannot pin (`Plan.blocks`) and the recomputation that follows from them: the
    planner chooses both again.
    """
    parallelism = ParallelismSpec(
        dp=plan.dp,
        tp=plan.tp,
        sequence_parallel=None if plan.sequence_parallel else False,
        pp=plan.pp,
        head_parts=plan.head_parts,
        zero=plan.zero,
        micro_batch=plan.microbatch,
        slices=plan.slices,
        schedule=_schedule(plan),
        stages=plan.blocks,
        recompute=plan.recompute_pin,
    )
    resources = dataclasses.replace(job.spec.resources, ranks=plan.num_ranks, min_ranks=None)
    return job.with_spec(parallelism=parallelism, resources=resources)


def _schedule(plan: Plan) -> str | ScheduleSpec:
    """Return the schedule by its name where the shape determines it, else as a list of actions that a job may pin.

    The plan's own recomputations are left out of the list: where it names one, its stage recomputes everything. A plan
    whose recomputations cannot be pinned keeps its schedule by name too: the planner chooses none for a list.
    """
    is_chosen = any(plan.recompute) and plan.recompute_pin is None and plan.schedule.generator != CSV
    if not plan.schedule.text or is_chosen:
        return plan.schedule.generator
    recorded = dataclasses.replace(plan, recompute=())
    return ScheduleSpec(generator=CSV, text=schedule_of(recorded).to_csv())


def commands(job: PipelineJob, server: str, packages: Sequence[tuple[str, str]]) -> tuple[str, ...]:
    """Return shell commands to run the job on the service at the URL ``server``, with these packages and versions."""
    file = f"{job.metadata.name}.yaml"
    versions = {name: version.partition("+")[0] for name, version in packages}
    constraint = "--constraint WHEELS/penstock.txt " if "penstock" in versions else ""
    requirements = " ".join(
        f"'{package}=={versions[name]}'" for name in versions for package in OF_PENSTOCK.get(name, (name,))
    )
    install = (f"pip install {constraint}{requirements}",) if requirements else ()
    document = f"cat > {file} <<'END'\n{yamltext.dump(job.to_manifest()).rstrip()}\nEND"
    return (*install, document, f"penstock submit {file} --server {server}")
