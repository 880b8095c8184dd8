"""Events of the stability system: refused updates, incidents, rewinds, learning-rate limits."""

from __future__ import annotations

from megastable.base.text import count_noun, show_number, show_size
from megastable.run.events.event import (
    NOTHING,
    Event,
    Flag,
    Items,
    MaybeTree,
    OfIncident,
    Ranges,
    Real,
    Text,
    Tree,
    Whole,
    read_later,
    read_pairs,
    read_tree,
)


class Discarded(Event):
    """A refused update. first_position, next_position: of its batch; loss: nats per token."""

    NAME = "discarded"
    step: Whole
    verdict: Text
    reason: Text
    first_position: Whole
    next_position: Whole
    loss: Real
    grad_norm: Real
    loss_scale: Real

    def describe_event(self) -> str:
        loss, grad_norm = show_number(self.get("loss")), show_number(self.get("grad_norm"), ".3g")
        return f"update refused, loss {loss}, gradient norm {grad_norm}{self.format_reason()}"


class _Samples(Event):
    """A case of suspected samples of the steps `first` to `last` is closed without a skip. suspected: the reason;
    positions: the known ones."""

    FOUND = "examined, nothing is skipped"
    step: Whole
    first: Whole
    last: Whole
    suspected: Text
    positions: Items
    reason: Text

    def describe_event(self) -> str:
        first_step, last_step = self.get("first"), self.get("last")
        step_text = f"step {first_step}" if first_step == last_step else f"steps {first_step} to {last_step}"
        return f"samples of {step_text} {self.FOUND}{self.format_reason()}"


class DiscardExamined(_Samples):
    """Of a refused batch. seconds: duration."""

    NAME = "discard_examined"
    seconds: Real


class SamplesExamined(_Samples):
    """seconds: duration."""

    NAME = "samples_examined"
    seconds: Real


class SamplesDropped(_Samples):
    NAME = "samples_dropped"
    FOUND = "not examined"


class OfHardware(Event):
    """What was found at or after `step`; ranks: whose it is, as far as it is known; hosts: theirs."""

    TOLD = "{reason}"

    step: Whole
    ranks: Items
    hosts: Items
    reason: Text


class ReplicasDiffer(OfHardware):
    """Copies that must be equal differ after `step`; `proven`: the last step after which they were equal. ranks: whose
    copy a majority contradicts."""

    NAME = "replicas_differ"
    proven: Whole


class WrongCopy(OfHardware):
    """Copies differed after `step`, which was not known to be wrong on which of the ranks. The step done again gives
    what the others held. ranks: whose copy it does not give, and those whose gradients were in it."""

    NAME = "wrong_copy"


class MessagesDiffer(OfHardware):
    """The update of `step` was refused: a message between pipeline stages did not arrive as it was sent. ranks: that
    received it."""

    NAME = "messages_differ"


class StateChanged(OfHardware):
    """Masters, moments or weights of some `ranks` are not what the update of `step` left."""

    NAME = "state_changed"


class GradientsDoubted(OfHardware):
    """The update of `step` was refused, as a rank's gradient stood out (kinds: how), or the sum of all is wrong.
    verdict: "sum"; of repeating the step: "transient", "persistent", or "data": no hardware, and the step is done as it
    is. ranks: which ones are proven to be wrong."""

    NAME = "gradients_doubted"
    verdict: Text
    kinds: Items


class ReplayDiffers(OfHardware):
    """A micro-batch of `step`, computed again, gave another gradient, or a product with a known answer is wrong.
    verdict: "transient" or "persistent". ranks: which were wrong, one of them at least; empty if it is not known."""

    NAME = "replay_differs"
    verdict: Text


class HostFaulty(OfHardware):
    """Ranks on `hosts` are proven to compute wrong, again and again: the process ends, to go on without them."""

    NAME = "host_faulty"


class Located(Event):
    """The origin of the first non-finite number (engine/locators.py), or of a growth, in its
    field `sentence`."""

    NAME = "located"
    TOLD = "{sentence}"
    step: Whole
    kind: Text
    reproduced: Flag


class Would(Event):
    """A decision of a dry run."""

    NAME = "would"
    TOLD = "would {action}{because}"
    step: Whole
    action: Text
    reason: Text


