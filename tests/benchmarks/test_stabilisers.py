"""The ruler for stabilisers: its shared runs, its rules and its table."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import typer
from typer.testing import CliRunner

from benchmarks import stabilisers
from benchmarks.ruler import run as ruler_run
from benchmarks.ruler.contestants import (
    APPLY,
    REFUSE,
    WATCHERS,
    BackAndSkip,
    KillLossSpike,
    SigmaSkip,
    clip_adagc,
    clip_norm,
    clip_zclip,
)
from benchmarks.ruler.faults import FAULTS, lay_data
from benchmarks.ruler.ours import OURS
from benchmarks.ruler.results import find_excess, find_misses, summarize_contestant
from benchmarks.ruler.task import BATCH, KINDS, LENGTH, POSITIONS, STEP, STEPS, VOCABULARY


def make_run(norm: float = 1.0) -> Any:
    """What a bound sees of a run: one gradient of a norm."""
    gradients = [torch.tensor([0.6, 0.8]) * norm]
    return SimpleNamespace(
        gradients=lambda: gradients, named_gradients=lambda: [("weight", gradients[0])], memory={}, step=200,
        position=7, position_at=lambda step: step, newest_copy=lambda step: step // 50 * 50, skipped_steps=set(),
    )  # fmt: skip


def test_clip_norm_is_torch_s() -> None:
    run, reference = make_run(5.0), torch.nn.Parameter(torch.zeros(2))
    reference.grad = run.gradients()[0].clone()
    torch.nn.utils.clip_grad_norm_([reference], 1.0)
    clip_norm(run, 5.0)
    torch.testing.assert_close(run.gradients()[0], reference.grad)


def test_adagc_bounds_a_tensor_by_its_own_average() -> None:
    run = make_run(2.0)
    run.memory["weight"] = 1.0
    clip_adagc(run, 2.0)
    assert float(run.gradients()[0].norm()) == pytest.approx(1.05)
    assert run.memory["weight"] == pytest.approx(0.98 + 0.02 * 1.05)


def test_zclip_bounds_an_outlier_by_mean_and_deviation() -> None:
    run = make_run(5.0)
    run.memory.update(first=[0.0] * 25, mean=0.5, variance=0.01)
    clip_zclip(run, 5.0)
    assert float(run.gradients()[0].norm()) == pytest.approx(0.5 + 2.5**2 / 45 * 0.1, rel=1e-4)
    assert run.memory["mean"] == pytest.approx(0.97 * 0.5 + 0.03 * (0.5 + 2.5**2 / 45 * 0.1), rel=1e-4)


def test_zclip_bounds_all_norms_at_1() -> None:
    """As the authors' class does by default."""
    run = make_run(1.5)
    run.memory.update(first=[0.0] * 25, mean=1.4, variance=0.25)
    clip_zclip(run, 1.5)
    assert float(run.gradients()[0].norm()) == pytest.approx(1.0, rel=1e-4)


def test_sigma_skip_waits_for_64_steps_and_keeps_nan() -> None:
    """As OLMo-core's: a nan that is known makes all comparisons false for 128 steps."""
    run, rule = make_run(), SigmaSkip(make_run())
    draws = np.random.default_rng(0)
    assert all(
        rule.judge_step(run, 3 + draws.normal(0, 0.1), 1.0 + draws.normal(0, 0.1)) is APPLY
        for _ in range(100)
    )
    assert rule.judge_step(run, 3.9, 1.0) is REFUSE
    assert rule.judge_step(run, 3.0, math.nan) is REFUSE
    assert rule.judge_step(run, 3.0, 1.0) is REFUSE


def test_kill_loss_spike_needs_five_outliers_in_a_row() -> None:
    run, rule = make_run(), KillLossSpike(make_run())
    assert all(rule.judge_update(run, 3.0) is APPLY for _ in range(100))
    assert all(rule.judge_update(run, 7.0) is APPLY for _ in range(4))
    assert rule.judge_update(run, 7.0).kind == "rewind"


def test_palm_s_rule_goes_back_100_steps_and_skips_200() -> None:
    run, rule = make_run(), BackAndSkip(make_run())
    draws = np.random.default_rng(0)
    for _ in range(100):
        rule.judge_step(run, 3 + draws.normal(0, 0.1), 1.0)
    actions = [rule.judge_step(run, 9.0, 1.0) for _ in range(3)]
    assert [action.kind for action in actions] == ["apply", "apply", "rewind"]
    assert (actions[2].back, actions[2].position) == (100, 300)


