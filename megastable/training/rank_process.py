"""Runs a rank as a process: command line, process group, exit codes."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from megastable.base.errors import FAILED, ConfigError, MegastableError, RendezvousError, code_of
from megastable.base.spared_output import spare_output
from megastable.base.stop_signals import release_stops
from megastable.config import deepspeed_json, recipe
from megastable.config.tree import RunConfig
from megastable.engine.distributed import start_distributed, stop_distributed
from megastable.run.membership import membership, tasks
from megastable.run.rank_ipc import attempt_of, host_name, run_of
from megastable.training.beats import Beats
from megastable.training.heartbeat import parting


def main(
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
    args = parser.parse_intermixed_args(arguments)
    spare_output()
    _join()
    attempt = attempt_of(args.supervised)
    rank, world = int(os.environ["RANK"]), int(os.environ.get("WORLD_SIZE", "1"))
    if attempt is not None:
        Beats(run_of(args.supervised), attempt, rank, host_name(), world)
    try:
        config = recipe.load(args.recipe, args.overrides)
        deepspeed_json.build(config, world)
    except MegastableError as error:
        # The same on every rank: one message is enough. The launcher ends all ranks when the first one ends: not before
        # it, nor before a stop that waits, which would end it without a word.
        if rank:
            release_stops()
            time.sleep(30)
        _fail(error)
    try:
        start_distributed(config.run.timeout, config.run.deterministic, config.run.rendezvous)
        code = train(config, recipe.find(args.recipe), attempt)
    except MegastableError as error:
        # The supervisor chose the port, and will choose another for the next attempt.
        retried = isinstance(error, RendezvousError) and attempt is not None
        code = FAILED if retried else error.code
        if rank == 0 or not error.collective:
            print(f"error: {error}", file=sys.stderr, flush=True)
        if not error.collective:
            # The others wait in a collective that this rank will not reach: exit, and the launcher ends them.
            sys.stdout.flush()
            os._exit(code)
    except (Exception, KeyboardInterrupt) as error:
        # Do not wait for the thread that writes this rank's part of a checkpoint: it will never be committed.
        sys.stdout.flush()
        print(parting(error, rank, world), end="", file=sys.stderr, flush=True)
        os._exit(code_of(error))
    stop_distributed()
    # Everything is on disk. Destructors of C++ libraries abort about once in hundreds of runs ("terminate called
    # without an active exception"): a complete run would exit with -6.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _join() -> None:
    """Set RANK etc. in the environment."""
    try:
        os.environ.update(membership(os.environ))
    except ConfigError as error:
        together = tasks(os.environ)
        if together is None or together.rank == 0:
            print(f"error: {error}", file=sys.stderr, flush=True)
        raise SystemExit(error.code) from None


def _fail(error: MegastableError) -> NoReturn:
    print(f"error: {error}", file=sys.stderr, flush=True)
    raise SystemExit(error.code) from None
