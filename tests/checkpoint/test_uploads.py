"""Uploads of a run directory: the store holds what a crash at that moment would leave, or the image before it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import xxhash
from fsspec.implementations.local import LocalFileSystem
from hypothesis import given, settings
from hypothesis import strategies as st

from megastable.base.errors import ConfigError, DataError
from megastable.base.object_store import DeniedError, ObjectStore, StoreError
from megastable.base.upload_process import UploadProcess, hash_content
from megastable.checkpoint import store
from megastable.checkpoint.files import hash_file, write_file
from megastable.checkpoint.store import Contents
from megastable.checkpoint.uploads import OutdatedError, Uploader, look_at_run, restore_checkpoints
from megastable.run import run_image
from megastable.run.directory import RunDirectory
from megastable.run.run_image import (
    HEADS,
    OBJECTS,
    PLAN,
    RunImage,
    StoredFile,
    find_heads,
    find_image,
    read_plan,
)
from tests.distributed import run_ranks
from tests.patience import until


@pytest.fixture(autouse=True)
def _in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uploads without a process for each uploader; `test_a_process_uploads_what_has_not_changed` has one."""

    def upload_here(self: UploadProcess, path: Path, key: str, xxh3: str) -> None:
        if hash_content(path) != xxh3:
            raise DataError("changed")
        ObjectStore(self.url).upload_file(path, key)

    monkeypatch.setattr(UploadProcess, "upload_file", upload_here)


UPLOAD = UploadProcess.upload_file  # the real one
HOSTS = ["node-1", "node-1", "node-2", "node-2"]


def write_checkpoint(run: RunDirectory, step: int, content: str = "", ranks: int = 4) -> Path:
    """A checkpoint as far as uploads look at it."""
    folder = run.checkpoints / f"step-{step}"
    folder.mkdir(parents=True)
    files = {
        f"rank-{rank:05d}.safetensors": write_file(
            folder / f"rank-{rank:05d}.safetensors", f"{step} {rank} {content}".encode() * 50
        )
        for rank in range(ranks)
    }
    files["state.json"] = write_file(folder / "state.json", f"{step} {content}".encode())
    write_file(folder / store.MANIFEST, Contents(step=step, files=files).to_sealed_bytes())
    return folder


def make_run(root: Path) -> RunDirectory:
    run = RunDirectory(root)
    for folder in (run.checkpoints, run.steps, run.layers):
        folder.mkdir(parents=True, exist_ok=True)
    add_line(run, "the first")
    run.skips.write_text('{"position": 3}\n')
    (run.steps / "0000.parquet").write_bytes(b"rows")
    return run


def add_line(run: RunDirectory, text: str, name: str = "training") -> None:
    with run.journal.open("a") as file:
        file.write(f'{{"event": "{name}", "name": "{text}", "reason": ""}}\n')


def contents_of(run: RunDirectory) -> dict[str, bytes]:
    """What an image of it holds, by path."""
    view = look_at_run(run)
    paths = [*view.grown, *view.fixed, *view.contents]
    for name in view.checkpoints:
        names = [*store.read_contents(run.checkpoints / name).files, store.MANIFEST]
        paths += [f"checkpoints/{name}/{file}" for file in names]
    return {path: (run.root / path).read_bytes() for path in paths}


def upload(run: RunDirectory, url: str, view: object = None) -> Uploader:
    """One upload, in this thread."""
    uploader = Uploader(url, run, ["here"], 0)
    uploader._upload(view or look_at_run(run))  # type: ignore[arg-type]
    uploader.finish(0)
    return uploader


def read_image(url: str) -> dict[str, bytes]:
    object_store = ObjectStore(url)
    found = find_image(object_store)
    assert found is not None
    return {path: object_store.read_object(f.key) for path, f in found[1].files.items()}


def fetch_all(run: Path, url: str) -> list[str]:
    return restore_checkpoints(RunDirectory(run), url)


def bring_back(root: Path, url: str) -> list[str]:
    """What a start does; the names of the fetched checkpoints."""
    said = list[str]()
    run_image.restore_records(root, url, said.append)
    return list(run_ranks(1, fetch_all, root, url)[0]) if (root / "checkpoints" / PLAN).exists() else []


