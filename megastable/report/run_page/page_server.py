"""Serves the page of runs, to whom it is for: Starlette and uvicorn, server-sent events for what is new."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import hmac
import ipaddress
import secrets
import socket
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
from typing import Any

import pyarrow as pa

from megastable.base.errors import ConfigError
from megastable.base.process import install_command
from megastable.report.run_page import page_file, run_reader
from megastable.report.run_page.plot_data import AXES
from megastable.report.run_page.run_reader import RunReader, told_apart

COOKIE = "megastable"
NAMES = ("localhost", "127.0.0.1", "[::1]")

# Of the page itself. uPlot sets its styles by script, which a policy allows.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; frame-src 'self'; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)
# Of an incident's files: no script, whatever they hold.
INCIDENT_POLICY = (
    "sandbox allow-same-origin; default-src 'none'; style-src 'unsafe-inline'; img-src 'self' data:; "
    "frame-ancestors 'self'; base-uri 'none'; form-action 'none'"
)
HEADERS = {
    "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer", "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin", "Cross-Origin-Opener-Policy": "same-origin",
}  # fmt: skip


@dataclass(frozen=True)
class PageGuard:
    """Keeps others out of a served page: foreign web sites, and whoever does not have its token.

    A page on a loopback address is protected from other machines, not from web sites that the same browser shows: one
    that lets its own name point to 127.0.0.1 (DNS rebinding) is told by the Host header. Elsewhere a token is needed:
    once in the address, from then on in a cookie.

    loopback: whether only this machine can connect. token: "" if none is needed. port: its own, so that two pages of
    one machine do not share a cookie."""

    loopback: bool
    token: str
    port: int

    @property
    def cookie(self) -> str:
        return f"{COOKIE}-{self.port}"

    def refuse_request(self, headers: Mapping[str, str], query: Mapping[str, str]) -> tuple[int, str] | None:
        """Why a request is not answered: a status and a sentence; None if it is."""
        if self.loopback and host_of(headers.get("host", "")) not in NAMES:
            return 421, "This page is served as localhost only: open it by that name.\n"
        fetch_site = headers.get("sec-fetch-site", "none")
        if fetch_site == "cross-site" and headers.get("sec-fetch-mode") != "navigate":
            return 403, "Other web sites may not read this page.\n"
        tokens = (query.get("token", ""), self._cookie(headers))
        if self.token and not any(map(self.match_token, tokens)):
            return 401, "This page needs its token: open the address that `megastable watch` has printed.\n"
        return None

    def match_token(self, given: str) -> bool:
        """Compare with the token in constant time."""
        return hmac.compare_digest(given.encode("utf-8", "replace"), self.token.encode())

    def _cookie(self, headers: Mapping[str, str]) -> str:
        try:
            own_cookie = SimpleCookie(headers.get("cookie", "")).get(self.cookie)
        except CookieError:
            return ""
        return "" if own_cookie is None else own_cookie.value


def host_of(header: str) -> str:
    """The name in a Host header, without the port."""
    host_name = header.strip().lower()
    if host_name.startswith("["):
        return host_name[: host_name.find("]") + 1]
    return host_name.rpartition(":")[0] if ":" in host_name else host_name


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address that is listened on."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


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

    def build_app(self) -> ASGIApp:
        page_routes = [
            Route("/", self._page),
            Route("/page.css", partial(_fixed, page_file.join_styles, "text/css; charset=utf-8")),
            Route("/page.js", partial(_fixed, page_file.join_scripts, "text/javascript; charset=utf-8")),
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
        return _Guarded(Starlette(routes=page_routes, lifespan=self._lifespan), self.guard)

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        for reader in self.readers:
            reader.start_reading()
        yield
        for reader in self.readers:
            reader.stop_reading()

    async def _page(self, request: Request) -> Response:
        if self.guard.token and "token" in request.query_params:
            # Out of the address, so that it is not in the browser's history or on a screenshot. Lax: a link on another
            # page, such as that of a chat, may lead here; what is asked from there without the user is refused.
            answer = RedirectResponse("/", 303)
            answer.set_cookie(self.guard.cookie, self.guard.token, httponly=True, samesite="lax")
            return answer
        told = [reader.describe_run() for reader in self.readers]
        return Response(page_file.render_served(told), media_type="text/html; charset=utf-8")

    async def _heads(self, request: Request) -> Response:
        return _json(await run_in_threadpool(self._all_heads))

    def _all_heads(self) -> list[dict[str, Any]]:
        return [reader.read_head() for reader in self.readers]

    async def _events(self, request: Request) -> Response:
        if self._streams >= STREAMS:
            return Response("Too many pages are open.\n", 503)
        return StreamingResponse(self._stream(), media_type="text/event-stream")

    async def _stream(self) -> AsyncIterator[bytes]:
        self._streams += 1
        try:
            told_versions, quiet_seconds = list[int](), 0.0
            while not self.ending():
                reader_versions = [run_reader.version for run_reader in self.readers]
                if reader_versions != told_versions:
                    told_versions, quiet_seconds = reader_versions, 0.0
                    yield b"data: " + page_file.as_json(await run_in_threadpool(self._all_heads)) + b"\n\n"
                elif quiet_seconds >= ALIVE:
                    quiet_seconds = 0.0
                    yield b": still here\n\n"
                await asyncio.sleep(TICK)
                quiet_seconds += TICK
        finally:
            self._streams -= 1

    async def _panel(self, request: Request) -> Response:
        return await self._answer(request, lambda reader: reader.read_panel())

    async def _plots(self, request: Request) -> Response:
        axis, begin, end = _window(request)
        columns = min(COLUMNS, max(50, int(_number(request, "columns") or 1000)))
        return await self._answer(request, lambda reader: reader.read_plots(axis, begin, end, columns))

    async def _heat(self, request: Request) -> Response:
        axis, window_begin, window_end = _window(request)
        return await self._answer(request, lambda reader: reader.read_heat(axis, window_begin, window_end))

    async def _machines(self, request: Request) -> Response:
        axis, window_begin, window_end = _window(request)
        return await self._answer(request, lambda reader: reader.machine_maps(axis, window_begin, window_end))

    async def _journal(self, request: Request) -> Response:
        query, group = (request.query_params.get(query_key, "")[:200] for query_key in ("query", "group"))
        most = min(2000, max(1, int(_number(request, "most") or run_reader.LINES)))
        return await self._answer(request, lambda r: run_reader.build_journal(r, query, group, most))

    async def _answer(self, request: Request, ask: Callable[[RunReader], Any]) -> Response:
        run_reader = self._reader(request)
        return _missing() if run_reader is None else _json(await run_in_threadpool(ask, run_reader))

    async def _incident(self, request: Request) -> Response:
        folder_name, file_name = request.path_params["folder"], request.path_params["file"]
        return self._file(request, folder_name, file_name) if folder_name.isdecimal() else _missing()

    async def _index(self, request: Request) -> Response:
        return self._file(request, request.path_params["file"])

    def _file(self, request: Request, *names: str) -> Response:
        """A file of an incident, which may lie nowhere else."""
        run_reader = self._reader(request)
        if run_reader is None or any(path_part.startswith(".") or "\0" in path_part for path_part in names):
            return _missing()
        path = run_reader.run.incidents.joinpath(*names)
        media_type = TYPES.get(path.suffix)
        try:
            incident_root = run_reader.run.incidents.resolve()
            if media_type is None or not path.is_file() or not path.resolve().is_relative_to(incident_root):
                return _missing()
        except (OSError, ValueError):
            return _missing()
        return FileResponse(path, media_type=media_type, headers={"Content-Security-Policy": INCIDENT_POLICY})

    def _reader(self, request: Request) -> RunReader | None:
        run_number = request.path_params["run"]
        return self.readers[run_number] if run_number < len(self.readers) else None


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
                given_names = {name.lower() for name, _ in message["headers"]}
                for header, value in {**HEADERS, "Content-Security-Policy": POLICY}.items():
                    if (encoded := header.lower().encode()) not in given_names:
                        message["headers"] = [*message["headers"], (encoded, value.encode())]
            await send(message)

        refused = self.guard.refuse_request(request.headers, request.query_params)
        if refused is not None:
            await Response(refused[1], refused[0], media_type="text/plain")(scope, receive, with_headers)
        else:
            await self.app(scope, receive, with_headers)


async def _fixed(text: Callable[[], str], kind: str, request: Request) -> Response:
    return Response(text(), media_type=kind)


def _json(value: Any) -> Response:
    return Response(page_file.as_json(value), media_type="application/json")


def _missing() -> Response:
    return Response("There is no such thing here.\n", 404, media_type="text/plain")


def _window(request: Request) -> tuple[str, float | None, float | None]:
    axis_name = request.query_params.get("axis", "step")
    return axis_name if axis_name in AXES else "step", _number(request, "from"), _number(request, "to")


def _number(request: Request, key: str) -> float | None:
    try:
        query_value = float(request.query_params[key])
    except (KeyError, ValueError):
        return None
    return query_value if abs(query_value) < 1e18 else None  # nan, too, is none


def open_socket(host: str, port: int | None) -> socket.socket:
    """A socket that listens. port: None = the first free one from PORT on. Raises ConfigError."""
    address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for candidate in range(PORT, PORT + TRIES) if port is None else (port,):
        found = socket.socket(address_family, socket.SOCK_STREAM)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            found.bind((host, candidate))
            found.listen(128)
        except (OSError, OverflowError) as error:
            found.close()
            is_taken = getattr(error, "errno", None) == errno.EADDRINUSE
            if port is None and is_taken and candidate < PORT + TRIES - 1:
                continue
            why = getattr(error, "strerror", None) or error
            raise ConfigError(f"--host {host} --port {candidate}: cannot listen there: {why}") from None
        return found
    raise AssertionError


def give_memory_back() -> None:
    """Let freed arrays leave the process at once: else those of a long run's account stay, as room for the next."""
    pa.set_memory_pool(pa.system_memory_pool())
    with suppress(OSError, AttributeError):  # another C library than glibc
        c_library = ctypes.CDLL(None)
        c_library.mallopt(MMAP_THRESHOLD, 1 << 15)
        c_library.mallopt(ARENA_MAX, 1)  # else every thread keeps memory of its own
        # Else the room of every column takes 2 MB more than is written.
        c_library.prctl(THP_DISABLE, 1, 0, 0, 0)


