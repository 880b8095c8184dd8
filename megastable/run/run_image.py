"""An image of a run directory in an object store: what a run is brought back from when its directory is gone.

    URL/heads/000000000012.json    the newest image: path, size and hash of every file
    URL/objects/XXH3-SIZE          the files' contents, by their hash: written once, never changed

A head is written after all objects that it names, and seals itself by a hash, so an image is there whole or not at all.
Uploads are checkpoint/uploads.py; this module, which needs no torch, reads. The journal only grows: of a directory and
an image, the one whose journal continues the other's is the newer one; if neither does, they are of two runs.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path, PurePosixPath

import xxhash
from pydantic import BaseModel, ConfigDict, NonNegativeInt, ValidationError, field_validator

from megastable.base import durable
from megastable.base.errors import ConfigError, DataError
from megastable.base.object_store import START_SECONDS, DeniedError, ObjectStore, retry
from megastable.run.directory import RunDirectory
from megastable.run.events.reading import event_of_line
from megastable.run.events.training_events import CheckpointRejected, CheckpointSuspect

HEADS, OBJECTS, JOURNAL, CHECKPOINTS = "heads/", "objects/", "journal.jsonl", "checkpoints"
PLAN = ".to-fetch.json"  # in checkpoints/: what the ranks are to bring back before they start
_HEAD = re.compile(rf"{HEADS}(\d{{12}})\.json")
_CHECKPOINT = re.compile(r"step-(?:0|[1-9][0-9]{0,17})")
BLOCK = 1 << 22  # bytes read and hashed at a time
DOWNLOADS = 4  # at once
LOOKS = 10  # for a head that an upload replaces at the same time
TRIES = 2  # of a file whose bytes are wrong: the network may have changed them


class StoredFile(BaseModel):
    """A file's content: its bytes and its xxh3-128."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    size: NonNegativeInt
    xxh3: str

    @property
    def key(self) -> str:
        """Of its object."""
        return f"{OBJECTS}{self.xxh3}-{self.size}"


Files = dict[str, StoredFile]


class RunImage(BaseModel):
    """The files of a run directory at one moment, by their paths in it. time: unix seconds."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: int = 1
    time: float
    files: Files

    @field_validator("files")
    @classmethod
    def _stay_inside(cls, files: Files) -> Files:
        for path in files:
            path_parts = PurePosixPath(path).parts
            if (
                not path_parts
                or PurePosixPath(path).is_absolute()
                or ".." in path_parts
                or str(PurePosixPath(path)) != path
            ):
                raise ValueError(f"{path!r} is not a path in a run directory")
        return files

    @property
    def checkpoints(self) -> dict[str, Files]:
        """The files of each checkpoint by their names, the newest first."""
        found_checkpoints = dict[str, Files]()
        for path, stored_file in self.files.items():
            path_parts = path.split("/")
            if len(path_parts) == 3 and path_parts[0] == CHECKPOINTS and _CHECKPOINT.fullmatch(path_parts[1]):
                found_checkpoints.setdefault(path_parts[1], {})[path_parts[2]] = stored_file
        return dict(sorted(found_checkpoints.items(), key=lambda item: -int(item[0].removeprefix("step-"))))

    @property
    def records(self) -> Files:
        """All files but those of checkpoints."""
        checkpoint_paths = {
            f"{CHECKPOINTS}/{name}/{file}" for name, files in self.checkpoints.items() for file in files
        }
        return {path: stored_file for path, stored_file in self.files.items() if path not in checkpoint_paths}

    def to_sealed_bytes(self) -> bytes:
        """Its hash in a line, then itself."""
        image_bytes = self.model_dump_json().encode()
        return f"{xxhash.xxh3_128_hexdigest(image_bytes)}\n".encode() + image_bytes


class Plan(BaseModel):
    """Checkpoints that are still to be fetched, by their names."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    checkpoints: dict[str, Files]


def head_name(number: int) -> str:
    return f"{HEADS}{number:012d}.json"


def find_heads(store: ObjectStore) -> list[int]:
    """The numbers of the heads in a store, ascending. Raises OSError."""
    return sorted(int(match[1]) for key in store.list_objects(HEADS) if (match := _HEAD.fullmatch(key)))


def find_image(store: ObjectStore) -> tuple[int, RunImage] | None:
    """The newest image that is whole, and its number. Raises OSError; DataError for one of another version."""
    for _ in range(LOOKS - 1):
        with suppress(FileNotFoundError):  # a newer one has just taken its place
            return _read_newest(store)
    return _read_newest(store)


