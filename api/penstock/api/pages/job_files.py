"""Files on a job's page: checkpoints from which another job can start, and files to download."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from urllib.parse import quote

from penstock.api.files.runfiles import Artifact, Checkpoint
from penstock.core.units import format_bytes
from penstock.view.axis import utc
from penstock.view.markup import Markup, element
from penstock.view.section import Section, left_out
from penstock.view.tables import card, scroll

MOST_FILES = 40


@dataclass(frozen=True, kw_only=True, slots=True)
class JobFiles:
    """Checkpoints, newest first, and files by name; empty if they are ``elsewhere``."""

    checkpoints: Sequence[Checkpoint]
    artifacts: Sequence[Artifact]
    elsewhere: str | None = None

    def missing(self, none_yet: str) -> str:
        """Reason for an empty section."""
        return f"they are {self.elsewhere}." if self.elsewhere else none_yet


def checkpoints_section(files: JobFiles, uid: str) -> Section:
    """Every checkpoint, with the URI that ``resumeFrom`` takes."""
    anchor, title = "checkpoints", "Checkpoints"
    if not files.checkpoints:
        return left_out(anchor, title, files.missing("none was written yet."))
    rows = (
        (
            f"step {checkpoint.step}, attempt {checkpoint.attempt}",
            format_bytes(checkpoint.num_bytes),
            utc(checkpoint.created_at),
            element("code", f"out://{uid}/{checkpoint.attempt}/{checkpoint.step}")
            if checkpoint.complete
            else "incomplete",
        )
        for checkpoint in files.checkpoints
    )
    return Section(anchor=anchor, title=title, body=_table(rows))


def files_section(files: JobFiles, place: str) -> Section:
    """The first `MOST_FILES` files, as links to downloads below ``place``."""
    anchor, title, artifacts = "files", "Files", files.artifacts
    if not artifacts:
        return left_out(anchor, title, files.missing("the job has written none yet."))
    rows = (
        (
            element("a", artifact.name, href=f"{place}/artifacts/{quote(artifact.name)}", download=""),
            format_bytes(artifact.num_bytes),
            utc(artifact.modified_at),
        )
        for artifact in artifacts[:MOST_FILES]
    )
    more = len(artifacts) - MOST_FILES
    note = element("p", f"and {more} more: penstock download", class_="note") if more > 0 else Markup()
    return Section(anchor=anchor, title=title, body=Markup(_table(rows) + note))


def _table(rows: Iterable[Sequence[str]]) -> Markup:
    body = (element("tr", *(element("td", cell) for cell in row)) for row in rows)
    return card(scroll(element("table", element("tbody", *body), class_="events files"), "files"))
