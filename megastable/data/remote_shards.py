"""A corpus in an object store: a local folder that shows it, whose shards are fetched whole when they are needed.

    FOLDER/remote.json        where from, and how much of it may lie here
    FOLDER/manifest.json      and the tokenizer: fetched once; the rest of megastable sees the folder of a corpus
    FOLDER/NAME.bin, .idx     shards, put in place by a rename once sizes and hashes are those of the manifest
    FOLDER/.fetching/NAME     of a fetch that is under way, or was killed: the next one begins again
    FOLDER/.locks/NAME        locked by whoever fetches or removes the shard; shared by all that read it

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
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pydantic import BaseModel, ConfigDict, PositiveInt, ValidationError

from megastable.base import durable
from megastable.base.errors import DataError
from megastable.base.object_store import ObjectStore, StoreError, retry, say_wait
from megastable.data.shard_format import REMOTE, ShardInfo, hash_file, with_suffix
from megastable.data.shards import Shard

log = logging.getLogger(__name__)

LOCKS, FETCHING = ".locks", ".fetching"
OPEN_SHARDS = 8  # per stream: what is open cannot make room
TRIES = 3  # of a shard whose bytes are wrong: the network may have changed them, the store may hold them so


class Remote(BaseModel):
    """remote.json. limit: bytes of shards that may lie in the folder; None: all of them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: str
    limit: PositiveInt | None = None


