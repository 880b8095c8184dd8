"""A corpus in an object store: a local folder that shows it, whose shards are fetched whole when they are needed.

    FOLDER/remote.json        where from, and how much of it may lie here
    FOLDER/manifest.json      and the tokenizer: fetched once; the rest of megastable sees the folder of a corpus
    FOLDER/NAME.bin, .idx     shards, put in place by a rename once sizes and hashes are those of the manifest
    FOLDER/.fetching/NAME     of a fetch that is under way, or was killed: the next one begins again
    FOLDER/.locks/NAME        locked exclusively by the process that fetches or removes the shard, shared by all that read it

All processes of a host share the folder: each shard is fetched once. Locks are flock's, which the kernel releases when
their process ends, however it ends. Above the limit the shard that was opened longest ago goes, except those that
a process has open: these may exceed the limit.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, PositiveInt, ValidationError

from megastable.base import durable
from megastable.base.errors import ConfigError, DataError
from megastable.base.object_store import START_SECONDS, ObjectStore, StoreError, retry
from megastable.data.shard_format import ShardInfo, hash_file, with_suffix
from megastable.data.shards import Shard

if TYPE_CHECKING:  # they import this module
    from megastable.data.manifest import Manifest, Stream
    from megastable.data.order import Order

log = logging.getLogger(__name__)

REMOTE, LOCKS, FETCHING = "remote.json", ".locks", ".fetching"
OPEN_SHARDS = 8  # per stream: what is open cannot make room
TRIES = 3  # of a shard whose bytes are wrong: the network may have changed them, the store may hold them so
Int64s = npt.NDArray[np.int64]
Key = tuple[int, str]  # the number of a stream, and the name of a shard
FETCHERS = 4  # shards that a rank fetches ahead at once
AHEAD = 256  # steps that shards are fetched ahead of, at most


class Remote(BaseModel):
    """remote.json. limit: bytes of shards that may lie in the folder; None: all of them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: str
    limit: PositiveInt | None = None


