"""A trial is one short training run of a study, on one rank, and its result is what the study keeps of it. A run that
diverges is a result: its losses are infinite from there on.

Several run at a time, each in a process of its own. The processes are forked from a server that has imported everything
once: a run starts in half a second instead of several, and nothing of it is left for the next one. They end with this
process, however it ends.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import shutil
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from multiprocessing import connection, parent_process
from pathlib import Path
from typing import Any, Self

import numpy as np
from pydantic import TypeAdapter

from megastable.base import durable
from megastable.base.errors import OK, UNSTABLE, DataError, user_errors
from megastable.run import records
from megastable.run.directory import RunDirectory, as_json, read_object

WINDOW = 10  # steps over which a loss is smoothed
LEARNT = 0.05  # nats per token by which a run must end below its first loss to count as trained
# One rank, no guard, and nothing that a run writes or measures beside its losses.
QUIET = (
    "parallel.tensor=1", "parallel.pipeline=1", "parallel.context=1", "parallel.replicas=1", "parallel.expert=1",
    "parallel.sequence=false", "parallel.tensor_overlap=1", "parallel.schedule=1f1b", "parallel.model_chunks=1",
    "train.eval_interval=0", "checkpoint.interval=0", "checkpoint.at_end=false", "logging.trackers=[]",
    "logging.layers_interval=0", "logging.norms_interval=0", "logging.peak_tflops=1", "stability.enabled=false",
)  # fmt: skip


@dataclass(frozen=True)
class Trial:
    """name: of its files; no two of a study share one. overrides: of the study's recipe, with `QUIET` and run.seed."""

    name: str
    overrides: tuple[str, ...]


@dataclass(frozen=True)
class SavedResult:
    """A result of a study's run, with its file: complete, or not there at all."""

    def save_file(self, path: Path) -> None:
        """Raises DataError."""
        try:
            durable.write_file(path, (as_json(asdict(self)) + "\n").encode())
        except OSError as error:
            raise DataError(f"{path} could not be written: {error}: make room, start again") from None

    @classmethod
    def load_file(cls, path: Path) -> Self:
        """Raises DataError for a file that is no result."""
        try:
            return TypeAdapter(cls).validate_json(path.read_bytes())
        except (OSError, ValueError) as error:
            reason = str(error).splitlines()[0]
            raise DataError(
                f"{path}: not the result of a run ({reason}): remove it, and it runs again"
            ) from None


@dataclass(frozen=True)
class TrialResult(SavedResult):
    """losses: smoothed, of every step, nats per token; inf from the step on where it diverged. first: the loss of the
    first batch, before any update. validation: at the end; nan = not measured. seconds: of all steps."""

    losses: tuple[float, ...]
    first: float
    validation: float
    seconds: float
    parameters: int

    @property
    def final(self) -> float:
        return self.losses[-1]

    @property
    def capped(self) -> float:
        """The final loss, at most that of the initialization."""
        return min(self.final, self.first)

    @property
    def diverged(self) -> bool:
        """Whether it ended no better than it began."""
        return not self.final < self.first - LEARNT

    @classmethod
    def of_run(cls, run: Path) -> Self:
        """What a finished run directory says. Raises DataError."""
        record_table = records.read_newest_records(run / "steps")
        step_losses = [math.nan if loss is None else loss for loss in record_table.column("loss").to_pylist()]
        summary = read_object(RunDirectory(run).summary)
        if not step_losses or not math.isfinite(step_losses[0]):
            raise DataError(f"{run}: the loss of the first batch, before any update, is not a finite number")
        validation_loss = summary.get("val_loss")
        return cls(
            smooth_losses(step_losses), step_losses[0], math.nan if validation_loss is None else float(validation_loss),
            float(sum(record_table.column("seconds").to_pylist())), int(summary.get("parameters") or 0),
        )  # fmt: skip


def smooth_losses(losses: Sequence[float]) -> tuple[float, ...]:
    """The mean of the last `WINDOW` losses at every step, of fewer at the start; inf from a non-finite one on."""
    broken_step = next((i for i, loss in enumerate(losses) if not math.isfinite(loss)), len(losses))
    loss_sums = np.concatenate(([0.0], np.cumsum(losses[:broken_step])))
    window_ends = np.arange(1, broken_step + 1)
    window_begins = np.maximum(window_ends - WINDOW, 0)
    window_means = (loss_sums[window_ends] - loss_sums[window_begins]) / (window_ends - window_begins)
    return (*window_means.tolist(), *[math.inf] * (len(losses) - broken_step))


TRAIN = "megastable.train"  # by name: it stands above all rooms
# Beside it, what torch and DeepSpeed import on the first engine and step.
PRELOAD = [
    TRAIN, "torch._dynamo", "torch._inductor.compile_fx", "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.runtime.zero.muon.muon_optimizer", "deepspeed.comm.mori", "numpy.ma", "rich._emoji_codes",
]  # fmt: skip