def _read_newest(store: ObjectStore) -> tuple[int, RunImage] | None:
    for number in reversed(find_heads(store)):
        seal, _, image_bytes = store.read_object(head_name(number)).partition(b"\n")
        if seal.decode(errors="replace") != xxhash.xxh3_128_hexdigest(image_bytes):
            continue  # of a store that shows objects before they are whole
        try:
            found_image = RunImage.model_validate_json(image_bytes)
        except ValidationError as error:
            raise DataError(f"{store.url}/{head_name(number)}: of another version? {error}") from None
        return number, found_image
    return None


def fetch_file(store: ObjectStore, stored: StoredFile, target: Path, what: str) -> None:
    """Bring a file back, unless an earlier start has; on disk when this returns. Raises DataError for wrong content,
    OSError."""
    target.parent.mkdir(parents=True, exist_ok=True)
    for attempt in range(TRIES + 1):
        if attempt:
            store.download_file(stored.key, target)
        elif not target.exists():
            continue
        digest = xxhash.xxh3_128()
        with target.open("rb") as file:
            while file_block := file.read(BLOCK):
                digest.update(file_block)
            os.fsync(file.fileno())
        if (target.stat().st_size, digest.hexdigest()) == (stored.size, stored.xxh3):
            return
        target.unlink()
    raise DataError(f"{store.url}/{stored.key}, {what}: damaged: it is not what was uploaded")


def restore_records(run_root: Path, url: str, say: Callable[[str], None]) -> None:
    """At the start of a run, on one process: bring back what the image in the store has and `run_root` lacks.

    A directory that is gone, or older than the image, gets the records at once, and a plan by which the ranks fetch the
    checkpoints (checkpoint/uploads.py). A directory that continues the image, but has no checkpoint, gets the plan.

    Raises ConfigError if the store holds another run, refuses our credentials, or cannot be read and there is no run
    here to go on with. A refused run leaves store and directory as they were.
    """
    store, run = ObjectStore(url), RunDirectory(run_root)
    try:
        run.checkpoints.mkdir(parents=True, exist_ok=True)
        run_lock = durable.lock_file(run_root / ".lock")
        if run_lock is None:
            return  # somebody trains here: the caller finds out, too
        with run_lock:
            _restore(run, store, say)
    except FileNotFoundError as error:
        raise ConfigError(f"checkpoint.upload={url}: an object of its image is gone: {error}") from None
    except DeniedError as error:
        raise ConfigError(
            f"checkpoint.upload={url} refuses this process's credentials: {error}: renew them, or go on without "
            "uploads: checkpoint.upload=null"
        ) from None
    except DataError as error:
        raise ConfigError(f"checkpoint.upload={url}: {error}: give another URL to begin without it") from None
    except OSError as error:
        raise ConfigError(f"run.dir={run_root}: it could not be brought back from {url}: {error}") from None


def _restore(run: RunDirectory, store: ObjectStore, say: Callable[[str], None]) -> None:
    local_journal = run.journal.read_bytes() if run.journal.exists() else b""
    try:
        found_image = retry(lambda: find_image(store), store.url, START_SECONDS)
        if found_image is None or JOURNAL not in found_image[1].files:
            _claim_store(run, store)
            return
        image_number, stored_image = found_image
        stored_journal = stored_image.files[JOURNAL]
        is_continued = xxhash.xxh3_128_hexdigest(local_journal[: stored_journal.size]) == stored_journal.xxh3
        if is_continued:
            _claim_store(run, store)
    except DeniedError:
        raise
    except OSError as error:
        if not local_journal:
            raise ConfigError(
                f"checkpoint.upload={store.url} cannot be used, so whether the run is there cannot be said: {error}"
            ) from None
        say(
            f"WARNING: checkpoint.upload={store.url} cannot be used now: {error}; the run goes on from {run.root}"
        )
        return
    if is_continued:
        _plan_missing(run, stored_image, local_journal[stored_journal.size :], say)
        return
    image_age = time.time() - stored_image.time
    staging_folder = run.root / ".restoring"
    shutil.rmtree(staging_folder, ignore_errors=True)
    try:
        _fetch_records(run, store, stored_image, local_journal)
        _claim_store(run, store)
        say(
            f"{run.root} is brought back from {store.url}, as it was {image_age / 60:.0f} minutes ago "
            f"(image {image_number})"
        )
        _set_aside_left(run, stored_image, say)
        for path in [path for path in stored_image.records if path != JOURNAL]:
            (run.root / path).parent.mkdir(parents=True, exist_ok=True)
            os.replace(staging_folder / path, run.root / path)
            durable.sync_directory((run.root / path).parent)
        _write_plan(run, stored_image.checkpoints)
        # Last: a directory with this journal has all the rest.
        os.replace(staging_folder / JOURNAL, run.journal)
        durable.sync_directory(run.root)
    finally:
        shutil.rmtree(staging_folder, ignore_errors=True)