def test_an_image_is_the_directory_and_brings_it_back(tmp_path: Path) -> None:
    run, url = make_run(tmp_path / "run"), f"file://{tmp_path}/store"
    write_checkpoint(run, 10)
    write_checkpoint(run, 20)
    (run.checkpoints / "step-10" / store.HEALTH).write_text("{}")
    (run.checkpoints / store.LATEST).write_text("step-20")
    (run.incidents / "0001").mkdir(parents=True)
    (run.incidents / "0001/report.html").write_text("<p>")
    wanted = contents_of(run) | {"incidents/0001/report.html": b"<p>"}
    upload(run, url)
    assert read_image(url) == wanted
    shutil.rmtree(run.root)
    run_image.restore_records(run.root, url, print)
    assert not list(run.checkpoints.glob("step-*/state.json"))
    plan = read_plan(run)
    assert plan is not None and list(plan.checkpoints) == ["step-20", "step-10"]
    assert run_ranks(2, fetch_all, run.root, url)[0] == ["step-20", "step-10"]
    assert contents_of(run) | {"incidents/0001/report.html": b"<p>"} == wanted
    assert not (run.checkpoints / PLAN).exists() and not list(run.checkpoints.glob(".fetching*"))
    for name in ("step-10", "step-20"):
        store.verify_checkpoint(run.checkpoints / name)
    assert bring_back(run.root, url) == []  # it is here


def test_only_what_is_new_is_uploaded_and_what_is_old_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, url = make_run(tmp_path / "run"), f"file://{tmp_path}/store"
    write_checkpoint(run, 10)
    uploaded, real = list[str](), ObjectStore.upload_file

    def put(self: ObjectStore, path: Path, key: str) -> None:
        uploaded.append(f"{path.parent.name}/{path.name}")
        real(self, path, key)

    monkeypatch.setattr(ObjectStore, "upload_file", put)
    uploader = Uploader(url, run, ["here"], 0)
    uploader._upload(look_at_run(run))
    assert len(uploaded) == 5
    write_checkpoint(run, 20)
    shutil.rmtree(run.checkpoints / "step-10")
    uploader._upload(look_at_run(run))
    assert len(uploaded) == 10 and all(name.startswith("step-20/") for name in uploaded[5:])
    image = find_image(ObjectStore(url))
    assert image is not None and list(image[1].checkpoints) == ["step-20"]
    objects = ObjectStore(url).list_objects(OBJECTS)
    assert set(objects) == {f.key for f in image[1].files.values()}
    assert find_heads(ObjectStore(url)) == [2]
    uploader.finish(0)
    # What a killed process has left is used where it fits, and deleted where it does not.
    ObjectStore(url).write_object(f"{OBJECTS}stray-3", b"abc")
    write_checkpoint(run, 30)
    path = run.checkpoints / "step-30/state.json"
    record = hash_file(path)
    real(ObjectStore(url), path, StoredFile(size=record.size, xxh3=record.xxh3).key)
    upload(run, url)
    assert len(uploaded) == 14 and f"{OBJECTS}stray-3" not in ObjectStore(url).list_objects(OBJECTS)


def test_a_process_uploads_what_has_not_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(UploadProcess, "upload_file", UPLOAD)
    one, url = tmp_path / "one", f"file://{tmp_path}/store"
    one.write_bytes(b"12345")
    process = UploadProcess(url)
    process.upload_file(one, "a/one", hash_content(one))
    assert ObjectStore(url).read_object("a/one") == b"12345"
    child = process._process
    assert child is not None and os.getpriority(os.PRIO_PROCESS, child.pid) == 19
    with pytest.raises(DataError, match="not what it was"):
        process.upload_file(one, "a/two", "0" * 32)
    with pytest.raises(FileNotFoundError):
        process.upload_file(tmp_path / "none", "a/three", "")
    child.kill()
    child.wait()
    process.upload_file(one, "a/four", hash_content(one))  # by another process
    (tmp_path / "store/a/file").write_text("")
    with pytest.raises(StoreError):
        process.upload_file(one, "a/file/below", hash_content(one))
    assert list(ObjectStore(url).list_objects("a/")) == ["a/file", "a/four", "a/one"]
    child = process._process
    process.close()
    assert child is not None and child.poll() is not None


