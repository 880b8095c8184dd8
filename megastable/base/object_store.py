"""A folder in an object store (S3, Google Cloud Storage, ...) by an fsspec URL: whole objects in and out, none cached.

fsspec and the client of the store are imported only where a URL is used (the extra `store`). Credentials and endpoint
are those of the client's own environment (AWS_ENDPOINT_URL, AWS_PROFILE, ...), never of a recipe.
"""

from __future__ import annotations

import logging
import random
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from megastable.base.errors import ConfigError, is_full
from megastable.base.process import install_command

log = logging.getLogger(__name__)
T = TypeVar("T")

LONGEST_PAUSE = 30.0  # seconds between two tries
SAID_EVERY = 60.0  # seconds between two warnings about the same wait
START_SECONDS = 60.0  # a start waits so long for a store; a run that trains waits for as long as it takes

# Packages that draw from Python's random numbers, whose state is part of every checkpoint, when they wait or retry.
CLIENTS = ("aiobotocore", "aiohttp", "botocore", "fsspec", "gcsfs", "s3fs")
_own_random = random.Random()

# What threads of this process wait for, by thread. Also before a request has failed: a store that hangs says nothing
# for a minute.
_awaited: dict[int, str] = {}
_of_thread = threading.local()


# What clients call it when credentials are missing, wrong or over: types of exceptions, and S3's codes.
DENIALS = re.compile("Credential|Token|Unauthori|Authenticat|Forbidden|AccessDenied")


class StoreError(OSError):
    """The store, or the way to it, fails: it may help to try again."""


class DeniedError(StoreError):
    """The store refuses our credentials, or there are none: it helps to renew them."""


def is_url(text: str) -> bool:
    """Whether a text is a URL of an object store rather than a path."""
    return "://" in text


def describe_wait() -> str:
    """What this process waits for in a store, and why it is not there yet, if known; "" if for nothing."""
    return next(iter(list(_awaited.values())), "")


def hide_waits() -> None:
    """From now on this thread fetches what nobody waits for yet: else a process that hangs would seem to wait for the
    store."""
    _of_thread.hidden = True


def _tell_wait(what: str) -> None:
    if not getattr(_of_thread, "hidden", False):
        _awaited[threading.get_ident()] = what


@contextmanager
def say_wait(what: str) -> Iterator[None]:
    """This thread waits for something in a store, which another process may be fetching."""
    _tell_wait(what)
    try:
        yield
    finally:
        _awaited.pop(threading.get_ident(), "")


def retry(
    action: Callable[[], T], what: str, seconds: float = float("inf"), stopped: threading.Event | None = None
) -> T:
    """The result of `action`, tried again after longer and longer pauses when the store fails.

    Args:
        action: talks to a store.
        what: it wants, for the log and `describe_wait`.
        seconds: until it is given up.
        stopped: set by others to give up.

    Raises:
        FileNotFoundError: At once, the store has no such object.
        DeniedError: At once if there is an end to the waiting: a start is refused, what trains waits for a person.
        OSError: At once for a full disk, otherwise the last one when it is given up.
    """
    stop_event, thread_number = stopped or threading.Event(), threading.get_ident()
    begin_time, said_time, pause_seconds = time.monotonic(), float("-inf"), 0.5
    has_failed = False
    _tell_wait(what)
    try:
        while True:
            try:
                return action()
            except FileNotFoundError:
                raise
            except OSError as error:
                now = time.monotonic()
                if isinstance(error, DeniedError) and seconds < float("inf"):
                    raise
                if is_full(error) or stop_event.is_set() or now - begin_time + pause_seconds > seconds:
                    raise
                has_failed = True
                _tell_wait(f"{what}: {error}")
                if now - said_time >= SAID_EVERY:
                    log.warning("waiting for %s: %s; it is tried again until it is there", what, error)
                    said_time = now
            stop_event.wait(pause_seconds)
            pause_seconds = min(2 * pause_seconds, LONGEST_PAUSE)
    finally:
        _awaited.pop(thread_number, "")
        if has_failed:
            log.warning("no longer waiting for %s, after %.0f s", what, time.monotonic() - begin_time)


