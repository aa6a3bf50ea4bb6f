"""What single ranks did in the steps that were sampled, as a section of a job's page."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.api.store.ingest import BUSY, MOST_RANKS, PEAK
from penstock.core.curves import Curve
from penstock.view import charts
from penstock.view.charts import Figure
from penstock.view.markup import Markup, element
from penstock.view.section import Section, left_out
from penstock.view.tables import chart, paragraphs

Charts = Mapping[tuple[str, int], Curve]

ANCHOR, TITLE = "ranks", "Rank by rank"
MIB = 2**20


def ranks_section(found: Charts) -> Section:
    """Seconds of computing and peak memory, a line for each rank; a rank alone has nobody to be compared with."""
    busy, peak = _of_ranks(found, BUSY, 1e3), _of_ranks(found, PEAK, 1 / MIB)
    if len(busy) < 2:
        return left_out(ANCHOR, TITLE, "no step of several ranks was sampled.")
    text = f"Of sampled steps, and of up to {MOST_RANKS} ranks. A rank whose line lies above the others holds them up."
    places = [chart("rank-busy", "Computing, in a step", class_="half")]
    figures: dict[str, Figure] = {"rank-busy": charts.by_rank(busy, "milliseconds")}
    if peak:
        places.append(chart("rank-peak", "Peak memory, up to a step", class_="half"))
        figures["rank-peak"] = charts.by_rank(peak, "MiB")
    body = Markup(paragraphs([text]) + element("div", *places, class_="grid"))
    return Section(anchor=ANCHOR, title=TITLE, body=body, figures=figures)


def _of_ranks(found: Charts, name: str, scale: float) -> dict[int, list[tuple[int, float]]]:
    return {
        rank: [(point.step, scale * point.mean) for point in curve.points]
        for (of, rank), curve in found.items()
        if of == name and rank >= 0
    }
