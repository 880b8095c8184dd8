"""Bad data in a real run: caught, attributed, rewound, skipped; exact to the byte, whatever the layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megastable.base import errors
from megastable.config.tree import RunConfig
from megastable.data.corpora import open_corpora
from megastable.data.plant import Planted, plant_corruption
from megastable.data.skip_ledger import Ledger, SkipEntry, read_ledger
from megastable.data.skips import Selection
from megastable.run import records
from megastable.run.directory import RunDirectory
from megastable.run.events.stability_events import (
    AlertEvent,
    BranchesTried,
    Discarded,
    IncidentEvent,
    Located,
    SnapshotRejected,
    Would,
)
from megastable.run.events.training_events import Resumed
from megastable_tools.forensics.history import History
from tests.conftest import tiny, write_corpus
from tests.distributed import run_ranks
from tests.engine.test_gate import trainer_of
from tests.training.test_failures import terminate
from tests.training.test_failures import train as train_with
from tests.training.test_resume import identical

STEPS = 50
FIRST_BAD = 31


def recipe(corpus: Path, run: Path, **parts: Any) -> RunConfig:
    """One micro-batch a step through one layer: where the layout matters, LAYOUTS has more of both."""
    train = {"steps": STEPS, "global_batch": 8, "micro_batch": 8, "eval_samples": 8, "eval_interval": 0}
    train |= parts.pop("train", {})
    # Judged from early on, so that the runs can be short. A state that is damaged here stands for one that training
    # has damaged: memory is not watched, which would find it before the loss shows anything.
    stability = parts.pop("stability", {}) | {"detector": {"warmup_steps": 20, "min_values": 12}}
    stability |= {"hardware": {"state": False}}
    defaults: dict[str, Any] = {
        "stability": stability,
        "train": train,
        "optimizer": {"lr": 1e-2},
        "schedule": {"warmup_steps": 10, "total_steps": STEPS},
        "checkpoint": {"interval": 0},
        "model": {"layers": 1},
    }
    return tiny(corpus, run, **{**defaults, **parts})


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Planted]:
    """A corpus with 20 samples of noise, in parts of the batches of the steps 31 to 33."""
    folder = tmp_path_factory.mktemp("planted")
    write_corpus(folder / "clean", ids=20)
    (folder / "clean/tokenizer.model").write_bytes(b"")  # copied along, never read
    config = recipe(folder / "clean", folder / "run")
    what, _ = plant_corruption(folder / "clean", folder / "bad", config, step=FIRST_BAD, samples=20)
    return folder / "bad", what


def train(config: RunConfig) -> tuple[int, str]:
    from megastable import train as module

    try:
        return module.train(config, Path("recipe.yaml")), ""
    except errors.MegastableError as error:
        return error.code, str(error)


def train_spoilt(
    config: RunConfig,
    spoilt: int | None,
    name: str,
    factor: float,
    kind: str = "weight",
    always: bool = False,
) -> tuple[int, int]:
    """Train; the update of step `spoilt` also multiplies a parameter's weight or moments: once, or also where it is
    repeated. The exit code, and how often."""
    trainer = trainer_of(config)
    engine, real, done = trainer.engine, trainer.engine._apply_update, 0

    def apply_update(*given: Any) -> None:
        nonlocal done
        real(*given)
        if engine.ds.global_steps != spoilt or (done and not always):
            return
        done += 1
        flat = engine.flat_state()
        for f in flat.fragments:
            if f.name == name and (piece := flat.view_piece(f, kind)) is not None:
                piece.mul_(factor)
        engine.refresh_weights()

    engine._apply_update = apply_update
    return trainer.train(), done


def incidents(run: Path, what: str = "closed") -> list[dict[str, Any]]:
    found = [e for e in RunDirectory(run).iterate_events(IncidentEvent) if e["what"] == what]
    return [e["summary"] for e in found] if what == "closed" else found


TWO: dict[str, Any] = {
    "model": {"layers": 2},
    "train": {"micro_batch": 4},
}  # layers, and micro-batches of one rank
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, TWO),
    "pp2": (2, {**TWO, "parallel": {"pipeline": 2}}),
    "pp2-zero-bubble": (2, {**TWO, "parallel": {"pipeline": 2, "schedule": "zero_bubble"}}),
    "tp2": (2, {"model": {"layers": 2}, "parallel": {"tensor": 2}}),
    "zero1-dp2": (2, {"model": {"layers": 2}, "train": {"micro_batch": 2}}),
    "zero2-dp2": (2, {**TWO, "parallel": {"zero": 2}}),
    "zero3-dp2": (2, {**TWO, "parallel": {"zero": 3}}),
    "replicas2-dp4": (4, {"model": {"layers": 2}, "train": {"micro_batch": 1}, "parallel": {"replicas": 2}}),
}


def hit_and_told(hit: RunConfig, told: RunConfig) -> tuple[tuple[int, str], tuple[int, str]]:
    """A run that meets the bad region, and one that is told from the start to leave out what the first one skipped."""
    assert hit.run.dir is not None
    first = train(hit)
    skips = [tuple(r) for incident in incidents(hit.run.dir) for r in incident["positions"]]
    return first, train(told.model_copy(update={"data": told.data.model_copy(update={"skip": skips})}))


@pytest.mark.quick("one")
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_rewind_is_exact(name: str, planted: tuple[Path, Planted], tmp_path: Path) -> None:
    """The run that hit the bad region ends with the bytes of a run that was told to skip it from the start."""
    world, parts = LAYOUTS[name]
    corpus, what = planted
    hit, told = tmp_path / "hit", tmp_path / "told"
    configs = recipe(corpus, hit, **parts), recipe(corpus, told, **parts)
    assert run_ranks(world, hit_and_told, *configs) == [((0, ""), (0, ""))] * world
    (incident,) = incidents(hit)
    assert incident["cause"] == "data" and incident["outcome"] == "healed"
    assert [tuple(r) for r in incident["positions"]] == what.positions
    assert incident["documents"] == [d.model_dump() for d in what.documents]
    assert incident["steps_lost"] <= 25 and incident["batches_discarded"] <= 4
    assert incidents(told) == [] and not list(RunDirectory(told).iterate_events(Discarded))
    assert not [
        e for e in RunDirectory(hit).iterate_events(Located) if e["kind"] == "growth"
    ]  # the state was good
    assert identical(hit / f"checkpoints/step-{STEPS}", told / f"checkpoints/step-{STEPS}") >= 3
    one, other = (records.read_newest_records(run / "steps") for run in (hit, told))
    for column in ("step", "first_position", "next_position", "loss", "grad_norm", "lr", "applied"):
        assert one.column(column).equals(other.column(column)), column


# Faults of other kinds, on one process


def spoil(config: RunConfig, kind: str, steps: list[int], times: int = 1) -> dict[str, Any]:
    """Train with a fault at the steps `steps`, the first `times` times that each is done; how it ended, and the end."""
    import torch

    from megastable.engine import engine as engines

    trainer = trainer_of(config)
    engine, real = trainer.engine, trainer.engine.train_step
    done: dict[int, int] = {}

    def train_step(*args: Any, **options: Any) -> Any:
        step = trainer.state.step + 1
        if getattr(engine, "_probing", False) or step not in steps or done.get(step, 0) >= times:
            return real(*args, **options)
        done[step] = done.get(step, 0) + 1
        if kind == "weights":
            generator = torch.Generator().manual_seed(step)
            master = engine.masters[0]
            engine._wait_for_copies()  # or the checkpoint of before would be spoilt, too
            master.data += torch.randn(master.shape, generator=generator) * 0.2
            engine.refresh_weights()
            return real(*args, **options)
        loss = engines.LossFunction.__call__
        engines.LossFunction.__call__ = lambda self, *a: twice(loss, self, *a)  # type: ignore[method-assign]
        try:
            return real(*args, **options)
        finally:
            engines.LossFunction.__call__ = loss  # type: ignore[method-assign]

    def twice(loss: Any, self: Any, *args: Any) -> Any:
        """What a chip that computes wrongly for a moment does to a step."""
        value = loss(self, *args)
        self.samples[-1] = self.samples[-1] * 2
        return value * 2

    engine.train_step = train_step  # type: ignore[method-assign]
    try:
        code, message = trainer.train(), ""
    except errors.MegastableError as error:
        code, message = error.code, str(error)
    factor = trainer.recovery.limit_rate(trainer.state.updates, 1.0)
    return {"code": code, "message": message, "factor": factor}


@pytest.fixture(scope="module")
def easy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus that is learnt quickly, so that a fault shows."""
    folder = tmp_path_factory.mktemp("easy")
    write_corpus(folder, ids=20)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", ["one", "pp2"])
