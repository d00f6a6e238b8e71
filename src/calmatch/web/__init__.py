"""The web server of `label` and `serve`: loopback, a token, nothing loaded from outside."""

import asyncio
import secrets
import socket
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from pathlib import Path
from typing import Any

from calmatch import files
from calmatch.spec import import_extra

HERE = Path(__file__).parent
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "cache-control": "no-store",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",  # an address holds the token
    "x-content-type-options": "nosniff",
}


class Guard:
    """Refuses a request with a foreign Host or Origin, without the token, or with too large a body.

    The token comes as `?token=`, as `Authorization: Bearer`, or in the cookie that the first answer
    sets: a page's own requests need not repeat it. Without a token nothing is asked for. Without
    `hosts`, which takes a token, the server goes by any name.
    """

    def __init__(
        self, app: Any, *, token: str | None, hosts: Sequence[str] | None, port: int, limit: int
    ) -> None:
        assert token or hosts
        self.app, self.token, self.limit = app, token, limit
        self.hosts = {f"{host}:{port}".lower() for host in hosts} if hosts else None
        self.cookie = f"calmatch-{port}"  # cookies know no ports

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        from starlette.datastructures import MutableHeaders
        from starlette.exceptions import HTTPException
        from starlette.requests import Request
        from starlette.responses import PlainTextResponse

        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request, size = Request(scope), 0

        async def bounded() -> Any:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > self.limit:
                raise HTTPException(413, f"A request may hold {self.limit:,} bytes at most.")
            return message

        async def guarded(message: Any) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
                if self.token and "token" in request.query_params and message["status"] < 400:
                    value = f"{self.cookie}={self.token}; Path=/; HttpOnly; SameSite=Strict"
                    headers.append("set-cookie", value)
            await send(message)

        status, why = self._refusal(request)
        if status:
            await PlainTextResponse(why, status)(scope, receive, guarded)
        else:
            await self.app(scope, bounded, guarded)

    def _refusal(self, request: Any) -> tuple[int, str]:
        headers = request.headers
        host, origin = headers.get("host", "").lower(), headers.get("origin")
        if self.hosts is not None and host not in self.hosts:
            return 400, "This address is not the server's own."
        if origin is not None and origin.lower().partition("://")[2] != host:
            return 403, "Another site may not ask."
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > self.limit:
            return 413, f"A request may hold {self.limit:,} bytes at most."
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        offers = [request.query_params.get("token", ""), request.cookies.get(self.cookie, "")]
        offers += [bearer] if scheme.lower() == "bearer" else []
        token = self.token and self.token.encode()
        if not token or any(secrets.compare_digest(offer.encode(), token) for offer in offers):
            return 0, ""
        return 401, "The token is missing or wrong: open the address that calmatch printed."


def listen(host: str, port: int) -> socket.socket:
    """A bound socket; another port where the wanted one is taken."""
    if not 0 <= port < 1 << 16:
        raise ValueError("--port is at most 65535; 0 takes any that is free.")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    place: Any = {"family": family, "backlog": 2048}  # who comes from now on waits for the server
    with suppress(OSError):
        return socket.create_server((host, port), **place)
    try:
        return socket.create_server((host, 0), **place)
    except OSError as error:
        why = str(error.strerror).partition(" (while")[0]  # the address is in our sentence
        raise ValueError(f"Cannot listen on {host}: {why}.") from error


def page_routes(name: str) -> list[Any]:
    """A page of this folder with its style and its script; and no icon, for which browsers ask."""
    from starlette.responses import Response
    from starlette.routing import Route

    def send(address: str, ending: str, kind: str) -> Any:
        content = files.read_bytes(HERE / f"{name}.{ending}")
        return Route(address, lambda _: Response(content, media_type=kind))

    page, style = send("/", "html", "text/html"), send(f"/{name}.css", "css", "text/css")
    icon = Route("/favicon.ico", lambda _: Response(status_code=204))
    return [page, style, send(f"/{name}.js", "js", "text/javascript"), icon]


def need_server() -> list[Any]:
    """What serves a page, asked for before anything takes time; or which extra brings it."""
    why = "This needs a web server: pip install 'calmatch[web]'."
    return import_extra(why, "starlette.applications", "starlette.middleware", "uvicorn")


def build_app(
    routes: Sequence[Any],
    place: socket.socket,
    *,
    token: str | None,
    limit: int,
    hosts: Sequence[str] | None = LOOPBACK,
    lifespan: Callable[[Any], AbstractAsyncContextManager[Any]] | None = None,
) -> Any:
    """Routes behind the guard, for the socket they will be served on."""
    apps, middleware, _ = need_server()
    port = place.getsockname()[1]
    guard = middleware.Middleware(Guard, token=token, hosts=hosts, port=port, limit=limit)
    return apps.Starlette(routes=list(routes), middleware=[guard], lifespan=lifespan)


def run(app: Any, place: socket.socket) -> None:
    """Serve until SIGINT or SIGTERM; requests that have been sent are answered first."""
    import uvicorn

    class Server(uvicorn.Server):
        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            """Let nobody new in, and wait: an open connection may have a request under way."""
            for server in self.servers:
                server.close()
            state = self.server_state
            state.default_headers = [*state.default_headers, (b"connection", b"close")]
            for _ in range(20):
                if state.connections:
                    await asyncio.sleep(0.05)
            await super().shutdown(sockets)

    settings = uvicorn.Config(
        app, log_level="warning", access_log=False, ws="none", timeout_graceful_shutdown=30
    )
    Server(settings).run(sockets=[place])
