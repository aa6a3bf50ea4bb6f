"""Large documents in rows: compressed JSON."""

from __future__ import annotations

import json
import zlib
from typing import Any


def pack(manifest: Any) -> bytes:
    """Compress plain data."""
    return zlib.compress(json.dumps(manifest, separators=(",", ":")).encode())


def unpack(body: bytes) -> Any:
    """Decompress plain data."""
    return json.loads(zlib.decompress(body))
