"""Prepares a process before training: signals, the run directory, the data; the same on all ranks."""

from __future__ import annotations

import json
import math
import os
import secrets
import signal
import socket
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import FrameType

import torch.distributed as dist

from megastable.base import durable
from megastable.base.collectives import find_difference, mark_collective, run_on_all, run_on_first
from megastable.base.errors import CheckpointError, ConfigError
from megastable.base.hardware import leads_host
from megastable.base.process import SAME, STOPS, release_stops
from megastable.checkpoint.uploads import restore_checkpoints
from megastable.config import deepspeed_json
from megastable.config.tree import RunConfig
from megastable.data.blends import Line, read_blends
from megastable.data.corpora import Corpora, HeldOut, Manifests, open_corpora
from megastable.data.shards import Shard
from megastable.run import directory
from megastable.run.directory import RunDirectory, read_object
from megastable.run.run_image import PLAN, restore_records


class StopRequest:
    """Set by SIGTERM or SIGINT, also one that came while this process was starting, or after so many hours; a SIGINT
    that follows later interrupts at once."""

    def __init__(self, hours: float | None = None) -> None:
        self.signal: int | None = None
        self._came = -math.inf
        self._until = math.inf if hours is None else time.monotonic() + 3600 * hours
        for signal_number in STOPS:
            signal.signal(signal_number, self._set)
        release_stops()

    def ask_to_stop(self) -> None:
        """Request a stop, as the signal does."""
        self.signal = self.signal or signal.SIGTERM

    @property
    def wanted(self) -> bool:
        return self.signal is not None or time.monotonic() > self._until

    def _set(self, number: int, frame: FrameType | None) -> None:
        arrival_time = time.monotonic()
        if number == signal.SIGINT and self.signal is not None and arrival_time - self._came > SAME:
            raise KeyboardInterrupt
        self.signal, self._came = number, arrival_time


def open_run(config: RunConfig, recipe_path: Path) -> tuple[RunConfig, RunDirectory]:
    """Open the run directory: rank 0 chooses, makes and locks it, and all ranks see it."""
    token, mine = secrets.token_hex(8), []

    def make() -> tuple[Path, str]:
        made_run = directory.make_directory(config, recipe_path)
        made_run.lock_run()
        mine.append(made_run)
        try:
            (made_run.root / ".seen").write_text(token)
        except OSError as error:
            raise ConfigError(
                f"run.dir={made_run.root} cannot be written to: {error}: make room, or use another"
            ) from None
        plan_path = made_run.checkpoints / PLAN
        if config.checkpoint.upload is None and plan_path.exists():
            raise CheckpointError(
                f"{plan_path}: this run's checkpoints are still in an object store: give its checkpoint.upload again"
            )
        return made_run.root, token

    def see() -> None:
        if not leads_host():
            return
        try:
            own_text = (root / ".seen").read_text()
        except OSError:
            own_text = ""
        if own_text != theirs:
            raise ConfigError(
                f"run.dir={root} is not the same directory on {socket.gethostname()} (rank {dist.get_rank()}) as on "
                "rank 0: it must lie on a file system that all hosts share"
            )

    root, theirs = run_on_first(make)
    run_on_all(see)
    run = config.run.model_copy(update={"dir": root})
    if config.checkpoint.upload is not None:  # those that a run which was brought back lacks
        restore_checkpoints(RunDirectory(root), config.checkpoint.upload)
    # Rank 0 keeps the object that holds the lock.
    return config.model_copy(update={"run": run}), mine[0] if mine else RunDirectory(root)


def _restore_run(config: RunConfig, supervised: bool) -> None:
    """Bring back the records of a run whose directory is gone, from where `checkpoint.upload` says; the supervisor has
    done it before its first attempt. Collective. Raises ConfigError."""
    url, root = config.checkpoint.upload, config.run.dir
    if url is not None and root is not None and not supervised:
        run_on_first(lambda: restore_records(root, url, partial(print, flush=True)))


