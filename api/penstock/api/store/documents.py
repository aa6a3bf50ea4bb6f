"""Large documents as rows hold them: compressed JSON."""

from __future__ import annotations

import json
import zlib
from typing import Any


def pack(manifest: Any) -> bytes:
    """Plain data as compressed JSON."""
    return zlib.compress(json.dumps(manifest, separators=(",", ":")).encode())


def unpack(body: bytes) -> Any:
    """The data again."""
    return json.loads(zlib.decompress(body))
