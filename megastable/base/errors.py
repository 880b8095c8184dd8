"""Errors that a user can act on, and the process exit codes that go with them.

A message says what was wrong, where, and what to do. The entry points (`train.main`, the tools) print it without a
traceback and exit with `code`.
"""

from __future__ import annotations

import errno
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from megastable.base.text import make_visible

LINES = "\n\t"
# Failures of the file system that a name given by the user can cause.
OF_NAMES = {errno.ENAMETOOLONG, errno.ELOOP, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR}
# Exit codes, documented in docs/exit-codes.md. The supervisor and schedulers act on them.
OK = 0
FAILED = 1  # an unforeseen error, with a traceback; of a command that answers a question: no
BAD_INPUT = 2  # configuration, data or arguments, missing, wrong or damaged: a retry changes nothing
STOPPED = 75  # asked to stop (SIGTERM, SIGINT): a checkpoint was written, restart to continue
UNSTABLE = 76  # the gate gave up: the run cannot continue on its own
NO_SPACE = 77  # no room: for checkpoints, or for what the training cannot do without
HANDOVER = 78  # restart: the run continues from a checkpoint before the incident
SUPERSEDED = 79  # the supervisor has started another attempt: this one must stop writing
HOST_GONE = 80  # a host stayed away, or is faulty: continue without it, or once it is back
INTERRUPTED = 130  # Ctrl-C, as shells have it


class MegastableError(Exception):
    """An error whose message is all that the user needs. `collective`: every rank has raised it."""

    code = FAILED
    collective = False


class ConfigError(MegastableError):
    """A recipe, an override or a DeepSpeed file that cannot be used."""

    code = BAD_INPUT


class RendezvousError(ConfigError):
    """The ranks cannot meet at the given address, mostly because the port is taken."""


class DataError(MegastableError):
    """A shard, index, manifest, tokenizer, ledger or corpus that cannot be used."""

    code = BAD_INPUT


class CheckpointError(MegastableError):
    """A checkpoint that is missing, damaged, or does not fit this run."""

    code = BAD_INPUT


class UnstableError(MegastableError):
    """The updates of this run can no longer be trusted."""

    code = UNSTABLE


class HandoverError(MegastableError):
    """The run must continue from an older checkpoint; a restart does that."""

    code = HANDOVER


class SpaceError(MegastableError):
    """Checkpoints could not be written, and the run may not continue without them."""

    code = NO_SPACE


def is_full(error: BaseException) -> bool:
    """Whether a disk is full, or the user's share of it is used up."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def code_of(error: BaseException) -> int:
    """The exit code of a process that ends with `error`."""
    if isinstance(error, MegastableError):
        return error.code
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    return NO_SPACE if is_full(error) else FAILED


@contextmanager
def user_errors() -> Iterator[None]:
    """Turn a `MegastableError` into one message on stderr and its exit code, Ctrl-C into 130, and a file-system error
    about a name given by the user into a message and exit code 2."""
    try:
        yield
    except MegastableError as error:
        # File names and contents are untrusted: a terminal must not obey escape sequences in them.
        print(f"error: {make_visible(error, keep=LINES)}", file=sys.stderr, flush=True)
        raise SystemExit(error.code) from None
    except OSError as error:
        if error.errno not in OF_NAMES:
            raise
        error_text = f"{error.filename}: {error.strerror}" if error.filename is not None else str(error)
        print(f"error: {make_visible(error_text[:500])}", file=sys.stderr, flush=True)
        raise SystemExit(BAD_INPUT) from None
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr, flush=True)
        raise SystemExit(INTERRUPTED) from None
