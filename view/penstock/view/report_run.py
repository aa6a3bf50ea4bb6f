"""The report's sections on the run: loss, memory, the fit of costs, sampled text, machine, how to repeat it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from penstock.core.comparison import RankMemory, prediction_error
from penstock.core.curves import RunCurves
from penstock.core.profile import Profile
from penstock.core.sharding import Collective
from penstock.core.units import format_bytes, format_seconds
from penstock.view import charts, profile_charts
from penstock.view.axis import signed, utc
from penstock.view.data import ReportData
from penstock.view.markup import Markup, element
from penstock.view.profile_charts import FitError
from penstock.view.section import Section, left_out
from penstock.view.tables import card, chart, keys, paragraphs, table
from penstock.view.theme import UNIT_NAMES


def loss_section(data: ReportData) -> Section:
    """Loss, and below it throughput, learning rate, gradient norm and the time of every step."""
    anchor, title = "loss", "Loss and speed"
    run = data.run
    if not run:
        return left_out(anchor, title, "no step of this run was reported.")
    predicted = data.plan.prediction.step_seconds if data.plan and data.plan.prediction else None
    named = run.curves.get
    figures = {
        "loss": charts.loss(run, data.unigram_loss),
        "throughput": charts.single(named("tokens_per_second"), "tokens per second", "series-4"),
        "learning-rate": charts.single(named("learning_rate"), "learning rate", "series-3"),
        "gradient-norm": charts.single(named("gradient_norm"), "gradient norm", "series-5"),
        "step-time": charts.step_time(named("step_seconds"), predicted),
    }
    places = (
        chart("loss", "Loss", class_="full"),
        chart("throughput", "Tokens per second", class_="third"),
        chart("learning-rate", "Learning rate", class_="third"),
        chart("gradient-norm", "Gradient norm", class_="third"),
        chart("step-time", "Time of every step", caption=_speeds_text(data), class_="full"),
    )
    texts = [*_loss_text(data), *_bucket_text(run)]
    body = paragraphs(texts) + element("div", *places, class_="grid")
    return Section(anchor=anchor, title=title, body=Markup(body), figures=figures)


def _speeds_text(data: ReportData) -> str:
    """The speeds of the typical step and of the predicted one."""
    plan, usual = data.plan, data.run.step_seconds
    measured, predicted = plan.speed(usual.value) if plan and usual else None, plan.speed() if plan else None
    texts = [f"{usual.origin.capitalize()}: {measured.text}."] if usual and measured else []
    texts += [f"Predicted: {predicted.text}."] if predicted else []
    return " ".join(texts)


def _loss_text(data: ReportData) -> Iterator[str]:
    """The first and last loss, as exact values of single steps."""
    curve, validated = data.run.curves.get("loss"), data.run.last("validation_loss")
    if curve is None:
        return
    last = f"{curve.last.value:.3f} at step {curve.last.step:,}"
    if curve.first is None:
        yield f"Training loss is {last}."
    else:
        yield f"Training loss went from {curve.first.value:.3f} at step {curve.first.step:,} to {last}."
    if validated and data.unigram_loss is not None:
        yield (
            f"Validation loss is {validated.value:.3f} at step {validated.step:,}; knowing only how often each token "
            f"occurs would give {data.unigram_loss:.3f}."
        )


def _bucket_text(run: RunCurves) -> Iterator[str]:
    most = max((point.count for curve in run.curves.values() for point in curve.points), default=1)
    if most > 1:
        yield f"A point stands for up to {most:,} steps: the line is their mean, the band goes from least to greatest."


def memory_section(data: ReportData) -> Section:
    """Memory of every rank by cause, predicted and measured."""
    if not data.memory:
        return left_out("memory", "Memory", "there is no prediction of the ranks' memory.")
    place = chart("memory", "Memory of every rank")
    limit = "" if data.memory_limit_bytes is None else f" of {format_bytes(data.memory_limit_bytes)} allowed"
    largest = max(rank.predicted_bytes for rank in data.memory)
    text = f"The fullest rank was predicted to need {format_bytes(largest)}{limit}."
    body = paragraphs([text]) + place + card(_memory_table(data.memory))
    figures = {"memory": profile_charts.memory(data.memory, data.memory_limit_bytes)}
    return Section(anchor="memory", title="Memory", body=Markup(body), figures=figures)


def _memory_table(ranks: Iterable[RankMemory]) -> Markup:
    headers = ("", "process", "state", "slots", "transient", "predicted", "measured", "error")
    rows = [
        (
            f"rank\u00a0{i}",
            *map(format_bytes, (r.constant_bytes, r.state_bytes, r.slot_bytes, r.transient_bytes, r.predicted_bytes)),
            "" if r.measured_bytes is None else format_bytes(r.measured_bytes),
            "" if not r.measured_bytes else signed(prediction_error(r.predicted_bytes, r.measured_bytes)),
        )
        for i, r in enumerate(ranks)
    ]
    return table(headers, rows, numbers=range(1, 8))


def fit_section(data: ReportData) -> Section:
    """Section on the errors of the cost model's fit, and on the links between ranks."""
    anchor, title = "fit", "Cost model"
    links = data.profile.links if data.profile else ()
    if not data.fit and not links:
        return left_out(anchor, title, "this run was planned without a measured profile.")
    parts, figures = [], {}
    if data.fit:
        caption = "One mark per measured action; hollow marks took no part in the fit."
        parts.append(chart("fit", "Predicted against measured seconds", caption=caption, class_="seven"))
        parts.append(
            card(_fit_table(profile_charts.fit_errors(data.fit)), title="Mean error of the fit", class_="five")
        )
        figures["fit"] = profile_charts.fit(data.fit)
    if links:
        figures["links"] = profile_charts.links(links)
        parts.append(chart("links", "Bandwidth between ranks", class_="five"))
        if data.profile:
            parts.append(card(_other_costs(data.profile), title="Other measured costs", class_="seven"))
    return Section(anchor=anchor, title=title, body=element("div", *parts, class_="grid"), figures=figures)


