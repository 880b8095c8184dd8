"""The table of faults is whole, and chosen from by name."""

from __future__ import annotations

import pytest

from megastable.drills.scenarios import (
    BROKEN_STEPS,
    CLEAN,
    CLEAN_EPOCHS,
    CLEAN_FP8,
    NAMES,
    QUICK,
    QUICK_FAULT_STEP,
    QUICK_STEPS,
    REST,
    SCENARIOS,
    STEPS,
    Scenario,
    choose,
    references,
)
from megastable.errors import ConfigError
from megastable.stability.policy import Cause
from megastable.stability.settings import StabilityConfig


def test_there_are_fourteen_and_each_plants_one_thing() -> None:
    assert len(SCENARIOS) == len(set(NAMES)) == 14
    assert set(QUICK) <= set(NAMES)
    for s in SCENARIOS:
        assert sum(x is not None for x in (s.region, s.fault, s.outside)) == 1
        assert s.causes and s.kinds and s.reason and not s.causes & s.tolerated
        assert (Cause.DATA in s.causes) == (s.region is not None)
        assert Cause.DATA not in s.tolerated and Cause.UNKNOWN not in s.causes | s.tolerated


@pytest.mark.parametrize("scenario", SCENARIOS, ids=NAMES)
def test_the_detector_knows_what_is_usual_before_and_an_action_is_proven_after(scenario: Scenario) -> None:
    tree = [
        override.split("=") for override in scenario.overrides if override.startswith("stability.detector")
    ]
    c = StabilityConfig.model_validate({"detector": {key.rpartition(".")[2]: value for key, value in tree}})
    usual = max(c.detector.warmup_steps, c.detector.min_values)
    assert usual + 10 <= scenario.step
    assert scenario.step + scenario.steps + c.policy.verify_steps <= STEPS
    early = scenario.at(QUICK_FAULT_STEP)
    assert early.step == QUICK_FAULT_STEP >= usual + 10
    assert early.fault is None or (early.fault.step, early.fault.kind) == (early.step, scenario.fault.kind)  # type: ignore[union-attr]
    if scenario.name in QUICK:
        assert QUICK_FAULT_STEP + scenario.steps + c.policy.verify_steps <= QUICK_STEPS


def test_a_broken_kernel_is_mended_before_fp8_is_tried_again_and_that_before_the_end() -> None:
    (s,) = (s for s in SCENARIOS if Cause.NUMERICS in s.causes)
    assert BROKEN_STEPS < REST < STEPS - s.step - 10
    assert s.overrides == (*CLEAN_FP8.overrides, f"stability.policy.fp8_rest={REST}")


def test_every_scenario_has_a_run_without_a_fault_to_be_compared_with() -> None:
    assert references(SCENARIOS) == [CLEAN, CLEAN_EPOCHS, CLEAN_FP8] and references(
        choose(["fp8-kernel"])
    ) == [CLEAN_FP8]
    assert references(choose(QUICK)) == [CLEAN]
    for clean in (CLEAN, CLEAN_EPOCHS, CLEAN_FP8):
        assert clean.name == clean.reference not in NAMES and clean.fault is None and not clean.causes


def test_faults_lie_at_the_steps_that_are_scored() -> None:
    for s in SCENARIOS:
        if s.fault is not None:
            assert (s.fault.step, s.fault.steps) == (s.step, s.steps)


def test_chosen_by_name_in_the_order_of_the_table() -> None:
    assert [s.name for s in choose([NAMES[3], NAMES[0]])] == [NAMES[0], NAMES[3]]
    assert choose([]) == choose(["all"]) == choose([NAMES[5], "all"]) == list(SCENARIOS)
    assert CLEAN not in SCENARIOS
    with pytest.raises(ConfigError, match=r"flood: there is no such scenario: all, random-tokens"):
        choose([NAMES[0], "flood"])
