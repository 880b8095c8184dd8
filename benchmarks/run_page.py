"""Measure the run page: its server, and what a browser waits for, of a run of a million steps.

    python -m benchmarks.run_page
    python -m benchmarks.run_page --steps 20000 --json page.json

It makes the run in a temporary folder, starts the server without and with its cache, and opens the page in a headless
Chromium, if there is one. Processor times are the server's, and hold on a busy machine, too; paints do not.
The targets: 300 MB at the peak, a first contentful paint within a second.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.made_run import SECONDS, long_run, progress
from megastable.base.errors import MegastableError
from megastable.run.directory import RunDirectory, read_object

ROOT = Path(__file__).parents[1]
COLUMNS = 1000  # of a plot
NEWS = 5  # steps that are timed until they are on the page
SETTLED = 3.0  # seconds of rest, after which memory is read
QUIET = 0.05  # share of a core, below which a server rests
Figures = dict[str, Any]
# By key: what it is, and its unit.
MEANING = {
    "first_start_cpu": ("start without a cache until the first answer, CPU time", "s"),
    "first_all_cpu": ("... until all record files are read, CPU time", "s"),
    "start_cpu": ("start with the cache until the first answer, CPU time", "s"),
    "start_wall": ("... on the clock", "s"),
    "answer_cpu": (f"answer for all plots, {COLUMNS:,} columns, CPU time", "s"),
    "answer_wall": ("... on the clock", "s"),
    "answer_bytes": ("... its size", "MB"),
    "rss": ("memory of the server at rest (RSS)", "MB"),
    "first_peak": ("... peak, without a cache", "MB"),
    "peak": ("... peak, with the cache", "MB"),
    "first_paint": ("first paint", "s"),
    "first_contentful_paint": ("first contentful paint", "s"),
    "ready": ("everything is drawn", "s"),
    "script_memory": ("script memory of the page", "MB"),
    "news": ("a new step in progress.json until it is on the page", "s"),
    "news_slowest": ("... the slowest", "s"),
}


class Server:
    """A server of the page, as a process. began: its CPU time counts from its start."""

    def __init__(self, run: Path, cache: Path, patience: float) -> None:
        words = [sys.executable, str(ROOT / "tools/watch.py"), str(run), "--port", "0"]
        environment = {**os.environ, "XDG_CACHE_HOME": str(cache)}
        self.patience, self.began = patience, time.perf_counter()
        self.process = subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        said = self.process.stdout.readline().split()  # the address, and how to end it
        if not said:
            raise MegastableError(f"{' '.join(words)}: ended before it told its address")
        self.address = said[0]
        self.seen = psutil.Process(self.process.pid)

    def ask(self, path: str) -> bytes:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(self.address + path, timeout=self.patience) as answer:
            return bytes(answer.read())

    def cpu(self) -> float:
        times = self.seen.cpu_times()
        return float(times.user + times.system)

    def peak(self) -> float:
        """MB, the most that it ever had."""
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024 / 1e6

    def settle(self) -> None:
        """Wait until it rests: all is read, and the account of time is made."""
        self.until(lambda: json.loads(self.ask("heads"))[0]["loaded"] >= 1)
        self.until(lambda: json.loads(self.ask("run/0/panel"))["time"] is not None)
        while True:
            before = self.cpu()
            time.sleep(SETTLED)
            if self.cpu() - before < QUIET * SETTLED:
                return

    def until(self, true: Callable[[], bool]) -> None:
        end = time.monotonic() + self.patience
        while not true():
            if time.monotonic() > end:
                raise MegastableError(f"the server of the page was not ready within {self.patience:.0f} s")
            time.sleep(0.1)

    def close(self) -> None:
        self.process.terminate()
        self.process.communicate()


@contextmanager
def serving(run: Path, cache: Path, patience: float) -> Iterator[Server]:
    server = Server(run, cache, patience)
    try:
        yield server
    finally:
        server.close()


def measure(steps: int, patience: float, rounds: int, in_browser: bool) -> Figures:
    """All figures of MEANING that can be had."""
    with tempfile.TemporaryDirectory(prefix="megastable-page-") as name:
        folder, found = Path(name), Figures(steps=steps)
        run = long_run(folder / "run", steps)
        found["files"] = len(os.listdir(run.steps))
        with serving(run.root, folder / "cache", patience) as server:
            server.ask("heads")
            found["first_start_cpu"] = server.cpu()
            server.until(lambda: json.loads(server.ask("heads"))[0]["loaded"] >= 1)
            found["first_all_cpu"] = server.cpu()
            server.settle()
            found["first_peak"] = server.peak()
        with serving(run.root, folder / "cache", patience) as server:
            server.ask("heads")
            found["start_cpu"], found["start_wall"] = server.cpu(), time.perf_counter() - server.began
            server.settle()
            found["rss"] = server.seen.memory_info().rss / 1e6
            found |= _answers(server, rounds)
            if in_browser:
                found |= _page(server, run, folder / "browser", rounds)
            found["peak"] = server.peak()
    return found


def _answers(server: Server, rounds: int) -> Figures:
    walls, before, size = [], server.cpu(), 0
    for _ in range(rounds):
        begin = time.perf_counter()
        size = len(server.ask(f"run/0/plots?axis=step&columns={COLUMNS}"))
        walls.append(time.perf_counter() - begin)
    return {
        "answer_cpu": (server.cpu() - before) / rounds, "answer_wall": median(walls), "answer_bytes": size / 1e6,
    }  # fmt: skip


def _page(server: Server, run: RunDirectory, home: Path, rounds: int) -> Figures:
    """What a browser sees; medians of `rounds` loads."""
    from benchmarks.browser import browser

    home.mkdir()
    paints: dict[str, list[float]] = {"first-paint": [], "first-contentful-paint": [], "ready": []}
    with browser(home) as driver:
        for _ in range(rounds):
            driver.get("about:blank")
            begin = time.perf_counter()
            driver.get(server.address)
            server.until(lambda: bool(driver.execute_script("return document.documentElement.dataset.ready")))
            paints["ready"].append(time.perf_counter() - begin)
            script = "return performance.getEntriesByType('paint').map((one) => [one.name, one.startTime])"
            for name, milliseconds in driver.execute_script(script):
                paints[name].append(milliseconds / 1000)
        memory = driver.execute_script("return performance.memory.usedJSHeapSize")
        news = [_new_step(server, run, driver) for _ in range(NEWS)]
    found = {key.replace("-", "_"): median(values) for key, values in paints.items() if values}
    return {**found, "script_memory": memory / 1e6, "news": median(news), "news_slowest": max(news)}


def _new_step(server: Server, run: RunDirectory, driver: Any) -> float:
    """Seconds from a new progress.json until its step is in the plot of the loss."""
    last = read_object(run.progress)
    step, loss = int(last["step"]) + 1, float(last["loss"]) + 1e-3
    begin = time.perf_counter()
    progress(run, step, float(last["time"]) + SECONDS, loss, steps=step)
    # Not in a plot: of a long run many steps share a pixel.
    script = "return document.querySelector('.figures').textContent.includes(arguments[0])"
    server.until(lambda: bool(driver.execute_script(script, f"step {step:,} of")))
    return time.perf_counter() - begin


def table(found: Figures) -> Table:
    title = f"Run page: {found['steps']:,} steps in {found['files']:,} record files, load {os.getloadavg()[0]:.1f}"
    shown = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, show_header=False)
    for key, (what, unit) in MEANING.items():
        if key in found:
            digits = 0 if unit == "MB" and found[key] >= 10 else 2
            shown.add_row(what, f"{found[key]:,.{digits}f} {unit}")
    return shown


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.run_page", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=5, help="answers, and loads of the page")
    parser.add_argument(
        "--patience", type=float, default=600.0, help="seconds for a server to be ready, at most"
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the figures, in seconds and MB, there, too"
    )
    args = parser.parse_args(arguments)
    missing = _missing()
    found = measure(args.steps, args.patience, args.rounds, not missing)
    Console().print(table(found))
    if missing:
        print(f"not measured in a browser: {missing}")
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


def _missing() -> str:
    """Why there is no browser; "" if there is."""
    try:
        from benchmarks.browser import MISSING
    except ImportError:
        return "no selenium: pip install selenium"
    return MISSING


if __name__ == "__main__":
    main()