def open_data(config: RunConfig, supervised: bool = False) -> tuple[RunConfig, Corpora]:
    """Open the corpora, and add their vocabulary to the configuration. All hosts must see the same of both: one rank of
    each reads the manifests, the others take those of rank 0. A run whose directory is gone is brought back before, as
    its order of the data is in there."""
    _restore_run(config, supervised)
    data_config, sequence_length = config.data, config.model.sequence_length

    def open_known(blends: list[Line], known: Manifests) -> Corpora:
        wanted_corpora, seed = data_config.corpora, config.run.seed
        return open_corpora(wanted_corpora, sequence_length, seed, blends, data_config.validation, known)

    def read_first() -> tuple[list[Line], Manifests]:
        # A new run's directory does not exist yet.
        known_blends = read_blends(RunDirectory(config.run.dir).blends) if config.run.dir is not None else []
        read_manifests: Manifests = {}
        open_known(known_blends, read_manifests)
        return known_blends, read_manifests

    def open_here() -> tuple[RunConfig, Corpora]:
        is_reading = leads_host() and dist.get_rank() > 0
        opened_corpora = open_known(known_blends, {} if is_reading else first_manifests)
        vocab_size = config.model.vocab_size or opened_corpora.vocab_size
        if vocab_size < opened_corpora.vocab_size:
            raise ConfigError(
                f"model.vocab_size={vocab_size} is smaller than the tokenizer's {opened_corpora.vocab_size}: "
                "leave it out, or make it larger"
            )
        model_config = config.model.model_copy(update={"vocab_size": vocab_size})
        return config.model_copy(update={"model": model_config}), opened_corpora

    known_blends, first_manifests = run_on_first(read_first)
    resolved_config, opened_corpora = run_on_all(open_here)
    ds_config = deepspeed_json.build_deepspeed_json(resolved_config, dist.get_world_size())
    rank_view = {
        "recipe": resolved_config.model_dump_json(), "DeepSpeed file": json.dumps(ds_config),
        "data.corpora": opened_corpora.order_fingerprint, "validation data": json.dumps(opened_corpora.held_out.names),
    }  # fmt: skip
    if difference := find_difference(rank_view):
        raise mark_collective(
            ConfigError(
                "{}: ranks {} see another one than rank 0: make them the same on all hosts".format(
                    *difference
                )
            )
        )
    return resolved_config, opened_corpora


def verify_held_out(run: RunDirectory, held_out: HeldOut) -> None:
    """Read the shards of `data.validation` in full, each on one rank, except those that an earlier start of the run has
    read and that have not changed since. Collective. Raises DataError if one is not what its manifest says."""
    shards = held_out.shards
    if not shards:
        return

    def find_unread() -> tuple[dict[str, list[object]], list[int]]:
        known_states = read_object(run.verified)
        states = dict(_state_of(stream.open_shard(shard_name)) for stream, shard_name in shards)
        return states, [n for n, path in enumerate(states) if known_states.get(path) != states[path]]

    # How they were before they are read: what changes meanwhile is read again.
    states, unread_indices = run_on_first(find_unread)
    mine = [shards[i] for i in unread_indices[dist.get_rank() :: dist.get_world_size()]]
    run_on_all(lambda: [stream.open_shard(name).verify_shard() for stream, name in mine])
    if unread_indices and dist.get_rank() == 0:
        with suppress(OSError):  # read again at the next start
            durable.write_file(run.verified, json.dumps(states).encode())


def _state_of(shard: Shard) -> tuple[str, list[object]]:
    """The path of a shard, and what tells whether it has changed: what it should be, sizes and times of its files."""
    assert shard.info is not None, "a manifest has them all"
    files = [os.stat(path) for path in (shard.bin_path, shard.idx_path)]
    state = [shard.vocab_size, shard.info.bin_xxh3, shard.info.idx_xxh3]
    return str(shard.bin_path), [*state, *(n for file in files for n in (file.st_size, file.st_mtime_ns))]
