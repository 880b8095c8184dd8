"""Uploads the run directory to an object store behind training, and fetches checkpoints from there at a start.

    uploader.offer_view(look_at_run(run))   # rank 0, between two steps; costs a few milliseconds
    ... steps; a thread of the first rank of every host uploads, rank 0's then writes the head (run/run_image.py)
    uploader.finish(seconds)                # at the end of the run

What the store is to hold is looked at between two steps: how long the journal and the ledgers are, which records and
checkpoints there are. So an image is a run directory as a crash at that moment would leave it, from which a run goes on
with the same bytes. Files that grow are uploaded to the length they had then; files that do not change are named by
their hash, and uploaded once. What the newest image no longer names is deleted, so the store keeps the checkpoints that
the run directory keeps.

A store that fails stops nothing: it is tried again, with the newest view, for as long as the run lasts.
"""

from __future__ import annotations

import logging
import re
import shutil
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch.distributed as dist
import xxhash

from megastable.base import durable
from megastable.base.collectives import gather_objects, mark_collective, run_on_first
from megastable.base.errors import CheckpointError, DataError
from megastable.base.object_store import LONGEST_PAUSE, ObjectStore, StoreError, retry
from megastable.checkpoint import store
from megastable.checkpoint.files import hash_file
from megastable.run.directory import RunDirectory
from megastable.run.run_image import (
    OBJECTS,
    PLAN,
    Files,
    RunImage,
    StoredFile,
    fetch_file,
    find_heads,
    find_image,
    head_name,
    read_plan,
)

log = logging.getLogger(__name__)

MARKERS = (store.HEALTH, store.PINNED, store.QUARANTINED, store.ACCEPTED)
OF_RANK = re.compile(r"(?:rank|rng)-(\d+)\.")
HELP_SECONDS = 120.0  # without a new object of the other hosts, after which rank 0 uploads their files itself
LAST_SECONDS = 600.0  # that the end of a run waits for its last upload
FETCH_SECONDS = 600.0  # that a start waits for a store that does not answer


class OutdatedError(Exception):
    """Something has gone since it was looked at: a newer view is needed."""


@dataclass(frozen=True)
class RunView:
    """What the run directory held at one moment: bytes of files that grow, files that stay as they are, the contents of
    small ones that are replaced, and the names of checkpoints, the newest first."""

    grown: Mapping[str, int] = field(default_factory=dict)
    fixed: Sequence[str] = ()
    contents: Mapping[str, bytes] = field(default_factory=dict)
    checkpoints: Sequence[str] = ()


def look_at_run(run: RunDirectory) -> RunView:
    """What the run directory holds now; rank 0 calls it between two steps. Raises OSError, CheckpointError."""
    root, contents = run.root, dict[str, bytes]()
    checkpoint_names = [path.name for path in store.newest_first(run.checkpoints)]
    replaced_paths = [run.recipe, run.summary, run.checkpoints / store.LATEST, *root.glob("trackers/*.json")]
    for name in checkpoint_names:
        replaced_paths += [run.checkpoints / name / marker for marker in MARKERS]
    for path in replaced_paths:
        if path.is_file():
            contents[str(path.relative_to(root))] = path.read_bytes()
    growing_paths = [path for path in (run.journal, run.skips, run.blends, run.changes) if path.exists()]
    record_paths = [*run.steps.glob("*.parquet"), *run.layers.glob("*.parquet")]
    fixed_paths = [path for path in record_paths if not path.name.startswith(".")]
    return RunView(
        {path.name: path.stat().st_size for path in growing_paths},
        sorted(str(path.relative_to(root)) for path in fixed_paths), contents, checkpoint_names,
    )  # fmt: skip


