"""One route called directly: what a framework does around a request takes longer than this one's own work.

The route is declared, documented and tested like any other. Its endpoint takes the request and nothing else, and gives
a response.
"""

from __future__ import annotations

from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.api.errors import answer, translated


class Direct:
    """Wraps the application, and goes past it for the ``route``."""

    def __init__(self, app: ASGIApp, route: APIRoute) -> None:
        self._app, self._route = app, route
        self._methods = frozenset(route.methods or ())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        route = self._route
        if scope["type"] != "http" or scope["path"] != route.path or scope["method"] not in self._methods:
            await self._app(scope, receive, send)
            return
        scope.update(route=route, path_params={})
        try:
            response = await route.endpoint(Request(scope, receive))
        except ClientDisconnect:
            return
        except Exception as error:
            response = answer(translated(error))
        await response(scope, receive, send)
