"""Packed documents (`penstock.core.packing`) as ConfigMaps hold bytes, in base64, and plans among them."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Any

from penstock.core.packing import UnpackError, pack, unpack
from penstock.core.plan import Plan
from penstock.core.pod import CONFIDENCE_FILE, PLAN_FILE


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


def packed_plan(plan: Plan) -> dict[str, str]:
    """The files of a plan: one for ranks, and one with the parts that only people read."""
    files = {PLAN_FILE: packed(plan.for_ranks.to_manifest())}
    return {**files, CONFIDENCE_FILE: packed(plan.confidence)} if plan.confidence else files


def unpacked_plan(files: Mapping[str, str]) -> Plan | None:
    """The whole plan in these files, none if there is none; raises `UnpackError` or `UserError` for a broken one."""
    if PLAN_FILE not in files:
        return None
    confidence = unpacked(files[CONFIDENCE_FILE]) if CONFIDENCE_FILE in files else {}
    return Plan.with_confidence(unpacked(files[PLAN_FILE]), confidence)
