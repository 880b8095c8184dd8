"""Runs a rank as a process: command line, process group, exit codes."""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from torch.distributed import distributed_c10d

from megastable.base import activity
from megastable.base.activity import StepTimes
from megastable.base.errors import FAILED, SUPERSEDED, ConfigError, MegastableError, RendezvousError, code_of
from megastable.base.process import release_stops, spare_output
from megastable.config import deepspeed_json, recipe
from megastable.config.tree import RunConfig
from megastable.engine.distributed import start_distributed, stop_distributed
from megastable.parallel.topology import CHANNEL
from megastable.run.directory import RunDirectory
from megastable.run.membership import find_membership, find_tasks
from megastable.run.rank_ipc import WorkBlock, attempt_of, host_name, pause_of, run_of
from megastable.run.wire import Address, StoreClient
from megastable.training.heartbeat import describe_end

# Sends a heartbeat a second to the supervisor's store: what this rank does, how many collectives it has entered in
# every process group, and how long its own work took.
#
# The counts are torch's own sequence numbers, read by this thread: the training thread pays nothing for them. It
# touches no file once it knows the address, so a file system that stalls does not make the rank look dead.


STEPS = 10  # of a block
ENOUGH = 8  # steps for a mean: a process may start within a block, or go back


class WorkBlocks:
    """Fed every step in order."""

    def __init__(self) -> None:
        self._steps: list[StepTimes] = []

    def add_steps(self, steps: Iterable[StepTimes]) -> list[WorkBlock]:
        """The blocks that these steps complete."""
        complete_blocks = []
        for step_times in steps:
            last_step = self._steps[-1][0] if self._steps else step_times[0]
            if step_times[0] // STEPS != last_step // STEPS or (self._steps and step_times[0] <= last_step):
                complete_blocks += self._sum_up()
            self._steps.append(step_times)
            if step_times[0] % STEPS == STEPS - 1:
                complete_blocks += self._sum_up()
        return complete_blocks

    def _sum_up(self) -> list[WorkBlock]:
        steps, self._steps = self._steps, []
        if len(steps) < ENOUGH:
            return []
        return [WorkBlock(
            block=steps[0][0] // STEPS, step=_mean([step_seconds for _, step_seconds, _ in steps]),
            own=_mean([sum(parts) for _, _, parts in steps]),
            parts=[_mean(part) for part in zip(*(parts for _, _, parts in steps), strict=True)],
        )]  # fmt: skip


def _mean(seconds: Sequence[float]) -> float:
    return round(statistics.fmean(seconds), 6)


SECONDS = 1.0  # between two heartbeats


class Beats:
    """The heartbeats of one rank; they end with the process. Starts at once, before the process group exists."""

    def __init__(self, root: Path, attempt: int, rank: int, host: str, world: int = 1) -> None:
        self._store = RunDirectory(root).store
        self._attempt = attempt
        # Without a supervisor all ranks look for its address, for as long as that takes.
        self._pause = pause_of(world)
        self._hello = {"role": "rank", "attempt": attempt, "rank": rank, "host": host, "pid": os.getpid()}
        self._work = WorkBlocks()
        threading.Thread(target=self._run, name="beats", daemon=True).start()

    def _run(self) -> None:
        was_told = False
        pause_random = random.Random()  # of its own: the process's random states are part of every checkpoint
        while True:
            try:
                self._serve()
            except OSError:
                pass  # no supervisor now, or no way to it: the next one writes a new address
            except Exception:
                # A rank that stops speaking looks like the first one that died.
                if not was_told:
                    traceback.print_exc()
                was_told = True
            time.sleep(self._pause * pause_random.uniform(0.5, 1.5))  # all lose it in the same moment

    def _serve(self) -> None:
        store_address = Address.read_file(self._store)
        if store_address is None:
            raise FileNotFoundError(self._store)
        store_client = StoreClient(store_address, self._hello)
        try:
            self._obey(store_client.welcome)
            while True:
                store_client.send_message(self.make_heartbeat())
                next_beat = time.monotonic() + SECONDS
                while (seconds_left := next_beat - time.monotonic()) > 0:
                    for message in store_client.receive_messages(seconds_left):
                        self._obey(message)
        finally:
            store_client.close()

    def make_heartbeat(self) -> dict[str, Any]:
        """The fields of `rank_ipc.Beat`."""
        name, lasted = activity.current_activity()
        new_steps = [activity.timed.popleft() for _ in range(len(activity.timed))]
        work_blocks = [work_block.model_dump() for work_block in self._work.add_steps(new_steps)]
        return {
            "time": round(time.time(), 3), "activity": name, "lasted": round(lasted, 3), "step": activity.step,
            "entered": count_collectives(), **({"work": work_blocks} if work_blocks else {}),
        }  # fmt: skip

    def _obey(self, message: dict[str, Any]) -> None:
        if int(message.get("attempt", 0)) > self._attempt:
            os._exit(SUPERSEDED)


