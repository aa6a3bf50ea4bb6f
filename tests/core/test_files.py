"""Files that only their user may read."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from penstock.core.serialization.files import write_secret


def test_a_secret_file_is_never_readable_by_others(tmp_path: Path) -> None:
    """Neither the umask nor an existing file that others may read makes a difference."""
    path = tmp_path / "new" / "service.json"
    before = os.umask(0)
    try:
        write_secret(path, "first")
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        path.chmod(0o666)
        write_secret(path, "second")
    finally:
        os.umask(before)
    assert path.read_text() == "second"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(path.parent.iterdir()) == [path]
