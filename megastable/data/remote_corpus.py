"""Open a corpus in an object store as a local folder (remote_shards.py), and fetch its shards before their step."""

from __future__ import annotations

import os
import shutil
import threading
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt

from megastable.base import durable
from megastable.base.errors import ConfigError, DataError
from megastable.base.object_store import START_SECONDS, hide_waits, retry
from megastable.data.manifest import FILE, Manifest, Stream
from megastable.data.order import Order
from megastable.data.remote_shards import FETCHING, LOCKS, Remote, RemoteShards
from megastable.data.shard_format import REMOTE, hash_file

Int64s = npt.NDArray[np.int64]
Key = tuple[int, str]  # the number of a stream, and the name of a shard
FETCHERS = 4  # shards that a rank fetches ahead at once
AHEAD = 256  # steps that shards are fetched ahead of, at most


def open_remote(folder: Path, url: str, limit: int | None) -> RemoteShards:
    """Make `folder` show the corpus at `url`, and fetch its manifest and tokenizer if they are not there yet.

    limit: bytes of shards that may lie in the folder. Raises ConfigError for a folder that is something else, DataError
    for a corpus that is not there, and StoreError's text in a DataError if the store does not answer.
    """
    remote_shards = RemoteShards(folder, Remote(url=url, limit=limit))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with remote_shards._locked(folder / ".lock"):
            known_shards = RemoteShards.find_remote(folder)
            # What a start that was killed may have made before `REMOTE`, or half of that, is hidden.
            other_paths = [path for path in folder.iterdir() if not path.name.startswith(".")]
            if known_shards is None and other_paths:
                raise ConfigError(
                    f"{folder} is not a folder for {url}: {other_paths[0].name} is in it; name an empty or a new one "
                    "as path"
                )
            if known_shards is not None and known_shards.remote.url != url:
                raise ConfigError(
                    f"{folder} holds shards of {known_shards.remote.url}, not of {url}: name another folder as path"
                )
            (folder / LOCKS).mkdir(exist_ok=True)
            if known_shards is None or known_shards.remote != remote_shards.remote:
                durable.write_file(folder / REMOTE, remote_shards.remote.model_dump_json().encode())
            if not (folder / FILE).exists():
                manifest_bytes = retry(
                    lambda: remote_shards.store.read_object(FILE), f"{url}/{FILE}", START_SECONDS
                )
                incoming_folder = folder / FETCHING / ".corpus"
                shutil.rmtree(incoming_folder, ignore_errors=True)
                incoming_folder.mkdir(parents=True)
                (incoming_folder / FILE).write_bytes(manifest_bytes)
                _fetch_tokenizer(remote_shards, Manifest.load_manifest(incoming_folder), incoming_folder)
                durable.write_file(folder / FILE, manifest_bytes)  # last: it says that the rest is there
                shutil.rmtree(incoming_folder, ignore_errors=True)
    except FileNotFoundError as error:
        raise DataError(
            f"{error}: {url} is not a prepared corpus: upload all of its folder to there"
        ) from None
    except OSError as error:
        raise DataError(f"{url} cannot be fetched to {folder}: {error}") from None
    return remote_shards


def _fetch_tokenizer(remote: RemoteShards, manifest: Manifest, incoming: Path) -> None:
    """Fetch the tokenizer's file to the folder. Raises DataError if it is another one."""
    file_name = manifest.tokenizer.file
    if Path(file_name).name != file_name:
        raise DataError(f"{remote.remote.url}: the tokenizer {file_name!r} is not a file of that folder")
    download_path, file_url = incoming / "tokenizer", f"{remote.remote.url}/{file_name}"
    retry(lambda: remote.store.download_file(file_name, download_path), file_url, START_SECONDS)
    if hash_file(download_path) != manifest.tokenizer.xxh3:
        raise DataError(f"{file_url} is not the tokenizer that the manifest describes: upload it again")
    durable.sync_file(download_path)
    os.replace(download_path, remote.folder / file_name)


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
        run_arguments = steps, self._stopped
        threading.Thread(target=self._run, args=run_arguments, name="read-ahead", daemon=True).start()

    def note_step(self) -> None:
        """A step was taken: the next one may come into view."""
        self._taken += 1

    def close(self) -> None:
        """End the threads; one that waits for the store ends soon."""
        self._stopped.set()

    def _run(self, steps: Iterator[Int64s], stopped: threading.Event) -> None:
        step_window, seen_keys, first_step = deque[set[Key]](), Counter[Key](), 0
        with ThreadPoolExecutor(FETCHERS, "fetch", hide_waits) as fetch_pool:
            for step_number, positions in enumerate(steps):
                if step_number == AHEAD:
                    self._fetch_rest(fetch_pool, stopped)
                step_keys = self._keys_of(positions)
                while not stopped.is_set():
                    while step_window and first_step < self._taken:
                        seen_keys -= Counter(step_window.popleft())
                        first_step += 1
                    if not step_window or (len(step_window) < AHEAD and self._fits({*seen_keys, *step_keys})):
                        break
                    stopped.wait(0.2)
                if stopped.is_set():
                    break
                for new_key in step_keys - seen_keys.keys():
                    fetch_pool.submit(self._fetch, new_key, stopped)
                step_window.append(step_keys)
                seen_keys += Counter(step_keys)
            fetch_pool.shutdown(cancel_futures=True)

    def _keys_of(self, positions: Int64s) -> set[Key]:
        places, token_count = self._order.locate_samples(positions), self._order.sequence_length + 1
        found_keys = set[Key]()
        for corpus_index, first_token in zip(places.corpus, places.first_token, strict=True):
            stream = self._streams[corpus_index]
            if stream.remote is not None:
                shard_names = stream.shards_between(int(first_token), token_count)
                found_keys |= {(int(corpus_index), name) for name in shard_names}
        return found_keys

    def _fits(self, keys: set[Key]) -> bool:
        """Whether half of this rank's share of every limit holds these shards."""
        needed_bytes = Counter[int]()
        for corpus_index, name in keys:
            info = self._streams[corpus_index].describe_shard(name)
            needed_bytes[corpus_index] += info.bin_bytes + info.idx_bytes
        byte_limits = {
            index: remote.remote.limit for index in needed_bytes if (remote := self._streams[index].remote)
        }
        return all(
            limit is None or needed_bytes[index] * 2 * self._ranks <= limit
            for index, limit in byte_limits.items()
        )

    def _fetch_rest(self, pool: ThreadPoolExecutor, stopped: threading.Event) -> None:
        """Fetch all shards of the corpora without a limit, every rank of a host from another one on."""
        for index, stream in enumerate(self._streams):
            if stream.remote is not None and stream.remote.remote.limit is None:
                shard_names = list(dict.fromkeys(segment.shard for segment in stream.segments))
                first_index = len(shard_names) * self._rank // self._ranks
                for name in [*shard_names[first_index:], *shard_names[:first_index]]:
                    pool.submit(self._fetch, (index, name), stopped)

    def _fetch(self, key: Key, stopped: threading.Event) -> None:
        shard_stream = self._streams[key[0]]
        if shard_stream.remote is None or stopped.is_set():
            return
        with suppress(DataError, OSError):
            os.close(shard_stream.remote.hold_shard(shard_stream.describe_shard(key[1]), stopped))
