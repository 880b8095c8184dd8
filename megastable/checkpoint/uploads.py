"""Uploads the run directory to an object store behind training, and fetches checkpoints from there at a start.

    uploader.offer_view(look_at_run(run))   # rank 0, between two steps; costs a few milliseconds
    ... steps; a thread of the first rank of every host has uploaded what is new, rank 0's then writes the head
    uploader.finish(seconds)                # at the end of the run

What the store is to hold is looked at between two steps: how long the journal and the ledgers are, which records and
checkpoints there are. So an image is a run directory as a crash at that moment would leave it, from which a run goes on
with the same bytes. Files that grow are uploaded to the length they had then; files that do not change are named by
their hash, and uploaded once. What the newest image no longer names is deleted, so the store keeps the checkpoints that
the run directory keeps. Two things stay: a checkpoint that is whole in the store and damaged here; and what an earlier
process uploaded, until a checkpoint that it did not have is there as well: this one may have failed to read it.

A store that fails stops nothing: it is tried again, with the newest view, for as long as the run lasts. So is one that
refuses our credentials, with those that are there by then. But it takes a person: that is said every hour, and the end
of the run does not wait for it.
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
from functools import partial
from pathlib import Path

import torch.distributed as dist
import xxhash

from megastable.base import durable
from megastable.base.collectives import gather_objects, mark_collective, run_on_first
from megastable.base.errors import CheckpointError, ConfigError, DataError
from megastable.base.object_store import LONGEST_PAUSE, DeniedError, ObjectStore, StoreError, retry
from megastable.base.upload_process import UploadProcess
from megastable.checkpoint import store
from megastable.run.directory import RunDirectory
from megastable.run.run_image import (
    JOURNAL,
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
DENIED_SECONDS = 3600.0  # between two warnings that the store refuses our credentials
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
    run_root, small_contents = run.root, dict[str, bytes]()
    checkpoint_names = [path.name for path in store.newest_first(run.checkpoints)]
    replaced_paths = [
        run.recipe,
        run.summary,
        run.checkpoints / store.LATEST,
        *run_root.glob("trackers/*.json"),
    ]
    for name in checkpoint_names:
        replaced_paths += [run.checkpoints / name / marker for marker in MARKERS]
    for path in replaced_paths:
        if path.is_file():
            small_contents[str(path.relative_to(run_root))] = path.read_bytes()
    growing_paths = [path for path in (run.journal, run.skips, run.blends, run.changes) if path.exists()]
    record_paths = [*run.steps.glob("*.parquet"), *run.layers.glob("*.parquet")]
    fixed_paths = [path for path in record_paths if not path.name.startswith(".")]
    return RunView(
        {path.name: path.stat().st_size for path in growing_paths},
        sorted(str(path.relative_to(run_root)) for path in fixed_paths), small_contents, checkpoint_names,
    )  # fmt: skip


class Uploader:
    """The uploads of one rank: of all files that its host's ranks have written; rank 0's also writes the head.

    outdated: a view was of no use, because what it named has gone; a new one is wanted.
    """

    def __init__(self, url: str, run: RunDirectory, hosts: Sequence[str], rank: int) -> None:
        """hosts: of every rank. Raises ConfigError if there is no client for the URL."""
        self._store, self._process = ObjectStore(url), UploadProcess(url)
        self._run, self._hosts, self._rank = run, hosts, rank
        self.outdated = False
        self._lock, self._wake, self._given_up = threading.Lock(), threading.Event(), threading.Event()
        self._view: RunView | None = None
        self._closing = False
        self._head: int | None = None  # the number of the newest head, once it was looked for
        self._sent = dict[int, bytes]()  # heads that the store has not acknowledged
        self._unused = set[str]()  # objects that are there, or may be, and that the newest head does not need
        self._image, self._earlier = RunImage(time=0.0, files={}), RunImage(time=0.0, files={})
        self._damaged = set[str]()  # checkpoints that are left out
        self._failing_since, self._denied_said, self._notes = 0.0, float("-inf"), list[str]()
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
        """Wait for what was offered, but not longer than that, nor for new credentials; whether it is in the store."""
        self._closing = True
        self._wake.set()
        self._thread.join(seconds)
        self._given_up.set()
        self._process.close()
        return not self._thread.is_alive() and not self.outdated and not self._failing_since

    # In its thread

    def _run_thread(self) -> None:
        pause_seconds = 1.0
        while True:
            self._wake.wait()
            with self._lock:
                self._wake.clear()
                next_view, self._view = self._view, None
            if next_view is None:
                if self._closing:
                    return
                continue
            try:
                self._upload(next_view)
                pause_seconds = 1.0
                self._tell_success()
            except OutdatedError as error:
                log.info("%s: %s", self._store.url, error)
                with self._lock:
                    self.outdated = self._view is None
            except Exception as error:
                if not isinstance(error, OSError | DataError | CheckpointError):
                    log.exception("an upload failed")
                self._tell_failure(error)
                if self._closing and isinstance(error, DeniedError):
                    return
                with self._lock:
                    self._view = self._view or next_view
                self._given_up.wait(pause_seconds)
                pause_seconds = min(2 * pause_seconds, LONGEST_PAUSE)
            if self._given_up.is_set():
                return
            if self._view is not None or self._closing:
                self._wake.set()

    def _upload(self, view: RunView) -> None:
        present_objects = self._store.list_objects(OBJECTS)
        if not self.writes_head:
            for checkpoint_name in view.checkpoints:
                self._put_checkpoint(checkpoint_name, present_objects)
            return
        if self._head is None:
            self._head = self._find_own_head()
            self._unused = set(present_objects)
        # Before what takes long: files of records are soon replaced.
        image_files = self._put_records(view, present_objects)
        for checkpoint_name in view.checkpoints:
            checkpoint_files = self._put_checkpoint(checkpoint_name, present_objects)
            if (
                not checkpoint_files
                and checkpoint_name == view.checkpoints[0]
                and not (self._run.checkpoints / checkpoint_name).exists()
            ):
                raise OutdatedError(f"{checkpoint_name} was deleted or set aside before it was uploaded")
            if not checkpoint_files:
                image_files = {
                    path: f
                    for path, f in image_files.items()
                    if not path.startswith(f"checkpoints/{checkpoint_name}/")
                }
                if (
                    self._run.checkpoints / checkpoint_name
                ).exists():  # damaged: in the store it may be whole
                    checkpoint_files = self._image.checkpoints.get(checkpoint_name, {})
            image_files |= {
                f"checkpoints/{checkpoint_name}/{file}": stored for file, stored in checkpoint_files.items()
            }
        self._await_others(image_files)
        self._write_head(RunImage(time=round(time.time(), 3), files=image_files))

    def _find_own_head(self) -> int:
        """The number of the newest head, 0 if there is none, once the journal proves that it is of this run: it and its
        objects will be deleted. The start may not have been able to ask, or another run may have begun to upload since.
        """
        listed_numbers, found_image = find_heads(self._store), find_image(self._store)
        if found_image is None:
            return max(listed_numbers, default=0)
        stored_journal = found_image[1].files.get(JOURNAL)
        if stored_journal is not None:
            with self._run.journal.open("rb") as file:
                own_bytes = file.read(stored_journal.size)
            if xxhash.xxh3_128_hexdigest(own_bytes) != stored_journal.xxh3:
                raise StoreError(
                    f"{self._store.url} holds another run than {self._run.root}, or one that has gone on from it "
                    "elsewhere: give this run another checkpoint.upload"
                )
        self._image = self._earlier = found_image[1]
        return max([*listed_numbers, found_image[0]])

    def _put_records(self, view: RunView, present: dict[str, int]) -> Files:
        record_files = dict[str, StoredFile]()
        for path, size in view.grown.items():
            with (self._run.root / path).open("rb") as file:
                file_bytes = file.read(size)
            # Another process may be in the middle of a line.
            record_files[path] = self._put_content(file_bytes[: file_bytes.rfind(b"\n") + 1], present)
        for path, file_bytes in view.contents.items():
            record_files[path] = self._put_content(file_bytes, present)
        for path in view.fixed:
            try:
                file_bytes = (self._run.root / path).read_bytes()
            except FileNotFoundError:
                raise OutdatedError(f"{path} is now part of a larger file") from None
            record_files[path] = self._put_content(file_bytes, present)
        for report_path in self._run.incidents.rglob("*"):  # which the supervisor writes whenever it likes
            with suppress(FileNotFoundError):
                if report_path.is_file() and not report_path.name.startswith("."):
                    path = str(report_path.relative_to(self._run.root))
                    record_files[path] = self._put_content(report_path.read_bytes(), present)
        return record_files

    def _put_content(self, content: bytes, present: dict[str, int]) -> StoredFile:
        stored_file = StoredFile(size=len(content), xxh3=xxhash.xxh3_128_hexdigest(content))
        if present.get(stored_file.key) != stored_file.size:
            self._store.write_object(stored_file.key, content)
            present[stored_file.key] = stored_file.size
        return stored_file

    def _put_checkpoint(self, name: str, present: dict[str, int]) -> Files:
        """Upload this host's files of a checkpoint; returns those of all hosts, none of one that has gone or is
        damaged."""
        checkpoint_folder = self._run.checkpoints / name
        if name in self._damaged:
            return {}
        try:
            manifest_bytes = (checkpoint_folder / store.MANIFEST).read_bytes()
            file_records = store.read_contents(checkpoint_folder).files
            stored_files = {
                file_name: StoredFile(size=r.size, xxh3=r.xxh3) for file_name, r in file_records.items()
            }
            for file_name, stored_file in stored_files.items():
                if self._is_own(file_name) and present.get(stored_file.key) != stored_file.size:
                    self._process.upload_file(
                        checkpoint_folder / file_name, stored_file.key, stored_file.xxh3
                    )
                    present[stored_file.key] = stored_file.size
        except (FileNotFoundError, DataError, CheckpointError) as error:
            # It has gone, or the disk has damaged it.
            if checkpoint_folder.exists():
                log.warning("%s is not uploaded: %s", name, error)
            return {}
        if self.writes_head:
            stored_files[store.MANIFEST] = self._put_content(manifest_bytes, present)
        return stored_files

    def _is_own(self, file: str) -> bool:
        """Whether a rank of this host has written a file of a checkpoint, or would have in another layout."""
        name_match = OF_RANK.match(file)
        owner_rank = int(name_match[1]) % len(self._hosts) if name_match else 0
        return self._hosts[owner_rank] == self._hosts[self._rank]

    def _await_others(self, files: Files) -> None:
        """Wait for the files of other hosts; upload those that do not come."""
        still_missing, last_progress = len(files) + 1, time.monotonic()
        while True:
            present_objects = self._store.list_objects(OBJECTS)
            missing_files = {
                path: stored
                for path, stored in files.items()
                if present_objects.get(stored.key) != stored.size
            }
            if not missing_files:
                return
            if len(missing_files) < still_missing:
                still_missing, last_progress = len(missing_files), time.monotonic()
            if len(set(self._hosts)) == 1 or time.monotonic() - last_progress > HELP_SECONDS:
                for path, stored in missing_files.items():
                    try:
                        self._process.upload_file(self._run.root / path, stored.key, stored.xxh3)
                    except FileNotFoundError:
                        raise OutdatedError(f"{path} was deleted before it was uploaded") from None
                    except DataError as error:
                        self._damaged.add(path.split("/")[1])
                        raise OutdatedError(str(error)) from None
            elif self._given_up.wait(2.0):
                raise StoreError("the run is over")

    def _write_head(self, image: RunImage) -> None:
        head_numbers = find_heads(self._store)
        newest_number, head_bytes = max(head_numbers, default=0), image.to_sealed_bytes()
        # A newer one may be our own: the store's answer may be lost, or come late.
        sent_bytes = self._sent.get(newest_number, b"")
        is_own = newest_number in (0, self._head)
        if not is_own and self._store.read_object(head_name(newest_number)) != sent_bytes:
            raise StoreError(
                f"{self._store.url}/{head_name(newest_number)} is not of this process: another one uploads to the same "
                "URL"
            )
        own_number = max(newest_number, self._head or 0, *self._sent) + 1
        needed_keys = {stored.key for stored in image.files.values()}
        self._sent[own_number] = head_bytes
        self._unused |= needed_keys
        self._store.write_object(head_name(own_number), head_bytes)
        self._head, self._sent = own_number, {}
        self._store.delete_objects([head_name(old_number) for old_number in head_numbers])
        if image.checkpoints.keys() - self._earlier.checkpoints.keys():
            self._earlier = RunImage(time=0.0, files={})
        held_keys = needed_keys | {stored.key for stored in self._earlier.files.values()}
        self._store.delete_objects(sorted(self._unused - held_keys))
        self._unused, self._image = held_keys, image

    def _tell_failure(self, error: Exception) -> None:
        now, is_first = time.monotonic(), not self._failing_since
        self._failing_since = self._failing_since or now
        if isinstance(error, DeniedError):
            if now - self._denied_said >= DENIED_SECONDS:
                self._denied_said = now
                self._note(
                    f"NOT UPLOADED, the store refuses this run's credentials: {error}. Until they are renewed, "
                    f"checkpoints are in {self._run.checkpoints} only. A file of credentials is read again at every "
                    "try; those in variables need a restart"
                )
        elif is_first:
            self._note(f"not uploaded, tried again until it is: {error}")

    def _tell_success(self) -> None:
        if self._failing_since:
            seconds, self._failing_since = time.monotonic() - self._failing_since, 0.0
            self._denied_said = float("-inf")
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

    wanted_checkpoints, present_names, damage_problems = run_on_first(read), list[str](), list[str]()
    for name, files in wanted_checkpoints.items():
        if run_on_first((run.checkpoints / name).exists):
            present_names.append(name)
            continue
        incoming_folder = run.checkpoints / f".fetching-{name}"
        rank_problems = gather_objects(_fetch_share(url, files, incoming_folder))
        if outage_texts := [text for text, is_damage in rank_problems if text and not is_damage]:
            raise mark_collective(
                CheckpointError(
                    f"{name} could not be fetched: {outage_texts[0]}: start again, it goes on from there"
                )
            )
        if damage_texts := [text for text, _ in rank_problems if text]:
            damage_problems.append(damage_texts[0])
            log.warning("%s is left out: %s", name, damage_texts[0])
            run_on_first(partial(shutil.rmtree, incoming_folder, ignore_errors=True))
            continue
        run_on_first(partial(_put_in_place, incoming_folder, run.checkpoints / name))
        present_names.append(name)
    if damage_problems and not present_names:
        raise mark_collective(CheckpointError(f"no checkpoint in {url} is whole: {damage_problems[0]}"))
    if wanted_checkpoints:
        run_on_first(lambda: (run.checkpoints / PLAN).unlink(missing_ok=True))
    return present_names


def _put_in_place(incoming: Path, target: Path) -> None:
    try:
        durable.sync_directory(incoming)
        incoming.rename(target)
        durable.sync_directory(target.parent)
    except OSError as error:
        raise CheckpointError(f"{incoming} could not be put in place: {error}") from None


def _fetch_share(url: str, files: Files, incoming: Path) -> tuple[str, bool]:
    """Fetch every world-th file; the problem, and whether it is in the store's content."""
    try:
        object_store = ObjectStore(url)
    except ConfigError as error:  # this host has no client: the others must not wait
        return f"rank {dist.get_rank()}: {error}", False
    by_size = sorted(files.items(), key=lambda item: (-item[1].size, item[0]))
    for file_name, stored_file in by_size[dist.get_rank() :: dist.get_world_size()]:
        fetch = partial(fetch_file, object_store, stored_file, incoming / file_name, file_name)
        try:
            retry(fetch, f"{url}/{stored_file.key}", FETCH_SECONDS)
        except (DataError, FileNotFoundError) as error:
            return str(error), True
        except OSError as error:
            return str(error), False
    return "", False
