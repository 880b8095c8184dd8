"""Builds the command lines of the deepspeed launcher. Pure, but for a free port."""

from __future__ import annotations

import socket
import sys
from collections.abc import Sequence

from megastable.config.supervise import redacted_override
from megastable.run.directory import RunDirectory
from megastable.run.rank_ipc import FLAG, mark

# Not the `deepspeed` script beside the interpreter: there is none if DeepSpeed is on PYTHONPATH.
LAUNCHER = (sys.executable, "-m", "deepspeed.launcher.runner")
MODULE = "megastable.train"  # default module to train with


def command(
    run: RunDirectory,
    number: int,
    module: str,
    recipe: str,
    overrides: Sequence[str],
    given: Sequence[str],
    port: int | None = None,
) -> list[str]:
    """The command that starts an attempt. port: where the ranks meet; one that is free here if not given."""
    # The ranks send no notifications: they need no password, and other users see their arguments.
    words = launcher(module, recipe, [redacted_override(text) for text in overrides], given, port)
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
