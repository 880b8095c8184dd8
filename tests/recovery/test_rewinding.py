"""What the shell of a rewind tells the policy, and what it makes of the answer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch

from megastable.attribution.sample_history import Waiting
from megastable.attribution.sample_replay import Trained
from megastable.checkpoint import markers, origin, store
from megastable.checkpoint.origin import Origin
from megastable.checkpoint.snapshot import Ring
from megastable.checkpoint.vitals import Vitals
from megastable.config.stability import StabilityConfig
from megastable.config.tree import ScheduleConfig
from megastable.config.warmups import Stages
from megastable.engine import locators
from megastable.recovery import rewind_points
from megastable.recovery.replay_trials import SuspectsTrial
from megastable.recovery.rewind_points import Points, RewindState
from megastable.recovery.rewinding import Rewinding, Tripped
from megastable.run.events.event import Event
from megastable.run.events.stability_events import RateCut, RateWarmup, SettingsAdjusted
from megastable_guard.actions import Action, Cause, Signals, Verdict
from megastable_guard.conclusion import Conclusion, Region, Suspect
from megastable_guard.detector import Detector, DetectorState
from megastable_guard.guard_config import DetectorConfig, PolicyConfig
from megastable_guard.policy import Policy
from megastable_guard.policy_state import Taken
from megastable_guard.random_states import read_random_states
from megastable_guard.scores import CROWD
from megastable_guard.trials import CorpusTrial, HarmTrial, RemedyTrial, TrialVerdict
from tests.checkpoint.states import state_of
from tests.guard.traces import seen
from tests.journal import KeptLog

FOUND = Conclusion(Cause.DATA, [7, 8, 9, 20], [], "bad", region=MagicMock(spec=Region), later=[30])


def shell(policy: Policy) -> Any:
    """All that it talks to is made up; the present state is that of step 40, the good one that of step 30."""
    fields = ("parts", "guard", "points", "replays", "incident_log", "last_resort", "watches")
    rewinding: Any = Rewinding(**{name: MagicMock() for name in fields})
    rewinding.guard.policy = policy
    rewinding.trials = MagicMock()
    rewinding.trials.unless_unreadable = lambda step, attempt: attempt()
    rewinding.trials.try_suspects.return_value = None  # nothing to compare
    rewinding.trials.try_remedies.return_value = None
    rewinding.config.stability.detector = DetectorConfig()
    rewinding.replays.without_kernels.return_value = None  # nor is a kernel to blame
    rewinding.engine.numerics.kernels = {"attention": "sdpa"}
    rewinding.config.stability.policy.swap_most = 0.5
    rewinding.config.schedule = ScheduleConfig(warmup_steps=0)
    rewinding.parts.select_unskipped.return_value.share_without.return_value = 1.0
    rewinding.parts.source.order.locate_samples.return_value.corpus = [0]
    snapshot = rewinding.points.before_region.return_value
    saved = snapshot.extra.state
    saved.updates = saved.step = snapshot.step = 30
    saved.model_copy.return_value = saved
    snapshot.extra.random = read_random_states()
    return rewinding


def go_back(
    found: Conclusion,
    chosen: str = "",
    harms_anyway: bool = False,
    verdict: Verdict = Verdict.SPIKE,
    tried: TrialVerdict | None = TrialVerdict.BAD,
    corpora: Sequence[int] = (0,),
    before: int = 0,
    helps: bool = True,
    detector: DetectorState | None = None,
) -> tuple[Any, Conclusion]:
    """The shell after trouble at step 40, when the rate was ten times that of the good state, and what is written down.
    found: by the examination. corpora: of what it names; before: proven incidents of the corpus 1; helps: to leave it
    out. chosen: the remedy whose branch wins; harms_anyway: other data does not help."""
    policy = Policy(PolicyConfig(swap_after=2, rewinds=9))
    policy.decide_on_step(seen(20), 0)
    earlier = Taken(clock=20, step=20, action=Action.REWIND, cause=Cause.DATA, corpus="1", proven=True)
    policy.state.taken = [earlier.model_copy() for _ in range(before)]
    decision = policy.decide_on_step(seen(40, Verdict.SPIKE), 0)
    decision = replace(decision, finding=replace(decision.finding, verdict=verdict))
    tripped = Tripped(
        decision, MagicMock(state=MagicMock(step=40, seconds=1.0)), detector or DetectorState(), ""
    )
    rewinding = shell(policy)
    rewinding.parts.source.order.locate_samples.return_value.corpus = list(corpora)
    rewinding.parts.source.order.corpora = [SimpleNamespace(name="0"), SimpleNamespace(name="1")]
    rewinding.trials.try_corpus.return_value = CorpusTrial("1", helps, 0.3, 0.01, 16)
    rewinding.replays.compare_replays.return_value = (False, "")
    rewinding.incident_log.is_adjacent.return_value = False
    rewinding.incident_log.blame_returned.return_value = found
    rewinding.points.origin.note_return.return_value = False
    points = rewinding.points
    points.rate_before.return_value, points.highest_rate_since.return_value = 1e-3, 1e-2
    rewinding.config.train.steps = 1000
    suspects = None if tried is None else trial(tried)
    rewinding.trials.try_suspects.return_value = SuspectsTrial(suspects, harms_anyway)
    if chosen:
        rewinding.trials.try_remedies.return_value = RemedyTrial(chosen, 0.3, 0.01, 26)
    with mock.patch.object(locators, "measure_sizes", return_value={}):  # there is no model
        rewinding.go_back(tripped)
    written = (
        rewinding.incident_log.record_conclusion.call_args or rewinding.incident_log.train_through.call_args
    )
    return rewinding, written.args[0]


@pytest.mark.parametrize(
    ("verdict", "proven"), [(TrialVerdict.BAD, True), (TrialVerdict.NOISE, False), (None, False)]
)
def test_what_no_trial_has_clearly_shown_can_be_withdrawn(verdict: TrialVerdict | None, proven: bool) -> None:
    made, told = go_back(replace(FOUND, alone=FOUND.bad), tried=verdict)
    assert told.bad_positions == FOUND.bad_positions and told.cause is Cause.DATA and told.proven is proven
    (taken,) = made.guard.policy.state.taken
    assert (taken.proven, taken.unproven) == (proven, () if proven else (7, 8, 9, 20))
    made.trials.try_remedies.assert_not_called()  # other data helps


@pytest.mark.parametrize(("others", "is_skipped"), [(2.0, True), (6.4, False), (math.nan, True)])
def test_a_few_that_are_far_out_are_no_cause_where_all_others_are_as_hard_on_the_good_state(
    others: float, is_skipped: bool
) -> None:
    detector = Detector(DetectorConfig())
    for step in range(100):
        detector.observe_step(Signals(step, 2.0 + 0.01 * (step % 3), 1.0))
    suspects = [Suspect(position, 9.0, 20.0) for position in FOUND.bad]
    suspects += [Suspect(position, others, 1.0) for position in range(40, 60)]
    found = replace(FOUND, alone=FOUND.bad, suspects=suspects)
    made, told = go_back(found, tried=TrialVerdict.NOISE, detector=detector.state)
    assert made.incident_log.train_through.called is not is_skipped
    assert (
        told.bad_positions == FOUND.bad_positions and made.incident_log.record_conclusion.called is is_skipped
    )


@pytest.mark.parametrize(
    ("chosen", "action", "cause", "emitted"),
    [
        ("cap_lr", Action.CAP_LR, Cause.LEARNING_RATE, [RateCut]),
        ("cut_lr", Action.CUT_LR, Cause.LEARNING_RATE, [RateCut]),
        ("rewarm", Action.ADJUST, Cause.STATE, [RateWarmup]),
        ("reset_moments", Action.ADJUST, Cause.MOMENTS, [RateWarmup, SettingsAdjusted]),
        ("beta2", Action.ADJUST, Cause.MOMENTS, [SettingsAdjusted]),
        ("swiglu_clamp", Action.ADJUST, Cause.STATE, [SettingsAdjusted]),
        ("other_kernels", Action.FALL_BACK, Cause.NUMERICS, []),
    ],
)
def test_a_remedy_that_won_takes_the_blame_off_the_samples(
    chosen: str, action: Action, cause: Cause, emitted: list[type[Event]]
) -> None:
    made, told = go_back(FOUND, chosen, harms_anyway=True)
    policy = made.guard.policy
    assert (policy.state.taken[-1].action, policy.state.taken[-1].remedy) == (action, chosen)
    assert (told.cause, told.bad_positions, told.later) == (cause, [], [])
    assert told.kernels == tuple(policy.state.kernels) == (("sdpa",) if chosen == "other_kernels" else ())
    assert made.incident_log.record_conclusion.call_args.args[1] == []  # nothing is deferred
    assert [type(call.args[0]) for call in made.log.emit_event.call_args_list] == emitted
    made.engine.change_once.assert_called_once_with(chosen)
    assert not policy.state.taken[0].proven and not policy.state.taken[0].unproven


@pytest.mark.parametrize(
    ("corpora", "before", "verdict", "helps", "action"),
    [
        ([1, 1, 1, 0, 0], 2, TrialVerdict.BAD, True, Action.SWAP_CORPUS),
        ([1, 1, 1, 0, 0], 2, TrialVerdict.MIXED, True, Action.SWAP_CORPUS),  # deferred is bad as well
        ([1, 1, 1, 0, 0], 2, TrialVerdict.BAD, False, Action.REWIND),
        ([1, 1, 1, 0, 0], 1, TrialVerdict.BAD, True, None),
        ([0, 0, 0, 1, 1], 2, TrialVerdict.BAD, True, None),  # of another corpus
        ([0, 0, 1, 1], 2, TrialVerdict.BAD, True, None),  # of none in particular
        ([1, 1, 1, 0, 0], 2, None, True, None),  # not clear
    ],
)
def test_a_corpus_of_bad_samples_is_tried_after_enough_clear_incidents(
    corpora: list[int], before: int, verdict: TrialVerdict | None, helps: bool, action: Action | None
) -> None:
    found = replace(FOUND, later=[30] if len(corpora) == 5 else [])
    made, _ = go_back(found, tried=verdict, corpora=corpora, before=before, helps=helps)
    assert made.trials.try_corpus.called == (action is not None)
    if action is not None:
        assert made.trials.try_corpus.call_args.args[:2] == ("1", [7, 8, 9, 20, 30])
    assert made.guard.policy.state.taken[-1].action is (action or Action.REWIND)
    *_, left_out = made.incident_log.record_conclusion.call_args.args
    assert left_out == ("1" if action is Action.SWAP_CORPUS else None)


def test_what_is_not_finite_is_bad_without_a_trial_and_remedies_wait_until_it_comes_back() -> None:
    made, told = go_back(FOUND, "cut_lr", verdict=Verdict.NON_FINITE)
    assert told.bad_positions == FOUND.bad_positions and made.guard.policy.state.taken[-1].proven
    made.trials.try_suspects.assert_not_called()
    made.trials.try_remedies.assert_not_called()


def look_back(found: Conclusion, good: bool = True, last: int = 39) -> tuple[Any, Any]:
    """Where the run goes back to, None = it stays, and the shell. good: there is a good state of before the case."""
    policy, present = Policy(PolicyConfig(rewind_warmup=8)), MagicMock(step=40, seconds=1.0)
    policy.decide_on_step(seen(40), 0)
    rewinding = shell(policy)
    trained = [MagicMock(step=step, positions=np.array([step - 30])) for step in (37, 38, 39, 40)]
    rewinding.points.steps_since = lambda onset: [t for t in trained if t.step >= onset]
    rewinding.points.examine_window.return_value = found
    if not good:
        rewinding.points.look_back_before.return_value = None
    case = Waiting(kind="batch", first=last - 2, last=last, verdict=Verdict.SHIFT, reason="higher")
    return rewinding.look_back(case, MagicMock(), present), rewinding


def test_a_crowd_that_is_bad_is_undone() -> None:
    found = Conclusion(Cause.DATA, list(range(CROWD)), [], "bad")
    stands, made = look_back(found)
    assert stands is not None
    window = made.points.examine_window.call_args.args[0]
    assert [t.step for t in window] == [37, 38, 39]
    (taken,) = made.guard.policy.state.taken
    assert (taken.action, taken.cause, taken.unproven) == (Action.REWIND, Cause.DATA, tuple(range(CROWD)))
    assert made.guard.policy.state.rewound == 30
    assert made.log.emit_event.call_args.args == (RateWarmup(step=30, begin=0.1, updates=8),)
    assert made.guard.policy.state.watching and made.incident_log.record_conclusion.call_args.args[0] == found
    made.points.forget_after.assert_called_once_with(30)
    made.points.restore_snapshot.assert_not_called()
    made.watches.samples.shorten_rest.assert_called_once()


@pytest.mark.parametrize(
    "found",
    [
        Conclusion(Cause.DATA, list(range(CROWD - 1)), [], "bad"),
        Conclusion(Cause.STATE, [], [], "harmless"),
    ],
)
@pytest.mark.parametrize("good", [True, False])
def test_whoever_is_not_bad_costs_nothing_but_time(found: Conclusion, good: bool) -> None:
    stands, made = look_back(found, good)
    assert stands is None and not made.guard.policy.state.taken and made.guard.policy.state.rewound is None
    made.points.restore_snapshot.assert_called_once_with(made.points.ring.copy_aside.return_value)
    made.watches.samples.record_nobody_bad.assert_called_once()
    made.incident_log.open_incident.assert_not_called()
    made.points.forget_after.assert_not_called()
    made.points.go_back_before.assert_not_called()  # which drops points that are not good
    made.watches.samples.skip_bad_samples.assert_not_called()


def test_a_few_that_are_bad_by_themselves_are_skipped_on_the_present_state() -> None:
    """So is whoever outside of the window is like them, but not what is suspected in a crowd or by a gradient."""
    found = Conclusion(Cause.DATA, [7, 8, 20, 30], [], "bad", alone=[7])
    stands, made = look_back(found)
    assert stands is None
    made.points.restore_snapshot.assert_called_once_with(made.points.ring.copy_aside.return_value)
    assert made.guard.policy.state.rewound is None
    case, few = made.watches.samples.skip_bad_samples.call_args.args[:2]
    assert case.first == 37 and few == Conclusion(Cause.DATA, [7, 20, 30], [], "bad", alone=[7])
    (taken,) = made.guard.policy.state.taken
    assert (taken.action, taken.cause, taken.unproven) == (Action.SKIP, Cause.DATA, (7, 20, 30))
    for undone in (made.watches.samples.record_nobody_bad, made.incident_log.open, made.points.forget_after):
        undone.assert_not_called()


@pytest.mark.parametrize("norm", [1.0, np.nan])
def test_a_look_without_a_good_state_drops_no_point_and_quarantines_no_checkpoint(
    norm: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state that was resumed from, and the only later point, are not finite, or worse than the checkpoint says."""
    monkeypatch.setattr(origin, "run_on_first", lambda action: action())
    monkeypatch.setattr(rewind_points, "gather_objects", lambda value: [value])
    resumed, config, engine = state_of(step=20, cursor=160, recent_losses=[3.0] * 8), MagicMock(), MagicMock()
    config.checkpoint.vitals.worse, config.batches = 0.1, Stages.of_constant(8)
    config.stability.policy.verify_steps = 60
    checkpoint = tmp_path / store.name_of(20)
    checkpoint.mkdir()
    suspect = Origin(MagicMock(checkpoints=tmp_path), config, resumed, [], KeptLog())
    engine.optimizer_state.return_value = {"weight": torch.zeros(2)}
    engine.flat_state().sum_norms.return_value = MagicMock(parameters=norm, second_moment=1.0)
    laboratory = MagicMock(measure_losses=lambda positions: np.full(positions.size, 9.0))
    config.stability = StabilityConfig()
    points = Points(MagicMock(config=config, engine=engine, log=KeptLog(), acts=False), suspect)
    points.ring, points.laboratory = Ring(engine, 4, 10), laboratory
    points.trained.append(Trained(38, np.arange(300, 308), np.full(8, 4.0), True))
    for step in (20, 30):
        points.ring.take_snapshot(
            step,
            RewindState(state_of(step=step, cursor=8 * step), {}, MagicMock(), {}),
        )
    made = shell(Policy(PolicyConfig()))
    made.points, present = points, MagicMock(step=40)
    made.parts.select_unskipped.return_value.mask_skipped = lambda positions: np.zeros(
        positions.size, dtype=bool
    )
    made.parts.select_unskipped.return_value.next_kept = lambda begin, count: (
        np.arange(begin, begin + count),
        None,
    )
    case = Waiting(kind="batch", first=37, last=39, verdict=Verdict.SHIFT, reason="higher")
    assert made.look_back(case, MagicMock(), present) is None
    made.watches.samples.record_nobody_bad.assert_called_once()
    assert points.ring.steps == [20, 30]
    assert not suspect.reason and markers.read_bad_ruling(checkpoint) is None
    points.go_back_before(37, 0, made.parts.select_unskipped())
    assert not points.ring.steps and bool(suspect.reason) == np.isfinite(norm)


