"""Defines the report of a host (host_check.py prints it), and reads one from the output of a remote command."""

from __future__ import annotations

import json

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, ValidationError

from megastable.base.text import visible


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
                first = error.errors()[0]
                where = ".".join(map(str, first["loc"]))
                return f"its report cannot be read ({where or 'JSON'}: {first['msg']}): is the code the same there?"
    said = visible(output.strip().splitlines()[-1], 200) if output.strip() else "nothing"
    return f"it printed no report, but {said}"


def as_facts(report: HostReport | str) -> object:
    """For JSON."""
    return json.loads(report.model_dump_json()) if isinstance(report, HostReport) else {"unreachable": report}