def _claim_store(run: RunDirectory, store: ObjectStore) -> None:
    """Write down whose store it is, once nothing speaks against it: so a wrong bucket or a missing permission is found
    now, not at the first checkpoint."""
    retry(lambda: store.write_object("run.txt", f"{run.root}\n".encode()), store.url, START_SECONDS)


def _fetch_records(run: RunDirectory, store: ObjectStore, image: RunImage, local_journal: bytes) -> None:
    """Bring a newer image's records to `.restoring`. Raises ConfigError if it is of another run, or lacks lines."""
    staging_folder, stored_journal = run.root / ".restoring", image.files[JOURNAL]
    fetch_file(store, stored_journal, staging_folder / JOURNAL, JOURNAL)
    if not (staging_folder / JOURNAL).read_bytes().startswith(local_journal):
        raise ConfigError(
            f"checkpoint.upload={store.url} holds another run than run.dir={run.root}, or one that has gone on from it "
            "elsewhere: give each run a URL of its own, or remove the one that is not wanted"
        )
    record_files = {path: stored for path, stored in image.records.items() if path != JOURNAL}
    with ThreadPoolExecutor(DOWNLOADS) as pool:
        list(
            pool.map(
                lambda item: fetch_file(store, item[1], staging_folder / item[0], item[0]),
                record_files.items(),
            )
        )
    _check_older(run, image)


def _check_older(run: RunDirectory, image: RunImage) -> None:
    """Raise a ConfigError if a ledger here has lines that the image lacks: a person may have written them."""
    for ledger in (run.skips, run.blends, run.changes):
        local_bytes, stored_file = (
            ledger.read_bytes() if ledger.exists() else b"",
            image.files.get(ledger.name),
        )
        fetched_bytes = (
            (run.root / ".restoring" / ledger.name).read_bytes() if stored_file is not None else b""
        )
        if not fetched_bytes.startswith(local_bytes):
            raise ConfigError(
                f"{ledger} has lines that the newer run in the object store does not: move it away, and add them again "
                "once the run is back"
            )


def _set_aside_left(run: RunDirectory, image: RunImage, say: Callable[[str], None]) -> None:
    """Rename the checkpoints here that are not those of the newer image: the run was rewound behind them since, or has
    quarantined them."""
    for checkpoint_path in [path for path in run.checkpoints.iterdir() if _CHECKPOINT.fullmatch(path.name)]:
        wanted_files = image.checkpoints.get(checkpoint_path.name, {})
        # The manifest seals all others but the markers.
        small_files = {
            name: stored.xxh3
            for name, stored in wanted_files.items()
            if name.endswith(".json") and not name.startswith("rank-")
        }
        own_files = {
            name: xxhash.xxh3_128_hexdigest((checkpoint_path / name).read_bytes())
            for name in small_files
            if (checkpoint_path / name).is_file()
        }
        if small_files and own_files == small_files:
            continue
        aside_path = checkpoint_path.with_name(f"rejected-{checkpoint_path.name}")
        if aside_path.exists():
            aside_path = aside_path.with_name(f"{aside_path.name}.{time.time_ns()}")
        checkpoint_path.rename(aside_path)
        durable.sync_directory(run.checkpoints)
        say(f"{checkpoint_path} is not that of the newer image: kept as {aside_path.name}")


def _plan_missing(run: RunDirectory, image: RunImage, tail: bytes, say: Callable[[str], None]) -> None:
    """Plan to fetch the image's checkpoints, but those that the journal has left since, if there are none here."""
    if any(_CHECKPOINT.fullmatch(path.name) for path in run.checkpoints.iterdir()):
        return
    later_events = map(event_of_line, tail.splitlines())
    left_names = {
        event.get("name")
        for event in later_events
        if isinstance(event, CheckpointSuspect | CheckpointRejected)
    }
    missing_checkpoints = {name: files for name, files in image.checkpoints.items() if name not in left_names}
    if missing_checkpoints:
        say(
            f"{run.checkpoints} has no checkpoint: {', '.join(missing_checkpoints)} are brought back from the object "
            "store"
        )
        _write_plan(run, missing_checkpoints)


def _write_plan(run: RunDirectory, checkpoints: Mapping[str, Files]) -> None:
    written_plan = Plan(checkpoints=dict(checkpoints))
    durable.write_file(run.checkpoints / PLAN, written_plan.model_dump_json().encode())


def read_plan(run: RunDirectory) -> Plan | None:
    """What is still to be fetched. Raises DataError."""
    plan_path = run.checkpoints / PLAN
    try:
        return Plan.model_validate_json(plan_path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as error:
        raise DataError(f"{plan_path}: {error}: delete {run.root}, it is brought back again") from None
