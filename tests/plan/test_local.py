"""What is measured of the machine that the tests run on."""

from __future__ import annotations

import time

import pytest

from benchmarks import local_plan
from megastable.config.tree import RunConfig
from megastable.parallel.layout import Layout
from megastable.plan.time import step_time


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_plan, "LEAST", 0.002)


def config(hidden: int) -> RunConfig:
    model = {"layers": 2, "hidden": hidden, "heads": 4, "sequence_length": 64, "vocab_size": 512}
    return RunConfig.model_validate(
        {"model": model, "train": {"global_batch": 2, "micro_batch": 1}, "precision": {"kind": "fp32"}}
    )


@pytest.mark.slow
def test_seconds_are_those_of_the_processor() -> None:
    """Who sleeps, or waits for others, does not work."""

    def busy() -> None:
        end = time.process_time() + 0.01
        while time.process_time() < end:
            pass

    assert local_plan.seconds_of(lambda: time.sleep(0.02)) < 0.01
    assert local_plan.seconds_of(busy) == pytest.approx(0.01, rel=0.5)


def test_a_measured_machine_predicts_more_for_more_work() -> None:
    small, large = config(64), config(512)
    cluster = local_plan.measured_cpu(large)
    assert cluster.device == "cpu" and cluster.tflops.bf16 == cluster.tflops.fp32
    assert 1e-4 < cluster.tflops.bf16 < 100
    assert 1e-5 < cluster.memory_tb_per_second < 10
    assert 0 < cluster.kernel_us < 1000
    predicted = [step_time(c, Layout(), cluster) for c in (small, large)]
    assert predicted[1].seconds > 5 * predicted[0].seconds
    assert all(0 < found.mfu < 1 for found in predicted)
