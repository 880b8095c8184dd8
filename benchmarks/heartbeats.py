"""The load of heartbeats on the supervisor: so many simulated ranks, each with a connection of its own, one heartbeat a
second.

    python -m benchmarks.heartbeats --ranks 10000 --seconds 20

Prints the share of a core that the store takes, the age of the oldest heartbeat at the end, and what a heartbeat costs
a rank. Fails (exit code 1) if any rank was not heard, or the store needs more than one core.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import tempfile
import time
from pathlib import Path

from megastable.cluster.store import Store
from megastable.run.directory import RunDirectory
from megastable.run.wire import Address, StoreClient

CLIENTS = 4  # processes
ENTERED = {str(group): 1_000_000 + group for group in range(8)}  # process groups of a rank


def ranks(address: Address, numbers: range, seconds: float, costs: multiprocessing.Queue[float]) -> None:
    """Simulate some ranks in one process: their heartbeats are spread over the second."""
    _more_files()
    links = [
        StoreClient(
            address, {"role": "rank", "attempt": 1, "rank": n, "host": f"node-{n // 8}", "pid": n}, seconds=60
        )
        for n in numbers
    ]
    until, sent, busy = time.monotonic() + seconds, 0, 0.0
    while time.monotonic() < until:
        second = time.monotonic()
        for index, link in enumerate(links):
            begin = time.perf_counter()
            link.send({
                "time": round(time.time(), 3), "activity": "forward", "lasted": 0.1, "step": sent, "entered": ENTERED,
            })  # fmt: skip
            busy += time.perf_counter() - begin
            sent += 1
            if (ahead := second + index / len(links) - time.monotonic()) > 0.01:
                time.sleep(ahead)
        time.sleep(max(0.0, second + 1 - time.monotonic()))
    costs.put(busy / sent)
    for link in links:
        link.close()


def _more_files() -> None:
    import resource

    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=20.0)
    args = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, Store(RunDirectory(Path(folder))) as store:
        store.begin(1)
        costs = context.Queue()
        numbers = [range(k, args.ranks, CLIENTS) for k in range(CLIENTS)]
        clients = [
            context.Process(target=ranks, args=(store.address, some, args.seconds, costs)) for some in numbers
        ]
        for client in clients:
            client.start()
        while sum(1 for rank in list(store.ranks.values()) if rank.beat) < args.ranks:
            time.sleep(0.2)
            if not any(client.is_alive() for client in clients):
                print(f"only {len(store.ranks)} of {args.ranks} ranks were heard", file=sys.stderr)
                return 1
        begin, used = (
            time.monotonic(),
            time.process_time(),
        )  # of all threads of this process: the store's, and this one
        time.sleep(args.seconds / 2)
        now = time.monotonic()
        share = (time.process_time() - used) / (now - begin)
        oldest = max(now - rank.at for rank in list(store.ranks.values()))
        cost = max(costs.get() for _ in clients)
        for client in clients:
            client.join()
        print(
            f"{args.ranks} ranks, a heartbeat a second each: {share:.0%} of a core, the oldest word {oldest:.1f} s old"
        )
        print(f"a heartbeat costs a rank {1e6 * cost:.0f} us: {cost:.3%} of its time")
        return 0 if share < 1 else 1


if __name__ == "__main__":
    sys.exit(main())
