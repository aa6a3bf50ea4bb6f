"""Large documents as ConfigMaps hold them: compressed JSON in their ``binaryData``."""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Mapping
from typing import Any


def packed(manifest: Mapping[str, Any]) -> str:
    """Plain data as ConfigMaps hold bytes; equal data always gives equal text."""
    text = json.dumps(manifest, separators=(",", ":")).encode()
    return base64.b64encode(gzip.compress(text, compresslevel=6, mtime=0)).decode()


def unpacked(text: str) -> Any:
    """What `packed` was given; raises ValueError or OSError for anything else."""
    return json.loads(gzip.decompress(base64.b64decode(text, validate=True)))
