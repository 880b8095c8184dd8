"""Watch a run as a person, Prometheus and the supervisor's metrics do, in a process of its own.

    python -m benchmarks.watch_audience runs/mine http://localhost:8765/

It follows the page's event stream and asks for panel and plots at every news, as an open page does; looks at the run
once a second, reads the host and serves metrics, as the supervisor does; and scrapes these every five seconds. Until it
is killed.
"""

from __future__ import annotations

import argparse
import threading
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from megastable.cluster.host_watch import HostWatch
from megastable.supervise.metrics import Metrics
from megastable.supervise.status import RunWatch

LOOK, SCRAPE = 1.0, 5.0  # seconds
PATIENCE = 600.0  # seconds: it may be stopped meanwhile
OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def follow(address: str) -> None:
    """Be an open page."""
    with OPENER.open(f"{address}events", timeout=PATIENCE) as stream:
        for line in stream:
            if line.startswith(b"data:"):
                for path in ("run/0/plots?columns=1000", "run/0/panel", "run/0/heat", "run/0/machines"):
                    with OPENER.open(address + path, timeout=PATIENCE) as answer:
                        answer.read()


def scrape(port: int) -> None:
    while True:
        with OPENER.open(f"http://127.0.0.1:{port}/metrics", timeout=PATIENCE) as answer:
            answer.read()
        time.sleep(SCRAPE)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.watch_audience", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("run", type=Path)
    parser.add_argument("address", help="of the page, with / at its end")
    args = parser.parse_args(arguments)
    watch, metrics = RunWatch(args.run), Metrics(0, machines=args.run / "machines")
    metrics.update(watch.status())
    threading.Thread(target=follow, args=(args.address,), daemon=True).start()
    threading.Thread(target=scrape, args=(metrics.port,), daemon=True).start()
    print("watching", flush=True)
    host = HostWatch()
    while True:
        host.latest()
        time.sleep(LOOK)
        metrics.update(watch.status())


if __name__ == "__main__":
    main()