def test_spoilt_weights_are_undone_and_nothing_is_put_off(name: str, easy: Path, tmp_path: Path) -> None:
    """The run ends with the bytes of one without the fault."""
    run, plain = tmp_path / "run", tmp_path / "plain"
    world, parts = LAYOUTS[name]
    parts = parts | {"stability": {"policy": {"recur_steps": 12, "verify_steps": 6}}}
    for end in run_ranks(world, spoil, recipe(easy, run, **parts), "weights", [32]):
        assert end["code"] == 0 and end["factor"] == 1.0
    (incident,) = incidents(run)
    assert incident["cause"] == "state" and incident["outcome"] == "healed" and incident["documents"] == []
    assert incident["actions"] == ["rewind"] and 31 <= incident["onset"] <= 33
    # The state after step 31 is spoilt already; that after step 30 is good.
    assert {e["step"] for e in RunDirectory(run).iterate_events(SnapshotRejected)} <= {31}
    assert incident["steps_lost"] <= 5
    assert incident["positions"] == [] == incident["deferred"]
    assert not (run / "skips.jsonl").exists()
    assert run_ranks(world, train, recipe(easy, plain, **parts)) == [(0, "")] * world
    checkpoint = f"checkpoints/step-{STEPS}"
    assert incidents(plain) == [] and identical(run / checkpoint, plain / checkpoint) >= 3


