"""Rate limit: a token bucket for each client, refilled at a steady rate.

Buckets are kept in memory, so each service counts separately. The number of addresses has no limit, but the number of
buckets has one: the least recently used bucket is evicted, and its client starts with a full one.
"""

from __future__ import annotations

import ipaddress
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

IPV6_SITE_BITS = 64
"""Length of the IPv6 prefix that a provider assigns to one site: all addresses with it count as one client."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rate:
    """A rate limit: ``per_second`` requests in the long run, and ``burst`` of them at once."""

    per_second: float
    burst: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Bucket:
    """A token bucket: ``left`` requests, including fractions of one, remained at the time ``at``."""

    left: float
    at: float


def take(bucket: Bucket | None, rate: Rate, now: float) -> tuple[Bucket, float]:
    """Return the bucket after a request, and the seconds until the request may pass, 0 if it passes.

    A refused request takes nothing from the bucket.
    """
    left: float = rate.burst
    if bucket is not None:
        left = min(left, bucket.left + max(now - bucket.at, 0.0) * rate.per_second)
    if left >= 1:
        return Bucket(left=left - 1, at=now), 0.0
    return Bucket(left=left, at=now), (1 - left) / rate.per_second


class Throttle:
    """The buckets of all clients, at most ``most`` of them. Not thread-safe."""

    def __init__(self, most: int, clock: Callable[[], float]) -> None:
        self._most, self._clock = most, clock
        self._buckets: OrderedDict[str, Bucket] = OrderedDict()

    def take(self, key: str, rate: Rate) -> float:
        """Count a request; return the seconds to wait before it, 0 if it may pass."""
        self._buckets[key], seconds = take(self._buckets.get(key), rate, self._clock())
        self._buckets.move_to_end(key)
        if len(self._buckets) > self._most:
            self._buckets.popitem(last=False)
        return seconds

    def __len__(self) -> int:
        return len(self._buckets)


def site(address: str) -> str:
    """Return the client of an address: an IPv4 address itself, or the network of an IPv6 address."""
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(ip, ipaddress.IPv4Address):
        return str(ip)
    if ip.ipv4_mapped is not None:
        return str(ip.ipv4_mapped)
    return str(ipaddress.IPv6Network((ip, IPV6_SITE_BITS), strict=False))
