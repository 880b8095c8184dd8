"""All ranks read a checkpoint together: every file once, and the same bits as every rank alone."""

from __future__ import annotations

import shutil
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from megastable.checkpoint import shared_reading, store
from megastable.checkpoint.files import FileRecord
from megastable.checkpoint.shared_reading import (
    assign_holders,
    count_answers,
    load_shared,
    read_checkpoint,
    read_newest_good,
)
from megastable.checkpoint.store import Contents
from megastable.checkpoint.whole import WholeState, load_into
from megastable.config.tree import RunConfig
from tests.conftest import VOCABULARY, tiny
from tests.distributed import run_ranks, train
from tests.engine.engines import build_engine

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp2": (2, {}),
    "dp4": (4, {}),
    "tp2-dp2": (4, {"tensor": 2}),
    "pp2-dp2": (4, {"pipeline": 2}),
    "pp2": (2, {"pipeline": 2}),
    "pp2-chunks": (2, {"pipeline": 2, "model_chunks": 2}),
    "tp4": (4, {"tensor": 4}),
    "dp2-zero3": (2, {"zero": 3}),
    "replicas2-dp4": (4, {"replicas": 2}),
    "replicas2-tp2": (4, {"replicas": 2, "tensor": 2}),
}
# Four ranks may share the heads; two chunks of the model on two stages.
MODEL = {"layers": 4, "kv_heads": 4, "tied": False, "vocab_size": VOCABULARY}
PAIRS = [
    ("dp2", "dp2"), ("tp2-dp2", "tp2-dp2"), ("pp2-dp2", "pp2-dp2"), ("dp2-zero3", "dp2-zero3"),
    ("tp2-dp2", "dp2"), ("dp2", "tp2-dp2"), ("pp2-dp2", "tp4"), ("tp4", "pp2-dp2"),
    ("replicas2-dp4", "replicas2-dp4"), ("replicas2-tp2", "replicas2-tp2"), ("replicas2-dp4", "dp2"),
    ("dp4", "replicas2-dp4"),
    ("dp2", "pp2"), ("pp2", "pp2-chunks"), ("pp2-chunks", "pp2"), ("pp2-chunks", "dp4"),
]  # fmt: skip


def configure(corpus: Path, run: Path, layout: str, **parts: Any) -> RunConfig:
    return tiny(
        corpus, run, parallel=LAYOUTS[layout][1], model={**tiny(corpus, run).model.model_dump(), **MODEL},
        train={"steps": 2, "global_batch": 8, "micro_batch": 2, "eval_samples": 0, "eval_interval": 0},
        checkpoint={"interval": 2}, **parts,
    )  # fmt: skip