def _fit_table(errors: Iterable[FitError]) -> Markup:
    rows = [
        (f"{UNIT_NAMES[e.unit]} {e.kind.value}", f"{e.num_records}", _percent(e.fitted), _percent(e.held_out))
        for e in errors
    ]
    return table(("action", "records", "fitted", "held out"), rows, numbers=(1, 2, 3))


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}"


_COLLECTIVE_NAMES = {
    Collective.SUM: "all-reduce",
    Collective.SCATTER: "reduce-scatter",
    Collective.GATHER: "all-gather",
}


def _other_costs(profile: Profile) -> Markup:
    rows = [("fixed cost of an action", format_seconds(profile.action_overhead_seconds), "")]
    rows.extend(
        (
            f"{_COLLECTIVE_NAMES[c.collective]} of {format_bytes(c.num_bytes)} over {c.num_ranks} ranks"
            + (f", in {c.reduction_type.value}" if c.reduction_type.is_narrow else ""),
            format_seconds(c.seconds),
            _percent(c.spread),
        )
        for c in profile.collectives
    )
    rows.extend(
        (
            f"optimizer step of {o.num_parameters:,} elements, moments in {o.moment_type.value}",
            format_seconds(o.seconds),
            _percent(o.spread),
        )
        for o in profile.optimizer
    )
    rows.append(("memory of a rank's process", format_bytes(profile.memory.constant_bytes), ""))
    return table(("what", "measured", "spread"), rows, numbers=(1, 2))


def samples_section(data: ReportData) -> Section:
    """Text the model wrote."""
    if not data.samples:
        return left_out("samples", "What the model writes", "no text was sampled from the trained model.")
    cards = []
    for sample in data.samples:
        rest = sample.text.removeprefix(sample.prompt)
        cards.append(card(element("pre", element("b", sample.prompt), rest), class_="half"))
    note = paragraphs(["Sampled from the trained model; the prompt is highlighted."])
    body = Markup(note + element("div", *cards, class_="grid"))
    return Section(anchor="samples", title="What the model writes", body=body)


def machine_section(data: ReportData) -> Section:
    """Section on the machine of the profile, the method of measurement, and versions."""
    anchor, title = "machine", "Machine and versions"
    if data.profile is None and not data.versions:
        return left_out(anchor, title, "the run has neither a profile nor a list of versions.")
    cards = []
    if data.profile:
        cards.append(card(keys(_machine(data.profile)), class_="seven"))
    if data.versions:
        cards.append(card(keys(dict(data.versions)), class_="five"))
    return Section(anchor=anchor, title=title, body=element("div", *cards, class_="grid"))


def _machine(profile: Profile) -> dict[str, str]:
    key = profile.key
    return {
        "host": key.host,
        "device": key.device,
        "cores": f"{key.num_cores}, {key.threads_per_rank} per rank",
        "memory": format_bytes(key.memory_bytes),
        "backend": f"{key.backend}, torch {key.torch_version}",
        "measured": f"{utc(profile.measured_at)}, load before {profile.load:.2f}",
        "method": profile.method,
        "profile": profile.digest[:12],
    }


def command_section(data: ReportData) -> Section:
    """The command that repeats the run, and the digests of its plan, Program and profile."""
    parts = [card(element("pre", data.command))]
    if data.plan:
        digests = {"plan": data.plan.digest, "program": data.plan.program_digest, "profile": data.plan.profile_digest}
        named = {name: digest[:16] for name, digest in digests.items() if digest}
        text = ", ".join(f"{name} {digest}" for name, digest in named.items())
        parts.append(paragraphs([f"The same inputs give the same plan. Digests: {text}."]))
    return Section(anchor="reproduce", title="Do it again", body=Markup("".join(parts)))