def test_hosts_share_the_files_and_rank_0_fills_gaps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, url = make_run(tmp_path / "run"), f"file://{tmp_path}/store"
    write_checkpoint(run, 10)
    one, other = Uploader(url, run, HOSTS, 0), Uploader(url, run, HOSTS, 2)
    other._upload(look_at_run(run))
    names = store.read_contents(run.checkpoints / "step-10").files
    theirs = {
        StoredFile(size=r.size, xxh3=r.xxh3).key
        for n, r in names.items()
        if n[:10] in ("rank-00002", "rank-00003")
    }
    assert set(ObjectStore(url).list_objects(OBJECTS)) == theirs and find_image(ObjectStore(url)) is None
    one._upload(look_at_run(run))
    assert read_image(url) == contents_of(run)
    write_checkpoint(run, 20)
    monkeypatch.setattr("megastable.checkpoint.uploads.HELP_SECONDS", 0.0)  # the other host does nothing
    one._upload(look_at_run(run))
    assert read_image(url) == contents_of(run)
    write_checkpoint(run, 30)
    (run.checkpoints / "step-30/rank-00003.safetensors").write_bytes(b"damaged")
    with pytest.raises(OutdatedError):
        one._upload(look_at_run(run))
    one._upload(look_at_run(run))
    image = find_image(ObjectStore(url))
    assert image is not None and list(image[1].checkpoints) == ["step-20", "step-10"]
    one.finish(0)
    other.finish(0)


def test_a_torn_line_and_what_was_written_since_are_not_in_it(tmp_path: Path) -> None:
    run, url = make_run(tmp_path / "run"), f"file://{tmp_path}/store"
    before = run.journal.read_bytes()
    with run.journal.open("a") as file:
        file.write('{"event": "torn')
    view = look_at_run(run)
    with run.journal.open("a") as file:
        file.write('", "a": 1}\n')
    upload(run, url, view)
    assert read_image(url)["journal.jsonl"] == before


def test_what_has_gone_asks_for_a_newer_view(tmp_path: Path) -> None:
    run, url = make_run(tmp_path / "run"), f"file://{tmp_path}/store"
    write_checkpoint(run, 10)
    view = look_at_run(run)
    (run.steps / "0000.parquet").rename(run.steps / "0001.parquet")  # compacted
    uploader = Uploader(url, run, ["here"], 0)
    with pytest.raises(OutdatedError):
        uploader._upload(view)
    view = look_at_run(run)
    (run.checkpoints / "step-10").rename(run.checkpoints / "suspect-step-10")  # rewound past it
    with pytest.raises(OutdatedError):
        uploader._upload(view)
    assert find_image(ObjectStore(url)) is None
    uploader.offer_view(view)
    until(lambda: uploader.outdated)
    write_checkpoint(run, 20)
    uploader.offer_view(look_at_run(run))
    assert not uploader.outdated and uploader.finish(30)
    assert read_image(url) == contents_of(run)
    # An older one that made room is left out, and so is one that the disk has damaged.
    write_checkpoint(run, 30)
    write_checkpoint(run, 40)
    view = look_at_run(run)
    shutil.rmtree(run.checkpoints / "step-20")
    (run.checkpoints / "step-30/state.json").write_bytes(b"damaged")
    upload(run, url, view)
    image = find_image(ObjectStore(url))
    assert image is not None and list(image[1].checkpoints) == ["step-40"]
    assert not [path for path in image[1].files if "step-30" in path]


def test_a_store_that_fails_is_tried_again_and_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, url = make_run(tmp_path / "run"), f"file://{tmp_path}/store"
    write_checkpoint(run, 10)
    failures, real = iter(range(2)), ObjectStore.write_object

    def write(self: ObjectStore, key: str, content: bytes) -> None:
        if next(failures, None) is not None:
            raise StoreError("503 Slow Down")
        real(self, key, content)

    monkeypatch.setattr(ObjectStore, "write_object", write)
    uploader = Uploader(url, run, ["here"], 0)
    uploader.offer_view(look_at_run(run))
    assert uploader.finish(60)
    notes = uploader.take_notes()
    assert len(notes) == 2 and "503 Slow Down" in notes[0] and "uploaded again" in notes[1]
    assert read_image(url) == contents_of(run) and not uploader.take_notes()