@dataclass(frozen=True)
class Work:
    """A module-level function and its arguments, to be called as the only rank of a run. name: of its folder."""

    name: str
    function: Callable[..., None]
    arguments: tuple[Any, ...]


def usual_jobs() -> int:
    """Processes at a time if nobody says: one for each GPU, or else for each core."""
    import torch

    on_cpu = os.environ.get("DS_ACCELERATOR") == "cpu"
    return (0 if on_cpu else torch.cuda.device_count()) or len(os.sched_getaffinity(0))


def run_trials(
    recipe: Path, trials: Sequence[Trial], folder: Path, jobs: int, done: Callable[[Trial, TrialResult], None]
) -> None:
    """Train all `trials`, `jobs` at a time, in run directories below `folder`.

    Raises DataError for a run that fails; one that diverges is a result.
    """
    by_name = {trial.name: trial for trial in trials}
    work = [
        Work(t.name, _train, ([str(recipe), *t.overrides, f"run.dir={folder / t.name}"],)) for t in trials
    ]
    # Without a guard, weights that are not finite may end a run by that code.
    run_pieces(
        work, folder, jobs, lambda name, run: done(by_name[name], TrialResult.of_run(run)), (OK, UNSTABLE)
    )


def run_pieces(
    work: Sequence[Work], folder: Path, jobs: int, done: Callable[[str, Path], None],
    accepted: tuple[int, ...] = (OK,),
) -> None:  # fmt: skip
    """Do all `work`, `jobs` at a time. done: called with a name and its folder, below `folder`, which is removed then.

    Raises DataError, with the end of its output, for a process that ends by another code than those accepted: its
    folder is left, and no process is.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    process_context = multiprocessing.get_context("forkserver")
    process_context.set_forkserver_preload(PRELOAD)
    waiting_work, free_slots = list(reversed(work)), list(range(jobs))
    running_work: dict[Any, tuple[Any, Work, int]] = {}
    try:
        while waiting_work or running_work:
            while waiting_work and free_slots:
                work_piece, free_slot = waiting_work.pop(), free_slots.pop()
                own_folder = folder / work_piece.name
                try:
                    shutil.rmtree(own_folder, ignore_errors=True)  # left by a process that was killed
                    own_folder.mkdir(parents=True)
                except OSError as error:
                    raise DataError(f"{own_folder} cannot be made: {error}: make room, start again") from None
                process = process_context.Process(
                    target=_work,
                    args=(work_piece, os.getcwd(), _environment(free_slot), own_folder / "output.log"),
                )
                process.start()
                running_work[process.sentinel] = (process, work_piece, free_slot)
            for sentinel in connection.wait(list(running_work)):
                process, work_piece, free_slot = running_work.pop(sentinel)
                process.join()
                free_slots.append(free_slot)
                own_folder = folder / work_piece.name
                if process.exitcode not in accepted:
                    raise DataError(_failure(work_piece.name, own_folder, process.exitcode))
                done(work_piece.name, own_folder)
                shutil.rmtree(own_folder)
    finally:
        for process, *_ in running_work.values():
            process.kill()
            process.join()


def _environment(slot: int) -> dict[str, str]:
    """Of a rank alone; on the GPU of its slot, if there are several."""
    rank_alone = {
        "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0",
    }  # fmt: skip
    visible_devices = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible_devices is None:
        import torch

        gpu_names = [str(gpu_number) for gpu_number in range(torch.cuda.device_count())]
    else:
        gpu_names = [gpu_name for gpu_name in visible_devices.split(",") if gpu_name]
    own_device = {"CUDA_VISIBLE_DEVICES": gpu_names[slot % len(gpu_names)]} if gpu_names else {}
    return dict(os.environ) | rank_alone | own_device


def _work(work: Work, directory: str, environment: dict[str, str], output: Path) -> None:
    """In the new process: become a rank with its output in a file, and do the work."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.setpgid(0, 0)  # Ctrl-C on the terminal is for the study, which ends this process
    log_descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log_descriptor, 1)
    os.dup2(log_descriptor, 2)
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    import torch

    torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))  # the server may be older than this setting
    with user_errors():
        work.function(*work.arguments)


def _train(arguments: list[str]) -> None:
    """As `python -m megastable.train` would."""
    import_module(TRAIN).main(arguments)


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _failure(name: str, folder: Path, code: int | None) -> str:
    log_path = folder / "output.log"
    try:
        last_lines = "\n".join(log_path.read_text(errors="replace").strip().splitlines()[-5:])
    except OSError:
        last_lines = ""
    return f"run {name} ended with code {code}:\n{last_lines}\nall of its output: {log_path}"
