"""Web server: uvicorn with time limits, and with TLS if there is a certificate.

uvicorn waits indefinitely for the head of a request, for the rest of a body that is not read, and for a client that
does not read its answer. Each of these holds a connection, and a client with enough of them locks all others out.
"""

from __future__ import annotations

import asyncio
import enum
import gc
import socket
import ssl
from pathlib import Path

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from penstock.api.app import create_app
from penstock.api.service import Service
from penstock.api.settings import Limits, Settings, Tls
from penstock.api.start.accepting import Acceptor, Connection, bound, most_connections
from penstock.core.errors import UserError

KEEP_ALIVE_SECONDS = 75
"""Keep-alive time: longer than the interval of jobs' reports, which should reuse their connection."""
SHUTDOWN_SECONDS = 20
"""Longest time that a shutdown waits for requests in progress; Kubernetes kills a pod after 30 s."""
MOST_HEAD_BYTES = 2**16
"""Largest size of a request's head."""
GARBAGE_THRESHOLDS = (10_000, 20, 100)
"""Objects that the youngest generation may gain before it is collected, and collections of each of the two younger
generations before the next older one is collected.
"""


class Server(uvicorn.Server):
    """Server that ends live streams at its shutdown instead of waiting for them."""

    def __init__(self, service: Service) -> None:
        super().__init__(_configured(service))
        self._feed, self._handshake_seconds = service.feed, service.settings.limits.idle_seconds

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, as `uvicorn.Server.startup` does, and accept by an `Acceptor`."""
        self._feed.open()
        await self.lifespan.startup()
        config = self.config
        if sockets is None:
            try:
                sockets = bound(config.host, config.port, config.backlog)
            except OSError as error:
                await self.lifespan.shutdown()
                raise UserError(
                    what=f"cannot listen there: {error}",
                    where=f"{config.host}:{config.port}",
                    remedy=f"choose another --port, or find the process: ss -ltnp 'sport = :{config.port}'",
                ) from None
        acceptor = Acceptor(sockets, self._connection, most_connections(), config.ssl, self._handshake_seconds)
        self.servers: list[Acceptor] = [acceptor]  # type: ignore[assignment]
        self.started = True

    def _connection(self) -> Connection:
        state, app_state = self.server_state, self.lifespan.state
        made: Connection = self.config.http_protocol_class(config=self.config, server_state=state, app_state=app_state)  # type: ignore[call-arg, assignment]
        return made

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._feed.close()
        await super().shutdown(sockets)


def collect_garbage_seldom() -> None:
    """Make full garbage collections rare, once the server of a serving process exists.

    A full collection delays all requests by a tenth of a second and frees next to nothing: objects of the start stay,
    and almost no garbage of requests is cyclic.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GARBAGE_THRESHOLDS)


def _configured(service: Service) -> uvicorn.Config:
    settings = service.settings
    tls = settings.tls
    return uvicorn.Config(
        create_app(service),
        host=settings.host,
        port=settings.port,
        http=_protocol(settings.limits),
        ws="none",
        log_level="warning",
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=SHUTDOWN_SECONDS,
        proxy_headers=False,  # any process of this machine could pretend to forward for another client
        ssl_certfile=tls.certificate if tls else None,
        ssl_keyfile=tls.key if tls else None,
    )


def _protocol(limits: Limits) -> type[asyncio.Protocol]:
    class Protocol(_TimeLimitedProtocol):
        idle_seconds = limits.idle_seconds

    return Protocol


class _Message(enum.Enum):
    """State of the newest request of a connection."""

    AWAITED = enum.auto()  # also while its head arrives
    BODY = enum.auto()
    DONE = enum.auto()


class _TimeLimitedProtocol(HttpToolsProtocol, Connection):
    """Protocol that disconnects a client after its time limit; bodies that are read have a separate limit."""

    idle_seconds: float

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._sending = _TimeLimit(transport, self.idle_seconds)
        self._reading = _TimeLimit(transport, self.idle_seconds)
        self._message, self._head_bytes = _Message.AWAITED, 0
        self._check()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._message is _Message.AWAITED:
            self._head_bytes += len(data)
            if self._head_bytes > MOST_HEAD_BYTES:
                self.send_400_response("The head of the request is too large.")
        self._check()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._message, self._head_bytes = _Message.AWAITED, 0

    def on_headers_complete(self) -> None:
        self._message = _Message.BODY
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._message = _Message.DONE

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._message is _Message.DONE and self.cycle.response_complete:
            self._message, self._head_bytes = _Message.AWAITED, 0
        self._check()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._reading.begin()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._reading.end()

    def connection_lost(self, exc: Exception | None) -> None:
        self._sending.end()
        self._reading.end()
        self.lost()
        super().connection_lost(exc)

    def _check(self) -> None:
        cycle: RequestResponseCycle | None = self.cycle
        answered = cycle is None or cycle.response_complete
        if answered and self._message is not _Message.DONE:
            self._sending.begin()
        else:
            self._sending.end()


class _TimeLimit:
    """Time limit that closes a connection, counted from its first start: no received byte restarts it."""

    def __init__(self, transport: asyncio.Transport, seconds: float) -> None:
        self._transport, self._seconds = transport, seconds
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._seconds, self._transport.abort)

    def end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None


def check_tls(settings: Settings) -> None:
    """Raise `UserError` unless the certificate and its key are valid."""
    if settings.tls is None:
        return
    try:
        # An encrypted key would prompt for its password at every start; an empty one is never right.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(settings.tls.certificate, settings.tls.key, password="")
    except (OSError, ValueError) as error:
        place = f"--tls-certificate {settings.tls.certificate}, --tls-key {settings.tls.key}"
        raise UserError(
            what=f"cannot be used: {error}",
            where=place,
            remedy="give a PEM certificate chain and its unencrypted key: openssl rsa -in KEY -out KEY.plain",
        ) from None


def tls_of(certificate: Path | None, key: Path | None) -> Tls | None:
    """Return the files of both, or none; raises `UserError` for only one."""
    if certificate is None and key is None:
        return None
    if certificate is None or key is None:
        missing = "--tls-certificate" if certificate is None else "--tls-key"
        raise UserError(
            what="is missing",
            where=missing,
            remedy="give both --tls-certificate and --tls-key, or none of them for plain HTTP",
        )
    return Tls(certificate=certificate.absolute(), key=key.absolute())
