"""Remedies for pending reasons of an attempt: the scheduler and the kubelet report only the reasons."""

from __future__ import annotations

_GOES_ON = "the job goes on by itself"
_NEW_JOB = "a spec cannot be changed, so make a new job"
_IMAGE = f"push the image or give the account a pull secret, and {_GOES_ON}; or fix kubernetes.image in a new job"

_REMEDIES = (
    ("persistentvolumeclaim", f"make the claim, and {_GOES_ON}"),
    ("Unschedulable", f"add nodes or free some, and {_GOES_ON}; or make a new job that requests less, or has minRanks"),
    ("InvalidImageName", f"fix kubernetes.image; {_NEW_JOB}"),
    ("ErrImage", _IMAGE),
    ("ImagePull", _IMAGE),
    ("CreateContainerConfigError", f"make the objects that kubernetes.env names, and {_GOES_ON}"),
)
"""The first key that occurs in the message decides."""


def with_remedy(message: str) -> str:
    """The message, with its remedy if there is one."""
    remedy = next((remedy for key, remedy in _REMEDIES if key in message), "")
    return f"{message}; {remedy}" if remedy else message


def clocks_differ(ahead_seconds: float) -> str:
    """Message about a difference between the operator's and the cluster's clocks; empty if they agree."""
    if not ahead_seconds:
        return ""
    which = "ahead of" if ahead_seconds > 0 else "behind"
    minutes = max(1, round(abs(ahead_seconds) / 60))
    return f"the operator's clock is about {minutes} min {which} the cluster's; synchronise both machines with NTP"
