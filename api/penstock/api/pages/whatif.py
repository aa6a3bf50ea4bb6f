"""Plans for other hardware: six controls, and the answer of /v1/plans, which is redrawn after each change."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from penstock.api.pages.shell import Page
from penstock.api.pages.submit import EXAMPLE
from penstock.api.store.plan_requests import State, StoredRequest
from penstock.core.job import PipelineJob
from penstock.core.plan import Cost, Plan, RunTime
from penstock.core.serialization import yamltext
from penstock.core.speed import format_rate
from penstock.core.units import format_amount, format_bytes, format_seconds
from penstock.view.data import ReportData
from penstock.view.markup import Markup, element, join
from penstock.view.page import json_in_html
from penstock.view.report_plan import plan_section, why_section
from penstock.view.tables import card, facts, phase_badge

CLUSTER: dict[str, Any] = {
    "name": "what-if",
    "device": {"name": "A100-80GB", "peakFlops": 312e12, "memoryBytes": "80Gi", "memoryBandwidth": 2e12},
    "numNodes": 1,
    "devicesPerNode": 8,
    "intraNode": {"latencySeconds": 5e-6, "bytesPerSecond": 250e9},
    "interNode": {"latencySeconds": 1e-5, "bytesPerSecond": 22e9},
}
JOB: dict[str, Any] = {
    "metadata": {"name": "what-if"},
    "spec": {
        "model": {"family": "llama", "layers": 24, "hidden": 2048, "heads": 16, "vocab": 32768},
        "training": {"globalBatch": 8, "steps": 10_000, "precision": "bf16"},
        "resources": {"device": "cuda", "ranks": 8, "memoryPerRank": "80Gi"},
    },
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Control:
    """A number to choose. ``paths`` are the fields that it sets, and ``unit`` is appended there."""

    label: str
    paths: tuple[str, ...]
    values: tuple[float, ...]
    chosen: float
    unit: str = ""
    displayed_unit: str = ""


RANKS = Control(
    label="devices",
    paths=("job.spec.resources.ranks", "cluster.devicesPerNode"),
    values=(1, 2, 4, 8, 16, 32),
    chosen=8,
)
MEMORY = Control(
    label="memory of a device",
    paths=("job.spec.resources.memoryPerRank", "cluster.device.memoryBytes"),
    values=(16, 24, 40, 80, 141, 192),
    chosen=80,
    unit="Gi",
    displayed_unit="GiB",
)
BANDWIDTH = Control(
    label="bandwidth of a link",
    paths=("cluster.intraNode.bytesPerSecond",),
    values=(1, 5, 12, 25, 64, 250, 450),
    chosen=250,
    unit="e9",
    displayed_unit="GB/s",
)
BATCH = Control(
    label="sequences a step", paths=("job.spec.training.globalBatch",), values=(1, 2, 4, 8, 16, 64), chosen=8
)
PRICE = Control(
    label="price of a device hour",
    paths=("job.spec.pricePerDeviceHour",),
    values=(0.5, 1, 2, 4, 8),
    chosen=2,
)
LENGTH = Control(
    label="tokens a sequence",
    paths=("job.spec.data.sequenceLength",),
    values=(512, 1024, 2048, 4096, 8192),
    chosen=2048,
)


def whatif_page(namespace: str, like: PipelineJob | None = None) -> Page:
    """Return the page with controls and a place for the answer, for an example in ``namespace`` or for the job
    ``like``.
    """
    job = _example(namespace) if like is None else _resembling(like)
    base = f'<script type="application/json" id="base">{json_in_html({"job": job, "cluster": CLUSTER})}</script>'
    form = element("form", *map(_control, _controls(like)), *_further_searches(), id="whatif", class_="controls")
    parts = (
        element("div", element("h1", "What if"), class_="head"),
        element("p", *_words(like), class_="under"),
        card(form),
        element("div", id="problem", class_="card", role="alert", hidden=""),
        element("div", id="answer", aria_live="polite"),
        Markup(base),
    )
    return Page(title="What if", here="/whatif", body=join(parts), scripts=("whatif.js",))


def _example(namespace: str) -> dict[str, Any]:
    example = yamltext.load(EXAMPLE, "the example")
    metadata = {**JOB["metadata"], "namespace": namespace}
    return {**example, "metadata": metadata, "spec": {**example["spec"], **JOB["spec"]}}


def _resembling(like: PipelineJob) -> dict[str, Any]:
    """Return the job's model, training and price, without fields that depend on its devices and files."""
    made, spec = _example(like.metadata.namespace), like.to_manifest()["spec"]
    kept = {name: spec[name] for name in ("model", "training", "pricePerDeviceHour") if name in spec}
    made["metadata"]["name"] = like.metadata.name
    made["spec"] = {**made["spec"], **kept}
    return made


