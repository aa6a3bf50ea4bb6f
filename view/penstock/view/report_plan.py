"""The report's sections on the plan: its picture, why it was chosen, and the step as predicted and as measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from penstock.core.comparison import prediction_error
from penstock.core.explanation import Explanation, Trial, Variation
from penstock.core.layout import num_parameters
from penstock.core.plan import Alternative, Plan, Prediction
from penstock.core.recomputation import RecomputeTime, over_ranks, recompute_times
from penstock.core.speed import Speed, speed_columns
from penstock.core.timeline import Timeline
from penstock.core.units import format_bytes, format_count, format_seconds, to_seconds
from penstock.view.axis import TimeUnit, large, signed, time_unit
from penstock.view.data import ReportData
from penstock.view.frontier import frontier_card
from penstock.view.gantt import MAX_SPANS, SOURCE_NAMES, gantt
from penstock.view.markup import Markup, element, join
from penstock.view.rows import rank_name
from penstock.view.section import Section, left_out
from penstock.view.stages import recomputation_text, stage_name, stages
from penstock.view.tables import card, drawing, facts, paragraphs, table

WIDE: Final = 1118
NARROW: Final = 334
NUM_ALTERNATIVES: Final = 5
NUM_REJECTED: Final = 12
_NONE: Final = Markup()


def plan_section(data: ReportData) -> Section:
    """The plan: stages by slices to scale, and the numbers behind them."""
    if data.plan is None:
        return left_out("plan", "The plan", "this run has no plan; it ended before planning.")
    plan = data.plan
    picture = drawing(stages(plan, width=WIDE), stages(plan, width=NARROW))
    return Section(anchor="plan", title="The plan", body=Markup(plan_facts(plan) + picture + _recomputation(plan)))


def _recomputation(plan: Plan) -> Markup:
    """The units that stages recompute before their backwards; empty where all keep everything."""
    rows = [
        (stage_name(plan, stage), recomputation_text(plan, stage) or "nothing") for stage in range(len(plan.stages))
    ]
    if not any(plan.recompute):
        return _NONE
    return card(table(("stage", "recomputes before its backwards"), rows), title="Recomputation by stage")


def plan_facts(plan: Plan) -> Markup:
    """The plan's own numbers in a line."""
    mesh = [f"dp {plan.dp}"] * (plan.dp > 1) + [f"tp {plan.tp}"] * (plan.tp > 1) + [f"pp {plan.pp}"]
    return facts(
        {
            "mesh": " × ".join(mesh) + plan.shards_text + plan.head_text,
            "schedule": plan.schedule.generator,
            "micro-batches": _microbatches(plan),
            "slices": plan.slices_text,
            **({"optimizer state": _optimizer_state(plan)} if plan.dp > 1 else {}),
            "receive ahead": f"{plan.receive_ahead}{', posted late' if plan.late_receives else ''}",
            "precision": plan.precision.value,
        }
    )


def _optimizer_state(plan: Plan) -> str:
    if plan.zero:
        return f"sharded over {plan.dp} replicas (ZeRO-{plan.zero})"
    return f"whole on each of {plan.dp} replicas"


def _microbatches(plan: Plan) -> str:
    sequences = f"{plan.num_alike} of {format_count(plan.microbatch, 'sequence')}"
    return f"{sequences} and one of {plan.remainder}" if plan.remainder else sequences


def model_text(plan: Plan) -> str:
    """The model and the run in a sentence."""
    model = plan.model
    size = large(num_parameters(model))
    return (
        f"A {model.family.value} of {format_count(model.layers, 'layer')}, width {model.hidden:,}, {size} parameters, "
        f"trained on {format_count(plan.num_ranks, 'rank')} with sequences of {plan.sequence_length:,} tokens."
    )


def why_section(data: ReportData) -> Section:
    """Why this plan: its reasons, the parts of its step, trials, variations, and the next best and rejected plans."""
    anchor, title = "why", "Why this plan"
    plan = data.plan
    if plan is None:
        return left_out(anchor, title, "there is no plan to explain.")
    if not (plan.reasons or plan.prediction or plan.alternatives):
        return left_out(anchor, title, "the plan carries no reasons; it was written by hand or pinned in the manifest.")
    parts = []
    if plan.reasons:
        items = (element("li", reason) for reason in plan.reasons)
        parts.append(card(element("ul", *items, class_="reasons"), class_="seven" if plan.prediction else "full"))
    if plan.prediction:
        parts.append(_step_parts(plan, plan.prediction, "five" if plan.reasons else "full"))
    explanation = plan.prediction.explanation if plan.prediction else None
    details = tuple(_details(explanation)) if explanation else ()
    body = join((element("div", *parts, class_="grid"), *details, _alternatives(plan), _rejected(plan)))
    return Section(anchor=anchor, title=title, body=body)


