"""Runs made of checkpoints: any layout from any other, a final decay, a mean. Every byte that should stay, stays."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from safetensors.torch import load_file

from megastable.base.errors import CheckpointError, ConfigError
from megastable.checkpoint import store
from megastable.checkpoint.new_run import ADAM, write_run
from megastable.checkpoint.plain import find_checkpoint
from megastable.checkpoint.whole import WholeState, describe_parameters, next_run_of, run_of
from megastable.config import recipe
from megastable.config.lint import lint_recipe
from megastable.config.tree import RunConfig
from megastable.optim.schedule import rate_at
from megastable.parallel.layout import Layout
from megastable.parallel.sharding import cut_shard
from megastable.recovery.recovery import PersistedState
from megastable.run import records
from megastable.run.changes import changes_of, config_at
from megastable.run.directory import RunDirectory
from megastable.run.events.people_events import ChangeMade, ChangeMeasured
from megastable.run.log import RunLog
from megastable_guard.policy_state import Limit, PolicyState
from megastable_guard.step_judge import GuardState
from megastable_tools.convert.derived_runs import (
    Sizes,
    average_checkpoints,
    average_tensors,
    branch_run,
    laid_out,
    limits_of,
    make_decaying_config,
    normalize_weights,
    reshape_checkpoint,
)
from megastable_tools.convert.inspecting import list_differences
from tests.checkpoint.states import LAYOUTS, make_run, numbers, recipe_of, state_of
from tests.conftest import tiny
from tests.convert.test_inspecting import weights
from tests.distributed import run_ranks, train
from tests.full_disk import files_no_larger_than
from tests.parallel.test_layouts import config as layout_config
from tests.training.test_resume import identical

# Another layout


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same weights and moments in every layout; not to be changed."""
    folder = tmp_path_factory.mktemp("sources")
    return {name: make_run(folder / name, layout) for name, layout in LAYOUTS.items()}


def check_same_bytes(checkpoint: Path, optimizer: bool = True) -> None:
    whole, expected = WholeState(checkpoint), numbers(recipe_of())
    assert whole.kinds == (("weight", "exp_avg", "exp_avg_sq") if optimizer else ("weight",))
    assert {(name, "weight") for name in whole.names} == {key for key in expected if key[1] == "weight"}
    for (name, kind), tensor in expected.items():
        if kind in whole.kinds:
            assert torch.equal(whole.read_tensor(name, kind), tensor), (name, kind)


@pytest.mark.quick("one")
@pytest.mark.parametrize("before", LAYOUTS)
def test_reshape_keeps_all_bytes(sources: dict[str, Path], before: str, tmp_path: Path) -> None:
    for after, (tensor, pipeline, zero, data) in LAYOUTS.items():
        made = reshape_checkpoint(sources[before], tmp_path / after, Sizes(tensor, pipeline, zero, data))
        assert find_checkpoint(tmp_path / after) == made.checkpoint
        check_same_bytes(made.checkpoint)
        state, old = store.read_state(made.checkpoint), store.read_state(sources[before])
        sizes = {"tensor": tensor, "pipeline": pipeline, "zero": zero, "data": data}
        layout = old.layout.model_copy(update=sizes)
        assert state == old.model_copy(update={"layout": layout, "versions": state.versions})
        assert made.layout == layout and len(list(made.checkpoint.glob("rank-*.safetensors"))) == layout.world
        run = run_of(made.checkpoint)
        assert (run.parallel.tensor, run.parallel.pipeline, run.parallel.zero) == (tensor, pipeline, zero)
        assert run.model == recipe_of().model and run.schedule == recipe_of().schedule
    back = reshape_checkpoint(made.checkpoint, tmp_path / "back", Sizes(1, 1, 1, 1))
    for file in ("rank-00000.safetensors", "rank-00000.json"):
        assert (back.checkpoint / file).read_bytes() == (sources["one"] / file).read_bytes()


