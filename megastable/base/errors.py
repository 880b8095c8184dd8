"""Errors that a user can act on, and the exit codes they end a process with.

Whoever raises one of these says what was wrong, where, and what to do; whoever starts a process
(`train.main`, the tools) prints the message without a traceback and exits with `code`.
"""

from __future__ import annotations

import errno
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from megastable.base.text import visible

LINES = "\n\t"
# What a name that a person gave can be wrong by.
OF_NAMES = {errno.ENAMETOOLONG, errno.ELOOP, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR}
# Exit codes, documented in docs/exit-codes.md. The supervisor and schedulers decide by them.
OK = 0
FAILED = 1  # an unforeseen error, with a traceback; of a command that answers a question: no
BAD_INPUT = 2  # configuration, data or arguments, missing, wrong or damaged: trying again changes nothing
STOPPED = 75  # asked to stop (SIGTERM, SIGINT): a checkpoint was written, start again to go on
UNSTABLE = 76  # the gate gave up: the run cannot go on by itself
NO_SPACE = 77  # checkpoints cannot be written
HANDOVER = 78  # start again: the run goes on from a checkpoint before the trouble
SUPERSEDED = 79  # the supervisor has started another attempt: this one must not write any more
INTERRUPTED = 130  # Ctrl-C, as shells have it


class MegastableError(Exception):
    """An error whose message is all that its reader needs. `collective`: every rank has raised it."""

    code = FAILED
    collective = False


class ConfigError(MegastableError):
    """A recipe, an override or a DeepSpeed file that cannot be used as it stands."""

    code = BAD_INPUT


class RendezvousError(ConfigError):
    """The ranks cannot meet where they were told to, mostly because the port is taken."""


class DataError(MegastableError):
    """A shard, index, manifest, tokenizer, ledger or corpus that cannot be used as it stands."""

    code = BAD_INPUT


class CheckpointError(MegastableError):
    """A checkpoint that is missing, damaged, or does not fit this run."""

    code = BAD_INPUT


class UnstableError(MegastableError):
    """The updates of this run can no longer be trusted."""

    code = UNSTABLE


class HandoverError(MegastableError):
    """The run must go on from an older checkpoint; starting it again does that."""

    code = HANDOVER


class SpaceError(MegastableError):
    """Checkpoints could not be written, and the run was told not to go on without."""

    code = NO_SPACE


@contextmanager
def user_errors() -> Iterator[None]:
    """Turn a `MegastableError` into one message on stderr and its exit code; Ctrl-C into 130; what the file system says
    of a name that a person gave into a message and 2."""
    try:
        yield
    except MegastableError as error:
        # Names of files and what stands in them are anybody's: a terminal must not obey them.
        print(f"error: {visible(error, keep=LINES)}", file=sys.stderr, flush=True)
        raise SystemExit(error.code) from None
    except OSError as error:
        if error.errno not in OF_NAMES:
            raise
        told = f"{error.filename}: {error.strerror}" if error.filename is not None else str(error)
        print(f"error: {visible(told[:500])}", file=sys.stderr, flush=True)
        raise SystemExit(BAD_INPUT) from None
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr, flush=True)
        raise SystemExit(INTERRUPTED) from None
