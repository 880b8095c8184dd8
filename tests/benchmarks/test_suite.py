"""What a GPU host runs: every stage in its time, whatever happens to one, and all of it in one JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import suite
from benchmarks.peers import OURS, chosen_peers
from benchmarks.suite import STAGES, Stage, allowed
from benchmarks.train_speed import resolve
from megastable.config import deepspeed_json, recipe
from megastable.fp8.te import misfit
from megastable.parallel.layout import Layout
from megastable_tools.plan import memory

ROOT = Path(__file__).parents[2]
WRITES = "import sys; open(sys.argv[sys.argv.index('--output') + 1], 'w').write({!r}); print('said')"


def python(text: str, seconds: int = 20, json: bool = True, name: str = "one") -> Stage:
    return Stage(name, ("-c", text), seconds, json)


def run(stage: Stage, seconds: float = 20.0) -> suite.Done:
    with tempfile.TemporaryDirectory() as folder:
        return suite.run(stage, sys.executable, seconds, Path(folder) / "one.log")


def run_until(stage: Stage, said: str | None) -> suite.Done:
    """A stage whose time is over as soon as it has printed `said`, on a slow machine, too; None: it ends by itself."""

    class Waiting(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, stdout: Any, **kwargs: Any) -> None:
            self.output = Path(stdout.name)
            super().__init__(*args, stdout=stdout, **kwargs)

        def wait(self, timeout: float | None = None) -> int:
            while timeout is not None and said is not None and self.poll() is None:
                if said in self.output.read_text():
                    raise subprocess.TimeoutExpired(self.args, timeout)
                time.sleep(0.05)
            return super().wait(timeout)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", Waiting)
        return run(stage, 240.0)


def test_a_stage_that_passes() -> None:
    done = run(python(WRITES.format('{"a": 1}')))
    assert (done.returned, done.result, done.tail, done.outcome) == (0, {"a": 1}, "said\n", "passed")


def test_a_stage_that_fails_leaves_its_last_words_and_all_of_them_in_a_file(tmp_path: Path) -> None:
    log = tmp_path / "one.log"
    stage = python("print('x' * 9000); raise SystemExit('no luck')", json=False)
    done = suite.run(stage, sys.executable, 20, log)
    assert done.log == str(log) and log.read_text() == "x" * 9000 + "\nno luck\n"
    assert (done.returned, done.result, done.outcome) == (1, None, "failed with 1")
    assert len(done.tail) == suite.TAIL and done.tail.endswith("no luck\n")


@pytest.mark.parametrize("text", ["", "{", "\\udcff"])
def test_a_result_that_is_none(text: str) -> None:
    assert run(python(WRITES.format(text))).result is None


TESTS = """
import pytest, time
@pytest.mark.parametrize("n", [1, 2])
def test_good(n): pass
def test_bad(): assert False
@pytest.mark.skip(reason="none")
def test_left(): pass
def test_slow(): time.sleep({})
"""


@pytest.mark.slow
@pytest.mark.parametrize("asleep", [0, 600], ids=["in time", "ended"])
def test_the_outcome_of_every_test_is_kept(asleep: int, tmp_path: Path) -> None:
    """Of a run that was ended, of those that it had come to."""
    (tmp_path / "test_it.py").write_text(TESTS.format(asleep))
    processes = "-n1" if asleep else "-n0"
    command = ("-m", "pytest", str(tmp_path), "-v", processes, "-p", "no:cacheprovider", "-c", os.devnull)
    done = run_until(Stage("tests", command, 20, json=False), "SKIPPED" if asleep else None)
    found = {name.rpartition("::")[2]: outcome for name, outcome in done.result.items()}
    wanted = {
        "test_good[1]": "passed",
        "test_good[2]": "passed",
        "test_bad": "failed",
        "test_left": "skipped",
    }
    assert found == wanted | ({} if asleep else {"test_slow": "passed"})
    assert done.outcome == ("its time was over" if asleep else "failed with 1")


KEPT = """
import sys, time
open(sys.argv[sys.argv.index("--output") + 1], "w").write('{"rows": [1]}')
print("written", flush=True)
time.sleep(600)
"""


def test_a_stage_that_is_ended_keeps_what_it_wrote() -> None:
    done = run_until(python(KEPT), "written")
    assert (done.outcome, done.result) == ("its time was over", {"rows": [1]})


CHILD = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
time.sleep({})
"""


@pytest.mark.parametrize("asleep", [600, 0], ids=["late", "in time"])
def test_nobody_is_left(asleep: int) -> None:
    """Neither of a stage whose time is over, nor of one that ends before its children do, which is not waited for."""
    done = run_until(python(CHILD.format(asleep), json=False), "\n" if asleep else None)
    assert done.outcome == ("its time was over" if asleep else "passed")
    child = Path("/proc") / done.tail.strip()
    for _ in range(1000):
        if not child.exists() or "(zombie)" in (child / "status").read_text():
            break
        time.sleep(0.05)
    else:
        pytest.fail(f"{child} runs on")