def _details(explanation: Explanation) -> Iterator[Markup]:
    if explanation.frontier is not None:
        yield frontier_card(explanation.frontier)
    yield _trials(explanation.trials)
    yield _variations(explanation.variations)


_PARTS: Final = (
    ("compute", "compute_seconds", "series-1"),
    ("waiting", "bubble_seconds", "other"),
    ("communication", "communication_seconds", "series-2"),
    ("reduction", "reduction_seconds", "series-3"),
    ("optimizer", "optimizer_seconds", "series-4"),
)


def _step_parts(plan: Plan, prediction: Prediction, class_: str) -> Markup:
    whole = prediction.step_seconds or 1.0
    of_all = dict(_all_ranks(prediction))
    shares = [(name, getattr(prediction, field), colour) for name, field, colour in _PARTS]
    bar = (
        element("i", style=f"flex:{seconds / whole:.5f};background:var(--{colour})") for _, seconds, colour in shares
    )
    rows = [
        (_named_swatch(name, colour), format_seconds(seconds), f"{seconds / whole:.1%}", *of_all.get(name, ()))
        for name, seconds, colour in shares
    ]
    blank = ("", "", "") if of_all else ("",)
    rows.append((element("b", "step"), format_seconds(prediction.step_seconds), *blank))
    if prediction.low_seconds is not None and prediction.high_seconds is not None:
        rows.append((element("span", "from"), format_seconds(prediction.low_seconds), *blank))
        rows.append((element("span", "to"), format_seconds(prediction.high_seconds), *blank))
    strip = element("div", *bar, class_="parts", role="img", aria_label="shares of the step, listed below")
    headers = ("busiest rank", "predicted", "share", *(("mean", "most") if of_all else ()))
    listing = table(headers, rows, numbers=tuple(range(1, len(headers))))
    notes = _speed_notes(plan, prediction)
    notes += ["Mean and most are shares of the step over all ranks."] if of_all else []
    notes += [f"Waiting for other ranks, over all ranks: {prediction.waiting_text}."]
    notes += [f"Bubble: {prediction.bubble.text}."] if prediction.bubble else []
    notes += [f"Warning: {warning}." for warning in prediction.warnings]
    return card(strip, listing, paragraphs(notes), title="Where a step goes", class_=class_)


def _all_ranks(prediction: Prediction) -> Iterator[tuple[str, tuple[str, str]]]:
    """Each part's share of the step, as the mean over ranks and the largest of one."""
    parts = prediction.explanation.parts if prediction.explanation else None
    if parts is not None:
        for (name, lost), (part_name, _, _) in zip(parts.named, _PARTS, strict=True):
            assert name.startswith(part_name), "parts come in one order"
            yield part_name, (f"{lost.mean:.1%}", f"{lost.worst:.1%}")


def _speed_notes(plan: Plan, prediction: Prediction) -> list[str]:
    speed = plan.speed()
    if speed is None:
        return []
    if prediction.peak_flops is None:
        return [f"Speed: {speed.text}."]
    peak = f"{prediction.peak_flops / 1e12:,.4g} TFLOP/s per device"
    convention = f"MFU counts the model's FLOPs over causal pairs, nothing that is computed twice, of {peak}."
    return [f"Speed: {speed.text}. {convention}"]


def _trials(trials: Sequence[Trial]) -> Markup:
    """Plans that were run for a few steps, in the order of their predictions."""
    if not trials:
        return Markup()
    rows: list[tuple[str, ...]] = []
    speeds = speed_columns([trial.measured_speed for trial in trials])
    for trial, fast in zip(trials, speeds.rows, strict=True):
        measured, predicted = trial.measured_seconds, trial.predicted_seconds
        if measured is None:
            rows.append((trial.plan, format_seconds(predicted), "", *fast, "", f"failed: {trial.failure}"))
            continue
        error, result = signed(prediction_error(predicted, measured)), "kept" if trial.chosen else "slower"
        rows.append((trial.plan, format_seconds(predicted), format_seconds(measured), *fast, error, result))
    chosen = next((i for i, trial in enumerate(trials) if trial.chosen), None)
    headers = ("plan", "predicted", "measured", *speeds.headers, "error", "result")
    listing = table(headers, rows, numbers=range(1, len(headers) - 1), chosen=chosen)
    spread = max(trial.spread for trial in trials)
    text = f"Measured is the median of steps after warm-up, whose interquartile range was up to {spread:.0%} of it."
    text += " Speeds are those of measured steps." if speeds.headers else ""
    note = element("p", text, class_="note")
    return card(listing, note, title="Plans that were run before one was kept")


