"""Real runs, traced: nothing differs where nothing should, what is planted is named, in every layout."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from megastable.commands.root import app
from megastable.config import recipe as recipes
from megastable.run import records
from megastable_tools.repeat import repeating
from megastable_tools.repeat.differences import first_beyond, first_difference
from megastable_tools.repeat.trace_file import (
    PARTS,
    PlantSpot,
    StepTrace,
    TraceRequest,
    path_of,
    read_header,
    read_steps,
)
from megastable_tools.study.trial import QUIET
from tests.conftest import tiny
from tests.distributed import run_main, run_ranks
from tests.tools.cli import Done, call

STEPS = 3
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {"parallel": {"recompute": "full"}, "model": {"qkv_bias": True}}),
    "dp2": (2, {}),
    "zero3": (2, {"parallel": {"zero": 3}}),
    "tp2": (2, {"parallel": {"tensor": 2, "sequence": True}}),
    "ep2": (2, {"parallel": {"expert": 2}, "model": {"experts": {"count": 4, "top_k": 2}}}),
    "pp2": (2, {"parallel": {"pipeline": 2}, "model": {"tied": True}}),
    "plain": (1, {"kernels": {"loss": "reference"}}),
}
Steps = list[tuple[StepTrace, ...]]


def _trace(path: str, overrides: Sequence[str]) -> int:
    from megastable_tools.repeat.traced_run import trace_steps

    torch.set_num_threads(1)
    return trace_steps(recipes.load_recipe(path, list(overrides)), Path(path))


def traced(world: int, recipe: Path, folder: Path, request: TraceRequest, *overrides: str) -> Steps:
    """The traces of a run, step by step and rank by rank."""
    request.save_request(folder)
    given = ("kernels.compile=false", *overrides, f"run.dir={folder}")
    assert run_ranks(world, _trace, str(recipe), given) == [0] * world
    assert read_header(folder, world - 1).world == world
    return list(zip(*(read_steps(folder, rank) for rank in range(world)), strict=True))


@pytest.fixture(scope="module")
def recipe_of(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("recipes")

    @cache
    def recipe(layout: str) -> Path:
        path = folder / f"{layout}.yaml"
        tree = tiny(corpus, folder / "run", **LAYOUTS[layout][1])
        path.write_text(yaml.safe_dump(tree.model_dump(mode="json")))
        return path

    return recipe


@pytest.fixture(scope="module")
def clean(
    recipe_of: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Steps]:
    """The traces of a layout without a fault."""

    @cache
    def run(layout: str) -> Steps:
        folder = tmp_path_factory.mktemp(layout)
        return traced(LAYOUTS[layout][0], recipe_of(layout), folder, TraceRequest(steps=STEPS, moments=True))

    return run


PLANTED = {
    "one": [
        "blocks.0.attention.qkv.bias output", "blocks.0.mlp.gate_up output gradient", "embedding weight gradient",
        "fp32 master of head.weight",
    ],
    "dp2": ["labels:1", "blocks.1 output gradient:1", "computing copy of blocks.1.mlp_norm.weight:1"],
    "zero3": ["gradient of blocks.1.mlp.down.weight:1"],
    "tp2": ["blocks.1.mlp.down product:1", "second moment of blocks.1.attention.q_norm.weight:1"],
    "ep2": [
        "blocks.1.mlp.experts.2.gate_up output:1", "gradient of blocks.1.mlp.experts.3.down.weight:1",
        "computing copy of blocks.0.mlp.experts.1.down.weight:0",
    ],
    "pp2": ["blocks.1.mlp.gate_up output", "gradient of embedding.weight:1"],
    "plain": ["head output gradient"],
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_traced_run_gives_the_same_bits_and_names_what_is_planted(
    layout: str, recipe_of: Callable[[str], Path], clean: Callable[[str], Steps], tmp_path: Path
) -> None:
    world, recipe, one = LAYOUTS[layout][0], recipe_of(layout), clean(layout)
    again = traced(world, recipe, tmp_path / "again", TraceRequest(steps=STEPS))
    same = first_difference(zip(one, again, strict=True))
    assert (same.difference, same.steps) == (None, STEPS)
    assert same.tensors == sum(len(rank.operations) for ranks in one for rank in ranks) > 300 * world
    for number, text in enumerate(PLANTED[layout]):
        step = 1 + number % 2  # before the last, so that it spreads
        point = PlantSpot.parse_spot(f"{step}:{text}", STEPS).find_point(one[step])
        other = traced(world, recipe, tmp_path / str(number), TraceRequest(steps=STEPS, plant=point))
        found = first_difference(zip(one, other, strict=True)).difference
        assert found is not None
        assert (found.step, found.rank, found.operation.name, found.operation.phase) == (
            step, point.rank, text.partition(":")[0], point.phase,
        )  # fmt: skip
        assert found.operation.micro_batch == (-1 if PARTS[point.phase] > PARTS["forward"] else 0)


def _faulty(path: str, overrides: Sequence[str], where: str, call: int) -> int:
    """A trace of a program that is wrong once, on rank 1, in the call of that number, and not by the watch."""
    import torch.distributed as dist

    from megastable.engine import gradient_sums as _sums
    from megastable.model import block_parts
    from megastable.model.attention import Attention

    calls = iter(range(10**6))

    def wrong() -> bool:
        return next(calls) == call and dist.get_rank() == 1

    if where == "swiglu":
        activation = block_parts.swiglu
        block_parts.swiglu = lambda gate_up: activation(gate_up) * (1.5 if wrong() else 1)
    elif where == "core backward":
        between = Attention.attend_between

        def hooked(self: Attention, qkv: torch.Tensor, at: Any) -> torch.Tensor:
            scale = 1.5 if wrong() else 1.0
            given = qkv.view_as(qkv)
            given.register_hook(lambda gradient: gradient * scale)
            return between(self, given, at)

        Attention.attend_between = hooked  # type: ignore[method-assign]
    else:
        sums: Any = _sums
        begin = sums.begin_sum

        def begun(whole: torch.Tensor, pieces: Sequence[torch.Tensor], rank: int, group: Any) -> Any:
            begin(whole, pieces, rank, group).wait()
            pieces[rank].mul_(1.5 if wrong() else 1)
            return SimpleNamespace(wait=lambda: None)  # another wait would copy the sum again

        sums.begin_sum = begun
    return _trace(path, overrides)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "call_", "named"),
    [
        # Two micro-batches a step and rank, two blocks.
        ("swiglu", 7, "step 2, rank 1, micro-batch 1, blocks.1.mlp.swiglu output (forward)"),
        ("core backward", 4, "step 2, rank 1, micro-batch 0, blocks.0.attention.qkv output gradient (backward)"),
        ("reduction", 2, "step 2, rank 1, gradient of blocks.1.attention_norm.weight (reduction)"),  # 2 groups a step
    ],
)  # fmt: skip
def test_traced_run_finds_a_wrong_program(
    where: str, call_: int, named: str, recipe_of: Callable[[str], Path], clean: Callable[[str], Steps], tmp_path: Path
) -> None:  # fmt: skip
    TraceRequest(steps=STEPS).save_request(tmp_path)
    assert run_ranks(2, _faulty, str(recipe_of("dp2")), [f"run.dir={tmp_path}"], where, call_) == [0, 0]
    other = zip(*(read_steps(tmp_path, rank) for rank in range(2)), strict=True)
    found = first_difference(zip(clean("dp2"), other, strict=True)).difference
    assert found is not None and str(found).startswith(named)


def test_traced_run_has_every_operation_in_the_models_order(
    clean: Callable[[str], Steps],
) -> None:
    one = [o for o in clean("one")[1][0].operations if o.micro_batch == 1]
    forward = [o.name.removesuffix(" output") for o in one if o.phase == "forward"]
    inside = [
        "attention_norm", "attention.qkv", "attention.qkv.bias", "attention.q_norm", "attention.k_norm",
        "attention.core", "attention.out", "mlp_norm", "mlp.gate_up", "mlp.swiglu", "mlp.down",
    ]  # fmt: skip
    blocks = [[*(f"blocks.{n}.{part}" for part in inside), f"blocks.{n}"] for n in range(2)]
    last = ["final_norm", "head", "loss of the samples", "loss"]
    assert forward == ["embedding", *blocks[0], *blocks[1], *last]
    # A gradient for each, but for what only the trace computes; and full recomputation does all of a block again.
    backward = {o.name.removesuffix(" output gradient") for o in one if o.name.endswith(" output gradient")}
    assert backward == {*forward} - {"head", "loss of the samples"}
    recomputed = [o.name.removesuffix(" output") for o in one if o.phase == "recomputed"]
    assert recomputed == [*blocks[1][:10], *blocks[0][:10]]  # the last product is needed by nobody
    # Every parameter, after the reduction, and as master, moments and copy after the update.
    whole = clean("one")[1][0].operations
    names = {o.name.removeprefix("gradient of ") for o in whole if o.phase == "reduction"}
    assert len(names) == 2 * 9 + 3
    for kind in ("fp32 master", "first moment", "second moment", "computing copy"):
        assert {f"{kind} of {name}" for name in names} <= {o.name for o in whole}


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["dp2", "zero3", "tp2"])
def test_first_beyond_lets_layouts_agree_up_to_rounding(layout: str, clean: Callable[[str], Steps]) -> None:
    found = first_beyond(zip(clean("plain"), clean(layout), strict=True), 0.05)
    assert (found.first, found.steps) == (None, STEPS) and found.largest is not None
    # What is unmatched: plain logits have a gradient.
    assert found.unmatched == ("head output gradient",)
    assert found.tensors > 120 * STEPS


def test_traced_run_does_the_steps_of_a_run(
    recipe_of: Callable[[str], Path], clean: Callable[[str], Steps], tmp_path: Path
) -> None:
    """Watching changes nothing: the losses of a training without it, in all digits of the records."""
    given = [*QUIET, f"train.steps={STEPS}", "schedule.total_steps=20", f"run.dir={tmp_path / 'run'}"]
    done = run_main(2, tmp_path / "log", str(recipe_of("dp2")), *given)
    assert done.code == 0, done.stderr
    losses = records.read_newest_records(tmp_path / "run/steps").column("loss").to_pylist()
    mine = [torch.tensor(ranks[0].losses, dtype=torch.float64).mean() for ranks in clean("dp2")[1:]]
    assert [x.float().item() for x in mine] == losses


# The command


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks without a launcher, in a second."""

    def run(words: Sequence[str], folder: Path, told: Callable[[int], None]) -> None:
        at = list(words).index("--module")
        assert words[at + 1] == repeating.MODULE
        world = int(words[list(words).index("--num_gpus") + 1])
        run_ranks(world, _trace, words[at + 2], words[at + 3 :])
        told(1)

    monkeypatch.setattr(repeating, "run_launcher", run)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