def serve_pages(
    runs: Sequence[Path], host: str, port: int | None, token: bool, say: Callable[[str], None]
) -> None:
    """Serve the page of run directories until Ctrl-C. token: require one on loopback, too. say: prints the address.

    Raises ConfigError, and DataError for a directory without a run."""
    give_memory_back()
    run_readers = told_apart([RunReader(run) for run in runs])
    with open_socket(host, port) as bound:
        is_local, port_number = is_loopback(host), bound.getsockname()[1]
        page_token = secrets.token_urlsafe(24) if token or not is_local else ""
        name = "localhost" if is_local else socket.gethostname() if host in ("0.0.0.0", "::") else host
        name = f"[{name}]" if ":" in name else name
        page = PageServer(run_readers, PageGuard(is_local, page_token, port_number))
        server_config = uvicorn.Config(
            page.build_app(), log_level="warning", access_log=False, server_header=False,
            timeout_graceful_shutdown=1, lifespan="on", ws="none",
        )  # fmt: skip
        say(f"http://{name}:{port_number}/" + (f"?token={page_token}" if page_token else ""))
        http_server = uvicorn.Server(server_config)
        page.ending = lambda: http_server.should_exit
        with suppress(KeyboardInterrupt):  # which it raises again, once it has ended in good order
            http_server.run(sockets=[bound])