def test_reshape_gives_a_rank_its_shard(sources: dict[str, Path], tmp_path: Path) -> None:
    """Read without our own reader: tensor rank 1 of 2, and half of it on each of two data ranks."""
    name = "blocks.1.attention.qkv.weight"
    of, whole = describe_parameters(recipe_of().model)[name], numbers(recipe_of())[name, "exp_avg"]
    made = reshape_checkpoint(sources["dp2-zero3"], tmp_path / "out", Sizes(tensor=2))
    assert made.layout.data == 2  # what is not said stays
    files = [load_file(made.checkpoint / f"rank-0000{rank}.safetensors") for rank in (1, 3)]
    mine = cut_shard(whole, of.placement, 1, 2).flatten()
    assert torch.equal(torch.cat([file[f"exp_avg/{name}"] for file in files]), mine)


@pytest.mark.parametrize(("tensor", "data", "context"), [(1, 4, 2), (1, 3, 1), (2, 2, 2), (4, 2, 1)])
def test_reshape_keeps_context_ranks_as_far_as_it_can(
    tensor: int, data: int, context: int, tmp_path: Path
) -> None:
    """A rank of a context group holds a data-parallel rank's part; the sizes that are left decide on its size."""
    tree = recipe_of(kv_heads=4).model_dump(mode="json")
    tree["parallel"]["context"], tree["train"] = 2, {"global_batch": 12, "micro_batch": 1}
    run = RunConfig.model_validate(tree)
    held, state = numbers(run), state_of((1, 1, 1, 2))
    before = write_run(tmp_path / "before", run, state, lambda *of: held[of], optimizer=ADAM, origin={})
    made = reshape_checkpoint(before, tmp_path / "after", Sizes(tensor, data=data))
    assert (made.layout.data, made.layout.context) == (data, context)
    assert run_of(made.checkpoint).parallel.context == context
    whole = WholeState(made.checkpoint)
    assert all(torch.equal(whole.read_tensor(*of), tensor) for of, tensor in held.items())


@pytest.mark.parametrize(("zero", "data", "expert"), [(2, 4, 4), (1, 6, 2), (1, 3, 1), (3, 4, 1)])
def test_reshape_keeps_expert_ranks_as_far_as_it_can(
    zero: int, data: int, expert: int, tmp_path: Path
) -> None:
    """With moments, of which every rank writes a part of all experts, not those of its own."""
    tree = recipe_of().model_dump(mode="json")
    tree["parallel"]["expert"], tree["train"] = 4, {"global_batch": 12, "micro_batch": 1}
    tree["model"]["experts"] = {"count": 8, "top_k": 2, "ffn": 16}
    run = RunConfig.model_validate(tree)
    held, state = numbers(run), state_of((1, 1, 1, 4))
    before = write_run(tmp_path / "before", run, state, lambda *of: held[of], optimizer=ADAM, origin={})
    assert store.read_state(before).layout.expert == 4
    made = reshape_checkpoint(before, tmp_path / "after", Sizes(zero=zero, data=data))
    assert (made.layout.data, made.layout.expert) == (data, expert)
    assert run_of(made.checkpoint).parallel.expert == expert
    whole = WholeState(made.checkpoint)
    assert all(torch.equal(whole.read_tensor(*of), tensor) for of, tensor in held.items())


def test_reshape_without_moments(sources: dict[str, Path], tmp_path: Path) -> None:
    made = reshape_checkpoint(sources["tp2-pp2"], tmp_path / "weights", optimizer=False)
    assert not made.optimizer and store.read_state(made.checkpoint).adam_step == 0
    assert store.read_state(made.checkpoint).cursor == 56
    # There are none to be kept.
    again = reshape_checkpoint(made.checkpoint, tmp_path / "again", Sizes(1, 1, 1, 1))
    check_same_bytes(again.checkpoint, optimizer=False)


