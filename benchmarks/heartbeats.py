"""The load of heartbeats on the supervisor: so many simulated ranks, each with a connection of its own, one heartbeat a
second; and what its heartbeats cost a real rank meanwhile.

    python -m benchmarks.heartbeats --ranks 10000 --seconds 20

All ranks connect at once, as after the supervisor was replaced. Prints how long that takes, the share of a core that
the store takes, how old the last word of any rank ever was, and how many heartbeats never arrived. Fails (exit code 1)
if a rank was not heard, a heartbeat was lost, or the store needs more than one core.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.synchronize import Event
from pathlib import Path

from megastable.cluster.store import Store, allow_many_files
from megastable.run.directory import RunDirectory
from megastable.run.wire import Address, StoreClient

CLIENTS = 4  # processes
GROUPS = 8  # process groups of a rank
ENTERED = {str(group): 1_000_000 + group for group in range(GROUPS)}
CONNECTED = 120.0  # seconds within which all must have connected
AGAIN = 2.0  # ... between two tries, as in training/beats.py
LATE = 2.0  # ... without a word from a rank: it has missed one


@dataclass
class Sent:
    """What a process of simulated ranks did. last: number of the last heartbeat, by rank; behind: seconds that it was
    behind its own schedule, at most; retries: connections that took more than one try."""

    last: dict[int, int]
    behind: float
    retries: int


def ranks(
    address: Address,
    numbers: range,
    seconds: float,
    go: Event,
    done: Event,
    told: multiprocessing.Queue[Sent],
) -> None:
    """Simulate some ranks in one process: their heartbeats are spread over the second. They stay connected until
    `done`."""
    allow_many_files()
    retries = []

    def connect(n: int) -> StoreClient:
        hello = {"role": "rank", "attempt": 1, "rank": n, "host": f"node-{n // 8}", "pid": n}
        while True:
            try:
                return StoreClient(address, hello)
            except OSError:
                retries.append(n)
                time.sleep(AGAIN)

    threading.stack_size(1 << 18)
    with ThreadPoolExecutor(len(numbers)) as pool:
        links = list(pool.map(connect, numbers))
    told.put(Sent({}, 0.0, len(retries)))
    go.wait()
    begin, behind, beats = time.monotonic(), 0.0, 0
    while time.monotonic() < begin + seconds:
        for index, link in enumerate(links):
            ahead = begin + beats + index / len(links) - time.monotonic()
            behind = max(behind, -ahead)
            if ahead > 0.01:
                time.sleep(ahead)
            link.send({
                "time": round(time.time(), 3), "activity": "forward", "lasted": 0.1, "step": beats, "entered": ENTERED,
            })  # fmt: skip
        beats += 1
    told.put(Sent(dict.fromkeys(numbers, beats - 1), behind, 0))
    done.wait()
    for link in links:
        link.close()


def real(root: Path, number: int, seconds: float, go: Event, share: multiprocessing.Queue[float]) -> None:
    """A rank's own heartbeats (training/beats.py), with as many process groups: the share of its time that their thread
    computes."""
    from torch import distributed

    from megastable.training.beats import Beats

    distributed.init_process_group("gloo", init_method=f"file://{root}/meeting", rank=0, world_size=1)
    for _ in range(GROUPS - 1):
        distributed.new_group([0])
    go.wait()
    Beats(root, 1, number, "node-real")
    time.sleep(seconds)
    (thread,) = (thread for thread in threading.enumerate() if thread.name == "beats")
    share.put(_computed(thread) / seconds)
    share.close()
    share.join_thread()
    os._exit(0)  # gloo's threads are not worth waiting for


def _computed(thread: threading.Thread) -> float:
    """CPU time of a thread so far. [seconds]"""
    assert thread.ident is not None
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=20.0)
    args = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, Store(RunDirectory(Path(folder))) as store:
        store.begin(1)
        (thread,) = (thread for thread in threading.enumerate() if thread.name == "store")
        told, share = context.Queue(), context.Queue()
        go, done = context.Event(), context.Event()
        numbers = [range(k, args.ranks, CLIENTS) for k in range(CLIENTS)]
        clients = [
            context.Process(
                target=ranks, args=(store.address, some, args.seconds, go, done, told), daemon=True
            )
            for some in numbers
        ]
        clients.append(
            context.Process(
                target=real, args=(Path(folder), args.ranks, args.seconds, go, share), daemon=True
            )
        )
        for client in clients:
            client.start()
        while not store.ranks:
            time.sleep(0.01)
        began, used = time.monotonic(), _computed(thread)
        while len(store.ranks) < args.ranks:
            time.sleep(0.05)
            if time.monotonic() - began > CONNECTED:
                print(f"only {len(store.ranks)} of {args.ranks} ranks have connected", file=sys.stderr)
                return 1
        connected, cost = time.monotonic() - began, _computed(thread) - used
        retries = sum(told.get().retries for _ in numbers)
        print(
            f"{args.ranks} ranks connected at once: {connected:.1f} s, {cost:.1f} s of the store's, "
            f"{retries} tried again"
        )

        go.set()
        time.sleep(2.0)  # the first heartbeat of each
        began, used, oldest, late = time.monotonic(), _computed(thread), 0.0, set[int]()
        while (now := time.monotonic()) < began + args.seconds - 4.0:
            ages = {n: now - heard.at for n, heard in list(store.ranks.items())}
            oldest = max(oldest, *ages.values())
            late |= {n for n, age in ages.items() if age > LATE}
            time.sleep(0.5)
        taken = (_computed(thread) - used) / (time.monotonic() - began)
        sent = [told.get() for _ in numbers]
        time.sleep(1.0)  # what is still on its way
        last = {n: beat for one in sent for n, beat in one.last.items()}
        lost = sum(store.ranks[n].beat.get("step") != beat for n, beat in last.items())
        cost = share.get(timeout=args.seconds + 60.0)
        done.set()
        for client in clients:
            client.join()
    print(
        f"a heartbeat a second each: the store takes {taken:.1%} of a core; oldest word at any time {oldest:.2f} s "
        f"(the simulation was at most {max(one.behind for one in sent):.2f} s behind), {len(late)} ranks late by more "
        f"than {LATE - 1:.0f} s, {lost} heartbeats lost"
    )
    print(f"a real rank's heartbeats take {cost:.4%} of its time")
    return 0 if taken < 1 and not lost else 1


if __name__ == "__main__":
    sys.exit(main())