@pytest.fixture(scope="module")
def saved(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("saved")

    def save(layout: str, **parts: Any) -> Path:
        run = folder / "-".join([layout, *parts])
        if not run.exists():
            run_ranks(LAYOUTS[layout][0], train, configure(corpus, run, layout, **parts))
        return run / "checkpoints/step-2"

    return save


def load_both(config: RunConfig, checkpoint: Path, room: bool = True, piece: int = 1 << 26) -> dict[str, Any]:
    """Load as every rank alone, then as all together. Returns which elements differ, the opens of every file, and the
    most bytes of a message that this rank has sent, or received, in pieces: all of a round."""
    opens, counting = Counter[str](), [False]

    def note_open(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and counting[0] and str(arguments[0]).startswith(str(checkpoint)):
            opens[Path(str(arguments[0])).name] += 1

    largest, send = [0], dist.all_to_all_single

    def note_message(received: torch.Tensor, sent: torch.Tensor, *options: Any, **named: Any) -> None:
        if sent.dtype == torch.uint8:
            largest[0] = max(largest[0], len(sent), len(received))
        send(received, sent, *options, **named)

    dist.all_to_all_single = note_message
    sys.addaudithook(note_open)
    shared_reading.PIECE, shared_reading.ROUND = piece, 2 * piece
    if not room:
        shared_reading.free_memory.free_bytes = lambda: 0
    engine = build_engine(config)
    state = store.read_state(checkpoint)
    load_into(engine, checkpoint, state)
    alone = {name: tensor.clone() for name, tensor in engine.optimizer_state().items()}
    for tensor in engine.optimizer_state().values():
        tensor.fill_(-1)
    counting[0] = True
    held = read_checkpoint(checkpoint)
    load_shared(engine, held, state)
    counting[0] = False
    together = engine.optimizer_state()
    differing = [name for name in alone if not torch.equal(alone[name], together[name])]
    return {
        "differing": [*differing, *(alone.keys() ^ together.keys())],
        "opens": dict(opens),
        "held": held.own is not None,
        "largest": largest[0],
    }


@pytest.mark.quick("tp2-dp2-tp2-dp2")
@pytest.mark.parametrize(("writer", "reader"), PAIRS)
def test_every_file_is_read_once(writer: str, reader: str, saved: Any, corpus: Path, tmp_path: Path) -> None:
    checkpoint = saved(writer)
    config = configure(corpus, tmp_path, reader)
    found = run_ranks(LAYOUTS[reader][0], load_both, config, checkpoint, True, 1 << 10)
    assert [rank["differing"] for rank in found] == [[]] * len(found)
    assert max(rank["largest"] for rank in found) <= 2 << 10
    opens = sum((Counter(rank["opens"]) for rank in found), Counter[str]())
    files = store.read_contents(checkpoint).files
    assert opens == Counter([store.MANIFEST, *files])
    if writer == reader:  # no rank reads more than its own part, and what is there once
        assert all(set(rank["opens"]) <= own_names(place) | others(files) for place, rank in enumerate(found))


@pytest.mark.parametrize("layout", ["replicas2-dp4", pytest.param("replicas2-tp2", marks=pytest.mark.slow)])
def test_every_replica_writes_a_part_of_what_all_hold(layout: str, saved: Any) -> None:
    checkpoint = saved(layout)
    whole = WholeState(checkpoint)
    numbers = 3 * sum(whole.read_tensor(name, "weight").numel() for name in whole.names)
    written = [
        sum(tensor.numel() for tensor in load_file(path).values())
        for path in sorted(checkpoint.glob("rank-*.safetensors"))
    ]
    assert len(written) == 4 and sum(written) == numbers
    assert min(written) > numbers / 10


def load_apart(config: RunConfig, checkpoint: Path) -> list[str]:
    """As `load_both`; each rank holds the descriptions of the parts that it needs, and the other one their tensors."""

    def assign(contents: Contents, world: int) -> dict[str, int]:
        needed_by = {name: int(name[5:10]) // 2 for name in contents.files if name.startswith("rank-")}
        return {
            name: 0 if name not in needed_by else needed_by[name] ^ name.endswith(".safetensors")
            for name in contents.files
        }

    shared_reading.assign_holders = assign
    return load_both(config, checkpoint)["differing"]


@pytest.mark.slow
def test_descriptions_and_tensors_may_be_of_two_ranks(saved: Any, corpus: Path, tmp_path: Path) -> None:
    """Four have written, two read: files go around the ranks by their size, the two of a part to different ones."""
    assert run_ranks(2, load_apart, configure(corpus, tmp_path, "dp2"), saved("dp4")) == [[], []]


def own_names(rank: int) -> set[str]:
    return {f"rank-{rank:05d}.json", f"rank-{rank:05d}.safetensors", f"rng-{rank:05d}.pt"}


def others(files: dict[str, Any]) -> set[str]:
    return {store.MANIFEST, *(name for name in files if not store.PARTS.fullmatch(name))}


def test_without_room_files_are_read_twice(saved: Any, corpus: Path, tmp_path: Path) -> None:
    """Once to compare them with the manifest and once to load them, and nothing is kept."""
    found = run_ranks(2, load_both, configure(corpus, tmp_path, "dp2"), saved("dp2"), False)
    assert [(rank["differing"], rank["held"]) for rank in found] == [([], False)] * 2
    assert [rank["opens"][f"rank-0000{place}.safetensors"] for place, rank in enumerate(found)] == [2, 2]


def find_good(folder: Path) -> tuple[str, dict[str, str]]:
    held, rejected = read_newest_good(folder)
    return "" if held is None else held.folder.name, rejected


@pytest.mark.quick("rank-00001.safetensors")
@pytest.mark.parametrize("name", ["rank-00001.safetensors", "rank-00000.json", "state.json"])
def test_the_failure_of_one_reader_is_everybodys(name: str, saved: Any, tmp_path: Path) -> None:
    for step in (1, 2):
        shutil.copytree(saved("dp2"), tmp_path / f"step-{step}")
    rewrite_step(tmp_path / "step-1", 1)
    damaged = tmp_path / "step-2" / name
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"~")
    for good, rejected in run_ranks(2, find_good, tmp_path):
        assert good == "step-1" and list(rejected) == ["step-2"]
        assert rejected["step-2"].startswith(f"{damaged}: its checksum is not the manifest's")


def rewrite_step(folder: Path, step: int) -> None:
    contents = store.read_contents(folder).model_copy(update={"step": step})
    (folder / store.MANIFEST).write_bytes(contents.to_sealed_bytes())


def test_a_round_is_shared_by_those_who_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_reading, "ROUND", 10)
    assert count_answers([[5, 5], [], [2, 3], [1]]) == [1, 0, 1, 1]
    assert count_answers([[], [5, 5, 1], [0]]) == [0, 2, 1]
    assert count_answers([[5, 5], [11]]) == [1, 0] and count_answers([[], []]) == [0, 0]


def test_parts_are_shared_out() -> None:
    sizes = {
        "rank-00000.safetensors": 9,
        "rank-00001.safetensors": 8,
        "shared.safetensors": 7,
        "state.json": 1,
    }
    sizes |= {"rank-00000.json": 2, "rank-00001.json": 2, "rng-00000.pt": 3, "rng-00001.pt": 3}
    files = {name: FileRecord(size=size, xxh3="") for name, size in sizes.items()}
    contents = Contents(step=1, files=files)
    own = assign_holders(contents, 2)
    assert all(own[name] == int(name[9]) for name in own if name.startswith("rank"))
    assert own["shared.safetensors"] == 0 and own["state.json"] == 1
    for world in (1, 3):
        held = assign_holders(contents, world)
        assert held.keys() == files.keys() and set(held.values()) == set(range(world))
        assert all(held[f"rng-0000{rank}.pt"] == rank for rank in range(min(2, world)))
