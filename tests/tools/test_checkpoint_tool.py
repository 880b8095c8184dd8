"""The command line as its users meet it: what it says, what it leaves behind, how it ends."""

from __future__ import annotations

import json
import os
import pty
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from megastable.base import durable
from megastable.checkpoint import markers, store
from megastable.checkpoint.new_run import ADAM, write_run
from megastable.checkpoint.whole import WholeState, describe_parameters
from megastable.config.tree import RunConfig
from megastable.run.directory import RunDirectory
from megastable.run.events.stability_events import Handover
from megastable.run.events.training_events import Finished
from megastable.run.log import RunLog
from megastable.supervise.standing import State
from megastable.supervise.status import read_status
from megastable_tools.commands.checkpoint import app
from tests.checkpoint.states import LAYOUTS, make_run, numbers, recipe_of, state_of
from tests.patience import PATIENCE

ROOT = Path(__file__).parents[2]
WEIGHTS = "rank-00000.safetensors"
Call = Callable[..., tuple[str, str]]


@pytest.fixture
def call() -> Callable[..., tuple[str, str]]:
    """Run a command in this process; (stdout, stderr)."""

    def run(*arguments: object, code: int = 0) -> tuple[str, str]:
        done = CliRunner().invoke(app, list(map(str, arguments)))
        assert done.exit_code == code, (done.exit_code, done.output, done.exception)
        assert done.exception is None or isinstance(done.exception, SystemExit)
        return done.stdout, done.stderr

    return run


def json_of(call: Call, *arguments: object, code: int = 0) -> dict[str, Any]:
    out, err = call(*arguments, "--json", code=code)
    assert err == ""
    found: dict[str, Any] = json.loads(out)
    return found


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return make_run(tmp_path / "run", LAYOUTS["tp2"])


def flip(path: Path, at: int = -1) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


# verify


def torn(checkpoint: Path) -> None:
    os.truncate(checkpoint / WEIGHTS, 1000)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (torn, ["rank-00000.safetensors: 1000 bytes, the manifest says", "truncated"]),
        (lambda c: flip(c / WEIGHTS), ["rank-00000.safetensors: its checksum is not the manifest's"]),
        (lambda c: (c / "manifest.json").unlink(), ["manifest.json: missing"]),
    ],
)
def test_verify_says_what_is_wrong(
    call: Call, checkpoint: Path, damage: Callable[[Path], None], words: list[str]
) -> None:
    assert "1 checkpoint, all files match their manifests" in call("verify", checkpoint)[0]
    damage(checkpoint)
    found = json_of(call, "verify", checkpoint.parents[1], code=2)
    assert {row["outcome"] for row in found["rows"]} == {"damaged"}
    problems = " | ".join(row["problem"] for row in found["rows"])
    assert all(word in problems for word in words), problems
    assert "cannot be trusted" in call("verify", checkpoint, code=2)[0]


def test_verify_reads_all_checkpoints_of_a_run(call: Call, checkpoint: Path, tmp_path: Path) -> None:
    shutil.move(make_run(tmp_path / "later", step=12), checkpoint.parent)
    torn(checkpoint)
    found = json_of(call, "verify", tmp_path / "run", code=2)["rows"]
    assert [(Path(row["checkpoint"]).name, row["outcome"]) for row in found] == [
        ("step-12", "good"), ("step-7", "damaged"),
    ]  # fmt: skip
    json_of(call, "verify", tmp_path / "run" / "checkpoints" / "step-12")
    call("verify", tmp_path / "run", tmp_path / "later", code=2)  # it holds none any more


# list, pin, show


def finished_run(tmp_path: Path) -> tuple[Path, Path]:
    """Checkpoints of steps 7 and 9 of a run that finished; the first, and the run."""
    first = make_run(tmp_path / "run")
    last, run = make_run(tmp_path / "other", step=9), first.parents[1]
    shutil.move(last, first.with_name(last.name))
    store.point_latest(first.parent)
    (run / "summary.json").write_text('{"steps": 9}')
    RunLog(RunDirectory(run)).emit_event(Finished(steps=9, val_loss=None))
    return first, run