def test_refused_credentials_are_named_at_once_and_looked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, url = make_run(tmp_path / "run"), f"file://{tmp_path}/store"
    write_checkpoint(run, 10)
    answers: list[Exception] = [StoreError("503"), PermissionError("The token has expired")]
    clients, real = list[object](), LocalFileSystem.pipe_file

    def answer(self: LocalFileSystem, *told: Any, **named: Any) -> None:
        clients.append(self)
        if answers:
            raise answers.pop(0)
        real(self, *told, **named)

    monkeypatch.setattr(LocalFileSystem, "pipe_file", answer)
    uploader = Uploader(url, run, ["here"], 0)
    uploader.offer_view(look_at_run(run))
    until(lambda: not uploader._failing_since and not answers)
    outage, denial, success = uploader.take_notes()
    assert "503" in outage and "uploaded again" in success
    assert "NOT UPLOADED, the store refuses this run's credentials" in denial
    assert "PermissionError: The token has expired" in denial and f"{run.checkpoints} only" in denial
    # A denial leads to a new client.
    assert clients[0] is clients[1] and len(set(map(id, clients))) == 2
    # The end does not wait for a person.
    answers += [PermissionError("over")] * 1000
    add_line(run, "later")
    uploader.offer_view(look_at_run(run))
    assert not uploader.finish(60) and not uploader._thread.is_alive()
    assert "over" in uploader.take_notes()[0]


def test_refused_credentials_refuse_a_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, url = make_run(tmp_path / "run"), f"file://{tmp_path}/store"
    write_checkpoint(run, 10)
    upload(run, url)

    def deny(*_: object, **named: object) -> None:
        raise PermissionError("The token has expired")

    for refused in ("find", "pipe_file"):
        with monkeypatch.context() as patch:
            patch.setattr(LocalFileSystem, refused, deny)
            with pytest.raises(
                ConfigError, match="The token has expired: renew them, or go on without uploads"
            ):
                run_image.restore_records(run.root, url, print)
    run_image.restore_records(run.root, url, print)


class NoCredentialsError(Exception):
    """as botocore's"""


class HttpError(Exception):
    code = 401


@pytest.mark.parametrize("error", [NoCredentialsError(), HttpError(), OSError("the token is malformed")])
def test_denials_of_all_kinds(error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if isinstance(error, OSError):
        error.__cause__ = Exception()
        error.__cause__.response = {"Error": {"Code": "InvalidToken"}}  # type: ignore[attr-defined]

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(LocalFileSystem, "cat_file", fail)
    with pytest.raises(DeniedError, match="no permission"):
        ObjectStore(f"file://{tmp_path}").read_object("it")


def test_an_answer_that_is_lost_does_no_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The head was written, or an object deleted, and the store's answer did not arrive."""
    run, url = make_run(tmp_path / "run"), f"file://{tmp_path}/store"
    write_checkpoint(run, 10)
    uploader = Uploader(url, run, ["here"], 0)
    for name, prefix in (("write_object", HEADS), ("delete_objects", OBJECTS)):
        real = getattr(ObjectStore, name)

        def lose(
            self: ObjectStore, key: str | list[str], *rest: bytes, real=real, prefix=prefix, name=name
        ) -> None:  # type: ignore[no-untyped-def]
            keys = [key] if isinstance(key, str) else key
            if name == "write_object":
                real(self, key, *rest)
            if any(one.startswith(prefix) for one in keys):
                monkeypatch.setattr(ObjectStore, name, real)
                raise StoreError("timed out")
            if name != "write_object":
                real(self, key)

        monkeypatch.setattr(ObjectStore, name, lose)
        add_line(run, name)
        (run.steps / "0000.parquet").write_bytes(name.encode())
        with pytest.raises(StoreError, match="timed out"):
            uploader._upload(look_at_run(run))
        add_line(run, "later")
        uploader._upload(look_at_run(run))
        image = find_image(ObjectStore(url))
        assert image is not None and read_image(url) == contents_of(run)
        assert set(ObjectStore(url).list_objects(OBJECTS)) == {f.key for f in image[1].files.values()}
        assert len(find_heads(ObjectStore(url))) == 1
    uploader.finish(0)


def test_the_end_does_not_wait_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path / "run")

    def fail(*_: object) -> None:
        raise StoreError("no route to host")

    monkeypatch.setattr(ObjectStore, "write_object", fail)
    uploader = Uploader(f"file://{tmp_path}/store", run, ["here"], 0)
    uploader.offer_view(look_at_run(run))
    assert not uploader.finish(0.3)