def count_collectives() -> dict[str, int]:
    """By name of the process group: how many collectives this rank has entered in it. Names are equal on all ranks."""
    world = distributed_c10d._world
    process_groups: list[Any] = list(world.pg_map)  # at once: the training thread may add some
    entered_by_group: dict[str, int] = {}
    for process_group in process_groups:
        group_name = world.pg_names.get(process_group)
        if process_group.group_desc == CHANNEL:
            continue  # stages do not send equally often
        if group_name is None:
            continue  # torch is still making it, or ending it: it enters the group first and its name later
        entered = process_group._get_sequence_number_for_group()
        is_default = process_group is world.default_pg
        entered_by_group[group_name] = activity.count_collectives(entered) if is_default else entered
    return entered_by_group


def run_rank(
    train: Callable[[RunConfig, Path, int | None], int], arguments: Sequence[str] | None = None
) -> NoReturn:
    """Run `train` as one rank of a process group; arguments: of the command line. Ends the process."""
    parser = argparse.ArgumentParser(
        prog="deepspeed --module megastable.train",
        description="Train a GPT as a recipe says; resume when run.dir holds a run already.",
        epilog="example: deepspeed --num_gpus 4 --module megastable.train launch/recipes/quickstart.yaml "
        "parallel.tensor=2 parallel.pipeline=2 train.steps=20",
    )
    parser.add_argument("recipe", help="a YAML file, e.g. launch/recipes/quickstart.yaml")
    parser.add_argument("overrides", nargs="*", help="dotted overrides, e.g. train.steps=20 run.dir=runs/x")
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # the launcher adds it
    parser.add_argument("--supervised", help=argparse.SUPPRESS)  # the supervisor's mark (rank_ipc.py)
    parsed_arguments = parser.parse_intermixed_args(arguments)
    spare_output()
    try:
        os.environ.update(find_membership(os.environ))  # RANK etc.
    except ConfigError as error:
        cluster_tasks = find_tasks(os.environ)
        if cluster_tasks is None or cluster_tasks.rank == 0:
            print(f"error: {error}", file=sys.stderr, flush=True)
        raise SystemExit(error.code) from None
    attempt = attempt_of(parsed_arguments.supervised)
    rank, world = int(os.environ["RANK"]), int(os.environ.get("WORLD_SIZE", "1"))
    if attempt is not None:
        Beats(run_of(parsed_arguments.supervised), attempt, rank, host_name(), world)
    try:
        recipe_config = recipe.load_recipe(parsed_arguments.recipe, parsed_arguments.overrides)
        deepspeed_json.build_deepspeed_json(recipe_config, world)
    except MegastableError as error:
        # The same on every rank: one message is enough. The launcher ends all ranks when the first one ends: not before
        # it, nor before a stop that waits, which would end it without a word.
        if rank:
            release_stops()
            time.sleep(30)
        print(f"error: {error}", file=sys.stderr, flush=True)
        raise SystemExit(error.code) from None
    try:
        start_distributed(
            recipe_config.run.timeout, recipe_config.run.deterministic, recipe_config.run.rendezvous
        )
        exit_code = train(recipe_config, recipe.find_recipe(parsed_arguments.recipe), attempt)
    except MegastableError as error:
        # The supervisor chose the port, and will choose another for the next attempt.
        is_retried = isinstance(error, RendezvousError) and attempt is not None
        exit_code = FAILED if is_retried else error.code
        if rank == 0 or not error.collective:
            print(f"error: {error}", file=sys.stderr, flush=True)
        if not error.collective:
            # The others wait in a collective that this rank will not reach: exit, and the launcher ends them.
            sys.stdout.flush()
            os._exit(exit_code)
    except (Exception, KeyboardInterrupt) as error:
        # Do not wait for the thread that writes this rank's part of a checkpoint: it will never be committed.
        sys.stdout.flush()
        print(describe_end(error, rank, world), end="", file=sys.stderr, flush=True)
        os._exit(code_of(error))
    stop_distributed()
    # Everything is on disk. Destructors of C++ libraries abort about once in hundreds of runs ("terminate called
    # without an active exception"): a complete run would exit with -6.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)