def test_rollback(call: Call, tmp_path: Path) -> None:
    checkpoint, run = finished_run(tmp_path)
    out, _ = call("rollback", checkpoint, "--reason", "step 8 spiked\x1b[31m")
    assert "trains on from step 7" in out and "rollback1-step-9" in out and str(run) in out
    folder = checkpoint.parent
    assert store.newest_first(folder) == [checkpoint] and (folder / store.LATEST).read_text() == "step-7"
    assert store.list_problems(folder / "rollback1-step-9") == []  # set aside as it was
    assert not (run / "summary.json").exists()
    assert json.loads((run / "summary-rollback1.json").read_text()) == {"steps": 9}
    told = [
        (event.event, event.get("step"), event.get("name")) for event in RunDirectory(run).iterate_events()
    ][-2:]
    assert told == [("rolled_back", 7, None), ("checkpoint_suspect", None, "step-9")]
    stands = read_status(run)
    assert (stands.state, stands.step) == (State.STOPPED, 7) and "rolled it back" in stands.reason
    [_, row] = sorted(json_of(call, "list", run)["rows"], key=lambda row: row["step"])
    assert (row["step"], row["state"]) == (9, "suspect")
    # And back again.
    call("accept", folder / "rollback1-step-9")
    assert [path.name for path in store.newest_first(folder)] == ["step-9", "step-7"]
    assert "no newer checkpoint" in call("rollback", folder / "step-9")[0]