def test_two_runs_never_share_a_url(tmp_path: Path) -> None:
    run, url = make_run(tmp_path / "run"), f"file://{tmp_path}/store"
    write_checkpoint(run, 10)
    uploader = upload(run, url)
    run_image.restore_records(run.root, url, print)
    other = make_run(tmp_path / "other")
    add_line(other, "of another run")
    (other.root / "journal.jsonl").write_text('{"event": "training", "name": "else"}\n')
    with pytest.raises(ConfigError, match="another run"):
        bring_back(other.root, url)
    assert ObjectStore(url).read_object("run.txt") == f"{run.root}\n".encode()
    assert not (other.root / ".restoring").exists()
    # While both run, the head tells.
    upload(run, url)
    with pytest.raises(StoreError, match="not of this process"):
        uploader._upload(look_at_run(run))


@pytest.mark.parametrize("other", ["begins", "goes on"])
def test_an_image_of_another_run_is_never_replaced(tmp_path: Path, other: str) -> None:
    """Neither of one that began to upload after our start, nor a newer one that our start could not ask for."""
    run, url = make_run(tmp_path / "run"), f"file://{tmp_path}/store"
    write_checkpoint(run, 10)
    if other == "goes on":
        upload(run, url)
    shutil.copytree(run.root, tmp_path / "other")
    other_run = RunDirectory(tmp_path / "other")
    if other == "begins":
        other_run.journal.write_text("")
    add_line(other_run, "other steps")
    write_checkpoint(other_run, 20)
    upload(other_run, url)
    wanted = read_image(url)
    add_line(run, "own steps")
    with pytest.raises(StoreError, match=r"holds another run .* give this run another checkpoint.upload"):
        upload(run, url)
    assert read_image(url) == wanted


def test_an_older_directory_is_brought_up_to_date(tmp_path: Path) -> None:
    run, url = make_run(tmp_path / "run"), f"file://{tmp_path}/store"
    write_checkpoint(run, 10)
    shutil.copytree(run.root, tmp_path / "old")
    write_checkpoint(run, 20)
    add_line(run, "later")
    upload(run, url)
    assert bring_back(tmp_path / "old", url) == ["step-20", "step-10"]
    assert contents_of(RunDirectory(tmp_path / "old")) == contents_of(run)
    # Unless a person has added a line there that would be lost.
    shutil.copytree(run.root, tmp_path / "edited")
    edited = RunDirectory(tmp_path / "edited")
    edited.journal.write_bytes(edited.journal.read_bytes()[: edited.journal.read_bytes().find(b"\n") + 1])
    edited.skips.write_text('{"position": 9}\n')
    with pytest.raises(ConfigError, match="has lines"):
        bring_back(edited.root, url)
    assert ObjectStore(url).read_object("run.txt") == f"{tmp_path / 'old'}\n".encode()
    assert not (edited.root / ".restoring").exists()


def test_an_older_directory_loses_the_checkpoints_that_the_run_has_left_since(tmp_path: Path) -> None:
    """It was rewound elsewhere, behind steps that are still here, and has taken some of them again."""
    run, url, old = make_run(tmp_path / "run"), f"file://{tmp_path}/store", RunDirectory(tmp_path / "old")
    for step in (10, 15, 20, 30):
        write_checkpoint(run, step)
    shutil.copytree(run.root, old.root)
    for name in ("step-20", "step-30"):
        (run.checkpoints / name).rename(run.checkpoints / f"suspect-{name}")
    add_line(run, "step-30", "checkpoint_suspect")
    write_checkpoint(run, 20, "again")
    (run.checkpoints / "step-15" / store.QUARANTINED).write_text("{}")
    upload(run, url)
    assert bring_back(old.root, url) == ["step-20", "step-15", "step-10"]
    assert contents_of(old) == contents_of(run)
    kept = {path.name for path in old.checkpoints.glob("rejected-*")}
    assert kept == {"rejected-step-15", "rejected-step-20", "rejected-step-30"}


def test_lost_checkpoints_come_back_but_not_those_left_since(tmp_path: Path) -> None:
    run, url = make_run(tmp_path / "run"), f"file://{tmp_path}/store"
    write_checkpoint(run, 10)
    write_checkpoint(run, 20)
    upload(run, url)
    add_line(run, "step-20", "checkpoint_suspect")
    journal = run.journal.read_bytes()
    assert bring_back(run.root, url) == []  # there are some
    shutil.rmtree(run.checkpoints)
    assert bring_back(run.root, url) == ["step-10"]
    assert run.journal.read_bytes() == journal