def samples_of(run: Path) -> list[tuple[int, int]]:
    """Epoch and sequence of all that a run of one corpus trained on, in its order; undone steps left out."""
    history = History(run)
    found = list[tuple[int, int]]()
    for done in history.list_steps(1, 10**6):
        if not done.undone:
            places = history.library_at(done.time).source.order.locate_samples(history.positions_of(done))
            found += zip(places.epoch.tolist(), places.sequence.tolist(), strict=True)
    return found


@pytest.mark.slow
def test_without_rewind_points_it_hands_over_to_a_restart(
    planted: tuple[Path, Planted], tmp_path: Path
) -> None:
    corpus, what = planted
    run = tmp_path / "run"
    config = recipe(
        corpus, run, stability={"snapshots": {"interval": 0}}, checkpoint={"interval": 20, "keep": 9}
    )
    ((code, message),) = run_ranks(1, train, config)
    assert code == errors.HANDOVER
    assert "there is no snapshot" in message and "checkpoint before step 31" in message
    told = incidents(run, "handed over")[0]["summary"]
    ((first, end),), ((begin, until),) = what.positions, told["deferred"]  # nobody was examined: read later
    assert begin <= first < until <= end + 8 and until - begin == 16
    assert told["outcome"] == "handed over" and told["positions"] == [] and not (run / "skips.jsonl").exists()
    assert run_ranks(1, train, config) == [(0, "")]
    assert [e["step"] for e in RunDirectory(run).iterate_events(Resumed)] == [20]
    (over,) = [
        i for i in incidents(run) if i["number"] == told["number"]
    ]  # what follows is the noise, read later
    assert over["outcome"] == "healed" and over["steps_lost"] >= 12