def _variations(variations: Sequence[Variation]) -> Markup:
    """Predicted speeds of changed jobs and hardware, the most helpful first."""
    if not variations:
        return Markup()
    rows: list[tuple[str, ...]] = []
    speeds = speed_columns([variation.speed for variation in variations])
    for variation, fast in zip(variations, speeds.rows, strict=True):
        step = "" if variation.step_seconds is None else format_seconds(variation.step_seconds)
        gain = "" if variation.gain is None else signed(variation.gain)
        rows.append((variation.change, step, *fast, gain, variation.refusal or variation.how))
    headers = ("change", "step", *speeds.headers, "gain", "how")
    note = element("p", "Gain is in tokens per second per device.", class_="note")
    return card(table(headers, rows, numbers=range(1, len(headers) - 1)), note, title="What would help")


def _named_swatch(name: str, colour: str) -> Markup:
    return Markup(element("span", class_="swatch", style=f"background:var(--{colour})") + element("span", name))


def _alternatives(plan: Plan) -> Markup:
    """The chosen plan above the next best ones."""
    timed = [(a.step_seconds, a) for a in plan.alternatives if a.step_seconds is not None]
    if not timed:
        return Markup()
    timed = sorted(timed, key=lambda pair: pair[0])[:NUM_ALTERNATIVES]
    best = plan.prediction
    chosen = [plan.speed()] if best else []
    speeds = speed_columns([*chosen, *(alternative.speed for _, alternative in timed)])
    rows: list[tuple[str, ...]] = []
    if best:
        label = f"{plan.schedule.generator}, {format_count(len(plan.slices), 'slice')}, pp {plan.pp}"
        peak = format_bytes(max(best.peak_bytes, default=0))
        rows.append((label, format_seconds(best.step_seconds), *speeds.rows[0], "", peak, "chosen"))
    for (seconds, alternative), fast in zip(timed, speeds.rows[len(chosen) :], strict=True):
        slower = signed(seconds / best.step_seconds - 1) if best and best.step_seconds else ""
        rows.append((alternative.label, format_seconds(seconds), *fast, slower, _peak(alternative), alternative.reason))
    headers = ("plan", "step", *speeds.headers, "slower", "peak memory", "why not")
    listing = table(headers, rows, numbers=range(1, len(headers) - 1), chosen=0 if best else None)
    return card(listing, title="The next best plans")


def _peak(alternative: Alternative) -> str:
    return "" if alternative.peak_bytes is None else format_bytes(alternative.peak_bytes)


def _rejected(plan: Plan) -> Markup:
    """Plans that were never timed, with the reason."""
    rejected = [a for a in plan.alternatives if a.step_seconds is None]
    if not rejected:
        return Markup()
    rows = [(a.label, _peak(a), a.reason) for a in rejected[:NUM_REJECTED]]
    more = len(rejected) - len(rows)
    note = element("p", f"and {more} more", class_="note") if more else Markup()
    listing = table(("plan", "peak memory", "why it was rejected"), rows, numbers=(1,))
    return card(listing, note, title="Rejected before simulation")


def step_section(data: ReportData, chooser: Markup = _NONE) -> Section:
    """The predicted step above a measured one, on one scale; ``chooser`` leads to other measured ones."""
    anchor, title = "step", "One step, predicted and measured"
    timelines = [timeline for timeline in (data.predicted, data.measured) if timeline is not None]
    if not timelines:
        return left_out(anchor, title, "there is neither a prediction nor a recorded step.")
    notes = {
        (True, False): "No step was recorded in this run, so only the prediction is shown.",
        (False, True): "The plan carries no predicted timeline, so only the recorded step is shown.",
    }
    note = notes.get((data.predicted is not None, data.measured is not None))
    text = _typical_text(data) + (compute_difference(*timelines) if note is None else note) + _speeds_text(data)
    tp = data.plan.tp if data.plan else 1
    wide, narrow = (gantt(timelines, width=width, tp=tp) for width in (WIDE, NARROW))
    picture = drawing(wide, narrow)
    others = (_other(timeline, data.sampled, data.plan) for timeline in data.sampled)
    body = join((element("p", text, class_="note"), chooser, picture, _recompute(timelines, tp), *others))
    return Section(anchor=anchor, title=title, body=body)