def test_reshape_copies_what_the_run_left_out(tmp_path: Path) -> None:
    before = make_run(tmp_path / "before")
    for name in ("skips.jsonl", "blends.jsonl"):
        (tmp_path / "before" / name).write_text(f'{{"of": "{name}"}}\n')
    made = reshape_checkpoint(before, tmp_path / "after", Sizes(tensor=2))
    assert made.ledgers == tmp_path / "before"
    for name in ("skips.jsonl", "blends.jsonl"):
        assert (tmp_path / "after" / name).read_text() == f'{{"of": "{name}"}}\n'
    event = json.loads((tmp_path / "after" / "journal.jsonl").read_text().splitlines()[0])
    assert (event["event"], event["step"], event["how"]) == ("imported", 7, "reshaped")
    alone = (tmp_path / "step-7").resolve()
    before.rename(alone)
    assert reshape_checkpoint(alone, tmp_path / "from-alone").ledgers is None


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (Sizes(3, 1, 1, 1), r"parallel\.tensor=3 does not divide model\.heads=4"),
        (Sizes(1, 3, 1, 1), r"parallel\.pipeline=3 needs at least one block a stage"),
        (Sizes(1, 2, 3, 1), r"parallel\.zero=3 with parallel\.pipeline=2"), (Sizes(1, 1, 0, 1), r"parallel\.zero=0"),
        (Sizes(1, 1, 1, 3), r"global_batch=8 is not a multiple of train\.micro_batch=2 x 3"),
        (Sizes(1, 1, 1, 0), "at least one"), (Sizes(micro_batch=3), r"micro_batch=3 does not divide"),
    ],
)  # fmt: skip
def test_reshape_refuses_a_layout(
    sources: dict[str, Path], tmp_path: Path, sizes: Sizes, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        reshape_checkpoint(sources["one"], tmp_path / "out", sizes)
    assert list(tmp_path.iterdir()) == []


def test_reshape_writes_over_nothing_and_leaves_nothing(sources: dict[str, Path], tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    taken.mkdir()
    with pytest.raises(CheckpointError, match="taken exists already"):
        reshape_checkpoint(sources["one"], taken)
    with pytest.raises(CheckpointError, match=r"would lie in .*, which holds checkpoints"):
        reshape_checkpoint(sources["one"], sources["one"].parent / "step-9")
    with files_no_larger_than(1 << 12), pytest.raises(CheckpointError, match="could not be written"):
        reshape_checkpoint(sources["one"], tmp_path / "full")
    assert list(tmp_path.iterdir()) == [taken] and list(taken.iterdir()) == []


@pytest.mark.slow
def test_reshaped_runs_train_on_as_from_the_checkpoint_itself(corpus: Path, tmp_path: Path) -> None:
    """Reshaped on the disk, or while the training process loads it: afterwards the same bytes."""
    short = {"train": {"steps": 4}, "checkpoint": {"interval": 2}, "schedule": {"total_steps": 4}}
    assert run_ranks(2, train, tiny(corpus, tmp_path / "one", parallel={"zero": 3}, **short)) == [0, 0]
    shutil.rmtree(tmp_path / "one" / "checkpoints" / "step-4")
    made = reshape_checkpoint(tmp_path / "one/checkpoints/step-2", tmp_path / "offline", Sizes(2, 1, 1, 1))
    reshape_checkpoint(made.checkpoint, tmp_path / "bare", optimizer=False)
    ends = {}
    for run in ("one", "offline", "bare"):
        assert run_ranks(2, train, tiny(corpus, tmp_path / run, parallel={"tensor": 2}, **short)) == [0, 0]
        ends[run] = find_checkpoint(tmp_path / run / "checkpoints" / "step-4")
    found = list_differences(WholeState(ends["one"]), WholeState(ends["offline"]))
    assert {one.outcome for one in found} == {"identical"}
    a, b, bare = (store.read_state(end) for end in ends.values())
    assert (a.cursor, a.updates, a.recent_losses) == (b.cursor, b.updates, b.recent_losses)
    # Without moments the next loss is the same, and Adam begins from scratch.
    assert (a.updates, bare.updates, a.adam_step, bare.adam_step) == (4, 4, 4, 2)
    assert a.recent_losses[:3] == bare.recent_losses[:3] and a.recent_losses[3] != bare.recent_losses[3]


@pytest.mark.parametrize("optimizer", [True, False])
def test_derived_runs_keep_what_their_routers_choose_by(optimizer: bool, tmp_path: Path) -> None:
    run = recipe_of(experts={"count": 4, "top_k": 2})
    held = numbers(run)
    biases = [torch.randn(2, 4, generator=torch.Generator().manual_seed(seed)) for seed in range(2)]
    first, second = (
        write_run(
            tmp_path / f"run-{number}", run, state_of(), lambda *of: held[of], origin={},
            optimizer=ADAM if optimizer else None, expert_state={"experts/bias": bias},
        )
        for number, bias in enumerate(biases)
    )  # fmt: skip
    exported = reshape_checkpoint(first, tmp_path / "exported", optimizer=False)
    reshaped = reshape_checkpoint(first, tmp_path / "reshaped", Sizes(tensor=2, data=1))
    for made in (exported, reshaped):
        assert WholeState(made.checkpoint).expert_state.keys() == {"experts/bias"}
        assert torch.equal(WholeState(made.checkpoint).biases, biases[0])
    mean = average_checkpoints([first, second], tmp_path / "mean", [1, 3])
    torch.testing.assert_close(WholeState(mean.checkpoint).biases, biases[0] / 4 + 3 * biases[1] / 4)


# A final decay

PEAK, AT, STEPS = 3e-3, 6, 12  # of the parent: it is branched at step AT
PARENTS: dict[str, tuple[int, dict[str, Any]]] = {
    "zero3-dp2": (2, {"parallel": {"zero": 3}}),
    "pp2-fp16": (2, {"parallel": {"pipeline": 2}, "precision": {"kind": "fp16", "initial_scale_power": 8}}),
}


def hash_files(folder: Path) -> dict[str, str]:
    return {
        str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in folder.rglob("*") if p.is_file()
    }  # fmt: skip


def read_steps(run: Path) -> list[dict[str, Any]]:
    """What the steps after AT recorded, without the time that they took."""
    columns = ("step", "loss", "grad_norm", "lr", "first_position", "next_position", "applied")
    rows = records.read_newest_records(run / "steps").to_pylist()
    return [{c: row[c] for c in columns} for row in rows if row["step"] > AT]


@pytest.mark.slow
@pytest.mark.parametrize("name", PARENTS)
def test_branch_is_its_parent_but_for_the_rate(name: str, corpus: Path, tmp_path: Path) -> None:
    """With a constant rate it ends with the parent's bytes, and the parent stays as it is; else it decays."""
    world, parts = PARENTS[name]
    run, out = tmp_path / "run", tmp_path / "out"
    constant: dict[str, Any] = {
        "schedule": {"kind": "constant", "warmup_steps": 3, "total_steps": None},
        "train": {"steps": STEPS, "global_batch": 8, "micro_batch": 2, "eval_samples": 0, "eval_interval": 0},
        "checkpoint": {"interval": 3, "keep": 9}, "data": {"skip": [[60, 70]]},
    }  # fmt: skip
    assert run_ranks(world, train, tiny(corpus, run, **constant, **parts)) == [0] * world
    before = hash_files(run)
    made = branch_run(run / f"checkpoints/step-{AT}", out, STEPS - AT)
    assert made.made.layout == store.read_state(run / f"checkpoints/step-{AT}").layout
    again = recipe.load_recipe(out / "recipe.yaml", ["schedule.kind=constant"])
    assert run_ranks(world, train, again) == [0] * world
    assert identical(run / f"checkpoints/step-{STEPS}", out / f"checkpoints/step-{STEPS}") >= 3
    assert read_steps(out) == read_steps(run) and len(read_steps(out)) == STEPS - AT
    made = branch_run(run / f"checkpoints/step-{AT}", tmp_path / "decaying", 4, "cosine", 0.2)
    assert (made.rate, made.floor, made.steps, made.limits) == (PEAK, 0.2 * PEAK, AT + 4, ())
    assert run_ranks(world, train, recipe.load_recipe(tmp_path / "decaying/recipe.yaml")) == [0] * world
    wanted = [PEAK * (0.2 + 0.8 * (1 + math.cos(math.pi * n / 4)) / 2) for n in range(4)]
    rows = read_steps(tmp_path / "decaying")
    assert [row["lr"] for row in rows] == pytest.approx(wanted, rel=1e-6)
    assert rows[0] == read_steps(run)[0] | {"lr": pytest.approx(PEAK)}  # the first is the parent's next one
    assert hash_files(run) == before


def at(step: int, updates: int | None = None, **schedule: Any) -> tuple[RunConfig, store.RunState]:
    given = {"warmup_steps": 10, "kind": "constant"} | schedule
    run = RunConfig.model_validate({"schedule": given, "train": {"steps": 100}, "optimizer": {"lr": PEAK}})
    return run, state_of(step=step, updates=step if updates is None else updates)


def test_decaying_changes_schedule_and_length_only() -> None:
    run, state = at(50)
    made = make_decaying_config(run, state, 20, "cosine")
    assert made.schedule.model_dump() == run.schedule.model_dump() | {
        "kind": "wsd", "decay": "cosine", "decay_steps": 20, "total_steps": 70
    }  # fmt: skip
    assert made.train.steps == 70
    assert made.model_copy(update={"schedule": run.schedule, "train": run.train}) == run
    assert lint_recipe(made) == lint_recipe(run)


@pytest.mark.parametrize("updates", [10, 37, 50])
def test_decaying_does_not_count_refused_updates(updates: int) -> None:
    """The schedule counts applied updates, the run its steps."""
    run, state = at(50, updates)
    made = make_decaying_config(run, state, 20)
    rates = [rate_at(made.schedule, PEAK, made.schedule.total_steps or 0, updates + n) for n in range(21)]
    assert rates == pytest.approx([PEAK * (1 - 0.9 * n / 20) for n in range(21)])
    assert made.train.steps == 70 and (lint_recipe(made) == lint_recipe(run)) == (updates == 50)


@pytest.mark.parametrize(
    ("step", "schedule", "problem"),
    [
        (9, {}, "in the warm-up, of 10 updates"), (10, {}, ""), (500, {}, ""),
        (11, {"kind": "cosine"}, "past the constant phase of schedule.kind=cosine"),
        (50, {"kind": "linear"}, "the rate is 0.0018, the peak 0.003"),
        (90, {"kind": "wsd"}, ""), (91, {"kind": "wsd"}, "past the constant phase"),
        (60, {"kind": "wsd", "decay_steps": 40}, ""), (61, {"kind": "wsd", "decay_steps": 40}, "past the constant"),
        (95, {"kind": "wsd", "total_steps": 900}, ""),
    ],
)  # fmt: skip
def test_decaying_refuses_where_the_rate_would_jump(
    step: int, schedule: dict[str, Any], problem: str
) -> None:
    if problem:
        with pytest.raises(ConfigError, match=problem):
            make_decaying_config(*at(step, **schedule), 20)
        return
    made = make_decaying_config(*at(step, **schedule), 20)
    assert rate_at(made.schedule, PEAK, step + 20, step) == pytest.approx(PEAK)
    assert rate_at(made.schedule, PEAK, step + 20, step + 1) == pytest.approx(PEAK * (1 - 0.9 / 20))


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        ({}, ()),
        ({"limits": [Limit(kind="cut", value=0.5, updates=5, clock=5)]},
         ("the learning rate is multiplied by 0.5",)),
        ({"limits": [Limit(kind="cut", value=0.5, updates=5, clock=5, lifted=8)]}, ()),
        ({"rewound": 49}, ("the learning rate warms up: 0.19 times the scheduled one at first",)),
    ],
)  # fmt: skip
def test_limits_of_the_parent_hold(policy: dict[str, Any], words: tuple[str, ...]) -> None:
    run, state = at(50)
    tree = run.model_dump(mode="json")
    tree["stability"]["policy"]["rewind_warmup"] = 10
    memory = PersistedState(guard=GuardState(policy=PolicyState(**policy)))
    state = state.model_copy(update={"stability": memory.model_dump()})
    assert limits_of(RunConfig.model_validate(tree), state) == words
    tree["stability"]["dry_run"] = True
    assert limits_of(RunConfig.model_validate(tree), state) == ()
    assert limits_of(run, state.model_copy(update={"stability": {"guard": {"of": "another version"}}})) == ()


