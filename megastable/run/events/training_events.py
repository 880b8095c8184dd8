"""Events of the training process: start, end, checkpoints, evaluations."""

from __future__ import annotations

from megastable.base.text import count_noun, show_number, show_size
from megastable.run.events.event import (
    NOTHING,
    Event,
    Flag,
    Items,
    OfIncident,
    Real,
    Text,
    Tree,
    Whole,
    read_real,
    read_tree,
)

SHOWN = 8  # corpora in a sentence
NEXT_UPDATE = "next_update"


class Training(Event):
    """Training begins, after `step`. cursor: the next data position; world: ranks; seconds: since this process was
    started. lineage: of its copies on other disks and in memories. software: what rank 0 computes with
    (base/hardware.py). peak_tflops: of a device, which MFU is a share of; peak_source: a data sheet, a measurement, the
    recipe. elementwise: what is known of own kernels (`Timing` in model/kernels.py). guarded: a loop of somebody else
    trains, under the guard alone: without recipe, data order and checkpoints of ours."""

    NAME = "training"
    step: Whole
    cursor: Whole
    world: Whole
    seconds: Real = None
    lineage: Text = None
    software: Tree = NOTHING
    peak_tflops: Real = None
    peak_source: Text = None
    elementwise: Items = ()
    guarded: Flag = None

    def describe_event(self) -> str:
        from_text = f" from position {self['cursor']}" if "cursor" in self else ""
        return f"training{from_text} on {count_noun(self.world or 0, 'rank')}"


class Resumed(Event):
    """changes: of the loaded state since it was saved, as measured: rounding. origin: "checkpoint", or "memory" of the
    hosts; checkpoint is then the point's name."""

    NAME = "resumed"
    step: Whole
    checkpoint: Text
    cursor: Whole
    changes: Tree
    origin: Text = None

    def describe_event(self) -> str:
        resume_source = "the hosts' memory" if self.get("origin") == "memory" else self.get("checkpoint")
        return f"resumed from {resume_source or 'a checkpoint of its own'}"


class MemoryResume(Event):
    """The state after `step` is to be restored from the hosts' memories, a point of `lineage` and `epoch`. Journaled
    before it is tried: one that fails with the process is not tried for ever."""

    NAME = "memory_resume"
    TOLD = "the state is restored from the hosts' memory"
    step: Whole
    lineage: Text
    epoch: Whole


class MemoryRefused(Event):
    """A point in the hosts' memories is not used, newer than what is."""

    NAME = "memory_refused"
    TOLD = "the copy in the hosts' memory is not used{because}"
    step: Whole
    lineage: Text
    reason: Text


class MemoryDropped(Event):
    """The run was rewound to `step`: points of later steps no longer count. epoch: how often it was."""

    NAME = "memory_dropped"
    TOLD = "later copies in the hosts' memory no longer count"
    step: Whole
    epoch: Whole


class MemoryOff(Event):
    """There are no copies in the hosts' memories, or this one failed; reason: why."""

    NAME = "memory_off"
    TOLD = "no copy in the hosts' memory{because}"
    step: Whole
    reason: Text


class Reshaped(Event):
    """old, new: layouts (`LayoutState`)."""

    NAME = "reshaped"
    TOLD = "the checkpoint was written by another layout: reshaped"
    old: Tree
    new: Tree


class MomentsReset(Event):
    NAME = "moments_reset"
    TOLD = "the checkpoint holds no optimizer state: the optimizer begins again"
    step: Whole


class ClippingReset(Event):
    """kind: of optimizer.clipping."""

    NAME = "clipping_reset"
    TOLD = "the checkpoint holds no averages of optimizer.clipping={kind}: they begin again"
    step: Whole
    kind: Text


class Imported(Event):
    """The first event of a run made from checkpoints. how: in words; more fields name them."""

    NAME = "imported"
    TOLD = "the run begins with a checkpoint that was made outside of training ({how})"
    step: Whole
    how: Text = None


class ConfigChanged(Event):
    """changes: "key: old -> new" each."""

    NAME = "config_changed"
    changes: Items

    def describe_event(self) -> str:
        changes = self.get("changes")
        return f"recipe changed: {'; '.join(map(str, changes)) if isinstance(changes, list) else changes}"


class Evaluated(Event):
    """loss: nats per token, mean over `samples`; seconds: that it took. corpora: loss and samples of each, if there are
    several."""

    NAME = "evaluated"
    step: Whole
    loss: Real
    samples: Whole
    seconds: Real = None
    corpora: Tree = NOTHING

    @property
    def by_corpus(self) -> dict[str, float]:
        """The loss of each corpus that has one."""
        found = {name: read_real(read_tree(fields).get("loss")) for name, fields in self.corpora.items()}
        return {name: loss for name, loss in found.items() if loss is not None}

    def describe_event(self) -> str:
        found = list(self.by_corpus.items())
        named_losses = [f"{name} {show_number(loss)}" for name, loss in found[:SHOWN]]
        named_losses += [f"{len(found) - SHOWN} more corpora"] if len(found) > SHOWN else []
        corpora_text = f" ({', '.join(named_losses)})" if named_losses else ""
        return f"validation loss {show_number(self.get('loss'))}{corpora_text}"