def test_damaged_objects_are_left_out(tmp_path: Path) -> None:
    run, url = make_run(tmp_path / "run"), f"file://{tmp_path}/store"
    write_checkpoint(run, 10)
    folder = write_checkpoint(run, 20)
    upload(run, url)
    record = hash_file(folder / "rank-00003.safetensors")
    damaged = tmp_path / "store" / StoredFile(size=record.size, xxh3=record.xxh3).key
    damaged.write_bytes(b"x" * record.size)
    shutil.rmtree(run.root)
    assert bring_back(run.root, url) == ["step-10"]
    # A head that is not whole does not count.
    heads = ObjectStore(url)
    number = find_heads(heads)[-1]
    heads.write_object(run_image.head_name(number + 1), RunImage(time=0, files={}).to_sealed_bytes()[:-3])
    found = find_image(heads)
    assert found is not None and found[0] == number


def test_what_is_damaged_here_stays_in_the_store(tmp_path: Path) -> None:
    run, url = make_run(tmp_path / "run"), f"file://{tmp_path / 'store'}"
    (tmp_path / "store").mkdir()
    good = write_checkpoint(run, 1)
    kept = {f"checkpoints/step-1/{path.name}": path.read_bytes() for path in good.iterdir()}
    uploader = Uploader(url, run, ["here"], 0)
    uploader._upload(look_at_run(run))
    (good / store.MANIFEST).write_bytes(b"rotten")
    write_checkpoint(run, 2)
    uploader._upload(look_at_run(run))
    uploader.finish(0)
    assert kept.items() <= read_image(url).items()


def test_what_a_start_could_not_read_stays_until_there_is_a_newer_checkpoint(tmp_path: Path) -> None:
    run, url = make_run(tmp_path / "run"), f"file://{tmp_path / 'store'}"
    (tmp_path / "store").mkdir()
    write_checkpoint(run, 1)
    left_out = write_checkpoint(run, 2)
    upload(run, url)
    keys = {stored.key for stored in find_image(ObjectStore(url))[1].checkpoints["step-2"].values()}  # type: ignore[index]
    shutil.rmtree(left_out)  # a reader took it for damaged
    uploader = Uploader(url, run, ["here"], 0)
    for step, is_kept in ((None, True), (3, False)):
        if step is not None:
            write_checkpoint(run, step)
        uploader._upload(look_at_run(run))
        assert (keys <= set(ObjectStore(url).list_objects(OBJECTS))) == is_kept
    uploader.finish(0)


def test_what_an_earlier_start_has_fetched_is_not_fetched_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, target, content = f"file://{tmp_path}/store", tmp_path / "here/file", b"content"
    stored = StoredFile(size=7, xxh3=xxhash.xxh3_128_hexdigest(content))
    ObjectStore(url).write_object(stored.key, content)
    run_image.fetch_file(ObjectStore(url), stored, target, "a file")
    downloads, real = [], ObjectStore.download_file
    monkeypatch.setattr(ObjectStore, "download_file", lambda *a: (downloads.append(a[1]), real(*a)))
    run_image.fetch_file(ObjectStore(url), stored, target, "a file")
    assert not downloads
    target.write_bytes(b"half")
    run_image.fetch_file(ObjectStore(url), stored, target, "a file")
    assert downloads == [stored.key] and target.read_bytes() == content


def test_a_head_that_is_replaced_while_it_is_read_is_looked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, url = make_run(tmp_path / "run"), f"file://{tmp_path}/store"
    write_checkpoint(run, 10)
    uploader, real = Uploader(url, run, ["here"], 0), ObjectStore.list_objects
    uploader._upload(look_at_run(run))
    write_checkpoint(run, 20)

    def look(self: ObjectStore, prefix: str) -> dict[str, int]:
        found = real(self, prefix)
        monkeypatch.setattr(ObjectStore, "list_objects", real)
        uploader._upload(look_at_run(run))
        return found

    monkeypatch.setattr(ObjectStore, "list_objects", look)
    found = find_image(ObjectStore(url))
    assert found is not None and list(found[1].checkpoints) == ["step-20", "step-10"]
    uploader.finish(0)


