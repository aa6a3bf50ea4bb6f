"""What all tests of the agent share."""

from __future__ import annotations

from tests.support.own_state import own_state

__all__ = ["own_state"]
