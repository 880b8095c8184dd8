"""Runs a burn-in on this host: a process for each device, which writes its state to a file after every test.

First each device by itself, then all-reduces over all of them. A process that dies or hangs leaves its last state,
which names the test that it was in.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from pydantic import ValidationError

from megastable.base import hardware
from megastable.cluster.burn_in.device_rounds import KEPT, rounds
from megastable.cluster.burn_in.faults import DeviceBurnIn, HostBurnIn
from megastable.cluster.burn_in.sum_exchange import exchanges

Phase = Literal["rounds", "exchange"]
EXCHANGE = 0.2  # of the time, where there are several devices
CPU_RANKS = 2  # that exchange, on a host without GPUs
HANG = (
    240.0  # seconds without a new state: torch's import from a cold shared file system, and the longest test
)
GRACE = 5.0  # seconds for other ranks to end by themselves, once one has failed
KILL = 10.0  # seconds for a killed process to end: one that waits for a dead device may never
WAITED = "waited for another rank"
LOOK = 0.05  # seconds between polls


def burn_in(seconds: float, seed: int, first: int = 0) -> HostBurnIn:
    """All devices of this host, for about `seconds` of work. first: number of the first round."""
    gpus = hardware.has_gpu() and os.environ.get("DS_ACCELERATOR") != "cpu"
    count = torch.cuda.device_count() if gpus else 0
    kind, alone = ("cuda" if count else "cpu"), count == 1
    share = 0.0 if alone else EXCHANGE
    found = phase("rounds", kind, max(1, count), seconds * (1 - share), seed, first)
    why = ""
    if any(state.ended for state in found):
        why = "not tried, because a device failed before"
    elif any(state.in_use for state in found):
        why = "not tried, because others use a device"
    elif not alone:
        exchanged = phase("exchange", kind, count or CPU_RANKS, seconds * share, seed)
        ends = [f"{state.device}: {state.ended}" for state in exchanged if state.ended]
        why = min(
            ends, key=lambda end: WAITED in end, default=""
        )  # the rank that failed, not one that waits for it
        found += [state.model_copy(update={"ended": ""}) for state in exchanged]
    return HostBurnIn(seed=seed, seconds=seconds, devices=merged(found), all_reduce_unknown=why)


def merged(states: Sequence[DeviceBurnIn]) -> list[DeviceBurnIn]:
    """One state per device, of what several processes did on it. Pure."""
    found = dict[str, DeviceBurnIn]()
    for new in states:
        old = found.get(new.device)
        if old is not None:
            runs, failed = dict(old.runs), dict(old.failed)
            for total, more in ((runs, new.runs), (failed, new.failed)):
                for test, n in more.items():
                    total[test] = total.get(test, 0) + n
            faults = [*old.faults, *new.faults][: 2 * KEPT]
            new = old.model_copy(update={"runs": runs, "failed": failed, "faults": faults})
        found[new.device] = new.model_copy(update={"now": ""})
    return list(found.values())


def phase(
    what: Phase, kind: str, ranks: int, seconds: float, seed: int, first: int = 0
) -> list[DeviceBurnIn]:
    """The last states of all ranks. One that ended badly has the reason in `ended`."""
    parent, started = os.getppid(), list[subprocess.Popen[bytes]]()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        words = [
            *(sys.executable, "-m", "megastable.cluster.burn_in", "--phase", what, "--kind", kind),
            *("--of", str(ranks), "--folder", name, "--seconds", str(seconds), "--seed", str(seed)),
            *("--first-round", str(first)),
        ]
        # Products and attention must give the same bits every time.
        environment = os.environ | {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_DEBUG": "WARN"}
        try:
            for rank in range(ranks):
                with (folder / f"log{rank}").open("wb") as log:
                    started.append(
                        subprocess.Popen(
                            [*words, "--rank", str(rank)], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                            env=environment,
                        )
                    )  # fmt: skip
            killed = _waited(started, folder, parent, together=what == "exchange")
        finally:
            for process in started:
                process.kill()
            for process in started:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(KILL)
        return [
            _last_state(folder, rank, kind, process.returncode, killed.get(rank))
            for rank, process in enumerate(started)
        ]


def _waited(
    ranks: Sequence[subprocess.Popen[bytes]], folder: Path, parent: int, together: bool
) -> dict[int, str]:
    """The ranks that have to be killed, and why. together: they wait for each other."""
    killed, until = dict[int, str](), float("inf")
    written = dict.fromkeys(
        range(len(ranks)), (0.0, time.monotonic())
    )  # by rank: a file's time, when it was seen
    while running := {rank for rank, process in enumerate(ranks) if process.poll() is None} - killed.keys():
        if os.getppid() != parent:
            raise SystemExit("whoever asked is gone")
        for rank in running:
            if (newest := _written(folder, rank)) != written[rank][0]:
                written[rank] = newest, time.monotonic()
            if time.monotonic() - written[rank][1] > HANG:
                killed[rank] = f"no news for {HANG:.0f} s"
        if together and until == float("inf") and any(process.returncode for process in ranks):
            until = time.monotonic() + GRACE
        if time.monotonic() > until:
            return killed | dict.fromkeys(running, WAITED)
        time.sleep(LOOK)
    return killed


def _written(folder: Path, rank: int) -> float:
    """When its state was written last, by a clock that may be set meanwhile; 0: not yet."""
    with suppress(OSError):
        return (folder / f"state{rank}").stat().st_mtime
    return 0.0


def _last_state(folder: Path, rank: int, kind: str, code: int | None, killed: str | None) -> DeviceBurnIn:
    """code: its exit code, None if it cannot be ended. killed: why it was, None if it ended by itself."""
    try:
        state = DeviceBurnIn.model_validate_json((folder / f"state{rank}").read_bytes())
    except (OSError, ValidationError):
        state = DeviceBurnIn(device=_device(kind, rank), now="its start")
    if state.ended or (code == 0 and killed is None):
        return state
    lines = (folder / f"log{rank}").read_text(errors="replace").strip().splitlines()
    said = f": {lines[-1][-300:]}" if lines else ""
    return state.model_copy(update={"ended": f"{state.now}: {killed or f'exit code {code}'}{said}"})


# One rank


def be_a_rank(
    what: Phase, kind: str, rank: int, of: int, folder: Path, seconds: float, seed: int, first: int
) -> int:
    """The exit code. The state goes to a file of the folder."""
    parent, state = os.getppid(), DeviceBurnIn(device=_device(kind, rank), now="its start")
    try:
        for state in _work(what, kind, rank, of, folder, seconds, seed, first):
            write_state(folder, rank, state)
            if os.getppid() != parent:
                return 1
    except torch.OutOfMemoryError:  # somebody else took what was free
        write_state(folder, rank, state.model_copy(update={"in_use": "others took its memory meanwhile"}))
        os._exit(0)
    except RuntimeError as error:  # torch's, of a device or a collective
        lines = str(error).strip().splitlines() or [type(error).__name__]
        write_state(folder, rank, state.model_copy(update={"ended": f"{state.now}: {lines[0][:300]}"}))
        # A device that failed may fail again, or hang, when it is asked to clean up.
        os._exit(1)
    return 0


def write_state(folder: Path, rank: int, state: DeviceBurnIn) -> None:
    """Whole, or not at all."""
    part = folder / f"part{rank}"
    part.write_text(state.model_dump_json())
    part.replace(folder / f"state{rank}")


def _work(
    what: Phase, kind: str, rank: int, of: int, folder: Path, seconds: float, seed: int, first: int
) -> Iterator[DeviceBurnIn]:
    device = torch.device("cpu")
    sharing = of if kind == "cuda" or what == "exchange" else 1
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // sharing))
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # else gloo looks up the host's name, which containers often lack
    if kind == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
        # Sums are exact in fp32, and rounded once.
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    if what == "rounds":
        yield from rounds(device, seed, seconds, first)
        return
    backend = "nccl" if kind == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{folder}/meet", rank=rank, world_size=of)
    yield from exchanges(device, seed, seconds)
    dist.destroy_process_group()


def _device(kind: str, rank: int) -> str:
    return f"cuda:{rank}" if kind == "cuda" else "cpu"