def repeat(recipe: Path, *arguments: object, cwd: Path) -> Done:
    return call(app, "repeat", recipe, "--steps", "2", *arguments, cwd=cwd)


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
def test_repeat_tells_a_difference_with_its_bits(recipe_of: Callable[[str], Path], tmp_path: Path) -> None:
    plant = ("--ranks", "2", "--plant", "2:blocks.1.mlp.down:1")
    done = repeat(recipe_of("dp2"), *plant, cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    *_, again, last = done.stdout.splitlines()
    assert again == "run again, both differ at the same place: repeatable"
    assert last.startswith(
        "first difference: step 2, rank 1, micro-batch 0, blocks.1.mlp.down output (forward): 1 of 2,048 elements, "
        "bit 6; the first is number 1,024, "
    )
    done = repeat(recipe_of("dp2"), *plant, "--json", cwd=tmp_path)
    found = json.loads(done.stdout)
    assert (found["same"], found["says"]) == (False, last)
    assert found["difference"] | {"differing": 0, "compared": 0} == {
        "step": 2, "ranks": [1], "operation": "blocks.1.mlp.down output", "phase": "forward", "micro_batch": 0,
        "other": None, "differing": 0, "compared": 0,
    }  # fmt: skip
    assert found["again"]["bits"]["bits"] == {"6": 1}
    assert [run["layout"]["data"] for run in found["runs"]] == [2, 2]


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
def test_repeat_compares_layouts_within_a_tolerance(recipe_of: Callable[[str], Path], tmp_path: Path) -> None:
    against = ("--against-ranks", "2", "--against", "parallel.tensor=2")
    done = repeat(recipe_of("plain"), *against, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith(
        "no difference beyond 0.05 (relative) in 2 steps of 1 and 2 ranks"
    )
    done = repeat(recipe_of("plain"), *against, "--tolerance", "1e-7", "--json", cwd=tmp_path)
    found = json.loads(done.stdout)
    assert done.returncode == 1 and found["difference"]["step"] == 1
    done = repeat(recipe_of("plain"), *against, "--tolerance", "0", cwd=tmp_path)
    assert done.returncode == 2 and "layouts are not the same" in done.stderr
    done = repeat(
        recipe_of("plain"), "--against", "optimizer.lr=1e-2", "--tolerance", "0", "--no-again", cwd=tmp_path
    )
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1] == (
        "first difference: step 1, rank 0, fp32 master of embedding.weight (update)"
    )


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--plant", "9:tokens"], "no step 9 of 2"),
        (["--ranks", "3"], "train.global_batch=8 is not a multiple of"),
        (["--against", "parallel.tensor=2"], "1 rank cannot be laid out as parallel.tensor=2"),
        (["--ranks", "2", "--", "--num_gpus", "2"], "--ranks is for this host alone"),
        (["--", "--hostfile", "hosts"], "give --output, a folder on a file system that all of them share"),
        (["data.corpora.0.path=none"], "then data.corpora.0.path=data/stdlib"),
        (["model.layer=2"], "model.layer"),
    ],
)
def test_repeat_refuses_before_anything_runs(
    arguments: list[str], told: str, recipe_of: Callable[[str], Path], tmp_path: Path
) -> None:
    done = repeat(recipe_of("plain"), *arguments, cwd=tmp_path)
    assert (
        (done.returncode, done.stdout) == (2, "") and told in done.stderr and "Traceback" not in done.stderr
    )


# Processes


@pytest.mark.slow
def test_run_launcher_ends_what_is_interrupted(tmp_path: Path) -> None:
    """As the launcher is by Ctrl-C, with time to end the ranks of other hosts."""
    folder, steps = tmp_path, path_of(tmp_path, 0)
    command = (
        f"trap 'echo > {folder}/ended; exit' INT; printf '\\n\\n\\n' > {steps}; while :; do sleep 0.05; done"
    )

    def told(_: int) -> None:
        signal.raise_signal(signal.SIGINT)

    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        repeating.run_launcher(["bash", "-c", command], folder, told)
    assert (folder / "ended").exists() and time.monotonic() - begin < repeating.PATIENCE
