"""Cache of verified tokens. Many requests use the same few tokens, so most of them need no lookup in the store."""

from __future__ import annotations

from collections.abc import Callable

from starlette.concurrency import run_in_threadpool

from penstock.api.auth.identity import Caller, digest

KNOWN_SECONDS = 5.0
"""Seconds for which a token that was revoked by another service, or in the database, may still pass."""
MOST_KNOWN = 1024


class KnownTokens:
    """Caches the bearer of each valid token by the token's digest. Unknown tokens are not cached.

    ``seconds`` returns the lifetime of a caller's entry, and ``most`` limits the number of entries. For use from one
    event loop.
    """

    def __init__(
        self, seconds: Callable[[Caller], float] = lambda caller: KNOWN_SECONDS, most: int = MOST_KNOWN
    ) -> None:
        self._seconds, self._most = seconds, most
        self._known: dict[str, tuple[float, Caller]] = {}

    def knows(self, secret: str, now: float) -> bool:
        """Whether the token is cached."""
        at, caller = self._known.get(digest(secret), (0.0, None))
        return caller is not None and 0 <= now - at < self._seconds(caller)

    async def find(self, secret: str, now: float, look_up: Callable[[], Caller | None]) -> Caller | None:
        """Return the bearer of the token with this secret, from the cache or from a lookup in a thread."""
        known, key = self._known, digest(secret)
        at, caller = known.get(key, (0.0, None))
        if caller is not None and 0 <= now - at < self._seconds(caller):
            return caller if caller.until is None or now < caller.until else None
        caller = await run_in_threadpool(look_up)
        if caller is not None:
            known.pop(key, None)  # newest last: the oldest are evicted first
            if len(known) >= self._most:
                del known[next(iter(known))]
            known[key] = (now, caller)  # into the old dict, and so without effect, if the cache was cleared meanwhile
        return caller

    def forget(self) -> None:
        """Clear the cache after a revocation. May be called from any thread."""
        self._known = {}