class Uploader:
    """The uploads of one rank: of all files that its host's ranks have written; rank 0's also writes the head.

    outdated: a view was of no use, because what it named has gone; a new one is wanted.
    """

    def __init__(self, url: str, run: RunDirectory, hosts: Sequence[str], rank: int) -> None:
        """hosts: of every rank. Raises ConfigError if there is no client for the URL."""
        self._store, self._run, self._hosts, self._rank = ObjectStore(url), run, hosts, rank
        self.outdated = False
        self._lock, self._wake, self._given_up = threading.Lock(), threading.Event(), threading.Event()
        self._view: RunView | None = None
        self._closing = False
        self._head: tuple[int, RunImage | None] | None = None
        self._unused = set[str]()  # objects of earlier processes that no image has named yet
        self._failing_since, self._notes = 0.0, list[str]()
        self.uploaded: tuple[int, float] = (0, 0.0)  # bytes and seconds of all uploads
        self._thread = threading.Thread(target=self._run_thread, name="uploads", daemon=True)
        self._thread.start()

    @property
    def writes_head(self) -> bool:
        """Whether this is rank 0's."""
        return self._rank == 0

    def offer_view(self, view: RunView) -> None:
        """Upload this as soon as possible; a view that waits still is forgotten."""
        with self._lock:
            self._view, self.outdated = view, False
        self._wake.set()

    def take_notes(self) -> list[str]:
        """What the console and the journal should say, each once."""
        with self._lock:
            taken_notes, self._notes = self._notes, []
        return taken_notes

    def finish(self, seconds: float) -> bool:
        """Wait for what was offered, but not longer than that; whether it is in the store."""
        self._closing = True
        self._wake.set()
        self._thread.join(seconds)
        self._given_up.set()
        return not self._thread.is_alive() and not self.outdated

    # In its thread

    def _run_thread(self) -> None:
        pause = 1.0
        while True:
            self._wake.wait()
            with self._lock:
                self._wake.clear()
                view, self._view = self._view, None
            if view is None:
                if self._closing:
                    return
                continue
            try:
                self._upload(view)
                pause = 1.0
                self._tell_success()
            except OutdatedError as error:
                log.info("%s: %s", self._store.url, error)
                self.outdated = True
            except Exception as error:
                if not isinstance(error, OSError | DataError | CheckpointError):
                    log.exception("an upload failed")
                self._tell_failure(error)
                with self._lock:
                    self._view = self._view or view
                self._given_up.wait(pause)
                pause = min(2 * pause, LONGEST_PAUSE)
            if self._given_up.is_set():
                return
            if self._view is not None or self._closing:
                self._wake.set()

    def _upload(self, view: RunView) -> None:
        begin_time, present = time.monotonic(), self._store.list_objects(OBJECTS)
        if not self.writes_head:
            for name in view.checkpoints:
                self._put_checkpoint(name, present)
            return
        if self._head is None:
            found = find_image(self._store)
            self._head = (max(find_heads(self._store), default=0), found[1] if found else None)
            self._unused = set(present)
        files = self._put_records(view, present)  # before what takes long: they are soon replaced
        for name in view.checkpoints:
            checkpoint_files = self._put_checkpoint(name, present)
            if not checkpoint_files and name == view.checkpoints[0] and not (self._run.checkpoints / name).exists():
                raise OutdatedError(f"{name} was deleted or set aside before it was uploaded")
            if not checkpoint_files:
                files = {path: f for path, f in files.items() if not path.startswith(f"checkpoints/{name}/")}
            files |= {f"checkpoints/{name}/{file}": stored for file, stored in checkpoint_files.items()}
        self._await_others(files)
        self._write_head(RunImage(time=round(time.time(), 3), files=files))
        self.uploaded = self.uploaded[0], self.uploaded[1] + time.monotonic() - begin_time

    def _put_records(self, view: RunView, present: dict[str, int]) -> Files:
        files = dict[str, StoredFile]()
        for path, size in view.grown.items():
            with (self._run.root / path).open("rb") as file:
                content = file.read(size)
            # Another process may be in the middle of a line.
            files[path] = self._put_content(content[: content.rfind(b"\n") + 1], present)
        for path, content in view.contents.items():
            files[path] = self._put_content(content, present)
        for path in view.fixed:
            try:
                content = (self._run.root / path).read_bytes()
            except FileNotFoundError:
                raise OutdatedError(f"{path} is now part of a larger file") from None
            files[path] = self._put_content(content, present)
        for report_path in self._run.incidents.rglob("*"):  # which the supervisor writes whenever it likes
            with suppress(FileNotFoundError):
                if report_path.is_file() and not report_path.name.startswith("."):
                    path = str(report_path.relative_to(self._run.root))
                    files[path] = self._put_content(report_path.read_bytes(), present)
        return files

    def _put_content(self, content: bytes, present: dict[str, int]) -> StoredFile:
        stored = StoredFile(size=len(content), xxh3=xxhash.xxh3_128_hexdigest(content))
        if present.get(stored.key) != stored.size:
            self._store.write_object(stored.key, content)
            self._count(stored, present)
        return stored

    def _put_checkpoint(self, name: str, present: dict[str, int]) -> Files:
        """Upload this host's files of a checkpoint; returns those of all hosts, none of one that has gone or is
        damaged."""
        folder = self._run.checkpoints / name
        try:
            manifest_bytes = (folder / store.MANIFEST).read_bytes()
            records = store.read_contents(folder).files
            files = {file: StoredFile(size=r.size, xxh3=r.xxh3) for file, r in records.items()}
            for file, stored in files.items():
                if self._is_own(file) and present.get(stored.key) != stored.size:
                    # What the disk has damaged since must not get the name of what it was.
                    if hash_file(folder / file) != records[file]:
                        raise CheckpointError(f"{folder / file}: not as the manifest says")
                    self._store.upload_file(folder / file, stored.key)
                    self._count(stored, present)
        except (FileNotFoundError, CheckpointError) as error:
            if folder.exists():
                log.warning("%s is not uploaded: %s", name, error)
            return {}
        if self.writes_head:
            files[store.MANIFEST] = self._put_content(manifest_bytes, present)
        return files

    def _is_own(self, file: str) -> bool:
        """Whether a rank of this host has written a file of a checkpoint, or would have in another layout."""
        match = OF_RANK.match(file)
        owner = int(match[1]) % len(self._hosts) if match else 0
        return self._hosts[owner] == self._hosts[self._rank]

    def _count(self, stored: StoredFile, present: dict[str, int]) -> None:
        present[stored.key] = stored.size
        self.uploaded = self.uploaded[0] + stored.size, self.uploaded[1]

    def _await_others(self, files: Files) -> None:
        """Wait for the files of other hosts; upload those that do not come."""
        still_missing, last_progress = len(files) + 1, time.monotonic()
        while True:
            present = self._store.list_objects(OBJECTS)
            missing = {path: stored for path, stored in files.items() if present.get(stored.key) != stored.size}
            if not missing:
                return
            if len(missing) < still_missing:
                still_missing, last_progress = len(missing), time.monotonic()
            if len(set(self._hosts)) == 1 or time.monotonic() - last_progress > HELP_SECONDS:
                for path, stored in missing.items():
                    try:
                        self._store.upload_file(self._run.root / path, stored.key)
                    except FileNotFoundError:
                        raise OutdatedError(f"{path} was deleted before it was uploaded") from None
            elif self._given_up.wait(2.0):
                raise StoreError("the run is over")

    def _write_head(self, image: RunImage) -> None:
        assert self._head is not None
        number, before = self._head
        heads = find_heads(self._store)
        if max(heads, default=0) != number:
            raise StoreError(
                f"{self._store.url}/{head_name(heads[-1])} is not of this process: another one uploads to the same URL"
            )
        self._store.write_object(head_name(number + 1), image.to_sealed_bytes())
        named_before = {stored.key for stored in before.files.values()} if before is not None else set()
        self._head = number + 1, image
        needed = {stored.key for stored in image.files.values()}
        self._store.delete_objects([head_name(old_number) for old_number in heads])
        self._store.delete_objects(sorted((named_before | self._unused) - needed))
        self._unused.clear()

    def _tell_failure(self, error: Exception) -> None:
        if not self._failing_since:
            self._failing_since = time.monotonic()
            self._note(f"not uploaded, tried again until it is: {error}")

    def _tell_success(self) -> None:
        if self._failing_since:
            seconds, self._failing_since = time.monotonic() - self._failing_since, 0.0
            self._note(f"uploaded again, after {seconds:.0f} s without {self._store.url}")

    def _note(self, text: str) -> None:
        log.warning("%s", text)
        with self._lock:
            self._notes.append(text)