class RemoteCorpus:
    """The folder of a corpus in a store. Thread-safe, and safe against other processes of this host."""

    def __init__(self, folder: Path, remote: Remote) -> None:
        self.folder, self.remote = folder, remote
        self._store: ObjectStore | None = None
        self._exceeded = False

    @classmethod
    def find_remote(cls, folder: Path) -> RemoteCorpus | None:
        """That of a folder; None if the folder is a corpus by itself. Raises DataError for a broken remote.json."""
        path = folder / REMOTE
        try:
            return cls(folder, Remote.model_validate_json(path.read_bytes()))
        except FileNotFoundError:
            return None
        except (OSError, ValidationError) as error:
            raise DataError(f"{path} cannot be used ({error}): delete {folder}, it is fetched again") from None

    @property
    def store(self) -> ObjectStore:
        if self._store is None:
            self._store = ObjectStore(self.remote.url)
        return self._store

    # Shards

    def open_shard(self, info: ShardInfo, vocab_size: int) -> Shard:
        """The shard, fetched if it is not here; it stays here for as long as it is open.

        Waits for as long as the store does not answer. Raises DataError for a shard that the store does not have, or
        that is not the one that the manifest describes.
        """
        hold = self.hold_shard(info, threading.Event())
        try:
            shard = Shard(self.folder / info.name, info, vocab_size)
        except BaseException:
            os.close(hold)
            raise
        weakref.finalize(shard, os.close, hold)
        return shard

    def hold_shard(self, info: ShardInfo, stopped: threading.Event) -> int:
        """Fetch a shard if it is not here, and keep it here: the descriptor of the lock to close.

        stopped: gives up a wait for the store. Raises as `open_shard`, and StoreError when given up.
        """
        hold = self._open_lock(info.name)
        try:
            while True:
                fcntl.flock(hold, fcntl.LOCK_SH)
                if self.is_here(info):
                    bin_path = with_suffix(self.folder / info.name, ".bin")
                    # The access time says when it was opened last; the other one, whether it was written since.
                    with suppress(OSError):
                        os.utime(bin_path, ns=(time.time_ns(), bin_path.stat().st_mtime_ns))
                    return hold
                # Not atomic: another process may fetch it first, or remove it after us. So we look again.
                fcntl.flock(hold, fcntl.LOCK_EX)
                if not self.is_here(info):
                    self._fetch(info, stopped)
        except BaseException:
            os.close(hold)
            raise

    def is_here(self, info: ShardInfo) -> bool:
        """Whether a shard need not be fetched, at this moment."""
        prefix = self.folder / info.name
        for suffix, byte_count in ((".bin", info.bin_bytes), (".idx", info.idx_bytes)):
            try:
                if with_suffix(prefix, suffix).stat().st_size != byte_count:
                    return False
            except OSError:
                return False
        return True

    def _fetch(self, info: ShardInfo, stopped: threading.Event) -> None:
        """Fetch a shard, whose lock is held exclusively."""
        temporary = self.folder / FETCHING / info.name
        try:
            self._make_room(info)
            for suffix, byte_count, xxh3 in (
                (".bin", info.bin_bytes, info.bin_xxh3), (".idx", info.idx_bytes, info.idx_xxh3),
            ):  # fmt: skip
                self._fetch_file(info.name + suffix, temporary, (byte_count, xxh3), stopped)
            # The index first: a shard counts as here when both are.
            for suffix in (".idx", ".bin"):
                os.replace(temporary / (info.name + suffix), self.folder / (info.name + suffix))
            durable.sync_directory(self.folder)
        except StoreError:
            raise
        except FileNotFoundError as error:
            raise DataError(
                f"{error}: the manifest lists it, the store does not have it: upload it again"
            ) from None
        except OSError as error:
            raise DataError(f"{self.folder}: {info.name} could not be fetched to there: {error}") from None
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    def _fetch_file(
        self, name: str, temporary: Path, wanted: tuple[int, str], stopped: threading.Event
    ) -> None:
        target = temporary / name
        for _ in range(TRIES):
            retry(lambda: self.store.download_file(name, target), f"{self.remote.url}/{name}", stopped=stopped)
            found = target.stat().st_size, hash_file(target)
            if found == wanted:
                _sync_file(target)
                return
            log.warning("%s/%s: came as %s, the manifest says %s", self.remote.url, name, found, wanted)
        raise DataError(
            f"{self.remote.url}/{name} is not the file that the manifest describes: {found[0]} bytes with hash "
            f"{found[1]}, it should be {wanted[0]} with {wanted[1]}: upload the corpus again, or delete "
            f"{self.folder} if all of it has changed"
        )

    def _make_room(self, info: ShardInfo) -> None:
        """Reserve the bytes of a shard that is about to be fetched, and remove others until it fits."""
        needed = info.bin_bytes + info.idx_bytes
        with self._locked(self.folder / ".lock"):
            temporary = self.folder / FETCHING / info.name
            shutil.rmtree(temporary, ignore_errors=True)
            used = self._count_bytes() + needed if self.remote.limit is not None else 0
            for _, name in sorted(self._list_shards()) if used > (self.remote.limit or used) else ():
                if used <= (self.remote.limit or used):
                    break
                used -= self._remove(name)
            temporary.mkdir(parents=True)
            (temporary / ".bytes").write_text(str(needed))
        if used > (self.remote.limit or used) and not self._exceeded:
            self._exceeded = True
            log.warning(
                "%s: %.2f GiB of shards are open at once, cache_gib allows %.2f: it is exceeded",
                self.folder, used / 2**30, (self.remote.limit or 0) / 2**30,
            )  # fmt: skip

    def _list_shards(self) -> list[tuple[int, str]]:
        """When each shard that lies here was opened last, and its name."""
        return [(path.stat().st_atime_ns, path.name[:-4]) for path in self.folder.glob("*.bin")]

    def _count_bytes(self) -> int:
        """Bytes of the shards that are here, or will be."""
        byte_count = sum(path.stat().st_size for end in ("bin", "idx") for path in self.folder.glob(f"*.{end}"))
        for reserved in (self.folder / FETCHING).glob("*/.bytes"):
            with self._try_lock(reserved.parent.name) as is_dead:
                if is_dead:  # of a fetch that was killed
                    shutil.rmtree(reserved.parent, ignore_errors=True)
                else:
                    byte_count += int(reserved.read_text() or 0)
        return byte_count

    def _remove(self, name: str) -> int:
        """Remove a shard that nobody has open; the bytes that came free."""
        freed = 0
        with self._try_lock(name) as is_free:
            for path in (self.folder / f"{name}.bin", self.folder / f"{name}.idx") if is_free else ():
                with suppress(FileNotFoundError):
                    size = path.stat().st_size
                    path.unlink()
                    freed += size
        return freed

    # Locks

    def _open_lock(self, name: str) -> int:
        try:
            return os.open(self.folder / LOCKS / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise DataError(f"{self.folder / LOCKS / name}: {error.strerror}") from None

    @contextmanager
    def _try_lock(self, name: str) -> Iterator[bool]:
        """Whether nobody reads or fetches a shard; nobody does until the block ends, then."""
        descriptor = self._open_lock(name)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield True
        except BlockingIOError:
            yield False
        finally:
            os.close(descriptor)

    @contextmanager
    def _locked(self, path: Path) -> Iterator[None]:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)