def trial(verdict: TrialVerdict, pays: bool = False) -> HarmTrial:
    return HarmTrial(verdict, 0.1, 0.01, 0.1, 0.01, 200, 16, pays, damaged=False)


@pytest.mark.parametrize(
    ("saved", "refused", "redone", "back"),
    [
        (30, (40,), 0, True),  # nine updates are done again
        (30, (), 0, False),
        (10, (40,), 0, False),  # too many
        (38, (39, 40), 64, True),  # nothing is undone
        (30, (40,), 60, False),  # the run has done enough again
    ],
)
def test_what_is_new_is_trained_on_and_so_are_the_refused_batches_of_it(
    saved: int, refused: tuple[int, ...], redone: int, back: bool
) -> None:
    """From the snapshot if updates were refused since, and few others are undone. Else from where the run stands."""
    policy = Policy(PolicyConfig())
    decision = policy.decide_on_step(seen(40, Verdict.SPIKE), 0)
    state = MagicMock(step=40, seconds=1.0)
    rewinding = shell(policy)
    rewinding.replays.compare_replays.return_value = (False, "")
    rewinding.incident_log.blame_returned.return_value = FOUND
    rewinding.incident_log.has_acted = False
    rewinding.trials.try_suspects.return_value = SuspectsTrial(trial(TrialVerdict.NEW, pays=True), False)
    policy.state.redone = redone
    rewinding.points.before_region.return_value.step = saved
    rewinding.points.steps_since = lambda onset: [
        MagicMock(step=step, applied=step not in refused) for step in range(onset, 41)
    ]
    done = MagicMock(state=state, applied=False)
    with mock.patch.object(locators, "measure_sizes", return_value={}):  # there is no model
        stands = rewinding.go_back(Tripped(decision, done, DetectorState(), ""))
    assert (stands is not None) == back
    assert (
        rewinding.points.restore_snapshot.called == (not back) and rewinding.parts.loader.go_to.called == back
    )
    assert not policy.state.taken and not policy.state.watching
    assert rewinding.incident_log.train_through.call_args.args[3] == (10 if back else 0)
    rewinding.incident_log.record_conclusion.assert_not_called()