def change_live(log: RunLog, *changes: tuple[int, int | None, dict[str, Any]]) -> None:
    for step, until, values in changes:
        of = {"change": str(step), "who": "ann", "reason": "because", "new": values}
        log.emit_event(ChangeMade(step=step, until=until, **of))


def test_reshape_keeps_each_live_change_as_long_as_its_parent_would(tmp_path: Path) -> None:
    checkpoint = make_run(tmp_path / "run", step=7)
    log, lr = RunLog(RunDirectory(tmp_path / "run")), run_of(checkpoint).optimizer.lr
    lrs = [{"optimizer.lr": lr / factor} for factor in (8, 4, 2)]
    change_live(log, (5, 7, lrs[0]), (6, None, lrs[1]), (7, 9, lrs[2]))
    log.emit_event(ChangeMeasured(step=7, change="6", steps=2))
    log.emit_event(ChangeMeasured(step=9, change="7", steps=3))
    assert next_run_of(checkpoint).optimizer.lr == lr / 2
    found = run_of(reshape_checkpoint(checkpoint, tmp_path / "reshaped").checkpoint)
    made = changes_of(tmp_path / "reshaped/journal.jsonl")
    held_lrs = [config_at(found, made, step).optimizer.lr for step in range(8, 12)]
    assert held_lrs == [lr / 2, lr / 2, lr / 4, lr / 4]
    names = [event.event for event in RunDirectory(tmp_path / "reshaped").iterate_events()]
    assert names == ["imported", "change_made", "change_made", "change_measured"]


