"""Runs pieces of a study, several at a time, each in a process of its own.

The processes are forked from a server that has imported everything once: a run starts in half a second instead of
several, and nothing of it is left for the next one. They end with this process, however it ends.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from multiprocessing import connection, parent_process
from pathlib import Path
from typing import Any

from megastable.base.errors import OK, UNSTABLE, DataError, user_errors
from megastable_tools.study.trial import Trial, TrialResult

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
    run_all(work, folder, jobs, lambda name, run: done(by_name[name], TrialResult.of(run)), (OK, UNSTABLE))


def run_all(
    work: Sequence[Work], folder: Path, jobs: int, done: Callable[[str, Path], None],
    accepted: tuple[int, ...] = (OK,),
) -> None:  # fmt: skip
    """Do all `work`, `jobs` at a time. done: called with a name and its folder, below `folder`, which is removed then.

    Raises DataError, with the end of its output, for a process that ends by another code than those accepted: its
    folder is left, and no process is.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    waiting, slots = list(reversed(work)), list(range(jobs))
    running: dict[Any, tuple[Any, Work, int]] = {}
    try:
        while waiting or running:
            while waiting and slots:
                one, slot = waiting.pop(), slots.pop()
                mine = _made(folder / one.name)
                process = context.Process(
                    target=_work, args=(one, os.getcwd(), _environment(slot), mine / "output.log")
                )
                process.start()
                running[process.sentinel] = (process, one, slot)
            for sentinel in connection.wait(list(running)):
                process, one, slot = running.pop(sentinel)
                process.join()
                slots.append(slot)
                mine = folder / one.name
                if process.exitcode not in accepted:
                    raise DataError(_failure(one.name, mine, process.exitcode))
                done(one.name, mine)
                shutil.rmtree(mine)
    finally:
        for process, *_ in running.values():
            process.kill()
            process.join()


def _made(folder: Path) -> Path:
    """A new folder, in place of what a process that was killed has left. Raises DataError."""
    try:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    except OSError as error:
        raise DataError(f"{folder} cannot be made: {error}: make room, start again") from None
    return folder


def _environment(slot: int) -> dict[str, str]:
    """Of a rank alone; on the GPU of its slot, if there are several."""
    alone = {
        "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0",
    }  # fmt: skip
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is None:
        import torch

        gpus = [str(n) for n in range(torch.cuda.device_count())]
    else:
        gpus = [name for name in given.split(",") if name]
    mine = {"CUDA_VISIBLE_DEVICES": gpus[slot % len(gpus)]} if gpus else {}
    return dict(os.environ) | alone | mine


def _work(work: Work, directory: str, environment: dict[str, str], output: Path) -> None:
    """In the new process: become a rank with its output in a file, and do the work."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.setpgid(0, 0)  # Ctrl-C on the terminal is for the study, which ends this process
    log = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
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
    log = folder / "output.log"
    try:
        last = "\n".join(log.read_text(errors="replace").strip().splitlines()[-5:])
    except OSError:
        last = ""
    return f"run {name} ended with code {code}:\n{last}\nall of its output: {log}"
