"""The table of faults is whole, and chosen from by name."""

from __future__ import annotations

import pytest

from drills.gross import BROKEN_STEPS, CLEAN_EPOCHS, CLEAN_FP8, GROSS, REST
from drills.learning import (
    NAMES,
    QUICK,
    QUICK_FAULT_STEP,
    QUICK_STEPS,
    SCENARIOS,
    choose,
    references,
)
from drills.scenario import CLEAN, GLOBAL_BATCH, STEPS, Scenario
from drills.thin import THIN
from megastable.base.errors import ConfigError
from megastable.config.stability import StabilityConfig
from megastable.config.warmups import Stages
from megastable.data.plant import positions_of
from megastable_guard.actions import Cause


def test_each_plants_one_thing() -> None:
    assert (len(GROSS), len(THIN)) == (15, 15) and len(set(NAMES)) == 36
    assert set(QUICK) <= {s.name for s in GROSS}
    for s in SCENARIOS:
        assert sum(x is not None for x in (s.region, s.fault, s.outside)) == (0 if s.warning else 1)
        may_learn = s.name == "trickle"  # whose samples may be trained on, without an incident
        assert bool(s.causes) != (s.warning or may_learn)
        assert s.kinds and s.reason and not s.causes & s.tolerated
        assert (Cause.DATA in (s.tolerated if may_learn else s.causes)) == (s.region is not None)
        assert may_learn or Cause.DATA not in s.tolerated
        assert Cause.UNKNOWN not in s.causes | s.tolerated
        assert (s.text is not None) == (s.region == "text") and not (s.warning and not s.overrides)


def test_a_region_lasts_as_long_as_its_samples_are_read() -> None:
    for s in SCENARIOS:
        if s.region is not None:
            ranges = positions_of(s.step, s.samples, Stages.constant(GLOBAL_BATCH), s.of_each)
            first, last = ranges[0][0] // GLOBAL_BATCH + 1, (ranges[-1][1] - 1) // GLOBAL_BATCH + 1
            assert first == s.step and last <= s.step + s.steps - 1
            assert s.name == "three-epochs" or last == s.step + s.steps - 1


@pytest.mark.parametrize("scenario", [s for s in SCENARIOS if not s.warning], ids=lambda s: s.name)
def test_the_detector_knows_what_is_usual_before_and_an_action_is_proven_after(scenario: Scenario) -> None:
    tree = [
        override.split("=") for override in scenario.overrides if override.startswith("stability.detector")
    ]
    c = StabilityConfig.model_validate({"detector": {key.rpartition(".")[2]: value for key, value in tree}})
    usual = max(c.detector.warmup_steps, c.detector.min_values)
    assert usual + 10 <= scenario.step
    for_good = scenario.fault is not None and scenario.step + scenario.steps == STEPS
    assert for_good or scenario.step + scenario.steps + c.policy.verify_steps <= STEPS
    early = scenario.at(QUICK_FAULT_STEP)
    assert early.step == QUICK_FAULT_STEP >= usual + 10
    assert early.fault is None or (early.fault.step, early.fault.kind) == (early.step, scenario.fault.kind)  # type: ignore[union-attr]
    if scenario.name in QUICK:
        assert QUICK_FAULT_STEP + scenario.steps + c.policy.verify_steps <= QUICK_STEPS


def test_a_broken_kernel_is_mended_before_fp8_is_tried_again_and_that_before_the_end() -> None:
    (s,) = choose(["fp8-kernel"])
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
    assert choose(["thin"]) == list(THIN) and choose(["thin", "gross"]) == list(SCENARIOS)
    assert choose(["thin", NAMES[0]]) == [SCENARIOS[0], *THIN]
    assert CLEAN not in SCENARIOS
    with pytest.raises(
        ConfigError, match=r"flood: there is no such scenario: all, gross, thin, slow, random-tokens"
    ):
        choose([NAMES[0], "flood"])