def test_branch_has_in_its_recipe_what_was_changed_live(tmp_path: Path) -> None:
    checkpoint = make_run(tmp_path / "run", step=7, updates=7)
    log, lr = RunLog(RunDirectory(tmp_path / "run")), run_of(checkpoint).optimizer.lr
    constant = {"schedule.kind": "constant", "schedule.warmup_steps": 0, "schedule.total_steps": None}
    change_live(log, (6, 20, {"optimizer.lr": lr / 4}), (7, None, constant))
    made = branch_run(checkpoint, tmp_path / "branch", 4)
    assert made.rate == run_of(made.made.checkpoint).optimizer.lr == lr / 4
    assert changes_of(tmp_path / "branch/journal.jsonl") == []
    assert f"optimizer.lr={lr / 4}" in made.changes


# A mean

FLOATS = arrays.arrays(
    np.float32, st.integers(0, 9), elements=st.floats(width=32, allow_nan=False, allow_infinity=False)
)


@given(FLOATS, st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=9))
def test_mean_of_copies_is_the_copy_byte_by_byte(values: np.ndarray, given_weights: list[float]) -> None:
    held = weights()
    held.tensors, held.names = {("a", "weight"): torch.from_numpy(values)}, ["a"]
    parts = normalize_weights(len(given_weights), given_weights)
    found = average_tensors([("it", held)] * len(parts), parts)("a", "weight")
    assert found.dtype == torch.float32 and found.numpy().tobytes() == values.tobytes()


