"""Evaluates the checkpoints of a run as they come: exports each, and runs the program of `eval.command` on it.

    python -m megastable_tools.downstream.evaluator RUN RECIPE [key=value ...]

The supervisor starts it. What it has done is in the journal, so another process goes on from there
and evaluates no checkpoint twice.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import IO, Any, NamedTuple

import xxhash

from megastable.base import durable
from megastable.base.errors import ConfigError, DataError, user_errors
from megastable.base.process import spare_output
from megastable.base.text import make_visible, show_size
from megastable.cluster.child_process import ChildProcess
from megastable.config import recipe
from megastable.config.tree import RunConfig
from megastable.run.directory import RunDirectory, read_object
from megastable.run.events.event import Event, read_whole
from megastable.run.events.training_events import TasksEvaluated, TasksFailed, TasksSkipped
from megastable.run.log import RunLog
from megastable.run.rank_ipc import parse_arguments
from megastable.training.tracking import Tracking, run_point

PAUSE = 2.0  # seconds between two looks for a checkpoint
LOOK = 0.2  # seconds between two looks at a child process
REASON = 500  # characters
LARGEST = 50 * 2**20  # bytes of a file of results
MOST = 1000  # scores
LONGEST = 120  # characters of the name of one


class Leaving(Exception):
    """The process is to end."""


class Evaluator:
    """Of one run. parent: the process that it ends with."""

    def __init__(self, config: RunConfig, run: RunDirectory, parent: int) -> None:
        self.config, self.run, self.settings, self._parent = config, run, config.eval, parent
        self.log = RunLog(run, partial(print, flush=True))
        self.leaving = self.told = False  # told: whether it has journaled anything
        self.folder = run.root.absolute() / "evaluation"
        if self.settings.scratch is not None:  # runs of one name may share it
            run_hash = xxhash.xxh3_64_hexdigest(os.fsencode(run.root.resolve()))
            self.folder = self.settings.scratch.absolute() / f"evaluation-{run_hash}"

    def watch_checkpoints(self) -> None:
        """Evaluate until the run is complete and its last checkpoint evaluated. Raises ConfigError, Leaving."""
        first = self.settings.fill_command(Path(), Path(), 0)[0]
        if shutil.which(first) is None:
            raise ConfigError(
                f"eval.command: {make_visible(first, 200)!r} is not a program that can be started: give its path, and "
                "make it executable"
            )
        try:
            self.folder.parent.mkdir(parents=True, exist_ok=True)
            evaluation_lock = self._only_one()
        except OSError as error:
            raise ConfigError(f"{error.filename or self.folder}: {error.strerror or error}") from None
        with evaluation_lock:
            settled_checkpoints = {
                (read_whole(event.get("of_step")) or 0, str(event.get("manifest")))
                for event in self.run.iterate_events(TasksEvaluated, TasksFailed, TasksSkipped)
            }
            while True:
                last_step = self.config.train.steps
                # Asked first: the last checkpoint is there by then.
                is_complete = (read_whole(read_object(self.run.summary).get("steps")) or 0) >= last_step
                there = list_saved_checkpoints(self.run)
                due_checkpoint, passed = find_next_due(
                    there, settled_checkpoints, self.settings.interval, last_step
                )
                for older_checkpoint in passed:
                    skip_reason = f"{due_checkpoint.name} is there already" if due_checkpoint else ""
                    self._tell(TasksSkipped(**_named(older_checkpoint), reason=skip_reason), say=False)
                    settled_checkpoints.add((older_checkpoint.step, older_checkpoint.manifest))
                if due_checkpoint is not None and passed:
                    named = " to ".join(dict.fromkeys((passed[0].name, passed[-1].name)))
                    self.log.say_line(f"not evaluated: {named}, as {due_checkpoint.name} is there already")
                if due_checkpoint is not None:
                    self._evaluate(due_checkpoint)
                    settled_checkpoints.add((due_checkpoint.step, due_checkpoint.manifest))
                elif is_complete:
                    break
                else:
                    self._wait(PAUSE)
            if self.told:  # after the training has closed its trackers
                tell_trackers(self.config, self.run, self.log.say_line)

    def _only_one(self) -> IO[str]:
        """The lock of the run's evaluation, once other processes have left it: that of a supervisor that was killed
        needs a moment. Raises OSError, Leaving."""
        lock, is_waiting = self.run.root / ".evaluation.lock", False
        while (held_lock := durable.lock_file(lock)) is None:
            if not is_waiting:
                self.log.say_line(f"another process evaluates {self.run.root}: waiting for its end")
            is_waiting = True
            self._wait(LOOK)
        return held_lock

    def _tell(self, event: Event, say: bool = True) -> None:
        """Journal an event, waiting for a full disk: unknown to the next process, it would be done again."""
        self.log.emit_event(event, say=say)
        self.told = True
        if self.log.waiting:
            self.log.say_line(f"WARNING: {self.run.journal} cannot be written: make room; waiting for it")
        while self.log.waiting:
            self._wait(PAUSE)
            with suppress(DataError):
                self.log.flush_events()

    def _evaluate(self, due: SavedCheckpoint) -> None:
        begin_time = time.monotonic()
        self.log.say_line(f"evaluating {due.name}")
        make_event: Callable[..., Event]
        try:
            scores, tokens = self._scores(due)
            make_event = partial(TasksEvaluated, tokens=tokens, scores=scores)
        except (DataError, OSError) as error:
            make_event = partial(TasksFailed, reason=make_visible(error, REASON))
        finally:  # first: the journal may wait for room
            shutil.rmtree(self.folder, ignore_errors=True)
        self._tell(make_event(**_named(due), seconds=round(time.monotonic() - begin_time, 1)))

    def _scores(self, due: SavedCheckpoint) -> tuple[dict[str, float], int]:
        """The scores of a checkpoint, and the tokens it was trained on."""
        checkpoint = self.run.checkpoints / due.name
        model_folder, results_folder = self.folder / "model", self.folder / "results"
        shutil.rmtree(self.folder, ignore_errors=True)  # of a process that was killed
        # Leave room for the next checkpoint: training has precedence. It takes more than an export.
        needed = sum(path.stat().st_size for path in checkpoint.iterdir())
        if os.stat(self.folder.parent).st_dev == os.stat(checkpoint).st_dev:
            needed *= 2
        free = shutil.disk_usage(self.folder.parent).free
        if free < needed:
            raise DataError(
                f"{self.folder.parent} has {show_size(free)} left, and {show_size(needed)} are needed for the export "
                "and the next checkpoint: make room, or set eval.scratch"
            )
        results_folder.mkdir(parents=True)
        tokens = read_whole(read_object(checkpoint / "state.json").get("tokens")) or 0
        export_words = "-m megastable.cli convert to-hf --no-check --dtype".split()
        command = [sys.executable, *export_words, self.settings.dtype, str(checkpoint), str(model_folder)]
        try:
            self._run("the export", command)
        except DataError:
            if not (checkpoint / "manifest.json").exists():
                raise DataError("it was deleted while it was read: see checkpoint.keep") from None
            raise
        results = results_folder / "results.json"
        self._run("the program", self.settings.fill_command(model_folder, results, due.step))
        return read_scores(results_folder), tokens

    def _run(self, what: str, words: list[str]) -> None:
        """Run a child process to its end. Raises DataError if it fails, Leaving if this process is to end."""
        threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(self.settings.threads))
        hidden = {"CUDA_VISIBLE_DEVICES": ""} if self.settings.device == "cpu" else {}
        tether = [sys.executable, "-m", "megastable_tools.downstream.tether", str(os.getpid())]
        time_limit = self.settings.timeout
        child = ChildProcess([*tether, *words], time_limit, environment={**os.environ, **threads, **hidden})
        try:
            while (child_result := child.poll()) is None:
                self._wait(LOOK)
        finally:
            child.kill()
            child.wait()
        if child_result.code is None:
            raise DataError(f"{what} was not done after {time_limit:g} s, and was ended (eval.timeout)")
        if child_result.code:
            print(child_result.tail, flush=True)
            code = child_result.code
            end_text = f"ended with code {code}" if code > 0 else f"was killed by signal {-code}"
            last_line = child_result.tail.strip().splitlines()[-1:]
            raise DataError(f"{what} {end_text}{': ' if last_line else ''}{''.join(last_line)}")

    def _wait(self, seconds: float) -> None:
        time.sleep(seconds)
        if self.leaving or os.getppid() != self._parent:
            raise Leaving


def list_saved_checkpoints(run: RunDirectory) -> list[SavedCheckpoint]:
    """The complete checkpoints of a run."""
    checkpoints_found = list[SavedCheckpoint]()
    for path in run.checkpoints.glob("step-*/manifest.json"):
        name, step = path.parent.name, path.parent.name.removeprefix("step-")
        if step.isdecimal():
            with suppress(OSError):  # deleted meanwhile
                manifest = xxhash.xxh3_128_hexdigest(path.read_bytes())
                checkpoints_found.append(SavedCheckpoint(name, int(step), manifest))
    return checkpoints_found


def _named(one: SavedCheckpoint) -> dict[str, Any]:
    return {"checkpoint": one.name, "of_step": one.step, "manifest": one.manifest}


# Which checkpoint is next, and what a program has written of it


class SavedCheckpoint(NamedTuple):
    """manifest: hash of its manifest; another checkpoint of the same step, after a rewind, has another one."""

    name: str
    step: int
    manifest: str


def find_next_due(
    there: Sequence[SavedCheckpoint], settled: Collection[tuple[int, str]], interval: int, last: int
) -> tuple[SavedCheckpoint | None, list[SavedCheckpoint]]:
    """The newest checkpoint that is due, and the older ones that are due, too, and are passed over for it.

    Due are the first one at or after each multiple of `interval`, and those from step `last` on. settled: (step,
    manifest) of those that were evaluated or passed over, there or not.
    """
    due, step_by_period = list[SavedCheckpoint](), {step // interval: step for step, _ in settled}
    for one in sorted(there, key=lambda c: c.step):
        step_period = one.step // interval
        period_step = step_by_period.setdefault(step_period, one.step)
        is_wanted = one.step >= last or (step_period > 0 and period_step == one.step)
        if is_wanted and (one.step, one.manifest) not in settled:
            due.append(one)
    return (due[-1], due[:-1]) if due else (None, [])


def tell_trackers(config: RunConfig, run: RunDirectory, say: Callable[[str], None]) -> None:
    """Open the trackers once more, as another process of the run: they read in the journal what they do not know yet.

    Returns when they are closed, or after some minutes: they go on by themselves.
    """
    summary = read_object(run.summary)
    steps, tokens = read_whole(summary.get("steps")), read_whole(summary.get("tokens"))
    if steps is None or tokens is None:
        return  # after fewer steps than they know, they would take the others for undone
    tracking = Tracking(config.logging, run, run_point(config, run, steps, tokens, None), say)
    # They wait for those of the training as long as for one call, and end as long after it at the latest.
    tracking.close(3 * config.logging.tracker_timeout)


def read_scores(folder: Path) -> dict[str, float]:
    """The scores in the newest results*.json below `folder`, by name. Raises DataError if there are none.

    The file has numbers by name, `{"acc": 0.5}`, or by task and name, `{"arc": {"acc": 0.5}}`, or the latter below
    "results", as lm-evaluation-harness writes it.
    """
    try:
        result_files = sorted(folder.rglob("results*.json"), key=lambda path: path.stat().st_mtime_ns)
        if not result_files:
            raise DataError("it has written no results: the JSON file belongs where {results} says")
        if result_files[-1].stat().st_size > LARGEST:
            raise DataError(f"{result_files[-1].name} has more than {LARGEST >> 20} MiB")
        results_content = json.loads(result_files[-1].read_bytes())
    except OSError as error:
        raise DataError(f"its results cannot be read: {error}") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{result_files[-1].name} is no JSON: {make_visible(error, 200)}") from None
    scores_found = scores_of(results_content)
    if not scores_found:
        raise DataError(f"{result_files[-1].name} has no numbers: expected {{task: {{metric: number}}}}")
    if len(scores_found) > MOST:
        raise DataError(f"{result_files[-1].name} has {len(scores_found):,} numbers, more than {MOST:,}")
    return scores_found


def scores_of(content: Any) -> dict[str, float]:
    """The finite numbers of a results file, by "TASK/METRIC" or name."""
    if not isinstance(content, Mapping):
        return {}
    is_harness = isinstance(content.get("results"), Mapping)
    numbers_found: dict[str, float] = {}
    for score_name, value in (content["results"] if is_harness else content).items():
        if isinstance(value, Mapping):
            # lm-evaluation-harness writes "acc,none": the metric, and the filter of the answers. Its standard errors
            # and counts are no scores.
            scores = {key: v for key, v in value.items() if "_stderr" not in key and key != "sample_len"}
            numbers_found |= {
                f"{score_name}/{score_key.removesuffix(',none')}": v for score_key, v in scores.items()
            }
        else:
            numbers_found[score_name] = value
    return {
        make_visible(score_name, LONGEST): float(value)
        for score_name, value in numbers_found.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    }


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse_arguments("megastable_tools.downstream.evaluator", __doc__, arguments)
    spare_output()
    with user_errors():
        recipe_config = recipe.load_recipe(args.recipe, args.overrides)
        if recipe_config.eval.command is None:
            raise ConfigError("eval.command is not set: give the program that evaluates a checkpoint")
        evaluator = Evaluator(recipe_config, RunDirectory(args.run), args.parent)

        def leave(number: int, frame: FrameType | None) -> None:
            evaluator.leaving = True

        signal.signal(signal.SIGTERM, leave)
        signal.signal(signal.SIGINT, leave)
        try:
            evaluator.watch_checkpoints()
        except Leaving:
            return


if __name__ == "__main__":
    main()