def open_remote(folder: Path, url: str, limit: int | None) -> RemoteCorpus:
    """Make `folder` show the corpus at `url`, and fetch its manifest and tokenizer if they are not there yet.

    limit: bytes of shards that may lie in the folder. Raises ConfigError for a folder that is something else, DataError
    for a corpus that is not there, and StoreError's text in a DataError if the store does not answer.
    """
    from megastable.data.manifest import FILE, Manifest

    remote = RemoteCorpus(folder, Remote(url=url, limit=limit))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with remote._locked(folder / ".lock"):
            known = RemoteCorpus.find_remote(folder)
            if known is None and (others := [p for p in folder.iterdir() if p.name != ".lock"]):
                raise ConfigError(
                    f"{folder} is not a folder for {url}: {others[0].name} is in it; name an empty or a new one as path"
                )
            if known is not None and known.remote.url != url:
                raise ConfigError(
                    f"{folder} holds shards of {known.remote.url}, not of {url}: name another folder as path"
                )
            (folder / LOCKS).mkdir(exist_ok=True)
            if known is None or known.remote != remote.remote:
                durable.write_file(folder / REMOTE, remote.remote.model_dump_json().encode())
            if not (folder / FILE).exists():
                content = retry(lambda: remote.store.read_object(FILE), f"{url}/{FILE}", START_SECONDS)
                incoming = folder / FETCHING / ".corpus"
                shutil.rmtree(incoming, ignore_errors=True)
                incoming.mkdir(parents=True)
                (incoming / FILE).write_bytes(content)
                _fetch_tokenizer(remote, Manifest.load_manifest(incoming), incoming)
                durable.write_file(folder / FILE, content)  # last: it says that the rest is there
                shutil.rmtree(incoming, ignore_errors=True)
    except FileNotFoundError as error:
        raise DataError(f"{error}: {url} is not a prepared corpus: upload all of its folder to there") from None
    except OSError as error:
        raise DataError(f"{url} cannot be fetched to {folder}: {error}") from None
    return remote


def _fetch_tokenizer(remote: RemoteCorpus, manifest: Manifest, incoming: Path) -> None:
    """Fetch the tokenizer's file to the folder. Raises DataError if it is another one."""
    file_name = manifest.tokenizer.file
    if Path(file_name).name != file_name:
        raise DataError(f"{remote.remote.url}: the tokenizer {file_name!r} is not a file of that folder")
    download, where = incoming / "tokenizer", f"{remote.remote.url}/{file_name}"
    retry(lambda: remote.store.download_file(file_name, download), where, START_SECONDS)
    if hash_file(download) != manifest.tokenizer.xxh3:
        raise DataError(f"{where} is not the tokenizer that the manifest describes: upload it again")
    _sync_file(download)
    os.replace(download, remote.folder / file_name)