class IncidentEvent(Event):
    """An incident changes. what: opened, attributed, released, rewound, restarted, handed over or closed. Opened by the
    training it has a reason, by the supervisor only the summary.

    number, summary: of the incident, as it is now (guard's incident); policy, left_out: state of the policy and
    the incident log, absent from the supervisor's. suspects: measured samples; deferred, returns: old and new positions
    of deferred samples; lost: those without room; positions: skipped, or released; next_epoch: released, but already
    passed. region: of bad data.
    """

    NAME = "incident"
    what: Text
    step: Whole = None
    verdict: Text = None
    onset: Whole = None
    cause: Text = None
    action: Text = None
    remedy: Text = None
    reason: Text = None
    positions: Ranges = ()
    next_epoch: Ranges = ()
    suspects: Items = ()
    region: MaybeTree = None
    deferred: Ranges = ()
    returns: Ranges = ()
    lost: Whole = None
    to_step: Whole = None
    cursor: Whole = None
    number: Whole = None
    left_out: Tree = NOTHING
    summary: Tree = NOTHING
    policy: Tree = NOTHING

    def describe_event(self) -> str:
        what, summary = self.get("what"), read_tree(self.get("summary"))
        about = str(what)
        if what == "opened":
            about += f": {self.get('reason') or summary.get('failure') or summary.get('verdict')}"
            about += self._action()
        elif what == "attributed":
            given = summary.get("reasons")
            reason_text = self.get("reason") or (given[-1] if isinstance(given, list) and given else "")
            about = f"cause: {self.get('cause') or summary.get('cause')}{f': {reason_text}' if reason_text else ''}"
            about += self._action()
            about += f", {self['remedy']}" if self.get("remedy") else ""
            about += f"; {deferral_text}" if (deferral_text := read_later(self.fields)) else ""
        elif what == "released":
            ranges = read_pairs(self.get("positions")) + read_pairs(self.get("next_epoch"))
            skipped_text = count_noun(
                sum(range_end - range_first for range_first, range_end in ranges), "skipped sample"
            )
            about = f"{skipped_text} found harmless, to be read after all{self.format_reason()}"
        elif what == "rewound":
            position_text = f", going on from position {self['cursor']}" if "cursor" in self else ""
            about = f"back at step {self.get('to_step')}{position_text}"
        elif what == "restarted":
            about = "training goes on in a new process"
        elif what == "handed over":
            about = "handed over to the next process"
        elif what == "closed":
            about = f"closed: {summary.get('outcome')}"
        return f"incident {self.get('number')}: {about}"

    def _action(self) -> str:
        return f"; action: {self['action']}" if self.get("action") else ""


class Handover(OfIncident):
    """The process ends, and the next one resumes from a checkpoint before step `before`. Other fields: as
    `IncidentEvent`."""

    NAME = "handover"
    TOLD = "handed over to a checkpoint from before step {before}{because}"
    step: Whole = None
    before: Whole


class IncidentLater(Event):
    """The loss at a step, `after` steps after an incident was over: median of the last applied steps, nats per token.
    at_end: of the run."""

    NAME = "incident_later"
    number: Whole
    step: Whole
    after: Whole
    loss: Real
    at_end: Flag = None

    def describe_event(self) -> str:
        end_text = ", at the end of the run" if self.at_end else ""
        when_text = f"{self.get('after')} steps after incident {self.get('number')} was over"
        return f"{when_text}{end_text}: loss {show_number(self.get('loss'))}"


class AlertEvent(OfIncident):
    """what: begun, with the fields of `IncidentEvent`, or over."""

    NAME = "alert"
    what: Text
    step: Whole

    def describe_event(self) -> str:
        if self.get("what") == "over":
            return "the alert is over"
        return f"ALERT: nothing more is done automatically, training goes on{self.format_reason()}"


class TrendEvent(Event):
    """A slow signal (warnings/trends.py), or one of routers (warnings/routing.py). what: warned, or over; remedy:
    suggested to people, nothing acts on it."""

    NAME = "trend"
    what: Text
    step: Whole
    signal: Text
    text: Text
    remedy: Text
    numbers: Tree

    def describe_event(self) -> str:
        remedy_text = f". What helps: {self.get('remedy')}" if self.get("remedy") else ""
        return f"trend of {self.get('signal')}: {self.get('text')}{remedy_text}"


