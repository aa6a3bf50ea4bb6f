"""Files of a run as ranks leave them, made by hand: what they hold does not matter here, where they lie does."""

from __future__ import annotations

from pathlib import Path

FILES = {
    "metrics.jsonl": b'{"step": 0}\n{"step": 1}\n',
    "plan.json": b"{}\n",
    "timeline.json": b"{}\n",
    "report.html": b"<script>alert(1)</script>",
    "logs/a1/none_x1/attempt_0/0/stdout.log": b"hello\n",
    "logs/a1/torchrun.log": b"",
    "attempts/1/supervisor.log": b"well\n",
    "exports/a1-step-4/model.safetensors": bytes(range(256)) * 1000,
}
"""What may be downloaded."""

PRIVATE = {
    "job.yaml": b"secret",
    "status/rank-0": b"secret",
    "outbox/a1-rank-0.jsonl": b"secret",
    "attempts/1/order.json": b"secret",
    "checkpoints/a1/step-4/manifest.json": b"{}",
    "exports/.a1-step-8.partial/model.safetensors": b"half",
    "logs/a1/notes.txt": b"secret",
}
"""What may not."""


def lay_out(root: Path) -> None:
    """Make all of them below ``root``."""
    for name, content in {**FILES, **PRIVATE}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def add_checkpoint(root: Path, attempt: int, step: int, *, state: str = "complete") -> None:
    """A checkpoint of 100 bytes and its manifest; ``state`` may be ``partial`` or ``removed`` as well."""
    name = f".partial-step-{step}" if state == "partial" else f"step-{step}"
    folder = root / "checkpoints" / f"a{attempt}" / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "__0_0.distcp").write_bytes(b"x" * 100)
    if state == "complete":
        (folder / "manifest.json").write_text("{}")