def _sync_file(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


class ReadAhead:
    """Fetches the shards of the steps to come, in threads; `Stream.read_tokens` waits for what is not here in time.

    A rank follows its own samples: what several ranks of a host need, the first one fetches. It looks as far ahead as
    half of its share of the limit holds, so nothing fetched ahead goes before it is read. Without a limit all shards
    of the run follow. Problems are those of the step that needs the shard, which meets them itself.
    """

    def __init__(self, order: Order, streams: Sequence[Stream]) -> None:
        self._order, self._streams = order, streams
        self._ranks = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        self._rank = int(os.environ.get("LOCAL_RANK", "0"))
        self._stopped, self._taken = threading.Event(), 0

    def follow_steps(self, steps: Iterator[Int64s]) -> None:
        """From now on fetch for these steps: the positions of each that this rank reads, endless."""
        self.close()
        self._stopped, self._taken = threading.Event(), 0
        arguments = steps, self._stopped
        threading.Thread(target=self._run, args=arguments, name="read-ahead", daemon=True).start()

    def note_step(self) -> None:
        """A step was taken: the next one may come into view."""
        self._taken += 1

    def close(self) -> None:
        """End the threads; one that waits for the store ends soon."""
        self._stopped.set()

    def _run(self, steps: Iterator[Int64s], stopped: threading.Event) -> None:
        window, seen, first_step = deque[set[Key]](), Counter[Key](), 0
        with ThreadPoolExecutor(FETCHERS, "fetch") as pool:
            for step_number, positions in enumerate(steps):
                step_keys = self._keys_of(positions)
                while not stopped.is_set():
                    while window and first_step < self._taken:
                        seen -= Counter(window.popleft())
                        first_step += 1
                    if not window or (len(window) < AHEAD and self._fits({*seen, *step_keys})):
                        break
                    if len(window) == AHEAD and step_number == AHEAD:
                        self._fetch_rest(pool, stopped)
                        step_number += 1
                    stopped.wait(0.2)
                if stopped.is_set():
                    break
                for key in step_keys - seen.keys():
                    pool.submit(self._fetch, key, stopped)
                window.append(step_keys)
                seen += Counter(step_keys)
            pool.shutdown(cancel_futures=True)

    def _keys_of(self, positions: Int64s) -> set[Key]:
        places, length = self._order.locate_samples(positions), self._order.sequence_length + 1
        found = set[Key]()
        for corpus_index, first_token in zip(places.corpus, places.first_token, strict=True):
            stream = self._streams[corpus_index]
            if stream.remote is not None:
                names = stream.shards_between(int(first_token), length)
                found |= {(int(corpus_index), name) for name in names}
        return found

    def _fits(self, keys: set[Key]) -> bool:
        """Whether half of this rank's share of every limit holds these shards."""
        needed = Counter[int]()
        for corpus_index, name in keys:
            info = self._streams[corpus_index].describe_shard(name)
            needed[corpus_index] += info.bin_bytes + info.idx_bytes
        limits = {index: remote.remote.limit for index in needed if (remote := self._streams[index].remote)}
        return all(
            limit is None or needed[index] * 2 * self._ranks <= limit for index, limit in limits.items()
        )

    def _fetch_rest(self, pool: ThreadPoolExecutor, stopped: threading.Event) -> None:
        """Fetch all shards of the corpora without a limit, every rank of a host from another one on."""
        for index, stream in enumerate(self._streams):
            if stream.remote is not None and stream.remote.remote.limit is None:
                names = list(dict.fromkeys(segment.shard for segment in stream.segments))
                first = len(names) * self._rank // self._ranks
                for name in [*names[first:], *names[:first]]:
                    pool.submit(self._fetch, (index, name), stopped)

    def _fetch(self, key: Key, stopped: threading.Event) -> None:
        stream = self._streams[key[0]]
        if stream.remote is None or stopped.is_set():
            return
        with suppress(DataError, OSError):
            os.close(stream.remote.hold_shard(stream.describe_shard(key[1]), stopped))
