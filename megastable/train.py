"""Pretraining, from the first step to the last. Started by the deepspeed launcher on every rank:

    deepspeed --num_gpus 2 --module megastable.train launch/recipes/quickstart.yaml train.steps=100

Each step: the next global batch by absolute position, forward and backward, the gate, the update, the record.
Once in a while: norms, evaluation, a checkpoint. Everything needed to go on is in the run directory.
Exit codes are those of errors.py: 0 done, 2 bad input, 75 stopped by a signal with a checkpoint, 76 unstable, 77 no
space for checkpoints, 78 to be started again from an older checkpoint.
"""

from __future__ import annotations

if __name__ == "__main__":
    from megastable.base.process import hold_stops

    hold_stops()  # before the imports, which take seconds

import gc
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import torch.distributed as dist

from megastable.base import activity
from megastable.base.collectives import combine_answers, run_on_first
from megastable.base.errors import OK, STOPPED, HandoverError, MegastableError, UnstableError
from megastable.base.hardware import describe_software
from megastable.config.tree import RunConfig
from megastable.engine.watch import Ballot
from megastable.optim.schedule import scheduled_rate
from megastable.recovery.recovery import Recovery, StepOutcome
from megastable.recovery.run_parts import RunParts, StepResult
from megastable.run.events.training_events import Evaluated, Stopped, Training, Warned
from megastable.training import rank_process
from megastable.training.data_order import Feed
from megastable.training.evaluation import Evaluation
from megastable.training.heartbeat import Heartbeat
from megastable.training.live_changes import Effects
from megastable.training.memory_copies import MemoryCopies
from megastable.training.recorder import Observer, StepRecorder, end_if_all_refused, is_due
from megastable.training.resume import Start
from megastable.training.startup import StopRequest, open_data, open_run
from megastable.training.step_profiler import explain_no_trace, profile_steps
from megastable.training.summary import find_peak, introduce_run, write_summary

COLLECT = 100  # steps between two collections of garbage, by all ranks at once: one alone makes all wait