class BranchesTried(Event):
    """Branches of `steps` steps were trained from the state after `snapshot`, and compared on samples of the data to
    come. before, present: their mean loss (nats) on that state, and where the run stands.

    branches: of each one its name; loss: of the samples at its end; difference: that minus the loss of the control, and
    its standard error; losses, norms: of its steps, to be drawn; cost: how intrusive it is, from 0.

    Where suspects were tried, suspects: how many; cost: the difference of the branch with them; learnt: by how many
    nats others of them are easier at its end; verdict: new, bad, mixed or noise (guard: trials.py); damaged: the
    state where the run stands is worse than both. Where remedies were tried, chosen: the name of a branch
    (guard: trials.py); healed: those in which what was warned of is over; tokens: ids of those that were rare until
    then, the most frequent first; also where the run was tried without a corpus, with the name of that corpus.
    """

    NAME = "branches_tried"
    TOLD = "tried: {reason}"
    step: Whole
    snapshot: Whole
    steps: Whole
    suspects: Whole
    verdict: Text
    chosen: Text
    healed: Items
    tokens: Items
    corpus: Text
    cost: Real
    cost_error: Real
    learnt: Real
    learnt_error: Real
    damaged: Flag
    before: Real
    present: Real
    branches: Items
    reason: Text
    seconds: Real


class Probed(Event):
    """loss: nats per token, mean over `samples` samples that are never trained on."""

    NAME = "probed"
    step: Whole
    loss: Real
    samples: Whole

    def describe_event(self) -> str:
        return f"probe loss {show_number(self.get('loss'))}"


class BaselineReset(Event):
    """The detector relearns the level of the loss."""

    NAME = "baseline_reset"
    TOLD = "detector baseline reset: {reason}"
    step: Whole
    reason: Text


class NoSnapshots(Event):
    """bytes: of one snapshot; budget: bytes available per rank."""

    NAME = "no_snapshots"
    bytes: Whole
    budget: Real

    def describe_event(self) -> str:
        return f"no room for a snapshot: one takes {show_size(self.get('bytes'))}"


class SnapshotRejected(Event):
    NAME = "snapshot_rejected"
    TOLD = "snapshot passed over: it {reason}"
    step: Whole
    reason: Text


class FellBack(Event):
    """to: the precision used instead; fallbacks: how many so far."""

    NAME = "fell_back"
    TOLD = "goes on without FP8, in {to}{because}"
    step: Whole
    to: Text
    reason: Text
    fallbacks: Whole


class KernelsLeft(Event):
    """Plain PyTorch computes in place of these kernels from here on."""

    NAME = "kernels_left"
    step: Whole
    kernels: Items
    reason: Text

    def describe_event(self) -> str:
        return f"goes on without {_listed(self.kernels)}{self.format_reason()}"


class KernelsTriedAgain(Event):
    """Kernels that were left are others by now, of another version or by another recipe. now: those in use."""

    NAME = "kernels_tried_again"
    step: Whole
    kernels: Items
    now: Items

    def describe_event(self) -> str:
        left = _listed(self.kernels)
        return f"computes by {_listed(self.now)}: {left}, which was left, is no longer in use"


def _listed(names: Items) -> str:
    return " and ".join(map(str, names)) or "plain PyTorch"


class Returned(Event):
    """FP8 is used again. fallbacks: how many so far."""

    NAME = "returned"
    TOLD = "computes in FP8 again{because}"
    step: Whole
    to: Text
    reason: Text
    fallbacks: Whole


class RateCut(Event):
    """limits: all in force (guard's policy_state)."""

    NAME = "rate_cut"
    TOLD = "the learning rate is limited{because}"
    step: Whole
    reason: Text
    limits: Items


class SettingsAdjusted(Event):
    """A remedy changes how the run trains. settings: reset_bias, reset_moments (once), past_routing (for 64 updates),
    clip, qk_clip, z_loss, hold_router, router_z_loss, balance_loss, no_balance_loss, router_rate, beta2, swiglu_clamp
    (for the rest of the run; engine/adjustments.py)."""

    NAME = "settings_adjusted"
    TOLD = "goes on otherwise{because}"
    step: Whole
    settings: Items
    reason: Text


class RateWarmup(Event):
    """After a rewind. begin: share of the rate at which it begins; updates: its length."""

    NAME = "rate_warmup"
    step: Whole
    begin: Real
    updates: Whole

    def describe_event(self) -> str:
        begin = show_number(self.get("begin"), ".3g")
        return f"the learning rate warms up from {begin} times itself, over {self.get('updates')} updates"


class RateLifted(Event):
    NAME = "rate_lifted"
    TOLD = "a limit of the learning rate is lifted{because}"
    step: Whole
    reason: Text