def test_nothing_begins_anew_while_the_store_cannot_be_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, url = make_run(tmp_path / "run"), f"file://{tmp_path}/store"
    write_checkpoint(run, 10)
    upload(run, url)
    monkeypatch.setattr(run_image, "START_SECONDS", 0.1)

    def fail(*_: object) -> None:
        raise StoreError("no route to host")

    monkeypatch.setattr(ObjectStore, "list_objects", fail)
    said = list[str]()
    run_image.restore_records(run.root, url, said.append)
    assert "no route to host" in said[0]
    with pytest.raises(ConfigError, match="cannot be said"):
        run_image.restore_records(tmp_path / "gone", url, said.append)


def test_a_killed_restore_is_begun_again_until_it_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, url = make_run(tmp_path / "run"), f"file://{tmp_path}/store"
    (run.layers / "0000.parquet").write_bytes(b"rows of layers")
    write_checkpoint(run, 10)
    upload(run, url)
    wanted, real, moves = contents_of(run), os.replace, [0]

    def move(source: object, target: object) -> None:
        if moves[0] == 0:
            raise KeyboardInterrupt  # as good as a kill: nothing handles it
        moves[0] -= 1
        real(source, target)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "replace", move)
    kills = 0
    while True:
        shutil.rmtree(run.root)
        moves[0] = kills
        try:
            run_image.restore_records(run.root, url, print)
        except KeyboardInterrupt:
            kills += 1
        else:
            break
        # No journal without all the rest: the next start begins again.
        assert not run.journal.exists() or (run.checkpoints / PLAN).exists()
        moves[0] = 10**9
        run_image.restore_records(run.root, url, print)
        assert {path: (run.root / path).read_bytes() for path in wanted if "checkpoints" not in path} == {
            path: content for path, content in wanted.items() if "checkpoints" not in path
        }
        assert read_plan(run) is not None
    assert kills == 5  # three records, the plan, the journal


@settings(max_examples=12, deadline=None)
@given(st.data())
def test_any_kill_leaves_a_whole_image(data: st.DataObject) -> None:
    """Whatever the run does, and after whichever request to the store its process dies: the newest image is one of the
    views, not an older one than before, and a new process goes on from what is there."""
    import tempfile

    class Killed(Exception):
        pass

    budget = [10**9]

    def spend() -> None:
        if budget[0] == 0:
            raise Killed
        budget[0] -= 1

    def guarded(name: str) -> Iterator[None]:
        real = getattr(ObjectStore, name)

        def call(self: ObjectStore, *arguments: object) -> object:
            if name == "delete_objects":  # one by one
                for key in arguments[0]:  # type: ignore[attr-defined]
                    spend()
                    real(self, [key])
                return None
            spend()
            return real(self, *arguments)

        patch.setattr(ObjectStore, name, call)
        yield

    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        for name in ("write_object", "upload_file", "delete_objects"):
            next(guarded(name))
        run, url = make_run(Path(folder) / "run"), f"file://{folder}/store"
        views, newest, step = list[dict[str, bytes]](), -1, 0
        uploader = Uploader(url, run, ["here"], 0)
        for _ in range(data.draw(st.integers(1, 6))):
            action = data.draw(st.sampled_from(["save", "rewind", "retain"]))
            here = store.newest_first(run.checkpoints)
            if action == "save" or not here:
                step += 10
                write_checkpoint(
                    run, step, content=str(len(views))
                )  # the same step again has another content
            elif action == "rewind":
                here[0].rename(here[0].with_name(f"suspect{len(views)}-{here[0].name}"))
                step -= 10
            else:
                shutil.rmtree(here[-1])
            add_line(run, action)
            views.append(contents_of(run))
            budget[0] = data.draw(st.one_of(st.integers(0, 14), st.just(10**9)))
            try:
                uploader._upload(look_at_run(run))
            except Killed:
                uploader.finish(0)
                uploader = Uploader(url, run, ["here"], 0)
            budget[0] = 10**9
            if find_image(ObjectStore(url)) is not None:
                found = views.index(read_image(url))
                assert found >= newest
                newest = found
        uploader._upload(look_at_run(run))
        assert read_image(url) == contents_of(run)
        image = find_image(ObjectStore(url))
        assert image is not None
        # What an earlier process has uploaded stays until there is a newer checkpoint.
        named = [*image[1].files.values(), *uploader._earlier.files.values()]
        assert set(ObjectStore(url).list_objects(OBJECTS)) == {f.key for f in named}
        uploader.finish(0)