def _controls(like: PipelineJob | None) -> tuple[Control, ...]:
    """Return controls with the job's own values, so that the first answer is for the unchanged job."""
    if like is None:
        return RANKS, MEMORY, BANDWIDTH, BATCH, LENGTH, PRICE
    spec = like.spec
    return (
        _choosing(RANKS, spec.resources.ranks),
        MEMORY,
        BANDWIDTH,
        _choosing(BATCH, spec.training.global_batch),
        _choosing(LENGTH, spec.data.sequence_length),
        _choosing(PRICE, spec.price_per_device_hour or PRICE.chosen),
    )


def _choosing(control: Control, value: float) -> Control:
    return replace(control, values=tuple(sorted({*control.values, value})), chosen=value)


def _words(like: PipelineJob | None) -> tuple[str, ...]:
    rest = "on described devices. Nothing runs; move a control to plan again."
    if like is None:
        return (f"A model of 24 layers, width 2,048, {rest}",)
    meta, model = like.metadata, like.spec.model
    link = element("a", meta.name, href=f"/jobs/{meta.namespace}/{meta.name}")
    return "The model of ", link, f", {model.layers} layers, width {model.hidden:,}, {rest}"


def _further_searches() -> Iterator[Markup]:
    """The options ``frontier`` and ``whatIf``, which need further searches."""
    texts = {
        "frontier": "on fewer devices, and compare time and cost",
        "whatIf": "with faster links, more memory, a node more or fewer, more micro-batches, longer sequences",
    }
    for name, text in texts.items():
        box = element("input", type="checkbox", name=name)
        yield element("label", box, f" also plan {text}", class_="check")


def _control(control: Control) -> Markup:
    options = (_option(control, value) for value in control.values)
    select = element("select", *options, data_paths=" ".join(control.paths))
    return element("label", element("span", control.label), select)


def _option(control: Control, value: float) -> Markup:
    chosen = {"selected": ""} if value == control.chosen else {}
    return element("option", f"{value:,} {control.displayed_unit}".strip(), value=f"{value}{control.unit}", **chosen)


def answer_page(stored: StoredRequest, plan: Plan | None, run_time: RunTime | None, cost: Cost | None) -> Page:
    """Return the page with state and result of the request, and with ``cost`` if a price is known."""
    head = element("div", element("h1", stored.name), phase_badge(stored.state.value), class_="head")
    return Page(
        title=f"Plan of {stored.name}", here="/whatif", body=join((head, _answer(stored, plan, run_time, cost)))
    )


def _answer(stored: StoredRequest, plan: Plan | None, run_time: RunTime | None, cost: Cost | None) -> Markup:
    if stored.state is State.FAILED:
        remedies = [element("p", text) for text in (stored.error.get("remedy", ""),) if text]
        return card(element("strong", _mistake(stored)), *remedies, class_="failure")
    if plan is None:
        progress = stored.progress
        progress_text = (
            f"{progress.get('candidates', 0):,} candidates of {progress.get('divisions', 0):,} outlines simulated"
        )
        progress_text = f"{progress['change']}, {progress_text}" if progress.get("change") else progress_text
        return element("p", f"{stored.state.value}: {progress_text}.", class_="lead")
    data = ReportData(job=stored.name, phase="", command="", plan=plan)
    return join((_numbers(plan, run_time, cost), *(make(data).markup for make in (plan_section, why_section))))


def _mistake(stored: StoredRequest) -> str:
    where, what = stored.error.get("where", ""), stored.error.get("what", "there is no plan")
    return f"{where}: {what}" if where else f"{what}"


def _numbers(plan: Plan, run_time: RunTime | None, cost: Cost | None) -> Markup:
    prediction = plan.prediction
    if prediction is None:
        return Markup()
    tokens = plan.global_batch * plan.sequence_length / prediction.step_seconds
    speed = plan.speed()
    assert speed is not None, "a simulated step has a duration"
    return facts(
        {
            "step": format_seconds(prediction.step_seconds),
            "throughput": f"{tokens:,.0f} tokens/s",
            "of a device": f"{format_rate(speed.tokens_per_second_per_device)} tokens/s",
            **({"MFU": speed.utilization_text} if speed.utilization_text else {}),
            "memory": format_bytes(max(prediction.peak_bytes, default=0)),
            "waiting for other ranks": prediction.waiting_text,
            **({} if prediction.bubble is None else {"bubble": prediction.bubble.text}),
            **({} if run_time is None else {"all steps": format_seconds(run_time.seconds)}),
            **_interruptions(run_time),
            **_prices(cost),
        }
    )


def _interruptions(run_time: RunTime | None) -> dict[str, str]:
    if run_time is None or not run_time.interruptions:
        return {}
    return {
        "interruptions": f"{run_time.interruptions:.3g}",
        "time for interruptions": format_seconds(run_time.interruption_seconds),
    }


def _prices(cost: Cost | None) -> dict[str, str]:
    if cost is None:
        return {}
    return {
        "cost of an hour": format_amount(cost.per_hour),
        "of a million tokens": format_amount(cost.per_million_tokens),
        "of all steps": format_amount(cost.whole_job),
    }