class ObjectStore:
    """The objects below a URL, by their keys: relative names with slashes. Thread-safe.

    All methods raise FileNotFoundError for an object that is not there, DeniedError where the store says no, and
    StoreError for all else that the store or the network does. After a denial a new client looks for credentials again.
    """

    def __init__(self, url: str) -> None:
        """Raises ConfigError if no client for such a URL is installed, or it is malformed."""
        self.url = url.rstrip("/")
        try:
            import fsspec
        except ImportError:
            raise ConfigError(f"{url}: object stores need fsspec: {install_command('store')}") from None
        scheme = url.partition("://")[0]
        # Listings change behind our back; a local folder, unlike a bucket, needs its subfolders made.
        client_options: dict[str, Any] = {"use_listings_cache": False}
        if scheme in ("file", "local"):
            client_options = {"auto_mkdir": True}
        elif scheme in ("s3", "s3a"):
            # The other modes bind Python's random numbers where `give_own_random` does not reach.
            client_options |= {"config_kwargs": {"retries": {"mode": "legacy"}}}
        self._denied = False
        self._connect = partial(fsspec.core.url_to_fs, self.url, **client_options)
        try:
            self._files, self._root = self._connect()
        except ImportError as error:
            raise ConfigError(
                f"{url}: {error}: {install_command('store')} for s3, the client of that name for others"
            ) from None
        except Exception as error:  # every client has its own errors
            raise ConfigError(f"{url} is not a URL that fsspec knows: {_in_a_line(error)}") from None
        self._root = self._root.rstrip("/")
        give_own_random()

    def read_object(self, key: str) -> bytes:
        """The bytes of an object."""
        with self._errors(key):
            object_bytes: bytes = self._files.cat_file(self._path(key))
        return object_bytes

    def write_object(self, key: str, content: bytes) -> None:
        """Write an object; in a store, unlike in a folder, it is there whole or not at all."""
        with self._errors(key):
            self._files.pipe_file(self._path(key), content)

    def download_file(self, key: str, path: Path) -> None:
        """Copy an object to a local file. Raises OSError also for the local disk."""
        with self._errors(key):
            self._files.get_file(self._path(key), str(path))

    def upload_file(self, path: Path, key: str) -> None:
        """Copy a local file to an object. FileNotFoundError: of the local file."""
        try:
            with self._errors(key):
                self._files.put_file(str(path), self._path(key))
        except FileNotFoundError as error:
            if path.exists():  # the bucket is not there
                raise StoreError(str(error)) from None
            raise

    def list_objects(self, prefix: str) -> dict[str, int]:
        """Keys below `prefix`, with their sizes in bytes; empty if there are none."""
        with suppress(FileNotFoundError), self._errors(prefix):
            self._files.invalidate_cache()
            found_objects = self._files.find(self._path(prefix), detail=True)
            return {
                path.rpartition(f"{self._root}/")[2]: int(facts["size"])
                for path, facts in found_objects.items()
            }
        return {}

    def delete_objects(self, keys: Sequence[str]) -> None:
        """Delete objects; those that are not there do not matter."""
        for key in keys:
            with suppress(FileNotFoundError), self._errors(key):
                self._files.rm_file(self._path(key))

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}"

    @contextmanager
    def _errors(self, key: str) -> Iterator[None]:
        object_url = f"{self.url}/{key}"
        try:
            if self._denied:
                self._files, self._denied = self._connect(skip_instance_cache=True)[0], False
            yield
        except FileNotFoundError as error:
            raise FileNotFoundError(f"{object_url}: {error}") from None
        except Exception as error:  # a client raises what it likes
            if isinstance(error, OSError) and is_full(error):
                raise
            if _is_denial(error):
                self._denied = True
                raise DeniedError(f"{object_url}: no permission: {_in_a_line(error)}") from error
            raise StoreError(f"{object_url}: {_in_a_line(error)}") from error


def give_own_random() -> None:
    """Have the clients draw from random numbers of their own: a run has the same bytes with and without a store."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in CLIENTS and getattr(module, "random", None) is random:
            module.random = _own_random  # type: ignore[attr-defined]


def _is_denial(error: Exception) -> bool:
    response = getattr(error.__cause__, "response", None)
    s3_code = str(response.get("Error", {}).get("Code")) if isinstance(response, dict) else ""
    is_named = DENIALS.search(f"{type(error).__name__} {s3_code}") is not None
    return is_named or isinstance(error, PermissionError) or getattr(error, "code", None) in (401, 403)


def _in_a_line(error: Any) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]
