"""Pages of profiles: the list, and one profile with costs of layers and links between ranks."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.api.pages.shell import Page
from penstock.api.store.profiles import StoredProfile
from penstock.core.comparison import FitPoint
from penstock.core.profile import Profile
from penstock.core.schedule import Kind
from penstock.core.units import format_age, format_count
from penstock.view import profile_charts
from penstock.view.data import ReportData
from penstock.view.markup import Markup, element, join
from penstock.view.report_run import fit_section, machine_section
from penstock.view.section import Section
from penstock.view.tables import card, chart, heading, scroll

HEADERS = ("host", "device", "ranks", "precision", "method", "measured", "")
CURVES = {Kind.F: "forward", Kind.I: "input gradient", Kind.W: "weight gradient"}
NONE_YET = "No machine was measured yet. A job measures the machine it runs on before it is planned."


def profile_list(stored_profiles: Sequence[StoredProfile], now: float) -> Page:
    """Return the list of profiles, newest first."""
    head = element("div", element("h1", "Profiles"), class_="head")
    under = element("p", "Measured costs of layers, links and memory, from which plans are made.", class_="under")
    body = _table(stored_profiles, now) if stored_profiles else card(element("p", NONE_YET), class_="empty")
    return Page(title="Profiles", here="/profiles", body=join((head, under, body)))


def _table(stored_profiles: Sequence[StoredProfile], now: float) -> Markup:
    head = map(heading, HEADERS)
    rows = (element("tr", *(element("td", cell) for cell in _cells(profile, now))) for profile in stored_profiles)
    content = Markup(element("thead", element("tr", *head)) + element("tbody", *rows))
    return card(scroll(element("table", content, class_="listed"), "profiles"))


def _cells(profile: StoredProfile, now: float) -> tuple[str, ...]:
    host = element("a", profile.host, href=f"/profiles/{profile.digest}")
    age = f"{format_age(now - profile.measured_at)} ago"
    newest = element("span", "newest", class_="good") if profile.newest else Markup()
    return host, profile.device, f"{profile.num_ranks}", profile.precision.value, profile.method, age, newest


def profile_page(stored: StoredProfile, profile: Profile, fit: tuple[FitPoint, ...]) -> Page:
    """Return the page of one profile; ``fit`` has its points with the predictions of the fitted cost model."""
    report = ReportData(job=profile.key.host, phase="", command="", profile=profile, fit=fit)
    sections = [_curves(profile), fit_section(report), machine_section(report)]
    summary = f"{format_count(profile.num_ranks, 'rank')}, {profile.precision.value}, {stored.method}"
    head = element("div", element("h1", stored.host), class_="head")
    return Page(
        title=f"Profile of {stored.host}",
        here="/profiles",
        body=join((head, element("p", summary, class_="under"), *(section.markup for section in sections))),
        figures={name: figure for section in sections for name, figure in section.figures.items()},
    )


def _curves(profile: Profile) -> Section:
    places = (chart(f"curve-{kind.value}", name.capitalize(), class_="third") for kind, name in CURVES.items())
    note = element("p", "One pass over a slice without a prefix, with all ranks computing.", class_="note")
    figures = {f"curve-{kind.value}": profile_charts.curves(profile.units, kind) for kind in CURVES}
    body = Markup(note + element("div", *places, class_="grid"))
    return Section(anchor="curves", title="Costs of layers", body=body, figures=figures)
