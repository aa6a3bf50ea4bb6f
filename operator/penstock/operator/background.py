"""An event loop in a thread of its own, for work that outlives a run of kopf: kopf cancels all tasks of its loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, TypeVar

T = TypeVar("T")


class BackgroundLoop:
    """A context manager: the loop runs during the block."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="controller", daemon=True)

    def __enter__(self) -> BackgroundLoop:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of the work, which runs on this loop while the caller's loop goes on."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self.loop))

    def wait_for(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of the work, for a caller without a loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()