def restore_checkpoints(run: RunDirectory, url: str) -> list[str]:
    """At a start: fetch the checkpoints that `run_image.restore_records` has planned; the names of those that are here
    now. Collective: the ranks share the files. Damaged ones are left out.

    Raises CheckpointError if the store does not answer, or none of them is whole.
    """

    def read() -> dict[str, Files]:
        try:
            plan = read_plan(run)
        except DataError as error:
            raise CheckpointError(str(error)) from None
        return plan.checkpoints if plan is not None else {}

    wanted, here, problems = run_on_first(read), list[str](), list[str]()
    for name, files in wanted.items():
        if run_on_first(lambda name=name: (run.checkpoints / name).exists()):  # type: ignore[misc]
            here.append(name)
            continue
        incoming = run.checkpoints / f".fetching-{name}"
        told = gather_objects(_fetch_share(url, files, incoming))
        if unreachable := [text for text, is_damage in told if text and not is_damage]:
            raise mark_collective(
                CheckpointError(f"{name} could not be fetched: {unreachable[0]}: start again, it goes on from there")
            )
        if damaged := [text for text, _ in told if text]:
            problems.append(damaged[0])
            log.warning("%s is left out: %s", name, damaged[0])
            run_on_first(lambda incoming=incoming: shutil.rmtree(incoming, ignore_errors=True))  # type: ignore[misc]
            continue

        def place(incoming: Path = incoming, name: str = name) -> None:
            try:
                durable.sync_directory(incoming)
                incoming.rename(run.checkpoints / name)
                durable.sync_directory(run.checkpoints)
            except OSError as error:
                raise CheckpointError(f"{incoming} could not be put in place: {error}") from None

        run_on_first(place)
        here.append(name)
    if problems and not here:
        raise mark_collective(CheckpointError(f"no checkpoint in {url} is whole: {problems[0]}"))
    if wanted:
        run_on_first(lambda: (run.checkpoints / PLAN).unlink(missing_ok=True))
    return here


def _fetch_share(url: str, files: Files, incoming: Path) -> tuple[str, bool]:
    """Fetch every world-th file; the problem, and whether it is in the store's content."""
    object_store, by_size = ObjectStore(url), sorted(files.items(), key=lambda item: (-item[1].size, item[0]))
    for file, stored in by_size[dist.get_rank() :: dist.get_world_size()]:
        target = incoming / file
        try:
            retry(
                lambda stored=stored, target=target, file=file: fetch_file(object_store, stored, target, file),  # type: ignore[misc]
                f"{url}/{stored.key}", FETCH_SECONDS,
            )  # fmt: skip
        except (DataError, FileNotFoundError) as error:
            return str(error), True
        except OSError as error:
            return str(error), False
    return "", False
