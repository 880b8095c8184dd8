"""Stop and go on: the same bytes as without the stop, and the same global order under another layout."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from megastable.checkpoint import store
from megastable.checkpoint.whole import WholeState, policy_of
from megastable.config.tree import RunConfig
from megastable.engine.flatstate import KINDS
from megastable.run import records
from megastable.run.directory import RunDirectory
from megastable.run.events.training_events import NEXT_UPDATE, Reshaped, Warned
from megastable.run.run_history import HistoryReader
from megastable.supervise.standing import State
from megastable.supervise.status import read_status
from tests.conftest import tiny
from tests.distributed import run_ranks, train


def identical(a: Path, b: Path) -> int:
    """Assert that two checkpoints hold the same bytes; the number of files compared."""
    names = [{p.name for p in folder.iterdir() if store.PARTS.fullmatch(p.name)} for folder in (a, b)]
    assert names[0] == names[1]
    for name in names[0]:
        if name.endswith(".pt"):
            one, other = (str(torch.load(folder / name, weights_only=True)) for folder in (a, b))
            assert one == other, name
        else:
            assert (a / name).read_bytes() == (b / name).read_bytes(), name
    return len(names[0])


GEMMA2 = dict(
    norms="both", zero_centered_norms=True, activation="gelu", embedding_scale="sqrt_hidden", qk_norm=False,
    attention_scale=0.3, attention_softcap=2.0, logit_softcap=5.0, window=9, full_attention_every=2,
)  # fmt: skip
EXPERTS = {"count": 4, "top_k": 2, "ffn": 32, "bias_rate": 0.01, "balance_over": "step", "balance_loss": 0.1}
STOP, END = 3, 6  # steps: after the warm-up of the rate, and as many again
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "pp2": (2, {"parallel": {"pipeline": 2}}),
    "pp2-dp2": (4, {"parallel": {"pipeline": 2}}),
    "pp2-chunks": (2, {"parallel": {"pipeline": 2, "model_chunks": 2}, "model": {"layers": 4}, "tied": True}),
    "tp2-sequence": (2, {"parallel": {"tensor": 2, "sequence": True}}),
    "zero1-dp2": (2, {}),
    "zero2-dp2": (2, {"parallel": {"zero": 2}}),
    "zero3-dp2": (2, {"parallel": {"zero": 3}}),
    "context2": (2, {"parallel": {"context": 2}}),
    "fp16-dp2": (2, {"precision": {"kind": "fp16", "initial_scale_power": 8}, "parallel": {"zero": 2}}),
    "fp8-delayed-pp2": (2, {"precision": {"fp8": "delayed"}, "parallel": {"pipeline": 2}}),
    "fp32-pp2-dp4-tied": (8, {"precision": {"kind": "fp32"}, "parallel": {"pipeline": 2}, "tied": True}),
    "pp2-dp3-tied": (6, {"parallel": {"pipeline": 2}, "tied": True, "batch": 12}),
    "replicas2-dp4": (4, {"parallel": {"replicas": 2}}),
    # What depends on the number of updates, or on the sample, goes on as well.
    "gemma2-dropout-dp2": (2, {"model": GEMMA2 | {"dropout": 0.1}}),
    "branch-yarn-tp2": (2, {"parallel": {"tensor": 2}, "model": {"norms": "branch", "branch_steps": 5}}),
    "mup-zero3-dp2": (2, {"parallel": {"zero": 3}, "model": {"mup": {"base_width": 8, "base_layers": 1}}}),
    "experts-pp2": (2, {"parallel": {"pipeline": 2}, "model": {"experts": EXPERTS}}),
    "experts-ep2": (2, {"parallel": {"expert": 2}, "model": {"experts": EXPERTS}}),
    "experts-ep2-dp4-zero2": (4, {"parallel": {"expert": 2, "zero": 2}, "model": {"experts": EXPERTS}}),
    "experts-ep2-fp8-delayed": (
        2, {"parallel": {"expert": 2}, "precision": {"fp8": "delayed"}, "model": {"experts": EXPERTS}},
    ),
    "experts-ep2-adafactor": (
        2, {"parallel": {"expert": 2}, "optimizer": {"name": "adafactor"}, "model": {"experts": EXPERTS}},
    ),
    # Resets of optimizers after the stop, and within a period; clipping at every update.
    "sgd-dp2": (2, {"optimizer": {"name": "sgd"}}),
    "lamb-dp2": (2, {"optimizer": {"name": "lamb"}}),
    "spam-dp2": (2, {"optimizer": {"name": "spam", "spam": {"interval": 4, "warmup": 2, "density": 0.4}}}),
    "stable_spam-dp2": (2, {"optimizer": {"name": "stable_spam", "stable_spam": {"interval": 4, "max_decay": 0.8}}}),
    "adafactor-dp2": (2, {"optimizer": {"name": "adafactor", "adafactor": {"momentum": 0.9}}}),
    "muon-dp2": (2, {"optimizer": {"name": "muon", "momentum": 0.95, "qk_clip": 0.06}, "model": {"qk_norm": False}}),
    "adagc-zero3-dp2": (2, {"parallel": {"zero": 3}, "optimizer": {"clipping": {"kind": "adagc", "warmup": 2}}}),
    "zclip-dp2": (2, {"optimizer": {"clipping": {"kind": "zclip", "warmup": 2, "threshold": 0.5}}}),
}  # fmt: skip


@pytest.mark.quick("one")
@pytest.mark.parametrize("name", LAYOUTS)
def test_resume_is_bit_for_bit(name: str, corpus: Path, tmp_path: Path) -> None:
    world, parts = LAYOUTS[name]
    tied = {"tied": True} if "tied" in parts else {}
    batch = parts.get("batch", 8)
    model = dict(tiny(corpus, tmp_path).model) | tied | parts.get("model", {})
    parts = {k: v for k, v in parts.items() if k not in ("tied", "batch", "model")}

    def at(run: str, steps: int) -> RunConfig:
        pipelines = world // math.prod(
            parts.get("parallel", {}).get(of, 1) for of in ("pipeline", "tensor", "context")
        )
        train = {
            "steps": steps, "global_batch": batch, "micro_batch": max(1, batch // pipelines // 2),
            "eval_samples": batch, "eval_interval": 0,
        }  # fmt: skip
        rate = {"warmup_steps": 2, "total_steps": 20}
        return tiny(corpus, tmp_path / run, **parts, model=model, train=train, schedule=rate)

    run_ranks(world, train, at("straight", END), at("stopped", STOP))
    run_ranks(world, train, at("stopped", END))  # which knows nothing but what is in the checkpoint
    straight, stopped = (tmp_path / r / f"checkpoints/step-{END}" for r in ("straight", "stopped"))
    assert identical(straight, stopped) == 3 * world
    shared = [path.read_bytes() for p in (straight, stopped) if (path := p / store.SHARED).exists()]
    stateful = name.startswith(("stable_spam", "adafactor", "adagc", "zclip", "experts"))
    assert len(shared) == 2 * stateful and len(set(shared)) == stateful
    one, other = (json.loads((p / "state.json").read_text()) for p in (straight, stopped))
    assert one["cursor"] == other["cursor"] == END * batch and one["updates"] == other["updates"]
    assert one["fp8"] == other["fp8"] and bool(one["fp8"]) == ("delayed" in name)
    table, again = (records.read_newest_records(tmp_path / r / "steps") for r in ("straight", "stopped"))
    assert table.num_rows == END
    for column in (
        "step", "first_position", "next_position", "loss", "grad_norm", "lr", "z_loss", "noise_scale", "worst_position",
        "norm_kept", "update_ratio",
    ):  # fmt: skip
        assert table.column(column).equals(again.column(column)), column
    events = [json.loads(line) for line in (tmp_path / "stopped/journal.jsonl").read_text().splitlines()]
    assert [e["step"] for e in events if e["event"] == "resumed"] == [STOP]


@pytest.mark.slow
@pytest.mark.parametrize(("world", "first", "second"), [(2, 1, 2), (2, 2, 1), (4, 2, 1), (4, 1, 2)])
def test_a_run_goes_on_with_another_number_of_replicas(
    world: int, first: int, second: int, corpus: Path, tmp_path: Path
) -> None:
    """Two ranks sum two numbers either way: the bytes of the run that stayed as it was. Four sum in another order."""

    def at(run: str, steps: int, replicas: int) -> RunConfig:
        train = {"steps": steps, "global_batch": 8, "micro_batch": 2, "eval_samples": 0, "eval_interval": 0}
        schedule = {"warmup_steps": 2, "total_steps": 20}
        return tiny(corpus, tmp_path / run, parallel={"replicas": replicas}, train=train, schedule=schedule)

    run_ranks(world, train, at("straight", END, second))
    run_ranks(world, train, at("moved", STOP, first))
    run_ranks(world, train, at("moved", END, second))
    (event,) = RunDirectory(tmp_path / "moved").iterate_events(Reshaped)
    assert (event["old"]["replicas"], event["new"]["replicas"]) == (first, second)
    states = [WholeState(tmp_path / run / f"checkpoints/step-{END}") for run in ("straight", "moved")]
    for name in states[0].names:
        for kind in KINDS:
            one, other = (state.read_tensor(name, kind) for state in states)
            if world == 2:
                assert torch.equal(one, other), (name, kind)
            else:
                assert float((one - other).norm()) < 0.02 * float(one.norm()), (name, kind)
    losses = [
        records.read_newest_records(tmp_path / run / "steps").column("loss") for run in ("straight", "moved")
    ]
    assert losses[1].to_pylist() == pytest.approx(losses[0].to_pylist(), rel=0 if world == 2 else 1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new"),
    [((2, {"pipeline": 2}), (2, {"tensor": 2})), ((2, {"expert": 2}), (1, {})), ((1, {}), (4, {"expert": 4})),
     ((4, {"expert": 2, "zero": 2}), (4, {"expert": 2, "pipeline": 2})),
     ((2, {"tensor": 2}), (4, {"expert": 2, "tensor": 2}))],
)  # fmt: skip
def test_experts_go_on_in_another_layout(
    old: tuple[int, dict[str, int]], new: tuple[int, dict[str, int]], corpus: Path, tmp_path: Path
) -> None:
    """The loss of a run that was never moved, and the same number of updates."""
    model = dict(tiny(corpus, tmp_path).model) | {"experts": EXPERTS}

    def at(run: str, steps: int, **parallel: int) -> RunConfig:
        train = {"steps": steps, "global_batch": 8, "micro_batch": 2, "eval_samples": 8, "eval_interval": 0}
        rate = {"warmup_steps": 2, "total_steps": 20}
        precision = {"kind": "fp32"}
        return tiny(
            corpus,
            tmp_path / run,
            model=model,
            train=train,
            schedule=rate,
            parallel=parallel,
            precision=precision,
        )

    run_ranks(old[0], train, at("straight", END, **old[1]))
    run_ranks(old[0], train, at("moved", STOP, **old[1]))
    run_ranks(new[0], train, at("moved", END, **new[1]))
    straight, moved = (records.read_newest_records(tmp_path / r / "steps") for r in ("straight", "moved"))
    assert moved.column("loss").to_pylist() == pytest.approx(straight.column("loss").to_pylist(), rel=1e-4)
    straight_bias, moved_bias, bias_at_stop = (
        WholeState(tmp_path / r / f"checkpoints/step-{step}").expert_state["experts/bias"]
        for r, step in (("straight", END), ("moved", END), ("moved", STOP))
    )
    # A token may choose otherwise by the last bit; what began again at the stop would lack what was there.
    assert float(bias_at_stop.abs().max()) > 0
    assert float(torch.isclose(moved_bias, straight_bias, rtol=0.0, atol=1e-6).double().mean()) > 0.8
    begun_again = straight_bias - bias_at_stop
    assert not torch.allclose(moved_bias, begun_again, rtol=0.0, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("old", "new"), [((2, 2), (2, 1)), ((2, 1), (2, 2)), ((2, 2), (1, 1))])
def test_delayed_scales_of_experts_go_on_where_others_have_them(
    old: tuple[int, int], new: tuple[int, int], corpus: Path, tmp_path: Path
) -> None:
    """old, new: ranks, and how many of them share out experts."""
    model = dict(tiny(corpus, tmp_path).model) | {"experts": EXPERTS}

    def run(name: str, steps: int, world: int, expert: int) -> None:
        train_part = {"steps": steps, "global_batch": 8, "micro_batch": 4 // world, "eval_samples": 0}
        c = tiny(
            corpus, tmp_path / name, model=model, train=train_part, parallel={"expert": expert},
            schedule={"warmup_steps": 2, "total_steps": 20}, precision={"kind": "fp32", "fp8": "delayed"},
        )  # fmt: skip
        run_ranks(world, train, c)

    run("straight", END, *old)
    run("moved", STOP, *old)
    run("moved", END, *new)
    tables = [records.read_newest_records(tmp_path / name / "steps") for name in ("moved", "straight")]
    losses, straight_losses = (table.column("loss").to_pylist() for table in tables)
    # What begins again differs at once: the first scales are those of the tensors themselves.
    assert losses[STOP] == pytest.approx(straight_losses[STOP], rel=1e-6)
    assert losses == pytest.approx(straight_losses, rel=1e-3)
    moved, straight = (
        store.read_state(tmp_path / name / f"checkpoints/step-{END}").fp8 for name in ("moved", "straight")
    )
    assert moved.keys() == straight.keys() and "blocks.1.mlp.experts.3.down" in moved
    for layer, slots in straight.items():
        assert all(sum(value > 0 for value in values) == END for values in moved[layer]), layer
        # Gradients of a mean over twice the tokens of a micro-batch are half as large.
        compared = slots if new[0] == old[0] else slots[:2]
        for values, straight_values in zip(moved[layer], compared, strict=new[0] == old[0]):
            assert values == pytest.approx(straight_values, rel=0.05), layer  # of flipped roundings


@pytest.mark.slow
def test_a_finished_run_that_is_rolled_back_trains_the_same_steps_again(corpus: Path, tmp_path: Path) -> None:
    from megastable_tools.convert.catalogue import accept_checkpoint, roll_back

    config = tiny(
        corpus, tmp_path / "run", train={"steps": END, "global_batch": 8, "micro_batch": 4, "eval_samples": 0},
        checkpoint={"interval": STOP}, schedule={"warmup_steps": 2},
    )  # fmt: skip
    run_ranks(1, train, config)
    folder = tmp_path / "run/checkpoints"
    roll_back(folder / f"step-{STOP}", "a test")
    aside = folder / f"rollback1-step-{END}"
    aside.rename(folder / f"step-{END}")  # killed after its line in the journal: the start finishes it
    run_ranks(1, train, config)
    assert identical(folder / f"step-{END}", aside) == 3
    assert read_status(tmp_path / "run").state is State.FINISHED
    # Accepted after a rollback, the last one counts again: nothing is left to do.
    roll_back(folder / f"step-{STOP}", "a test")
    accept_checkpoint(folder / f"rollback2-step-{END}", "it was right")
    run_ranks(1, train, config)
    assert (folder / f"step-{END}").exists() and not list(folder.glob("rollback2-*"))
    assert records.read_newest_records(tmp_path / "run/steps").column("step").to_pylist() == [
        *range(1, END + 1)
    ]


def train_adjusted(config: RunConfig, names: list[str] | None) -> int:
    """Train as after a remedy that has changed these settings; None: with what the checkpoint says."""
    from tests.engine.test_gate import trainer_of

    trainer = trainer_of(config)
    if names is not None:
        policy = trainer.recovery.guard.policy.state
        policy.adjusted = names
        trainer.engine.adjustments.switch_to(names)
    code: int = trainer.train()
    return code


@pytest.mark.slow
def test_what_a_remedy_has_changed_holds_also_without_stability(corpus: Path, tmp_path: Path) -> None:
    def at(run: str, steps: int, **stability: bool) -> RunConfig:
        train = {"steps": steps, "global_batch": 8, "micro_batch": 8, "eval_samples": 0}
        rate = {"warmup_steps": 2, "total_steps": 20}
        return tiny(corpus, tmp_path / run, train=train, schedule=rate, stability=stability)

    names = ["z_loss", "swiglu_clamp", "never_heard_of"]
    run_ranks(1, train_adjusted, at("with", END), names)
    run_ranks(1, train_adjusted, at("plain", END), None)
    run_ranks(1, train_adjusted, at("off", STOP), names)
    shutil.copytree(tmp_path / "off", tmp_path / "rehearsed")
    run_ranks(1, train_adjusted, at("off", END, enabled=False), None)
    run_ranks(1, train_adjusted, at("rehearsed", END, dry_run=True), None)
    whole, plain, off, rehearsed = (
        tmp_path / run / f"checkpoints/step-{END}" for run in ("with", "plain", "off", "rehearsed")
    )
    assert identical(whole, off) == identical(whole, rehearsed) == 3
    with pytest.raises(AssertionError):
        identical(whole, plain)
    told = [event["text"] for event in RunDirectory(tmp_path / "off").iterate_events(Warned)]
    assert any("goes on without never_heard_of, with which a remedy" in text for text in told)
    for folder in (off, rehearsed):
        assert policy_of(store.read_state(folder)).adjusted == names


def resave(config: RunConfig, folder: Path) -> None:
    """Load the newest checkpoint in this layout and save it elsewhere."""
    from megastable.checkpoint.saving import Saver
    from tests.engine.test_gate import start_of

    start = start_of(config)
    folder.mkdir(exist_ok=True, parents=True)
    saver = Saver(folder, start.engine, config.checkpoint, config.model, start.freeze_recipe, start.lineage)
    saver.begin_save(start.state)
    saved = saver.finish_save()
    assert saved is not None and saved.path is not None, saved


@pytest.mark.slow
def test_another_deepspeed_file_moves_the_pieces_and_nothing_else(corpus: Path, tmp_path: Path) -> None:
    """The layout is the same, DeepSpeed's groups are not."""
    other = tmp_path / "other.json"
    given = json.loads(Path("ds_configs/zero3.json").read_text())
    given["zero_optimization"]["sub_group_size"] = 5000
    other.write_text(json.dumps(given))
    train_part = {"global_batch": 8, "micro_batch": 2, "eval_samples": 0}

    def at(run: str, steps: int, **parts: Any) -> RunConfig:
        return tiny(
            corpus, tmp_path / run, parallel={"zero": 3}, train=train_part | {"steps": steps}, **parts
        )

    run_ranks(2, train, at("straight", END), at("moved", STOP))
    run_ranks(2, train, at("moved", END, deepspeed=str(other)))
    events = [json.loads(line) for line in (tmp_path / "moved/journal.jsonl").read_text().splitlines()]
    assert "reshaped" not in [e["event"] for e in events]  # the layout is the same
    table, moved = (records.read_newest_records(tmp_path / r / "steps") for r in ("straight", "moved"))
    assert moved.column("loss").to_pylist() == pytest.approx(table.column("loss").to_pylist(), rel=3e-3)


