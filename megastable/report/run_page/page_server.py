"""Serves the page of runs: Starlette and uvicorn, server-sent events for what is new."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import secrets
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from megastable.base.errors import ConfigError
from megastable.base.installation import install_command
from megastable.report.run_page import page_parts, run_panel
from megastable.report.run_page.page_guard import HEADERS, INCIDENT_POLICY, POLICY, PageGuard, is_loopback
from megastable.report.run_page.plot_data import AXES
from megastable.report.run_page.run_reader import RunReader, told_apart

try:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.requests import Request
    from starlette.responses import FileResponse, RedirectResponse, Response, StreamingResponse
    from starlette.routing import Route
    from starlette.types import ASGIApp, Receive, Scope, Send
except ImportError as error:
    raise ConfigError(
        f"a live page needs Starlette and uvicorn ({error}): install megastable with its dependencies "
        f"({install_command()}), or write the page as a file with --output run.html"
    ) from None

PORT = 8765
TRIES = 20  # ports from PORT on
COLUMNS = 4000  # most pixel columns of a plot
TICK = 0.2  # seconds between two looks for news
ALIVE = 10.0  # seconds, after which a sign of life is sent
STREAMS = 64  # pages that are open at a time
MMAP_THRESHOLD, ARENA_MAX = -3, -8  # M_MMAP_THRESHOLD and M_ARENA_MAX of mallopt(3)
THP_DISABLE = 41  # PR_SET_THP_DISABLE of prctl(2)
TYPES = {
    ".html": "text/html; charset=utf-8", ".png": "image/png", ".txt": "text/plain; charset=utf-8",
    ".csv": "text/csv; charset=utf-8", ".md": "text/plain; charset=utf-8", ".json": "application/json",
    ".log": "text/plain; charset=utf-8",
}  # fmt: skip


class PageServer:
    """The answers to the page's questions (static/source.js). ending: whether the server is to end, which open streams
    must not hold up."""

    def __init__(self, readers: Sequence[RunReader], guard: PageGuard) -> None:
        self.readers, self.guard = readers, guard
        self.ending: Callable[[], bool] = lambda: False
        self._streams = 0

    def app(self) -> ASGIApp:
        routes = [
            Route("/", self._page),
            Route("/page.css", partial(_fixed, page_parts.style, "text/css; charset=utf-8")),
            Route("/page.js", partial(_fixed, page_parts.script, "text/javascript; charset=utf-8")),
            Route("/heads", self._heads),
            Route("/events", self._events),
            Route("/run/{run:int}/panel", self._panel),
            Route("/run/{run:int}/plots", self._plots),
            Route("/run/{run:int}/heat", self._heat),
            Route("/run/{run:int}/machines", self._machines),
            Route("/run/{run:int}/journal", self._journal),
            Route("/run/{run:int}/incidents/{folder}/{file}", self._incident),
            Route("/run/{run:int}/incidents/{file}", self._index),
        ]
        return _Guarded(Starlette(routes=routes, lifespan=self._lifespan), self.guard)

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        for reader in self.readers:
            reader.start()
        yield
        for reader in self.readers:
            reader.stop()

    async def _page(self, request: Request) -> Response:
        if self.guard.token and "token" in request.query_params:
            # Out of the address, so that it is not in the browser's history or on a screenshot. Lax: a link on another
            # page, such as that of a chat, may lead here; what is asked from there without the user is refused.
            answer = RedirectResponse("/", 303)
            answer.set_cookie(self.guard.cookie, self.guard.token, httponly=True, samesite="lax")
            return answer
        told = [reader.line() for reader in self.readers]
        return Response(page_parts.served(told), media_type="text/html; charset=utf-8")

    async def _heads(self, request: Request) -> Response:
        return _json(await run_in_threadpool(self._all_heads))

    def _all_heads(self) -> list[dict[str, Any]]:
        return [reader.head() for reader in self.readers]

    async def _events(self, request: Request) -> Response:
        if self._streams >= STREAMS:
            return Response("Too many pages are open.\n", 503)
        return StreamingResponse(self._stream(), media_type="text/event-stream")

    async def _stream(self) -> AsyncIterator[bytes]:
        self._streams += 1
        try:
            told, quiet = list[int](), 0.0
            while not self.ending():
                versions = [reader.version for reader in self.readers]
                if versions != told:
                    told, quiet = versions, 0.0
                    yield b"data: " + page_parts.as_json(await run_in_threadpool(self._all_heads)) + b"\n\n"
                elif quiet >= ALIVE:
                    quiet = 0.0
                    yield b": still here\n\n"
                await asyncio.sleep(TICK)
                quiet += TICK
        finally:
            self._streams -= 1

    async def _panel(self, request: Request) -> Response:
        return await self._answer(request, lambda reader: reader.panel())

    async def _plots(self, request: Request) -> Response:
        axis, begin, end = _window(request)
        columns = min(COLUMNS, max(50, int(_number(request, "columns") or 1000)))
        return await self._answer(request, lambda reader: reader.plots(axis, begin, end, columns))

    async def _heat(self, request: Request) -> Response:
        axis, begin, end = _window(request)
        return await self._answer(request, lambda reader: reader.heat(axis, begin, end))

    async def _machines(self, request: Request) -> Response:
        axis, begin, end = _window(request)
        return await self._answer(request, lambda reader: reader.machine_maps(axis, begin, end))

    async def _journal(self, request: Request) -> Response:
        query, group = (request.query_params.get(key, "")[:200] for key in ("query", "group"))
        most = min(2000, max(1, int(_number(request, "most") or run_panel.LINES)))
        return await self._answer(request, lambda reader: run_panel.journal(reader, query, group, most))

    async def _answer(self, request: Request, ask: Callable[[RunReader], Any]) -> Response:
        reader = self._reader(request)
        return _missing() if reader is None else _json(await run_in_threadpool(ask, reader))

    async def _incident(self, request: Request) -> Response:
        folder, file = request.path_params["folder"], request.path_params["file"]
        return self._file(request, folder, file) if folder.isdecimal() else _missing()

    async def _index(self, request: Request) -> Response:
        return self._file(request, request.path_params["file"])

    def _file(self, request: Request, *names: str) -> Response:
        """A file of an incident, which may lie nowhere else."""
        reader = self._reader(request)
        if reader is None or any(name.startswith(".") or "\0" in name for name in names):
            return _missing()
        path = reader.run.incidents.joinpath(*names)
        kind = TYPES.get(path.suffix)
        try:
            root = reader.run.incidents.resolve()
            if kind is None or not path.is_file() or not path.resolve().is_relative_to(root):
                return _missing()
        except (OSError, ValueError):
            return _missing()
        return FileResponse(path, media_type=kind, headers={"Content-Security-Policy": INCIDENT_POLICY})

    def _reader(self, request: Request) -> RunReader | None:
        number = request.path_params["run"]
        return self.readers[number] if number < len(self.readers) else None


class _Guarded:
    """Refuses requests, and adds headers to all answers."""

    def __init__(self, app: ASGIApp, guard: PageGuard) -> None:
        self.app, self.guard = app, guard

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request = Request(scope)

        async def with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                given = {name.lower() for name, _ in message["headers"]}
                added = {**HEADERS, "Content-Security-Policy": POLICY}
                message["headers"] = [
                    *message["headers"],
                    *(
                        (k.lower().encode(), v.encode())
                        for k, v in added.items()
                        if k.lower().encode() not in given
                    ),
                ]
            await send(message)

        refused = self.guard.refusal(request.headers, request.query_params)
        if refused is not None:
            await Response(refused[1], refused[0], media_type="text/plain")(scope, receive, with_headers)
        else:
            await self.app(scope, receive, with_headers)


async def _fixed(text: Callable[[], str], kind: str, request: Request) -> Response:
    return Response(text(), media_type=kind)


def _json(value: Any) -> Response:
    return Response(page_parts.as_json(value), media_type="application/json")


def _missing() -> Response:
    return Response("There is no such thing here.\n", 404, media_type="text/plain")


def _window(request: Request) -> tuple[str, float | None, float | None]:
    axis = request.query_params.get("axis", "step")
    return axis if axis in AXES else "step", _number(request, "from"), _number(request, "to")


def _number(request: Request, key: str) -> float | None:
    try:
        value = float(request.query_params[key])
    except (KeyError, ValueError):
        return None
    return value if abs(value) < 1e18 else None  # nan, too, is none


def listen(host: str, port: int | None) -> socket.socket:
    """A socket that listens. port: None = the first free one from PORT on. Raises ConfigError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for candidate in range(PORT, PORT + TRIES) if port is None else (port,):
        found = socket.socket(family, socket.SOCK_STREAM)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            found.bind((host, candidate))
            found.listen(128)
        except (OSError, OverflowError) as error:
            found.close()
            if (
                port is None
                and getattr(error, "errno", None) == errno.EADDRINUSE
                and candidate < PORT + TRIES - 1
            ):
                continue
            raise ConfigError(
                f"--host {host} --port {candidate}: cannot listen there: {getattr(error, 'strerror', None) or error}"
            ) from None
        return found
    raise AssertionError


