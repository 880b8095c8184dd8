"""Builds the command lines of the deepspeed launcher. Pure, but for a free port."""

from __future__ import annotations

import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from megastable.config.supervise import redacted_override
from megastable.run.directory import RunDirectory
from megastable.run.rank_ipc import FLAG, mark

# Not the `deepspeed` script beside the interpreter: there is none if DeepSpeed is on PYTHONPATH.
LAUNCHER = (sys.executable, "-m", "deepspeed.launcher.runner")
MODULE = "megastable.train"  # default module to train with


@dataclass(frozen=True)
class TrainingCommand:
    """What a person asked for. overrides: of the recipe; given: arguments for the deepspeed launcher; module: what
    trains."""

    recipe: str
    overrides: Sequence[str] = ()
    given: Sequence[str] = ()
    module: str = MODULE


def command(
    run: RunDirectory,
    number: int,
    training: TrainingCommand,
    placed: Sequence[str] = (),
    port: int | None = None,
) -> list[str]:
    """The command that starts an attempt.

    Args:
        run: The run.
        number: Of the attempt.
        training: What is started.
        placed: Further arguments for the launcher, before those given: where the ranks are.
        port: Where the ranks meet; one that is free here if not given.
    """
    # The ranks send no notifications: they need no password, and other users see their arguments.
    overrides = [redacted_override(text) for text in training.overrides]
    words = launcher(training.module, training.recipe, overrides, [*placed, *training.given], port)
    return [*words, f"run.dir={run.root}", f"{FLAG}={mark(run, number)}"]


def launcher(
    module: str, recipe: str, overrides: Sequence[str], given: Sequence[str], port: int | None = None
) -> list[str]:
    """The deepspeed launcher of this interpreter, with a port of its own; given: further arguments for it."""
    elsewhere = any(a.startswith(("--hostfile", "-H", "--num_nodes")) for a in given)
    ports = []
    # Free ports of another host are unknown here: the launcher's default.
    if not any(a.startswith("--master_port") for a in given) and (port is not None or not elsewhere):
        ports = ["--master_port", str(free_port() if port is None else port)]
    quiet = [] if any(a in ("--quiet", "-q") or a.startswith("--log_level") for a in given) else ["--quiet"]
    return [*LAUNCHER, *quiet, *ports, *given, "--module", module, recipe, *overrides]


def free_port() -> int:
    """A port that is free on this host now."""
    with socket.socket() as s:
        s.bind(("", 0))
        return int(s.getsockname()[1])
