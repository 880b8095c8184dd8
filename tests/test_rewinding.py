"""What the shell of a rewind tells the policy, and what it makes of the answer."""

from __future__ import annotations

from typing import Any
from unittest.mock import MagicMock

from megastable.rewinding import Rewinding, Tripped
from megastable.rng import rng_state
from megastable.stability.actions import Action, Cause
from megastable.stability.attribution import Conclusion
from megastable.stability.policy import Policy
from megastable.stability.region import Region
from megastable.stability.settings import PolicyConfig
from megastable.stability.signals import Verdict
from tests.stability.policies import seen

FOUND = Conclusion(
    Cause.DATA, [7, 9], [], "bad", inferred=[8, 20], region=MagicMock(spec=Region), odds=0.5, later=[30]
)


def go_back(found: Conclusion, *rates: float) -> tuple[Policy, Conclusion]:
    """The policy after a spike at step 40, and what is written down. found: by the examination. rates: of the good
    state, and when it tripped."""
    policy = Policy(PolicyConfig())
    decision = policy.decide(seen(40, Verdict.SPIKE), 0)
    tripped = Tripped(decision, MagicMock(), MagicMock(), MagicMock(step=40, seconds=1.0), MagicMock(), "")
    fields = ("config", "engine", "source", "points", "replays", "rates", "casebook", "origin", "samples",
              "last_resort", "guard", "selection", "note", "say", "phase")  # fmt: skip
    rewinding: Any = Rewinding(**{name: MagicMock() for name in fields})
    rewinding.guard.return_value.policy = policy
    rewinding.config.stability.policy.swap_most = 0.5
    rewinding.config.schedule.warmup_steps = 0
    rewinding.selection.return_value.share_without.return_value = 1.0
    rewinding.source.order.locate.return_value.corpus = [0]
    rewinding.replays.compare.return_value = (False, "")
    rewinding.casebook.adjacent.return_value = False
    rewinding.casebook.returned_again.return_value = found
    rewinding.origin.again.return_value = False
    rewinding.rates.before.return_value, rewinding.rates.highest_since.return_value = rates
    snapshot = rewinding.points.before_region.return_value
    snapshot.extra.state.updates = snapshot.step = 30
    snapshot.extra.random = rng_state()
    rewinding.go_back(tripped, MagicMock())
    return policy, rewinding.casebook.attribute.call_args.args[0]


def test_what_was_inferred_can_be_withdrawn_as_well() -> None:
    policy, told = go_back(FOUND, 1.0, 1.0)
    assert told == FOUND and policy.state.taken[-1].weak == (7, 8, 9, 20)


def test_a_cause_that_the_policy_overrules_leaves_nobody_convicted() -> None:
    """The rate had jumped, and the samples are convicted weakly."""
    policy, told = go_back(FOUND, 1.0, 10.0)
    assert policy.state.taken[-1].action is Action.CAP_LR
    assert told == Conclusion(Cause.LEARNING_RATE, [], [], "bad")