def test_rollback_keeps_what_another_one_set_aside(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, run = finished_run(tmp_path)
    folder = checkpoint.parent
    monkeypatch.chdir(folder)  # a path as it is typed there
    call("rollback", "step-7")
    shutil.copytree(folder / "rollback1-step-9", folder / "step-9")  # trained again
    (run / "summary.json").write_text('{"steps": 10}')
    call("rollback", "step-7")
    shutil.copytree(folder / "rollback1-step-9", folder / "step-9")
    store.set_aside_newer(folder, 7)  # by an incident
    kept = {path.name for path in folder.iterdir()} - {store.LATEST}
    assert kept == {"step-7", "rollback1-step-9", "rollback2-step-9", "suspect-step-9"}
    summaries = [json.loads((run / f"summary-rollback{n}.json").read_text())["steps"] for n in (1, 2)]
    assert summaries == [9, 10] and not list(folder.glob("*.jsonl"))


@pytest.mark.parametrize("lock", [".lock", ".supervisor.lock"])
def test_rollback_refuses_a_run_at_work(lock: str, call: Call, tmp_path: Path) -> None:
    checkpoint, run = finished_run(tmp_path)
    with durable.lock_file(run / lock) as held:
        assert held is not None
        assert "at work: stop the run first" in call("rollback", checkpoint, code=2)[1]
    assert (run / "summary.json").exists() and (checkpoint.parent / "step-9").exists()


def test_rollback_refuses_what_no_run_can_go_on_from(call: Call, tmp_path: Path) -> None:
    checkpoint, run = finished_run(tmp_path)
    assert "name one: step-9, step-7" in call("rollback", run, code=2)[1]
    RunLog(RunDirectory(run)).emit_event(Handover(step=9, before=5))
    assert "from before step 5" in call("rollback", checkpoint, code=2)[1]
    RunLog(RunDirectory(run)).emit_event(Handover(step=9, before=8))
    moved = shutil.copytree(checkpoint, tmp_path / "elsewhere" / checkpoint.name)
    assert "is not in the checkpoints of a run" in call("rollback", moved, code=2)[1]
    markers.mark_bad(checkpoint, "of other losses")
    assert "of other losses" in call("rollback", checkpoint, code=2)[1]
    markers.mark_accepted(checkpoint)
    flip(checkpoint / WEIGHTS)
    assert "checksum" in call("rollback", checkpoint, code=2)[1]
    flip(checkpoint / WEIGHTS)
    store.set_aside_newer(checkpoint.parent, 7)
    assert "accept it first" in call("rollback", checkpoint.parent / "suspect-step-9", code=2)[1]
    assert (run / "summary.json").exists()


def test_show(call: Call, checkpoint: Path) -> None:
    markers.mark_healthy(checkpoint, 200, 150)
    text = call("show", checkpoint)[0]
    for words in (
        "2 layers, width 16",
        "tensor 2 x pipeline 1 x data 1, ZeRO 1, bf16",
        "150 steps after it",
        "3.375",
    ):
        assert words in text
    found = json_of(call, "show", checkpoint.parents[1], "--tensor", "*.qkv.*")
    assert len(found["tensors"]) == 6 and found["state"]["cursor"] == 56 and found["model"]["hidden"] == 16
    whole = WholeState(checkpoint)
    for row in found["tensors"]:
        tensor = whole.read_tensor(row["name"], row["kind"])
        assert row["norm"] == pytest.approx(float(tensor.norm()), rel=1e-6)
        assert row["absmax"] == float(tensor.abs().max())
        assert row["mean"] == pytest.approx(float(tensor.mean()), abs=1e-6)
        assert row["shape"] == list(tensor.shape) and row["nonfinite"] == 0
    assert "no tensor is named like 'nothing*'" in call("show", checkpoint, "--tensor", "nothing*", code=2)[1]


# diff


def test_diff_ends_with_whether_anything_differs(call: Call, checkpoint: Path, tmp_path: Path) -> None:
    same = make_run(tmp_path / "same", LAYOUTS["dp2-zero3"], seconds=99.0)
    found = json_of(call, "diff", checkpoint, same)
    assert {row["outcome"] for row in found["rows"]} == {"identical"} and len(found["rows"]) == 57
    assert found["facts"]["fields"]["layout.zero"] == {"a": 1, "b": 3} and found["facts"]["identical"] is True
    name = "blocks.1.mlp.down.weight"
    changed = WholeState(checkpoint).read_tensor(name, "weight").clone()
    changed[0, 0] += 0.5
    other = make_run(tmp_path / "other", change={(name, "weight"): changed})
    text = call("diff", checkpoint, other, code=1)[0]
    assert name in text and "final_norm.weight" not in text  # what is identical is not worth a line


# reshape, export, average


def test_reshape_says_how_to_go_on(call: Call, checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "a b"
    text = call("reshape", checkpoint, out, "--tensor", 1, "--pipeline", 2)[0]
    assert f"megastable supervise '{out}/recipe.yaml' run.dir='{out}' -- --num_gpus 2" in text
    call("diff", checkpoint, out)
    alone = shutil.copytree(checkpoint, tmp_path / "step-7")
    found = json_of(call, "reshape", alone, tmp_path / "from-alone", "--data", 2, "--zero", 3)
    assert found["world"] == 4 and found["ledgers"] is None and found["optimizer"]
    assert "skips.jsonl" in call("reshape", alone, tmp_path / "once-more")[0]


def test_branch_says_its_rates(call: Call, tmp_path: Path) -> None:
    layout = LAYOUTS["tp2"]
    tree = recipe_of(layout).model_dump(mode="json")
    tree["schedule"], tree["optimizer"]["lr"] = {"kind": "constant", "warmup_steps": 5}, 1e-3
    run = RunConfig.model_validate(tree)
    held = numbers(run)
    write_run(tmp_path / "run", run, state_of(layout), lambda *of: held[of], optimizer=ADAM, origin={})
    text = call("branch", tmp_path / "run", tmp_path / "out", "--decay-steps", 20)[0]
    assert "goes on at 0.001 and falls to 0.0001 over 20 updates; the run ends at step 27" in text
    options = ("--decay-steps", 3, "--kind", "sqrt", "--floor", 0)
    found = json_of(call, "branch", tmp_path / "run", tmp_path / "other", *options)
    assert (found["rate"], found["floor"], found["decay_steps"], found["steps"]) == (1e-3, 0.0, 3, 10)


def test_export_and_average(call: Call, checkpoint: Path, tmp_path: Path) -> None:
    assert "Without the optimizer's state" in call("export", checkpoint, tmp_path / "bare")[0]
    call("diff", checkpoint, tmp_path / "bare", "--weights-only")
    for step in (8, 9):
        shutil.move(make_run(tmp_path / str(step), step=step, seed=step), checkpoint.parent)
    run, folder = checkpoint.parents[1], checkpoint.parent
    made = json_of(call, "average", "--last", 2, run, tmp_path / "mean")
    assert made["step"] == 9 and not made["optimizer"] and made["averaged"] == [8, 9]
    text = call("average", folder / "step-8", folder / "step-9", tmp_path / "other", "--weights", "1,1")[0]
    assert "the mean of 2 checkpoints, of steps 8, 9" in text
    call("diff", tmp_path / "mean", tmp_path / "other")
    for arguments, message in (
        ((tmp_path / "x",), "name the checkpoints"), (("--last", 9, run, tmp_path / "x"), "3 checkpoints, --last 9"),
        (("--last", 2, run, folder, tmp_path / "x"), "--last K takes one run"),
        ((folder / "step-8", folder / "step-9", tmp_path / "x", "--weights", "1,a"), "expected numbers"),
    ):  # fmt: skip
        assert message in call("average", *arguments, code=2)[1]
    assert not (tmp_path / "x").exists()


# Others' formats


def test_export_megatron_and_back(call: Call, checkpoint: Path, tmp_path: Path) -> None:
    told = call("export-megatron", checkpoint, tmp_path / "theirs", "--tensor", 2, "--pipeline", 2)[0]
    assert "iter_0000007" in told and "--use-checkpoint-args" in told
    out, told = call("import-megatron", tmp_path / "theirs", tmp_path / "ours")
    assert "Without the optimizer's state" in out and "skips.jsonl" not in out and "iteration 7" in told
    call("diff", checkpoint, tmp_path / "ours", "--weights-only")
    assert "give one with --recipe" in call("import-megatron", tmp_path, tmp_path / "x", "a=1", code=2)[1]
    assert "exists already" in call("export-megatron", checkpoint, tmp_path / "theirs", code=2)[1]
    flip(checkpoint / WEIGHTS)
    assert "its checksum is not" in call("export-megatron", checkpoint, tmp_path / "x", code=2)[1]


# Bad input


def test_export_takes_the_newest_good_one(call: Call, checkpoint: Path, tmp_path: Path) -> None:
    later = Path(shutil.move(make_run(tmp_path / "later", step=9), checkpoint.parent))
    flip(later / WEIGHTS)
    out, told = call("export", checkpoint.parents[1], tmp_path / "out")
    assert "step 7" in out and "skipped" in told and "step-9" in told


def test_paths_that_are_none(call: Call, checkpoint: Path, tmp_path: Path) -> None:
    for path, message in (
        (tmp_path / "ru", f"there is no such path; runs in {tmp_path}: run"),
        (checkpoint.parent / "step-70", "there is no such checkpoint; there are step-7"),
        (tmp_path, "neither a checkpoint nor the directory of a run"),
        (tmp_path / "\x1b[31m", "\\x1b[31m: there is no such path"),
    ):
        assert message in call("verify", path, code=2)[1]


# As a process


@pytest.mark.slow
def test_reshape_shows_a_bar_and_ends_by_ctrl_c(checkpoint: Path, tmp_path: Path) -> None:
    """On a terminal: how far it is; after Ctrl-C nothing is left and the exit code says so."""
    run = recipe_of(layers=8, hidden=256, ffn=1024, vocab_size=4096)
    held = describe_parameters(run.model)
    big = write_run(
        tmp_path / "big",
        run,
        state_of(),
        lambda name, _: torch.zeros(held[name].shape),
        optimizer=ADAM,
        origin={},
    )
    before = sorted(os.listdir(tmp_path))
    master, slave = pty.openpty()
    environment = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "200", "TERM": "xterm"}
    process = subprocess.Popen(
        [sys.executable, "-m", "megastable", "checkpoint", "reshape", big, tmp_path / "out", "--tensor", "2"],
        env=environment, stdout=slave,
        stderr=slave,
    )  # fmt: skip
    os.close(slave)
    shown = b""
    while b"writing" not in shown:
        shown += os.read(master, 4096)
    process.send_signal(signal.SIGINT)
    try:
        while block := os.read(master, 4096):
            shown += block
    except OSError:  # the terminal's other end is closed
        pass
    os.close(master)
    assert process.wait(PATIENCE) == 130, shown
    assert b"interrupted" in shown and b"Traceback" not in shown
    assert sorted(os.listdir(tmp_path)) == before


def test_list_pin_and_unpin(call: Call, checkpoint: Path) -> None:
    [row] = json_of(call, "list", checkpoint.parents[1])["rows"]
    assert (row["step"], row["state"], row["pinned"]) == (7, "fresh", None)
    assert "a reason" in call("pin", checkpoint, "--reason", "a reason\x1b[31m")[0]
    assert "\x1b" not in call("list", checkpoint.parents[1])[0]
    [row] = json_of(call, "list", checkpoint.parents[1])["rows"]
    assert row["pinned"] == "a reason\x1b[31m"
    assert (
        "may be deleted" in call("unpin", checkpoint)[0] and "was not pinned" in call("unpin", checkpoint)[0]
    )
    assert markers.read_pin(checkpoint) is None
    call("pin", checkpoint.parent / "step-9", code=2)