@pytest.mark.slow
@pytest.mark.parametrize("last_resort", ["train_on", "stop"])
def test_a_handover_needs_a_checkpoint_of_before(last_resort: str, easy: Path, tmp_path: Path) -> None:
    """Where all are later the run trains on and tells a person, or stops if that is wanted, and keeps them: it must not
    begin again from nothing in silence."""
    run = tmp_path / "run"
    wanted = {"snapshots": {"interval": 0}, "policy": {"last_resort": last_resort}}
    config = recipe(easy, run, stability=wanted, checkpoint={"interval": 32})
    (end,) = run_ranks(1, spoil, config, "weights", [32])
    alerts = list(RunDirectory(run).iterate_events(AlertEvent))
    if last_resort == "stop":
        assert end["code"] == errors.UNSTABLE and "is from before step" in end["message"]
        assert len(list((run / "checkpoints").glob("step-*"))) == 1 and not alerts
        return
    assert end["code"] == 0 and end["factor"] == 1.0
    assert [e["what"] for e in alerts][:1] == ["begun"] and "is from before step" in alerts[0]["reason"]
    (incident,) = incidents(run)
    assert incident["actions"] == ["alert"] and incident["positions"] == []


def nan_gradients(config: RunConfig, steps: list[int]) -> int:
    """Train with gradients that are nan for once: the replay of the same step is finite."""
    import torch

    trainer = trainer_of(config)
    engine, real = trainer.engine, trainer.engine.train_step

    def train_step(*args: Any, **options: Any) -> Any:
        handle = None
        if not engine._probing and trainer.state.step + 1 in steps:
            steps.remove(trainer.state.step + 1)
            weight = next(iter(engine.ds.module.parameters()))
            handle = weight.register_hook(lambda g: torch.full_like(g, float("nan")))
        try:
            return real(*args, **options)
        finally:
            if handle is not None:
                handle.remove()

    engine.train_step = train_step  # type: ignore[method-assign]
    return int(trainer.train())