def test_nothing_behind_the_cursor_changes_places_where_nothing_is_undone() -> None:
    """It was trained on, and the sample that came in its place would never be read."""
    rewinding, named = shell(Policy(PolicyConfig())), list(range(100, 300))
    found = Conclusion(Cause.DATA, named, [], "bad")
    rewinding.trials.try_suspects.return_value = SuspectsTrial(trial(TrialVerdict.MIXED), False)
    for cursor, later in ((50, named), (200, list(range(200, 300)))):
        chosen, why = rewinding.choose_skips(found, [MagicMock(step=30)], MagicMock(cursor=cursor, step=40))
        assert (chosen.bad_positions, chosen.later, why) == ([], later, "")
    _, why = rewinding.choose_skips(found, [MagicMock(step=30)], MagicMock(cursor=300, step=40))
    assert "were read already" in why


@pytest.mark.parametrize(("costly", "skipped"), [([(7, 10)], [7, 8, 9, 20]), ([(7, 9)], [])])
def test_what_cost_more_than_it_taught_is_skipped_when_it_makes_trouble_again(
    costly: list[tuple[int, int]], skipped: list[int]
) -> None:
    """Without a further trial, near whose end there is too little left to measure it by, if most of them are those."""
    rewinding = shell(Policy(PolicyConfig()))
    rewinding.guard.policy.state.costly = costly
    rewinding.trials.try_suspects.return_value = SuspectsTrial(trial(TrialVerdict.MIXED), False)
    chosen, why = rewinding.choose_skips(FOUND, [MagicMock(step=30)], MagicMock(cursor=0, step=40))
    assert (chosen.bad_positions, why, chosen.proven) == (skipped, "", True)
    assert rewinding.trials.try_suspects.called == (not skipped)


