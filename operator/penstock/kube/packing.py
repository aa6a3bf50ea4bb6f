"""Packed documents (`penstock.core.packing`) as ConfigMaps hold bytes: in base64."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Any

from penstock.core.packing import UnpackError, pack, unpack


def packed(manifest: Mapping[str, Any]) -> str:
    """Plain data as ConfigMaps hold bytes; equal data always gives equal text."""
    return base64.b64encode(pack(manifest)).decode()


def unpacked(text: str) -> Any:
    """The data that `packed` was given; raises `UnpackError` for anything else."""
    try:
        content = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError, TypeError) as error:
        raise UnpackError(f"is not base64: {error}") from None
    return unpack(content)