def make_texts() -> dict[str, Any]:
    draws = np.random.default_rng(0)
    return {
        kind: draws.integers(3, VOCABULARY, (POSITIONS + 300 if kind == "code" else 3000, LENGTH + 1))
        for kind in KINDS
    }


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: str(fault.name))
def test_faults_begin_where_they_say(fault: Any) -> None:
    """Nothing changes before; a healthy change has no bad rows, and bad data some."""
    texts = make_texts()
    data, planted = lay_data(texts, 1), lay_data(texts, 1)
    if fault.plant:
        fault.plant(planted, texts, np.random.default_rng(0))
    first = (STEP - 1) * BATCH
    assert (data.inputs[:first] == planted.inputs[:first]).all() and (
        data.labels[:first] == planted.labels[:first]
    ).all()
    changed = (data.inputs != planted.inputs).any(1) | (data.labels != planted.labels).any(1)
    assert changed.any() == (fault.plant is not None)
    assert bool(planted.planted) == (fault.group == "bad data")
    assert planted.planted <= set(range(first, STEPS * BATCH))
    if planted.planted:
        assert set(np.flatnonzero(changed)) <= planted.planted


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["weight-1e4", "nan"])
def test_a_forked_run_is_the_run_of_a_watcher_that_was_alone(fault: str, tmp_path: Path) -> None:
    """Bit for bit, also where another watcher acts at the same steps."""
    texts = make_texts()
    saved: Path = tmp_path / "results.jsonl"
    kinds = {**WATCHERS, **OURS}
    names = ("olmo-skip", "kill-loss-spike", "palm", "ours", "ours-tried")
    wanted = {("small", 1, name, fault) for name in ("clipping", *names)}
    child = os.fork()
    if not child:
        try:
            ruler_run.run_family(
                ("small", 1, "clipping"), {name: kinds[name] for name in names}, texts, wanted,
                lambda key, facts: ruler_run.append_result(saved, key, "", facts),
            )  # fmt: skip
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    lines = [json.loads(line) for line in saved.read_text().splitlines()]
    assert {line["key"][2] for line in lines} == {"clipping", *names}
    for line in lines:
        run = ruler_run.Run("small", 1, "clipping", texts)
        if line["key"][2] in names:
            run.alone, run.watchers = True, [kinds[line["key"][2]](run)]
        run.train_until(STEP - 1)
        run.install_fault(next(known for known in FAULTS if known.name == fault))
        run.train_until(STEPS)
        alone = run.summarize(0.0)
        assert {**alone, "seconds": 0} == {**{key: line[key] for key in alone}, "seconds": 0}


def make_results(own: float, other: float) -> Any:
    facts = {
        "refused": 0,
        "rewinds": 1,
        "undone": 5,
        "computed": 325,
        "early": 0,
        "lost": 16,
        "bad_trained": 1,
    }
    results: Any = {}
    for name, loss in (("clipping", other), ("ours", own)):
        results["small", 1, name, "clean"] = {**facts, "loss": 3.0}
        results["small", 1, name, "noise"] = {**facts, "loss": loss}
    return results


def test_excess_is_measured_from_the_own_clean_run() -> None:
    results = make_results(3.1, 3.05)
    fault = next(fault for fault in FAULTS if fault.name == "noise")
    assert find_excess(results, "small", 1, "ours", fault) == pytest.approx(0.1)
    ((*place, behind),) = find_misses(results, "ours")
    assert place == ["noise", "small", 1] and behind == pytest.approx(0.05)
    assert not find_misses(results, "clipping")
    results["small", 1, "clipping", "noise"]["loss"] = None
    assert find_excess(results, "small", 1, "clipping", fault) == math.inf
    sums = summarize_contestant(results, "ours")
    assert (sums["false"], sums["lost"], sums["undone"]) == (1, 16, 5)


def test_command_reports_what_is_there_and_refuses_unknown_names(tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(stabilisers.main)
    options = ["--folder", str(tmp_path), "--report", "--quick"]
    refused = CliRunner().invoke(app, [*options, "--fault", "nose"])
    assert refused.exit_code == 2 and "noise" in refused.output
    empty = CliRunner().invoke(app, [*options, "--json", "--contestant", "clipping"])
    assert (empty.exit_code, json.loads(empty.stdout)) == (1, [])
    version = stabilisers.compute_version("clipping")
    line = {"key": ["small", 1, "clipping", "clean"], "version": version, "loss": 3.0}
    old = {**line, "key": ["small", 1, "clipping", "noise"], "version": "of before"}
    (tmp_path / "results.jsonl").write_text(f"{json.dumps(line)}\n{json.dumps(old)}\n{{")
    told = CliRunner().invoke(app, [*options, "--json", "--contestant", "clipping"])
    assert json.loads(told.stdout) == [
        {"size": "small", "seed": 1, "contestant": "clipping", "fault": "clean", "loss": 3.0}
    ]