def test_average_of_other_layouts(tmp_path: Path) -> None:
    paths = [
        make_run(tmp_path / "a", LAYOUTS["tp2-pp2"], seed=1, step=9),
        make_run(tmp_path / "b", LAYOUTS["dp2-zero3"], seed=2, step=12),
        make_run(tmp_path / "c", LAYOUTS["one"], seed=3, step=11),
    ]
    (tmp_path / "b" / "skips.jsonl").write_text("{}\n")
    made = average_checkpoints(paths, tmp_path / "out", [1, 2, 5])
    store.verify_checkpoint(made.checkpoint)
    whole, state = WholeState(made.checkpoint), store.read_state(made.checkpoint)
    assert whole.kinds == ("weight",) and whole.adam_step == state.adam_step == 0
    # Everything but the moments and the losses is of the newest one.
    own = {"adam_step": 0.0, "versions": state.versions, "recent_losses": []}
    assert state == store.read_state(paths[1]).model_copy(update=own)
    assert run_of(made.checkpoint).parallel.zero == 3 and made.layout.data == 2
    assert (tmp_path / "out" / "skips.jsonl").read_text() == "{}\n"
    held = [numbers(recipe_of(), seed) for seed in (1, 2, 3)]
    for name in whole.names:
        a, b, c = (one[name, "weight"].double() for one in held)
        expected = a / 8 + b / 4 + c * 5 / 8
        assert torch.allclose(whole.read_tensor(name, "weight").double(), expected, rtol=1e-7, atol=1e-12)
    event = json.loads((tmp_path / "out" / "journal.jsonl").read_text().splitlines()[0])
    assert (event["event"], event["how"], event["shares"]) == ("imported", "averaged", [0.125, 0.25, 0.625])


