"""A live stream as an HTTP answer."""

from __future__ import annotations

import asyncio

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from penstock.api.live.feed import Feed
from penstock.api.live.listeners import Listener
from penstock.api.live.messages import HELLO, KEEP_ALIVE, MEDIA_TYPE

KEEP_ALIVE_SECONDS = 15.0


class EventStream(Response):
    """Sends the messages of ``listener`` until the client disconnects, falls behind or reaches the time limit."""

    media_type = MEDIA_TYPE

    def __init__(self, feed: Feed, listener: Listener, most_seconds: float) -> None:
        super().__init__(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._feed, self._listener, self._most_seconds = feed, listener, most_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until one of the three tasks ends, and cancel the others."""
        self._feed.add(self._listener)
        ends = [
            asyncio.create_task(self._send(send)),
            asyncio.create_task(left(receive)),
            asyncio.create_task(self._listener.outgoing.dropped.wait()),
        ]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._feed.remove(self._listener)
            for task in ends:
                task.cancel()
            await asyncio.gather(*ends, return_exceptions=True)

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": HELLO, "more_body": True})
        loop = asyncio.get_running_loop()
        end = loop.time() + self._most_seconds
        while loop.time() < end:
            text = await self._listener.outgoing.take(min(KEEP_ALIVE_SECONDS, end - loop.time()))
            if text is None:
                break
            await send({"type": "http.response.body", "body": text or KEEP_ALIVE, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def left(receive: Receive) -> None:
    """Return once the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass
