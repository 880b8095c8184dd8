"""Asks every host for its report at once: puts a token into the run directory, starts host_check, reads what comes."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, ValidationError

from megastable.base.errors import ConfigError
from megastable.base.text import make_visible
from megastable.cluster.child_process import TimedProbe
from megastable.cluster.host_check import LOOK, TOKEN, allowed_seconds
from megastable.cluster.reach import AT_ONCE, CONNECT, Reach, build_python_command, run_on_hosts

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


def survey_hosts(
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
    check_words = ["--folder", str(folder.absolute()), *["--full"] * full]
    if burn_in is not None:
        check_words += ["--burn-in", str(burn_in.seconds), "--seed", str(burn_in.seed)]
    check_command = build_python_command("megastable.cluster.host_check", *check_words)
    time_limit = CONNECT + START + allowed_seconds(full, None if burn_in is None else burn_in.seconds)
    with _token(folder) as (token, unwritten):
        answers = run_on_hosts(
            hosts, reach, check_command, time_limit, at_once=AT_ONCE if burn_in is None else BURNING,
            told=None if told is None else lambda host, _: told(host), hurry=hurry,
        )  # fmt: skip
    reports, offsets = dict[str, HostReport | str](), dict[str, float]()
    for host, answer in answers.items():
        report = answer.reason if answer.reason is not None else read_report(answer.output)
        reports[host] = report
        if isinstance(report, HostReport):
            offsets[host] = report.time - answer.ended
    return Survey(reports, token, offsets, unwritten)


@contextmanager
def _token(folder: Path) -> Iterator[tuple[str | None, str]]:
    """A text that is in the folder's .preflight for as long as this lasts; or None, and why there is none."""
    token, path = secrets.token_hex(8), folder / TOKEN

    def write() -> None:
        with path.open("w") as file:
            file.write(token)
            file.flush()
            os.fsync(file.fileno())  # other hosts are to see it

    _, why = TimedProbe(write, LOOK).read_answer()
    try:
        if why is None:
            yield token, ""
        else:
            yield None, f"{path} could not be written: {why}. Every host writes into that directory"
    finally:
        TimedProbe(path.unlink, LOOK).read_answer()


def find_existing_folder(path: Path) -> Path:
    """`path`, or the directory above it in which it would be made. Raises ConfigError if the file system hangs."""
    parent_folders = [path.absolute(), *path.absolute().parents]
    probe = TimedProbe(lambda: [parent_folder.is_dir() for parent_folder in parent_folders].index(True), LOOK)
    index, probe_failure = probe.read_answer()
    if probe_failure is not None:
        raise ConfigError(f"{path}: {probe_failure}: its file system hangs or fails")
    return parent_folders[index]


class _Part(BaseModel):
    model_config = ConfigDict(allow_inf_nan=False, frozen=True)


class SharedFolder(_Part):
    """The run directory as a host sees it. token: text of its .preflight; seconds: a durable write of 4 KiB."""

    seen: bool
    token: str | None = None
    writable: bool = False
    seconds: float | None = None
    why: str = ""


class GpuState(_Part):
    """A GPU. None: it does not tell. memory in bytes, temperature in degrees Celsius, power in W, clock in
    MHz, utilization in percent of the last moment."""

    index: int = -1
    name: str
    driver: str | None = None
    memory: int | None = None
    memory_used: int | None = None
    temperature: int | None = None
    ecc_uncorrected: int | None = None
    utilization: int | None = None
    power: float | None = None
    clock: int | None = None
    xid: list[int] | None = None
    clocks_throttled: list[str] | None = None


class MatmulRate(_Part):
    """TFLOP/s of the slowest device, and of each."""

    tflops: NonNegativeFloat
    dtype: str
    device: str
    each: dict[str, NonNegativeFloat] = Field(default_factory=dict)


class AllReduceRate(_Part):
    """Bandwidth per rank. [GB/s]"""

    gb_per_second: NonNegativeFloat
    ranks: int
    device: str = ""


class HostBurnIn(_Part):
    """seconds: of work asked for. runs: results that were compared; found: what was wrong, with the device. in_use: why
    nothing was done, as others use a GPU, "" if nobody does; undiagnosed: why `dcgmi diag` told nothing, "" if it did
    or is not installed."""

    seed: int
    seconds: float
    runs: int = 0
    found: list[str] = Field(default_factory=list)
    in_use: str = ""
    undiagnosed: str = ""


class HostReport(_Part):
    """What a host says of itself. None: unknown, for the reason in the field of that name. Sizes in bytes; time in
    seconds since 1970, by its clock. machine: the same for two names of one host, "" if it does not tell."""

    host: str
    machine: str = ""
    time: float
    python: str
    packages: dict[str, str] | None
    code: str | None
    commit: str | None = None
    variables: dict[str, str]
    disk_free: int | None
    shm_free: int | None
    folder: SharedFolder | None
    gpus: list[GpuState] | None
    matmul: MatmulRate | None = None
    all_reduce: AllReduceRate | None = None
    burn_in: HostBurnIn | None = None
    packages_unknown: str = ""
    code_unknown: str = ""
    disk_free_unknown: str = ""
    shm_free_unknown: str = ""
    folder_unknown: str = ""
    gpus_unknown: str = ""
    matmul_unknown: str = ""
    all_reduce_unknown: str = ""
    burn_in_unknown: str = ""


def read_report(output: str) -> HostReport | str:
    """The report in what a remote command printed, or why there is none. A login shell, or ssh itself, may have
    printed something, too: the last line that is an object counts."""
    for line in reversed(output.splitlines()):
        if line.startswith("{"):
            try:
                return HostReport.model_validate_json(line)
            except ValidationError as error:
                first_error = error.errors()[0]
                field = ".".join(map(str, first_error["loc"]))
                problem = f"{field or 'JSON'}: {first_error['msg']}"
                return f"its report cannot be read ({problem}): is the code the same there?"
    last_line = make_visible(output.strip().splitlines()[-1], 200) if output.strip() else "nothing"
    return f"it printed no report, but {last_line}"


def as_facts(report: HostReport | str) -> object:
    """For JSON."""
    return json.loads(report.model_dump_json()) if isinstance(report, HostReport) else {"unreachable": report}