def test_average_refuses_other_models_and_leaves_nothing(tmp_path: Path) -> None:
    a, out = make_run(tmp_path / "a"), tmp_path / "out"
    for name, model, message in (
        ("wider", {"ffn": 32}, r"blocks\.0\.mlp.* is .*of different models"),
        ("turned", {"rope_theta": 5e5}, r"model\.rope_theta is .*500000"),
        ("deeper", {"layers": 3}, "has 'blocks.2"),
    ):
        with pytest.raises(CheckpointError, match=message):
            average_checkpoints([a, make_run(tmp_path / name, model=model)], out)
    with pytest.raises(ConfigError, match="at least two"):
        average_checkpoints([a], out)
    held = [("A", weights(a=[1.0, 2.0])), ("B", weights(a=[1.0, float("inf")]))]
    with pytest.raises(CheckpointError, match="B: a holds values that are not finite"):
        average_tensors(held, [0.5, 0.5])("a", "weight")
    assert not out.exists()
    other_loss = make_run(tmp_path / "loss", model={"z_loss": 0.0})
    average_checkpoints([a, other_loss], out)  # what only says how it is computed may differ
    with pytest.raises(CheckpointError, match="exists already"):
        average_checkpoints([a, other_loss], out)


@pytest.mark.parametrize(
    "parts",
    [
        {"pipeline": 2, "model_chunks": 2, "model": {"layers": 4}},
        {"pipeline": 2, "schedule": "zero_bubble"},
        {"tensor": 2, "sequence": True, "tensor_overlap": 2},
    ],
)
def test_one_rank_has_no_order_of_stages_and_no_chunks(parts: dict[str, Any]) -> None:
    c = layout_config(precision="bf16", micro_batch=1, **parts)
    layout = Layout(c.parallel.tensor, c.parallel.pipeline, 1)
    old = store.LayoutState(**vars(layout), zero=1, precision="bf16")
    assert laid_out(c, old, Sizes())[0].parallel == c.parallel
    alone = laid_out(c, old, Sizes(tensor=1, pipeline=1))[0].parallel
    assert (alone.schedule, alone.model_chunks, alone.tensor_overlap) == ("1f1b", 1, 1)
    if c.parallel.model_chunks > 1:  # four stages have one block each
        assert laid_out(c, old, Sizes(pipeline=4))[0].parallel.model_chunks == 1
