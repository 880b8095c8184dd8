"""The price of the watch over memory, from whole runs of train.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import watch_price
from benchmarks.watch_price import WARM, WatchCase, measure_watch, watch_table
from megastable.base.errors import ConfigError, MegastableError
from megastable.base.process import ROOT
from megastable.run.step_phases import COLUMNS

RECIPE = ROOT / "launch/recipes/quickstart.yaml"
SMALL = (
    "model.layers=1 model.hidden=32 model.heads=2 model.kv_heads=2 model.ffn=64 model.sequence_length=32 "
    "train.global_batch=4 train.micro_batch=2 kernels.compile=false"
).split()


@pytest.mark.slow
def test_a_round_is_a_run_with_the_watch_and_one_without() -> None:
    seen = list[int]()
    found = measure_watch(RECIPE, SMALL, WatchCase(1, WARM + 3), "cpu", lambda: seen.append(len(seen)))
    assert len(found.ratios) == 1 and len(seen) == 2
    with_watch, without = found.milliseconds["step"]
    assert found.ratios == [with_watch / without] and found.price == with_watch / without - 1
    assert list(found.milliseconds) == ["step", *COLUMNS]
    assert all(ms > 0 for name in ("step", "forward", "backward", "gate") for ms in found.milliseconds[name])
    table = watch_table(found)
    assert f"{found.price:+.2%}" in str(table.title) and table.row_count == 1 + len(COLUMNS)


def test_runs_differ_in_the_watch_alone_and_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """The watch costs a tenth; the second run of a round is slower by half, whichever it is."""
    told, runs = list[list[str]](), list[tuple[bool, float]]()

    def train(arguments: list[str], device: str) -> None:
        told.append([word for word in arguments if not word.startswith("run.dir=")])
        is_watched = "stability.hardware.state=true" in arguments
        runs.append((is_watched, (1.1 if is_watched else 1.0) * (1.5 if len(runs) % 2 else 1.0)))

    monkeypatch.setattr(watch_price, "_train", train)
    monkeypatch.setattr(watch_price, "_read_phases", lambda _: {"step": 1e3 * runs[-1][1]})
    found = measure_watch(RECIPE, SMALL, WatchCase(2, WARM + 1), "cpu")
    assert [watched for watched, _ in runs] == [True, False, False, True]
    assert found.ratios == pytest.approx([1.1 / 1.5, 1.1 * 1.5])
    one, other = ({*words} for words in told[:2])
    assert one ^ other == {"stability.hardware.state=true", "stability.hardware.state=false"}


def test_what_cannot_be_measured_is_told() -> None:
    with pytest.raises(ConfigError, match=f"--steps {WARM}"):
        measure_watch(RECIPE, SMALL, WatchCase(1, WARM), "cpu")


@pytest.mark.slow
def test_a_run_that_fails_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(MegastableError, match="no-such"):
        watch_price._train([str(tmp_path / "no-such.yaml")], "cpu")
