"""Checkpoints that somebody made up, checksums and all: an error that names the file, whatever stands in them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megastable.base.errors import CheckpointError
from megastable.checkpoint import store
from megastable.checkpoint.files import TensorFile, hash_file
from megastable.checkpoint.plain import load_plain
from megastable.checkpoint.store import MANIFEST, STATE
from tests.checkpoint.states import make_run

HUGE = 10**30


def seal(checkpoint: Path, **more: Any) -> None:
    """A manifest that is right about all that is there."""
    contents = store.read_contents(checkpoint)
    files = {name: hash_file(checkpoint / name) for name in contents.files if (checkpoint / name).is_file()}
    (checkpoint / MANIFEST).write_bytes(
        contents.model_copy(update={"files": files, **more}).to_sealed_bytes()
    )


def first(tree: Any) -> Any:
    return tree["pieces"][0]


def put(**fields: Any) -> Callable[[Any], None]:
    return lambda tree: first(tree).update(fields)


PARTS: dict[str, Callable[[Any], Any]] = {
    "negative shape": put(shape=[-8, -16]),
    "huge shape": put(shape=[HUGE, HUGE], numel=HUGE * HUGE),
    "shape without end": put(shape=[8] * 100_000),
    "huge but for its pieces": put(shape=[10**9, 16]),
    "negative start": put(start=-1),
    "no elements": put(numel=0),
    "nothing": put(numel="NaN"),
    "dimension": put(dim=7),
    "negative dimension": put(dim=-1),
    "sections": put(dim=0, sections=[1, 2]),
    "no sections": put(dim=0, sections=[]),
    "tensor rank": lambda tree: tree.update(tensor_rank=3),
    "negative tensor rank": lambda tree: tree.update(tensor_rank=-1),
    "twice": lambda tree: tree["pieces"].append(first(tree)),
    "overlap": lambda tree: tree["pieces"].append(first(tree) | {"start": 1, "numel": 2}),
    "kinds": lambda tree: tree.update(kinds=["exp_avg"]),
    "no kinds": lambda tree: tree.update(kinds=[]),
    "another parameter": put(name="blocks.0.\x1b[31m"),
    "a hole": put(start=1),
    "no parameter": lambda tree: tree["pieces"].pop(),
    "transposed": lambda tree: first(tree).update(shape=first(tree)["shape"][::-1]),
}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return make_run(tmp_path / "run", (1, 1, 1, 1))


@pytest.mark.quick("a hole", "another parameter")
@pytest.mark.parametrize("case", PARTS)
def test_pieces_that_make_no_sense(case: str, checkpoint: Path) -> None:
    path = checkpoint / "rank-00000.json"
    tree = json.loads(path.read_text())
    PARTS[case](tree)
    path.write_text(json.dumps(tree))
    seal(checkpoint)
    store.verify_checkpoint(checkpoint)
    with pytest.raises(CheckpointError, match="step-7"):
        load_plain(checkpoint)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"pieces": ' * 50_000, "NaN", "{}"])
def test_descriptions_that_are_none(text: str, checkpoint: Path) -> None:
    (checkpoint / "rank-00000.json").write_text(text)
    seal(checkpoint)
    with pytest.raises(CheckpointError, match=r"rank-00000\.json: damaged"):
        load_plain(checkpoint)


@pytest.mark.parametrize("damage", ["header", "length", "dtype", "shape", "empty"])
def test_tensors_that_are_none(damage: str, checkpoint: Path) -> None:
    path = checkpoint / "rank-00000.safetensors"
    parts = json.loads((checkpoint / "rank-00000.json").read_text())["pieces"]
    kinds = ("weight", "exp_avg", "exp_avg_sq")
    dtype = torch.float64 if damage == "dtype" else torch.float32
    shape = (lambda n: ()) if damage == "shape" else (lambda n: (n,))
    entries = [(f"{k}/{p['name']}", dtype, shape(p["numel"])) for p in parts for k in kinds]
    with TensorFile(path, entries) as file:
        for name, _, size in entries:
            file.write_tensor(name, torch.zeros(size, dtype=dtype))
    content = bytearray(path.read_bytes())
    if damage == "header":
        content[8:40] = b"[" * 32
    elif damage == "length":
        content[:8] = b"\xff" * 8
    elif damage == "empty":
        content.clear()
    path.write_bytes(content)
    seal(checkpoint)
    with pytest.raises(CheckpointError, match=r"rank-00000\.safetensors: "):
        load_plain(checkpoint)


@pytest.mark.parametrize("name", ["../../recipe.yaml", "/etc/passwd", "a\0b", "", "..", "x" * 5000])
def test_a_manifest_that_names_other_files(name: str, checkpoint: Path) -> None:
    contents = store.read_contents(checkpoint)
    record = hash_file(checkpoint / STATE)
    files = {**contents.files, name: record}
    (checkpoint / MANIFEST).write_bytes(contents.model_copy(update={"files": files}).to_sealed_bytes())
    with pytest.raises(CheckpointError):
        store.verify_checkpoint(checkpoint)


@pytest.mark.parametrize("name", [MANIFEST, STATE, "rank-00000.safetensors"])
def test_what_is_no_file_is_not_waited_for(name: str, checkpoint: Path) -> None:
    (checkpoint / name).unlink()
    os.mkfifo(checkpoint / name)
    if name != MANIFEST:
        contents = store.read_contents(checkpoint)
        empty = contents.files[name].model_copy(update={"size": 0})
        contents = contents.model_copy(update={"files": contents.files | {name: empty}})
        (checkpoint / MANIFEST).write_bytes(contents.to_sealed_bytes())
    with pytest.raises(CheckpointError, match=name):
        store.verify_checkpoint(checkpoint)
    if name == STATE:
        with pytest.raises(CheckpointError, match=name):
            store.read_state(checkpoint)