def test_a_run_that_lost_its_summary_is_finished(corpus: Path, tmp_path: Path) -> None:
    """Killed between the last checkpoint and the summary: started again, it evaluates and writes it."""
    run = tmp_path / "run"
    config = tiny(corpus, run, train={"steps": 6, "global_batch": 8, "micro_batch": 2, "eval_samples": 8})
    run_ranks(1, train, config)
    before = json.loads((run / "summary.json").read_text())
    (run / "summary.json").unlink()
    assert run_ranks(1, train, config) == [0]
    after = json.loads((run / "summary.json").read_text())
    assert after.pop("goodput")["wall_seconds"] > before.pop("goodput")["wall_seconds"]
    assert after == before
    assert records.read_newest_records(run / "steps").num_rows == 6


@pytest.mark.slow
def test_a_resume_that_makes_the_rate_jump_says_how_far(corpus: Path, tmp_path: Path) -> None:
    """A finished run that is made longer: its decay begins again."""
    run = tmp_path / "run"

    def at(steps: int) -> RunConfig:
        train = {"steps": steps, "global_batch": 4, "micro_batch": 2, "eval_samples": 0}
        return tiny(corpus, run, train=train, schedule={"warmup_steps": 1, "total_steps": None})

    run_ranks(2, train, at(3))
    run_ranks(2, train, at(6))
    warned = [event for event in RunDirectory(run).iterate_events(Warned) if event.sign == NEXT_UPDATE]
    assert [event.step for event in warned] == [3]
    ((name, (_, new)),) = warned[0].numbers.items()
    rates = records.read_newest_records(run / "steps").column("lr").to_pylist()
    assert name == "learning rate" and new == pytest.approx(rates[3])
    text = str(warned[0].text)
    assert "6.89 times" in text and "schedule.total_steps=3" in text and "checkpoint branch" in text
    reader = HistoryReader(run / "journal.jsonl")
    reader.look_again()
    assert [(step, text in told) for step, _, told in reader.history.rates] == [(3, True)]