def test_nan_gradients_that_do_not_come_again_are_the_hardware(easy: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert run_ranks(1, nan_gradients, recipe(easy, run), [32, 33, 34]) == [0]
    (incident,) = incidents(run)
    assert incident["cause"] == "hardware" and incident["positions"] == [] and incident["onset"] == 32
    assert not (run / "skips.jsonl").exists()
    assert [e["kind"] for e in RunDirectory(run).iterate_events(Located)] == ["not reproduced"] * 3


@pytest.mark.slow
def test_a_dry_run_says_what_it_would_do_and_does_nothing(
    planted: tuple[Path, Planted], tmp_path: Path
) -> None:
    corpus, _ = planted
    dry, off = tmp_path / "dry", tmp_path / "off"
    assert run_ranks(1, train, recipe(corpus, dry, stability={"dry_run": True})) == [(0, "")]
    assert run_ranks(1, train, recipe(corpus, off, stability={"enabled": False})) == [(0, "")]
    assert identical(dry / f"checkpoints/step-{STEPS}", off / f"checkpoints/step-{STEPS}") >= 3
    would = [(e["step"], e["action"]) for e in RunDirectory(dry).iterate_events(Would)]
    assert (31, "discard") in would and [a for _, a in would].count("rewind") == 1
    assert not (dry / "skips.jsonl").exists() and incidents(dry) == []


@pytest.mark.slow
def test_a_stop_in_the_middle_of_an_incident_forgets_nothing(
    planted: tuple[Path, Planted], tmp_path: Path
) -> None:
    corpus, what = planted
    run, straight = tmp_path / "run", tmp_path / "straight"
    # The 38th step that is computed is the 36th: two were done again.
    ((code, _),) = run_ranks(1, train_with, recipe(corpus, run), terminate, 38)
    assert code == errors.STOPPED and incidents(run) == []
    assert run_ranks(1, train, recipe(corpus, run)) == [(0, "")]
    assert run_ranks(1, train, recipe(corpus, straight)) == [(0, "")]
    assert identical(run / f"checkpoints/step-{STEPS}", straight / f"checkpoints/step-{STEPS}") >= 3
    for one, other in zip(incidents(run), incidents(straight), strict=True):
        assert one | {"seconds": 0} == other | {"seconds": 0} and one["outcome"] == "healed"
        assert [tuple(r) for r in one["positions"]] == what.positions


def train_where_little_is_harm(config: RunConfig) -> tuple[int, str]:
    """A few samples do not do much harm in a run as short as this, and what a corpus does to another one is not more
    than reading less of that one does."""
    from megastable.recovery import replay_trials
    from megastable_guard import trials

    def judge_corpus(*given: Any) -> trials.CorpusTrial:
        *losses, _, steps = given
        return trials.judge_corpus(*losses, 1.0, steps)

    trials.HARM, trials.SURE = 0.001, 2.0
    replay_trials.judge_corpus = judge_corpus
    return train(config)


@pytest.mark.slow
@pytest.mark.parametrize("helps", [True, False])
def test_a_corpus_that_is_bad_again_is_left_out_if_that_helps_the_others(helps: bool, tmp_path: Path) -> None:
    """Two corpora; the samples that the second gives to three steps are noise, twice. The second time the run is tried
    without it: that helps if it contradicts the first, and does not if it is of the same text."""
    for name in ("good", "bad"):
        write_corpus(tmp_path / name, ids=20, seed=len(name))
    corpora = [{"path": tmp_path / "good", "weight": 2.0}, {"path": tmp_path / "bad"}]
    run, steps, again = tmp_path / "run", 90, 64
    policy, train_steps = {"swap_after": 1}, {"steps": steps}
    config = recipe(tmp_path, run, data={"corpora": corpora}, stability={"policy": policy}, train=train_steps)
    source = open_corpora(config.data.corpora, config.model.sequence_length, config.run.seed).train
    bad = np.concatenate([np.arange(8 * (first - 1), 8 * (first + 2)) for first in (FIRST_BAD, again)])
    places = source.order.locate_samples(bad)
    noise = np.random.default_rng(0)
    tokens = np.memmap(tmp_path / "bad/part-0.bin", dtype=np.uint16, mode="r+")
    if helps:  # other ids in the same places: only documents still end as they did
        tokens[:] = np.append(0, noise.permutation(np.arange(1, 20)))[tokens]
    for first in places.first_token[places.corpus == 1].tolist():
        tokens[first : first + 32] = noise.integers(1, 250, 32)
    tokens.flush()
    assert run_ranks(1, train_where_little_is_harm, config) == [(0, "")]
    once, twice = incidents(run)
    tried = [event for event in RunDirectory(run).iterate_events(BranchesTried) if event.get("corpus")]
    # Those of the first incident have not had one before.
    assert [(event["corpus"], event["step"] > FIRST_BAD + 10) for event in tried] == [("bad", True)]
    assert tried[0]["chosen"] == ("without the corpus" if helps else "without the suspects")
    assert once["actions"] == ["rewind"]
    assert twice["actions"] == ["swap_corpus" if helps else "rewind"] and twice["outcome"] == "healed"
    found = [p for a, b in twice["positions"] for p in range(a, b)]
    assert set(found) <= set(bad[places.corpus == 1].tolist()) and len(found) > 3
    entries = [e for e in read_ledger(run / "skips.jsonl") if isinstance(e, SkipEntry)]
    assert [(e.corpus, e.first) for e in entries] == [("bad", found[0])] * helps
    chosen = Selection(source.order, Ledger.read_ledger(run / "skips.jsonl").exclusions)
    trained = chosen.next_kept(found[0], 500)[0]
    assert set(source.order.locate_samples(trained).corpus.tolist()) == ({0} if helps else {0, 1})
    last = records.read_newest_records(run / "steps").to_pylist()[-1]
    # A third of what came after is passed over.
    assert (last["next_position"] - 8 * steps > 50) is helps
