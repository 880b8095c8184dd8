"""Measure the cost of a large skip ledger: reading it at a start, rereading it with one more line, and per step.

python -m benchmarks.ledger_speed [--entries 1000000] [--rounds 5] [--output FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from megastable.base.errors import user_errors
from megastable.data.order import Order, OrderedCorpus
from megastable.data.skip_ledger import SampleEntry, SkipEntry, SkipLedger, append_all, sample_entries
from megastable.data.skips import Selection

TOKENS, LENGTH, BATCH = 10**12, 4096, 2048
REASON = "data: 1 of 2048 samples beyond what harmless ones show: 9.7 where 6.2 is usual"
AT_ONCE = 10_000  # lines written together


def ledgers(order: Order, entries: int) -> Iterator[tuple[str, list[Any]]]:
    """The kinds of ledgers, by name: each with the same number of samples or positions."""
    positions = np.random.default_rng(0).choice(order.sequences[0], entries, replace=False)
    yield "as the run writes them", [*sample_entries(order, positions, REASON, incident=1, step=100)]
    corpus, places = order.corpora[0], order.locate(positions).first_token.tolist()
    of: dict[str, Any] = {"corpus": corpus.name, "fingerprint": corpus.fingerprint, "reason": REASON}
    yield (
        "a line each",
        [
            SampleEntry(**of, tokens=[[first, first + LENGTH]], incident=n, step=n)
            for n, first in enumerate(places)
        ],
    )
    yield (
        "a line by position each",
        [SkipEntry(first=p, end=p + 1, reason="x", incident=1, step=1) for p in positions.tolist()],
    )


def measure(entries: int, rounds: int) -> list[dict[str, Any]]:
    """A row for each kind of ledger: medians over `rounds` in seconds of wall time, `cpu` of all threads."""
    order, rows = Order([OrderedCorpus("web", TOKENS, 1.0, "f" * 64)], LENGTH, seed=1), list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "skips.jsonl"
        for name, lines in ledgers(order, entries):
            path.unlink(missing_ok=True)
            for at in range(0, len(lines), AT_ONCE):
                append_all(path, lines[at : at + AT_ONCE])
            row: dict[str, Any] = {
                "ledger": name,
                "lines": len(lines),
                "megabytes": path.stat().st_size / 1e6,
            }
            del lines
            row["read"], row["read_cpu"] = _timed(lambda: SkipLedger(path).read(), rounds)
            kept = SkipLedger(path)
            excluded, odd = kept.read()
            assert not odd

            row["one_more"], _ = _timed(partial(_with_one_more, kept), rounds)
            row["selection"], _ = _timed(partial(Selection, order, excluded), rounds)
            row["step"], _ = _timed(partial(Selection(order, excluded).next_kept, 10**7, BATCH), 10 * rounds)
            rows.append(row)
    none, _ = _timed(partial(Selection(order).next_kept, 10**7, BATCH), 10 * rounds)
    return [*rows, {"ledger": "none", "step": none}]


def _with_one_more(ledger: SkipLedger) -> None:
    append_all(ledger.path, [SkipEntry(first=5, end=6, reason="x")])
    ledger.read()


def _timed(action: Callable[[], object], rounds: int) -> tuple[float, float]:
    wall, cpu = list[float](), list[float]()
    for _ in range(rounds):
        begin, used = time.perf_counter(), time.process_time()
        action()
        wall.append(time.perf_counter() - begin)
        cpu.append(time.process_time() - used)
    return median(wall), median(cpu)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ledger_speed", description=__doc__)
    parser.add_argument("--entries", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, help="all numbers, as JSON")
    args = parser.parse_args(arguments)
    with user_errors():
        rows, load = measure(args.entries, args.rounds), os.getloadavg()[0]
        for row in rows:
            print("  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()))
        print(f"{os.cpu_count()} cores, load of the last minute {load:.1f}")
        if args.output:
            args.output.write_text(json.dumps({"load": load, "rows": rows}))


if __name__ == "__main__":
    main()
