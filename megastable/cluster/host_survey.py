"""Asks every host for its report at once: puts a token into the run directory, starts host_check, reads what comes."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from megastable.base.errors import ConfigError
from megastable.cluster.host_check import LOOK, TOKEN, allowed
from megastable.cluster.host_report import HostReport, read_report
from megastable.cluster.reach import AT_ONCE, CONNECT, HostAnswer, Reach, python, run_on
from megastable.cluster.timed_probe import TimedProbe

BURNING = 1024  # hosts at a time: each only waits, and they are to be done at the same time
START = 20.0  # seconds for Python itself, from a cold shared file system


@dataclass(frozen=True)
class BurnInOrder:
    """seconds: of work on every host. seed: of its inputs, the same everywhere."""

    seconds: float
    seed: int


@dataclass(frozen=True)
class Survey:
    """Reports, or reasons why there is none, by the host's name; the token that they should have seen, None if it could
    not be written, and why (`unwritten`); offsets of their clocks against this one's. [seconds]"""

    reports: dict[str, HostReport | str]
    token: str | None
    offsets: dict[str, float]
    unwritten: str = ""


def survey(
    hosts: Sequence[str],
    reach: Reach,
    folder: Path,
    full: bool,
    burn_in: BurnInOrder | None = None,
    told: Callable[[str], None] | None = None,
    hurry: Callable[[], bool] = lambda: False,
) -> Survey:
    """The reports of `hosts`. folder: exists, and is shared by all of them. told: is told of each host that answered.
    hurry: whether to wait for no more.

    A disk that is full, or does not answer, is no reason to ask nobody: between two attempts it is what the run waits
    for.
    """
    words = ["--folder", str(folder.absolute()), *["--full"] * full]
    if burn_in is not None:
        words += ["--burn-in", str(burn_in.seconds), "--seed", str(burn_in.seed)]
    command = python("megastable.cluster.host_check", *words)
    seconds = CONNECT + START + allowed(full, None if burn_in is None else burn_in.seconds)
    with _token(folder) as (token, unwritten):
        answers = run_on(
            hosts,
            reach,
            command,
            seconds,
            at_once=AT_ONCE if burn_in is None else BURNING,
            told=None if told is None else lambda host, _: told(host),
            hurry=hurry,
        )
    reports = {host: _read(answer) for host, answer in answers.items()}
    offsets = {
        host: report.time - answers[host].ended
        for host, report in reports.items()
        if isinstance(report, HostReport)
    }
    return Survey(reports, token, offsets, unwritten)


def _read(answer: HostAnswer) -> HostReport | str:
    return answer.reason if answer.reason is not None else read_report(answer.output)


@contextmanager
def _token(folder: Path) -> Iterator[tuple[str | None, str]]:
    """A text that is in the folder's .preflight for as long as this lasts; or None, and why there is none."""
    token, path = secrets.token_hex(8), folder / TOKEN

    def write() -> None:
        with path.open("w") as file:
            file.write(token)
            file.flush()
            os.fsync(file.fileno())  # other hosts are to see it

    _, why = TimedProbe(write, LOOK).result()
    try:
        if why is None:
            yield token, ""
        else:
            yield None, f"{path} could not be written: {why}. Every host writes into that directory"
    finally:
        TimedProbe(path.unlink, LOOK).result()


def existing(path: Path) -> Path:
    """`path`, or the directory above it in which it would be made. Raises ConfigError if the file system hangs."""
    above = [path.absolute(), *path.absolute().parents]
    index, why = TimedProbe(lambda: [folder.is_dir() for folder in above].index(True), LOOK).result()
    if why is not None:
        raise ConfigError(f"{path}: {why}: its file system hangs or fails")
    return above[index]