def _recompute(timelines: Sequence[Timeline], tp: int) -> Markup:
    """Recomputation of the ranks in the drawn steps, and its hidden part; empty where no rank recomputes."""
    unit = time_unit(max(timeline.step_ns for timeline in timelines))
    rows: list[tuple[str, ...]] = []
    for timeline in timelines:
        times, source = recompute_times(timeline), SOURCE_NAMES[timeline.source].lower()
        if times:
            rows.append((element("b", f"{source}, all ranks"), *_recompute_cells(over_ranks(times), unit)))
            rows += [
                (f"{source}, {rank_name(timeline, rank, tp)}", *_recompute_cells(time, unit))
                for rank, time in enumerate(times)
            ]
    if not rows:
        return _NONE
    note = (
        "Recomputation is hidden as far as its rank would have waited for a message in its place. "
        "The exposed part delays the gradients that its rank sends, or the end of its step."
    )
    listing = table(("", "recomputation", "hidden", "exposed", "hidden part"), rows, numbers=(1, 2, 3, 4))
    return card(listing, paragraphs([note]), title="Recomputation")


def _recompute_cells(time: RecomputeTime, unit: TimeUnit) -> tuple[str, ...]:
    spent = (unit.text(duration_ns) for duration_ns in (time.total_ns, time.hidden_ns, time.exposed_ns))
    return (*spent, f"{time.hidden_share:.1%}")


def _typical_text(data: ReportData) -> str:
    """The length of the drawn step next to the typical one."""
    measured, usual = data.measured, data.run.step_seconds
    if measured is None or measured.step is None or usual is None:
        return ""
    unit = time_unit(measured.step_ns)
    return (
        f"Step {measured.step:,} was sampled and took {unit.text(measured.step_ns)}; "
        f"the {usual.origin} is {unit.text(1e9 * usual.value)}. "
    )


def _speeds_text(data: ReportData) -> str:
    """The speeds of the drawn steps."""
    timelines = {"Predicted": data.predicted, "Measured": data.measured}
    speeds = {name: _speed_of(timeline, data.plan) for name, timeline in timelines.items()}
    return "".join(f" {name}: {speed.text}." for name, speed in speeds.items() if speed is not None)


def _speed_of(timeline: Timeline | None, plan: Plan | None) -> Speed | None:
    return None if timeline is None or plan is None else plan.speed(to_seconds(timeline.step_ns))


def _other(timeline: Timeline, all_of_them: Sequence[Timeline], plan: Plan | None) -> Markup:
    """Another sampled step, folded. All such pictures together have as many shapes as one alone may have."""
    share, speed = MAX_SPANS // len(all_of_them), _speed_of(timeline, plan)
    fast = "" if speed is None else f", {speed.text}"
    taken = time_unit(timeline.step_ns).text(timeline.step_ns)
    summary = element("summary", f"Step {timeline.step or 0:,}: {taken}{fast}")
    wide, narrow = (gantt([timeline], width=width, most_spans=share) for width in (WIDE, NARROW))
    return element("details", summary, drawing(wide, narrow), class_="sampled")


def compute_difference(first: Timeline, second: Timeline) -> str:
    """Difference of two steps, divided into compute and everything else, as means over ranks."""
    unit = time_unit(max(first.step_ns, second.step_ns))
    busy = [sum(t.busy_ns(rank) for rank in range(t.num_ranks)) / max(1, t.num_ranks) for t in (first, second)]
    rest = [first.step_ns - busy[0], second.step_ns - busy[1]]
    return (
        f"Per rank, computing took {unit.text(busy[1])} where {unit.text(busy[0])} was predicted, "
        f"everything else {unit.text(rest[1])} where {unit.text(rest[0])} was predicted. "
        f"Bubble: {second.bubble.text}; predicted {first.bubble.text}.{_shards_difference(first, second)}"
    )


def _shards_difference(first: Timeline, second: Timeline) -> str:
    """A sentence on how long ranks waited for their shards while they computed; empty unless both timelines have it."""
    if first.collectives is None or second.collectives is None:
        return ""
    return f" Waiting for shards: {second.collectives.text}; predicted {first.collectives.text}."