class Trainer:
    """The training of one rank, ready for its next step; `train` closes it. All methods are collective.

    state: where the run stands.
    """

    @combine_answers()
    def __init__(self, start: Start, stop: StopRequest, heart: Heartbeat) -> None:
        c, order = start.config, start.order
        self.config, self.run, self.log, self.stop, self.heart = c, start.run, start.log, stop, heart
        self.order, self.engine = order, start.engine
        self.checkpoints, self.state, self.stopping = start.checkpoints, start.state, False
        with ExitStack() as closing:
            peak, source = find_peak(c, self.engine)
            self.log.say_line(introduce_run(c, self.engine, self.run.root, peak, source))
            for note_text in self.engine.kernels.notes:
                self.log.emit_event(Warned(step=self.state.step, text=note_text), say=f"WARNING: {note_text}")
            observer = None
            if dist.get_rank() == 0:
                device, attempt = self.engine.device, heart.attempt
                observer = Observer(c, self.run, start.layout, device, peak, self.state, attempt)
                closing.callback(observer.close)
                if start.unwritten is not None:
                    observer.steps.restore_records(start.unwritten)
            self.evaluation = Evaluation.for_run(
                self.engine, order.corpora.held_out, c.train, start.layout.samples, start.make_whole_loader
            )
            run_on_first(lambda: self.run.summary.unlink(missing_ok=True))  # of a shorter run here
            run_on_first(heart.skips.begin_to_read)
            loader = start.make_loader(order.source, order.select_samples(), self.state.cursor)
            closing.callback(loader.close)
            self.feed, self.changes = Feed(order, loader, heart), start.changes
            self.changes.read_requests(self.state.step)
            self.log.emit_event(Training(
                step=self.state.step, cursor=self.state.cursor, world=start.layout.world,
                seconds=round(activity.process_age(), 3), software=describe_software(self.engine.device),
                peak_tflops=float(f"{peak:.4g}"), peak_source=source, lineage=start.lineage,
                elementwise=self.engine.kernels.measured,
            ))  # fmt: skip
            self.checkpoints.begin_training(self.state, saved=start.restored is None)
            parts = RunParts(c, self.engine, loader, self.run, order.skipping, self.log, heart.enter_phase)
            held_out, sets = (e.micro_batches, e.sets) if (e := self.evaluation) else ([], 1)
            settle = self.checkpoints.settle_save
            self.recovery = Recovery(parts, self.state, settle, start.suspects, held_out, sets)
            self.effects = Effects(self.run, self.changes, self.recovery.incident_log, self.log)
            self.copies = MemoryCopies(
                start.memory, self.engine, self.recovery.points.ring, self.log, start.freeze_recipe, start.lineage,
                start.restored, self.state.step,
            )  # fmt: skip
            self.checkpoints.prepare_saves()
            if rejected := self.checkpoints.rejected:
                self.recovery.incident_log.record_rejected_checkpoints(rejected, self.state.step)
            self.recorder = StepRecorder(c.logging, self.engine, self.recovery, self.log, observer)
            world, done = dist.get_world_size(), self.state.step
            if why := explain_no_trace(c.logging.profile, self.run.profiles, world, done, c.train.steps):
                self.log.say_line(f"WARNING: {why}")
            closing.enter_context(profile_steps(c.logging, self.run, dist.get_rank(), self.log.say_line))
            self._closing = closing.pop_all()

    def train(self) -> int:
        """Run to the last step, or until asked to stop. The exit code."""
        try:
            self._all_steps()
            exit_code = self._end()
            self.checkpoints.finish_uploads()
            self.copies.close(remove=True)
            return exit_code
        except MegastableError as error:
            if error.collective:  # all ranks are here: what they have begun to write is good
                self.checkpoints.saver.finish_save()
            self.copies.close(remove=isinstance(error, HandoverError | UnstableError))
            raise
        finally:
            gc.enable()
            self._closing.close()

    def _all_steps(self) -> None:
        c, feed, recovery, recorder = self.config, self.feed, self.recovery, self.recorder
        gc.disable()
        while self.state.step < c.train.steps and not self.stopping:
            before = self.state
            self.heart.begin_step(before)
            begin_time = time.perf_counter()
            batch = feed.next_batch()
            mix, tokens = feed.mix_of(batch), batch.positions.size * c.model.sequence_length

            # Forward, backward, gate, update
            changed_keys = self.changes.begin_step(before.step)
            recovery.prepare_step(before, feed.tell_changes(before, batch, mix), changed_keys)
            scheduled_lr = scheduled_rate(self.engine.config, before.updates, before.trained_tokens, tokens)
            lr = recovery.limit_rate(before.updates, scheduled_lr)
            recorder.begin_step(before)
            measured, applied = self.engine.train_step(
                batch.micro_batches, lr, recovery.make_judge(before, lr), self._collect_ballot
            )
            seconds = time.perf_counter() - begin_time
            ballot = measured.ballot
            self.stopping = any(ballot["stop"])

            # Where the run stands now, and the record of it
            self.state = state = before.after_step(
                cursor=batch.next, tokens=tokens, seconds=seconds, loss=measured.loss, applied=applied, mix=mix,
                batch=batch.positions.size, piece=batch.piece,
            )  # fmt: skip
            step_result = StepResult(
                batch, measured, applied, before, state, lr, seconds, feed.waited, self.engine.kept
            )
            self.heart.end_step(
                state, loss=measured.loss, grad_norm=measured.grad_norm, lr=lr, applied=applied, seconds=seconds,
                tokens_per_second=tokens / seconds,
            )  # fmt: skip
            recorder.record_step(step_result)

            # What the guard decided: mostly nothing, sometimes back to an earlier step
            open_incident = recovery.incident_log.incident
            step_outcome = recovery.carry_out_decision(step_result)
            if step_outcome.repeated:
                self.state = step_outcome.state
                self.checkpoints.hear_ballot(ballot["checkpoint"])
                continue
            if not step_outcome.rewound:
                end_if_all_refused(step_result, recovery)
                step_outcome = recovery.inspect_hardware(step_result, self._saves(ballot))
            if not step_outcome.rewound:
                self.checkpoints.note_step(state.step, applied and recovery.on_trend, ballot["checkpoint"])
                if self.checkpoints.nonfinite_step is not None:
                    step_outcome = self._leave(step_result)
            if recovery.incident_log.incident is not open_incident:
                recorder.flush()  # one was opened or closed: its report is written now
            if any(ballot["read_skips"]):
                feed.read_ledger(state.step, step_outcome.state.cursor)
            self.changes.hear_ballot(ballot["read_changes"], step_outcome.state.step)
            if step_outcome.rewound:
                self.state = step_outcome.state
                self.copies.drop_after(self.state.step)
                self._remember()
                self.checkpoints.rewind_to(self.state)
                continue

            self.effects.note_step(step_result)
            self.copies.hear_ballot(ballot["copies"], state.step)
            if self.copies.is_wanted(state.step) and recovery.on_trend:
                if dist.get_rank() == 0:
                    self._remember()
                self.copies.begin_copy(self.state, recorder.pending)

            # Once in a while
            if is_due(COLLECT, state.step):
                gc.collect()  # of all generations: what lives through one of fewer would stay for good
            if is_due(c.train.eval_interval, state.step) and state.step < c.train.steps and not self.stopping:
                self._evaluate()
            if self.checkpoints.is_due(state.step, ballot["save"]):
                self._checkpoint()

    def _end(self) -> int:
        """The last checkpoint, the summary and the last word."""
        c, s = self.config, self.state
        self.heart.begin_step(s)
        self.checkpoints.finish_save()
        needs_checkpoint = s.step > self.checkpoints.last and (self.stopping or c.checkpoint.at_end)
        if needs_checkpoint and not self._checkpoint(wait=True):
            raise self.checkpoints.make_unsaved_error(s.step)
        self.checkpoints.saver.close()
        if self.stopping and s.step < c.train.steps:
            self.log.emit_event(
                Stopped(step=s.step, cursor=s.cursor),
                say=f"stopped at step {s.step} as asked; {self.run.resuming} goes on from there",
            )
            return STOPPED
        self.recovery.finish_run(s)
        self.effects.finish_run(s.step)
        validation = self._evaluate()
        observer = self.recorder.observer
        run_on_first(
            lambda: write_summary(self.run, c, s, validation, self.order.corpora, observer, self.log)
        )
        self.log.say_line(f"finished: {self.run.summary}")
        return OK

    def _collect_ballot(self) -> Ballot:
        """What this rank wants all of them to do after the step: stop, read what people have written, save; how far its
        part of a checkpoint is, and of a copy in memory; and what the watches over the hardware compare."""
        return {
            "stop": (float(self.stop.wanted),),
            "read_skips": (float(self.heart.skips.has_news),),
            "read_changes": (float(self.heart.changes.has_news),),
            "save": self.checkpoints.collect_ballot(),
            "checkpoint": self.checkpoints.saver.collect_ballot(),
            "copies": self.copies.collect_ballot(),
            **self.recovery.watches.collect_ballot(self.state.step),
        }

    def _saves(self, ballot: Ballot) -> bool:
        """Whether a checkpoint follows the step with these sums of the ballots."""
        is_last = self.stopping or self.state.step >= self.config.train.steps
        return is_last or self.checkpoints.is_due(self.state.step, ballot["save"])

    def _leave(self, done: StepResult) -> StepOutcome:
        """Go back from a state that was found not to be finite when it was to be saved."""
        if not self.recovery.acts:
            raise self.checkpoints.make_unstable_error()
        damage_text = f"weights or moments were not finite after step {self.checkpoints.nonfinite_step}"
        return self.recovery.rewind_damaged_state(done, damage_text)

    def _evaluate(self) -> Evaluated | None:
        """The losses of the evaluation samples; always the same samples."""
        if self.evaluation is None:
            return None
        self.heart.enter_phase("evaluate")
        evaluated_losses = self.evaluation.measure_losses(self.state.step)
        self.log.emit_event(evaluated_losses)
        self.recorder.record_validation(self.state, evaluated_losses)
        return evaluated_losses

    def _checkpoint(self, wait: bool = False) -> bool:
        """Begin to save, and wait for it where that is said; False when there is no checkpoint then."""
        self.recorder.flush(compact=True)
        self._remember()
        return self.checkpoints.save_state(self.state, wait)

    def _remember(self) -> None:
        """Into the state what a checkpoint is to know."""
        self.state.stability = self.recovery.dump_state()
        self.state.order_fingerprint = self.order.corpora.fingerprint_until(self.state.cursor)


def train(config: RunConfig, recipe_path: Path, attempt: int | None = None) -> int:
    """A whole run on this rank; the process group exists already. attempt: of the supervisor. The exit code."""
    # A supervisor counts its own time, which begins before ours.
    stop_request = StopRequest(config.run.max_hours if attempt is None else None)
    config, opened_corpora = open_data(config, supervised=attempt is not None)
    config, run_directory = open_run(config, recipe_path)
    with Heartbeat(
        run_directory, dist.get_rank(), dist.get_world_size(), config.train.steps, stop_request, attempt
    ) as rank_heartbeat:
        rank_start = Start(config, run_directory, opened_corpora, rank_heartbeat)
        if rank_start.complete:
            rank_start.end_complete()
            return OK
        return Trainer(rank_start, stop_request, rank_heartbeat).train()


def main(arguments: Sequence[str] | None = None) -> None:
    """The entry point of every rank."""
    rank_process.run_rank(train, arguments)


if __name__ == "__main__":
    main()