def test_a_benchmark_is_told_how_long_it_has() -> None:
    done = run(python("import sys; print(sys.argv[1:])", json=False), 50)
    assert done.tail == "[]\n"
    told = Stage("one", ("-c", "import sys; print(sys.argv[1:])", "{seconds}"), 50, json=False)
    assert run(told, 50).tail == f"['{50 - suite.MARGIN}']\n"


def test_what_is_left_goes_to_the_next() -> None:
    one, other = Stage("one", (), 100), Stage("other", (), 50)
    assert allowed(one, [other], 150) == 100
    assert allowed(one, [other], 190) == 140  # what was before them was faster
    assert allowed(one, [other], 120) == 100 and allowed(other, [], 20) == 20
    assert sum(stage.seconds for stage in STAGES) <= 540


@pytest.mark.parametrize("stage", [s for s in STAGES if "bench" in s.command], ids=lambda s: s.name)
def test_the_recipes_and_peers_are_there(stage: Stage) -> None:
    """Of stages that only a GPU host runs: what they ask for exists and can be laid out on one GPU."""
    words = list(stage.command)
    overrides = [word for word in words if "=" in word and not word.startswith("-")]
    config = recipe.load(ROOT / words[words.index("--recipe") + 1], overrides)
    assert deepspeed_json.build(config, 1)["train_batch_size"] == config.train.global_batch
    peers = [words[i + 1] for i, word in enumerate(words) if word == "--peers"]
    assert chosen_peers(peers, "cuda")[0] == OURS
    # FP8 is compared with bf16 in the same run, and only there; and the model has the sizes that it takes.
    (planned,) = memory.footprints(resolve(config)[0], Layout(1, 1, 1))
    assert planned.total < 75e9  # of an H100's 80 GB; the rest is the context's and the allocator's
    pair = {"megastable-bf16", "megastable-fp8-off"} & set(peers)
    assert bool(pair) == stage.name.endswith("-fp8") == (config.precision.fp8 is not None)
    assert config.precision.fp8 is None or misfit(config) is None


def started(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.suite", *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TERM": "dumb", "COLUMNS": "100"}
    return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)


def test_all_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stages = (
        python(WRITES.format("[1]"), name="good"), python("raise SystemExit(3)", name="bad"),
        python("", name="last"),
    )  # fmt: skip
    monkeypatch.setattr(suite, "STAGES", stages)
    file = tmp_path / "all.json"
    with pytest.raises(suite.typer.Exit) as end:
        suite.main(output=file, seconds=60, only=None, listed=False)
    assert end.value.exit_code == 1
    found = json.loads(file.read_text())["stages"]
    assert [(name, done["outcome"]) for name, done in found.items()] == [
        ("good", "passed"), ("bad", "failed with 3"), ("last", "passed"),
    ]  # fmt: skip
    assert all(Path(done["log"]).parent == tmp_path / "all.logs" for done in found.values())
    assert found["good"]["result"] == [1] and "failed with 3" in capsys.readouterr().out
    suite.main(output=file, seconds=60, only=["good"], listed=False)
    assert json.loads(file.read_text())["stages"].keys() == {"good"}
    with pytest.raises(suite.typer.Exit):
        suite.main(output=file, seconds=suite.LEAST - 1, only=["good"], listed=False)
    assert "left out: no time is left" in capsys.readouterr().out
    (left,) = json.loads(file.read_text())["stages"].values()
    assert left["outcome"].startswith("left out: no time is left") and left["returned"] is None


def test_the_list_and_bad_input(tmp_path: Path) -> None:
    done = started("--list", "--only", "7b-fp8")
    assert (
        done.returncode == 0 and done.stdout.count("\n") == 1 and "--peers megastable-fp8-off" in done.stdout
    )
    done = started("--only", "8b")
    assert done.returncode == 2 and done.stderr.startswith(
        "error: --only 8b: choose among tests, tests-exact, 350m"
    )
    done = started("--only", "tests", "--output", tmp_path / "no" / "such" / "file")
    assert done.returncode == 2 and "could not be written" in done.stderr and done.stderr.count("\n") == 1
    (tmp_path / "all.logs").write_text("")
    done = started("--only", "tests", "--output", tmp_path / "all.json")
    assert done.returncode == 2 and "give another --output" in done.stderr and done.stderr.count("\n") == 1


def test_the_script_lists_the_stages_without_an_environment(tmp_path: Path) -> None:
    """By a python3 that has what is needed: here that of the tests."""
    for name in ("launch", "benchmarks", "megastable"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "bin").mkdir()
    # A link to an interpreter is not in its environment.
    (tmp_path / "bin" / "python3").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (tmp_path / "bin" / "python3").chmod(0o755)
    script = tmp_path / "bench_gpu.sh"
    environment = os.environ | {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    script.write_text((ROOT / "launch" / "bench_gpu.sh").read_text().replace("/..", ""))
    command = ["bash", str(script), "--list", "--only", "1.3b"]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("1.3b "), done.stderr


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu() -> None:
    done = subprocess.run(["bash", "launch/bench_gpu.sh"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: no GPU")