class TasksEvaluated(Event):
    """The program of eval.command has evaluated a checkpoint, of step `of_step` and after `tokens`. manifest: hash of
    its manifest; scores: numbers by "TASK/METRIC"; seconds: with the export."""

    NAME = "tasks_evaluated"
    checkpoint: Text
    of_step: Whole
    manifest: Text
    tokens: Whole
    scores: Tree
    seconds: Real

    @property
    def numbers(self) -> dict[str, float]:
        """The scores that are numbers."""
        score_by_name = {score_name: read_real(value) for score_name, value in self.scores.items()}
        return {score_name: value for score_name, value in score_by_name.items() if value is not None}

    def describe_event(self) -> str:
        found = list(self.numbers.items())
        score_texts = [f"{name} {show_number(score, '.4g')}" for name, score in found[:SHOWN]]
        score_texts += [f"{len(found) - SHOWN} more"] if len(found) > SHOWN else []
        return f"tasks on {self.get('checkpoint')}: {', '.join(score_texts)}"


class TasksFailed(Event):
    """A checkpoint could not be evaluated; it is not tried again."""

    NAME = "tasks_failed"
    TOLD = "WARNING: {checkpoint} could not be evaluated{because}"
    checkpoint: Text
    of_step: Whole
    manifest: Text
    reason: Text
    seconds: Real


class TasksSkipped(Event):
    """A checkpoint is not evaluated, as there is a newer one."""

    NAME = "tasks_skipped"
    TOLD = "{checkpoint} is not evaluated{because}"
    checkpoint: Text
    of_step: Whole
    manifest: Text
    reason: Text


class CheckpointSaved(Event):
    """seconds: from the copy to the commit; blocked: those that the steps waited."""

    NAME = "checkpoint"
    step: Whole
    name: Text
    bytes: Whole
    seconds: Real
    blocked: Real

    def describe_event(self) -> str:
        took_text = f"{show_size(self.get('bytes'))} in {show_number(self.get('seconds'), '.1f')} s"
        return f"checkpoint {self.get('name')} saved: {took_text}"


class CheckpointHealthy(Event):
    """Training went on from checkpoint `name` for long enough, at `step`, to prove it healthy."""

    NAME = "checkpoint_healthy"
    TOLD = "checkpoint {name} has proved healthy"
    step: Whole
    name: Text


class CheckpointRecovered(Event):
    """From the local disks, of `step`; problem: why it failed."""

    NAME = "checkpoint_recovered"
    step: Whole
    problem: Text

    def describe_event(self) -> str:
        how_text = self.format_reason("problem") or ": brought over from the local disks"
        return f"a checkpoint that was not uploaded yet{how_text}"


class CheckpointFailed(Event):
    NAME = "checkpoint_failed"
    TOLD = "no checkpoint could be written{because_problem}"
    step: Whole
    problem: Text


class CheckpointRejected(Event):
    """Passed over at a start: its files or its state are damaged."""

    NAME = "checkpoint_rejected"
    TOLD = "checkpoint {name} is damaged{because_problem}"
    name: Text
    problem: Text


class CheckpointSuspect(Event):
    """Put aside, as a run resumed from it would go wrong."""

    NAME = "checkpoint_suspect"
    TOLD = "checkpoint {name} set aside{because}"
    name: Text
    reason: Text


class RolledBack(Event):
    """A person, `who`, had the next start resume from the checkpoint of `step`."""

    NAME = "rolled_back"
    step: Whole
    reason: Text
    who: Text = None

    def describe_event(self) -> str:
        by_whom = self.get("who") or "a person"
        return f"rolled back by {by_whom} to the checkpoint of step {self.get('step')}{self.format_reason()}"


class RecordsLost(Event):
    """steps: how many; from_step: the first of them."""

    NAME = "records_lost"
    TOLD = "the records of the last {steps} steps could not be written, and are lost"
    steps: Whole
    from_step: Whole


class Warned(Event):
    """sign, numbers: of a bad start (warnings/signs.py), "recipe", or `NEXT_UPDATE`: each value that a changed recipe
    gives the next update, with the old one."""

    NAME = "warning"
    TOLD = "warning: {text}"
    step: Whole
    text: Text
    sign: Text = None
    numbers: Tree = NOTHING


class BatchFarOff(Event):
    """The batch is far above or below the gradient noise scale (warnings/noise_scale.py), both in samples: a hint."""

    NAME = "batch_far_off"
    TOLD = "{text}"
    step: Whole
    scale: Real
    batch: Whole
    text: Text


class Stopped(Event):
    """By a signal, with a checkpoint."""

    NAME = "stopped"
    TOLD = "stopped as asked"
    step: Whole
    cursor: Whole


class Unstable(OfIncident):
    """The process gives up. discards: refused updates in a row. Other fields: of an incident, as `IncidentEvent`;
    before: the step that a checkpoint to resume from should precede."""

    NAME = "unstable"
    step: Whole
    discards: Whole = None
    before: Whole = None

    def describe_event(self) -> str:
        return f"gave up: {self.get('reason') or 'not finite, or refused on and on'}"


class Finished(Event):
    """All of summary.json. steps: done; val_loss: nats per token."""

    NAME = "finished"
    steps: Whole
    val_loss: Real

    def describe_event(self) -> str:
        loss = "" if self.get("val_loss") is None else f", validation loss {show_number(self['val_loss'])}"
        return f"finished after {self.get('steps')} steps{loss}"