def give_memory_back() -> None:
    """Let freed arrays leave the process at once: else those of a long run's account stay, as room for the next."""
    pa.set_memory_pool(pa.system_memory_pool())
    with suppress(OSError, AttributeError):  # another C library than glibc
        library = ctypes.CDLL(None)
        library.mallopt(MMAP_THRESHOLD, 1 << 15)
        library.mallopt(ARENA_MAX, 1)  # else every thread keeps memory of its own
        library.prctl(
            THP_DISABLE, 1, 0, 0, 0
        )  # else the room of every column takes 2 MB more than is written


def serve(runs: Sequence[Path], host: str, port: int | None, token: bool, say: Callable[[str], None]) -> None:
    """Serve the page of run directories until Ctrl-C. token: require one on loopback, too. say: prints the address.

    Raises ConfigError, and DataError for a directory without a run."""
    give_memory_back()
    readers = told_apart([RunReader(run) for run in runs])
    with listen(host, port) as bound:
        loopback, number = is_loopback(host), bound.getsockname()[1]
        guard = PageGuard(loopback, secrets.token_urlsafe(24) if token or not loopback else "", number)
        name = "localhost" if loopback else socket.gethostname() if host in ("0.0.0.0", "::") else host
        name = f"[{name}]" if ":" in name else name
        page = PageServer(readers, guard)
        config = uvicorn.Config(
            page.app(), log_level="warning", access_log=False, server_header=False,
            timeout_graceful_shutdown=1, lifespan="on", ws="none",
        )  # fmt: skip
        say(f"http://{name}:{number}/" + (f"?token={guard.token}" if guard.token else ""))
        server = uvicorn.Server(config)
        page.ending = lambda: server.should_exit
        with suppress(KeyboardInterrupt):  # which it raises again, once it has ended in good order
            server.run(sockets=[bound])