class RemoteShards:
    """The folder of a corpus in a store. Thread-safe, and safe against other processes of this host."""

    def __init__(self, folder: Path, remote: Remote) -> None:
        self.folder, self.remote = folder, remote
        self._store: ObjectStore | None = None
        self._exceeded = False

    @classmethod
    def find_remote(cls, folder: Path) -> RemoteShards | None:
        """That of a folder; None if the folder is a corpus by itself. Raises DataError for a broken remote.json."""
        remote_path = folder / REMOTE
        if not remote_path.exists():
            return None
        try:
            return cls(folder, Remote.model_validate_json(remote_path.read_bytes()))
        except (OSError, ValidationError) as error:
            raise DataError(
                f"{remote_path} cannot be used ({error}): delete {folder}, it is fetched again"
            ) from None

    @property
    def store(self) -> ObjectStore:
        if self._store is None:
            self._store = ObjectStore(self.remote.url)
        return self._store

    def check_unlimited(self, reason: str) -> None:
        """Raise a DataError if not all shards may lie here. reason: they have to."""
        if self.remote.limit is not None:
            raise DataError(f"{self.folder}: {reason}, and cache_gib limits how many are here: leave it out")

    # Shards

    def open_shard(self, info: ShardInfo, vocab_size: int) -> Shard:
        """The shard, fetched if it is not here; it stays here for as long as it is open.

        Waits for as long as the store does not answer. Raises DataError for a shard that the store does not have, or
        that is not the one that the manifest describes.
        """
        lock_descriptor = self.hold_shard(info, threading.Event())
        try:
            opened_shard = Shard(self.folder / info.name, info, vocab_size)
        except BaseException:
            os.close(lock_descriptor)
            raise
        weakref.finalize(opened_shard, os.close, lock_descriptor)
        return opened_shard

    def hold_shard(self, info: ShardInfo, stopped: threading.Event) -> int:
        """Fetch a shard if it is not here, and keep it here: the descriptor of the lock to close.

        stopped: gives up a wait for the store. Raises as `open_shard`, and StoreError when given up.
        """
        lock_descriptor = self._open_lock(info.name)
        try:
            while True:
                with say_wait(f"{self.remote.url}/{info.name}"):  # by another process of this host
                    fcntl.flock(lock_descriptor, fcntl.LOCK_SH)
                if self.is_here(info):
                    bin_path = with_suffix(self.folder / info.name, ".bin")
                    # The access time says when it was opened last; the other one, whether it was written since.
                    with suppress(OSError):
                        os.utime(bin_path, ns=(time.time_ns(), bin_path.stat().st_mtime_ns))
                    return lock_descriptor
                # Never wait for it: whoever fetches the shard first may keep it open to the end of the run. Nor is this
                # atomic: another process may remove the shard after us. So we look again.
                try:
                    fcntl.flock(lock_descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    fcntl.flock(lock_descriptor, fcntl.LOCK_UN)
                    time.sleep(
                        0.01 + threading.get_native_id() % 7 / 1000
                    )  # two that want it do not meet again
                    continue
                if not self.is_here(info):
                    self._fetch(info, stopped)
        except BaseException:
            os.close(lock_descriptor)
            raise

    def is_here(self, info: ShardInfo) -> bool:
        """Whether a shard need not be fetched, at this moment."""
        shard_prefix = self.folder / info.name
        for suffix, byte_count in ((".bin", info.bin_bytes), (".idx", info.idx_bytes)):
            try:
                if with_suffix(shard_prefix, suffix).stat().st_size != byte_count:
                    return False
            except OSError:
                return False
        return True

    def _fetch(self, info: ShardInfo, stopped: threading.Event) -> None:
        """Fetch a shard, whose lock is held exclusively."""
        fetch_folder = self.folder / FETCHING / info.name
        try:
            self._make_room(info)
            for suffix, byte_count, xxh3 in (
                (".bin", info.bin_bytes, info.bin_xxh3), (".idx", info.idx_bytes, info.idx_xxh3),
            ):  # fmt: skip
                self._fetch_file(info.name + suffix, fetch_folder, (byte_count, xxh3), stopped)
            # The index first: a shard counts as here when both are.
            for suffix in (".idx", ".bin"):
                os.replace(fetch_folder / (info.name + suffix), self.folder / (info.name + suffix))
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
            shutil.rmtree(fetch_folder, ignore_errors=True)

    def _fetch_file(
        self, name: str, temporary: Path, wanted: tuple[int, str], stopped: threading.Event
    ) -> None:
        target_path = temporary / name
        for _ in range(TRIES):
            retry(
                lambda: self.store.download_file(name, target_path),
                f"{self.remote.url}/{name}",
                stopped=stopped,
            )
            found_content = target_path.stat().st_size, hash_file(target_path)
            if found_content == wanted:
                durable.sync_file(target_path)
                return
            log.warning(
                "%s/%s: came as %s, the manifest says %s", self.remote.url, name, found_content, wanted
            )
        raise DataError(
            f"{self.remote.url}/{name} is not the file that the manifest describes: {found_content[0]} bytes with hash "
            f"{found_content[1]}, it should be {wanted[0]} with {wanted[1]}: upload the corpus again, or delete "
            f"{self.folder} if all of it has changed"
        )

    def _make_room(self, info: ShardInfo) -> None:
        """Reserve the bytes of a shard that is about to be fetched, and remove others until it fits."""
        needed_bytes = info.bin_bytes + info.idx_bytes
        with self._locked(self.folder / ".lock"):
            fetch_folder = self.folder / FETCHING / info.name
            shutil.rmtree(fetch_folder, ignore_errors=True)
            used_bytes = self._count_bytes() + needed_bytes if self.remote.limit is not None else 0
            for _, old_name in (
                sorted(self._list_shards()) if used_bytes > (self.remote.limit or used_bytes) else ()
            ):
                if used_bytes <= (self.remote.limit or used_bytes):
                    break
                used_bytes -= self._remove(old_name)
            fetch_folder.mkdir(parents=True)
            (fetch_folder / ".bytes").write_text(str(needed_bytes))
        if used_bytes > (self.remote.limit or used_bytes) and not self._exceeded:
            self._exceeded = True
            log.warning(
                "%s: %.2f GiB of shards are open at once, cache_gib allows %.2f: it is exceeded",
                self.folder, used_bytes / 2**30, (self.remote.limit or 0) / 2**30,
            )  # fmt: skip

    def _list_shards(self) -> list[tuple[int, str]]:
        """When each shard that lies here was opened last, and its name."""
        return [(path.stat().st_atime_ns, path.name[:-4]) for path in self.folder.glob("*.bin")]

    def _count_bytes(self) -> int:
        """Bytes of the shards that are here, or will be."""
        byte_count = sum(
            path.stat().st_size for end in ("bin", "idx") for path in self.folder.glob(f"*.{end}")
        )
        for reserved_path in (self.folder / FETCHING).glob("*/.bytes"):
            with self._try_lock(reserved_path.parent.name) as is_dead:
                if is_dead:  # of a fetch that was killed
                    shutil.rmtree(reserved_path.parent, ignore_errors=True)
                else:
                    byte_count += int(reserved_path.read_text() or 0)
        return byte_count

    def _remove(self, name: str) -> int:
        """Remove a shard that nobody has open; the bytes that came free."""
        freed_bytes = 0
        with self._try_lock(name) as is_free:
            for shard_path in (self.folder / f"{name}.bin", self.folder / f"{name}.idx") if is_free else ():
                with suppress(FileNotFoundError):
                    file_bytes = shard_path.stat().st_size
                    shard_path.unlink()
                    freed_bytes += file_bytes
        return freed_bytes

    # Locks

    def _open_lock(self, name: str) -> int:
        try:
            return os.open(self.folder / LOCKS / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise DataError(f"{self.folder / LOCKS / name}: {error.strerror}") from None

    @contextmanager
    def _try_lock(self, name: str) -> Iterator[bool]:
        """Whether nobody reads or fetches a shard; nobody does until the block ends, then."""
        lock_descriptor = self._open_lock(name)
        try:
            fcntl.flock(lock_descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield True
        except BlockingIOError:
            yield False
        finally:
            os.close(lock_descriptor)

    @contextmanager
    def _locked(self, path: Path) -> Iterator[None]:
        lock_descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(lock_descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock_descriptor)