def test_what_only_checkpoints_need_is_not_copied() -> None:
    kept = list[RewindState]()
    ring = SimpleNamespace(steps=[], take_snapshot=lambda step, extra, counters, marks: kept.append(extra))
    engine = SimpleNamespace(adjustments=SimpleNamespace(now=()))
    points: Any = SimpleNamespace(ring=ring, marks=lambda: None, engine=engine)
    state = state_of(recent_losses=[3.0], stability={"samples": [1.0]}, vitals=Vitals(losses=[2.5]))
    Points.take_snapshot(points, state, DetectorState(), {})
    state.recent_losses.append(4.0)
    (point,) = kept
    assert point.state.recent_losses == [3.0] and point.state.stability == {}
    assert point.state.vitals is state.vitals and state.stability == {"samples": [1.0]}


def test_a_snapshot_is_judged_with_the_changes_that_it_was_trained_with() -> None:
    """And those of now are in force again, whatever happens."""
    switched = list[tuple[str, ...]]()
    adjustments = SimpleNamespace(now=("swiglu_clamp",), switch_to=switched.append)
    norms = SimpleNamespace(parameters=1.0, second_moment=1.0)
    engine = SimpleNamespace(
        adjustments=adjustments, flat_state=lambda: SimpleNamespace(sum_norms=lambda: norms)
    )

    def reference(*_: object) -> tuple[np.ndarray, np.ndarray]:
        assert switched == [()]
        return np.full(8, 3.0), np.full(8, 2.9)

    points: Any = SimpleNamespace(engine=engine, restore_snapshot=lambda snapshot: None, _reference=reference)
    snapshot: Any = SimpleNamespace(step=20, extra=SimpleNamespace(adjusted=()))
    selection: Any = None
    assert Points._tried(points, snapshot, selection, lambda step, measure: "") == (True, True)
    assert switched == [(), ("swiglu_clamp",)]
