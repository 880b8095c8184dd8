"""Measure all stabilisers on the same faults, and on healthy changes that none should act on.

    python benchmarks/stabilisers.py --quick     a quarter of the faults, one size and seed: under 10 minutes
    python benchmarks/stabilisers.py --jobs 2    everything: two sizes, five seeds: hours; what is done is kept
    python benchmarks/stabilisers.py --report    only the table, the JSON and the picture of what is done

The contestants and their settings: benchmarks/ruler/contestants.py; the faults: benchmarks/ruler/faults.py.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import importlib.util
import inspect
import itertools
import json
import os
import sys
import textwrap
import time
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "guard"), str(ROOT / "tools")]  # this checkout
os.environ.setdefault("OMP_NUM_THREADS", "1")

from rich.console import Console  # noqa: E402
from rich.progress import Progress  # noqa: E402

from benchmarks.ruler.contestants import BOUNDS, WATCHERS, clip_norm  # noqa: E402
from benchmarks.ruler.faults import FAULTS  # noqa: E402
from benchmarks.ruler.ours import OURS  # noqa: E402
from benchmarks.ruler.results import Results, draw_picture, show_tables, write_markdown  # noqa: E402
from benchmarks.ruler.run import CLIPPING, Key, append_result, run_family  # noqa: E402
from benchmarks.ruler.task import SIZES, prepare_texts  # noqa: E402

PACKAGES = {"stabilityguard": "stabilityguard", "lightning": "lightning"}
ALL_WATCHERS = {**WATCHERS, **OURS}
SEEDS = (1, 2, 3, 4, 5)
QUICK = (
    "clean",
    "switch",
    "easy",
    "noise",
    "noise-1",
    "moved",
    "weight-100",
    "flipped-bit",
    "spoilt-moments",
    "nan",
    "rate-x10",
)


def read_program(source: str) -> str:
    """A program without its comments, docstrings and line breaks."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
            and ast.get_docstring(node) is not None
        ):
            node.body[0] = ast.Pass()
    return ast.dump(tree)


def compute_version(contestant: str) -> str:
    """A hash of what decides a contestant's runs: torch, the task with its texts and model, and its own code."""
    digest = hashlib.sha256(importlib.metadata.version("torch").encode())
    sources = [ROOT / "benchmarks/ruler" / name for name in ("task.py", "faults.py", "run.py")]
    sources += [ROOT / name for name in ("benchmarks/peers/plain_torch.py", "drills/court_scenarios.py")]
    kind: Any = BOUNDS[contestant][1] if contestant in BOUNDS else ALL_WATCHERS[contestant]
    if contestant in OURS:
        sources += [
            ROOT / "benchmarks/ruler/ours.py",
            *sorted((ROOT / "guard/megastable_guard").glob("*.py")),
        ]
    for source in sources:
        digest.update(read_program(source.read_text()).encode())
    bases = [base for base in getattr(kind, "__mro__", [kind]) if base.__module__.startswith("benchmarks")]
    for part in [clip_norm, *bases]:
        digest.update(read_program(textwrap.dedent(inspect.getsource(part))).encode())
    if contestant in PACKAGES:
        digest.update(importlib.metadata.version(PACKAGES[contestant]).encode())
    return digest.hexdigest()[:12]


def read_results(path: Path, versions: dict[str, str]) -> Results:
    """What was measured by the present code. A torn last line is left out."""
    results: Results = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            facts = json.loads(line)
        except ValueError:
            continue
        size, seed, contestant, fault = facts.pop("key")
        if versions.get(contestant) == facts.pop("version"):
            results[size, int(seed), contestant, fault] = facts
    return results


def refuse_unknown(kind: str, given: Iterable[str], known: Sequence[str]) -> None:
    """End with an error where a name is not known."""
    if unknown_names := [name for name in given if name not in known]:
        raise typer.BadParameter(f"{unknown_names[0]}: there is no such {kind}: {', '.join(known)}")


def run_families(
    families: Sequence[tuple[str, int, str]],
    wanted: set[Key],
    folder: Path,
    versions: dict[str, str],
    jobs: int,
) -> None:
    """Train what is wanted: `jobs` families of runs at the same time, each in a process of its own."""
    texts = prepare_texts(folder / f"texts-{versions[CLIPPING]}")
    output = folder / "results.jsonl"
    running_children: dict[int, tuple[str, int, str]] = {}
    waiting_families = list(families)
    done_before = len(read_results(output, versions))
    with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("runs", total=len(wanted))
        while waiting_families or running_children:
            while waiting_families and len(running_children) < jobs:
                size, seed, bound = waiting_families.pop(0)
                child = os.fork()
                if not child:
                    status = 1
                    try:
                        run_family(
                            (size, seed, bound), ALL_WATCHERS, texts, wanted,
                            lambda key, facts: append_result(output, key, versions[key[2]], facts),
                        )  # fmt: skip
                        status = 0
                    except Exception:  # in a child, that must not go on as its parent
                        traceback.print_exc()
                    finally:
                        os._exit(status)
                running_children[child] = (size, seed, bound)
            time.sleep(0.5)
            for child in list(running_children):
                if os.waitpid(child, os.WNOHANG)[0]:
                    family = running_children.pop(child)
                    progress.console.print(f"{time.strftime('%H:%M:%S')} {' '.join(map(str, family))}")
            progress.update(task, completed=len(read_results(output, versions)) - done_before)


def main(
    quick: Annotated[bool, typer.Option(help="The small size, one seed, a quarter of the faults")] = False,
    sizes: Annotated[list[str] | None, typer.Option("--size", help="Again for more; default: all")] = None,
    seeds: Annotated[list[int] | None, typer.Option("--seed", help="Again for more; default: 1 to 5")] = None,
    names: Annotated[
        list[str] | None, typer.Option("--contestant", help="Again for more; default: all")
    ] = None,
    faults: Annotated[list[str] | None, typer.Option("--fault", help="Again for more; default: all")] = None,
    folder: Annotated[Path, typer.Option(help="Of texts and results")] = Path("runs/stabilisers"),
    jobs: Annotated[int, typer.Option(min=1, help="Processes at the same time")] = 2,
    report: Annotated[bool, typer.Option(help="Train nothing: show what is done")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="All numbers as JSON, to stdout")] = False,
    markdown: Annotated[bool, typer.Option(help="The tables as Markdown, to stdout")] = False,
    picture: Annotated[Path | None, typer.Option(help="Draw the table as a PNG")] = None,
) -> None:
    """Measure all stabilisers on the same faults."""
    all_names = [*BOUNDS, *ALL_WATCHERS]
    fault_names = [fault.name for fault in FAULTS]
    refuse_unknown("size", sizes or [], list(SIZES))
    refuse_unknown("contestant", names or [], all_names)
    refuse_unknown("fault", faults or [], fault_names)
    sizes = sizes or (["small"] if quick else list(SIZES))
    seeds = seeds or ([1] if quick else list(SEEDS))
    # Excess is measured from clean runs and from those that clip.
    faults = [
        "clean",
        *(
            name
            for name in fault_names
            if name in (faults or (QUICK if quick else fault_names)) and name != "clean"
        ),
    ]
    missing = {name for name, package in PACKAGES.items() if importlib.util.find_spec(package) is None}
    for name in sorted(missing):
        print(
            f"{name} is left out: install {PACKAGES[name]} (bash launch/install.sh dev stacks)",
            file=sys.stderr,
        )
    chosen = [name for name in all_names if name in {*(names or all_names), CLIPPING} - missing]
    versions = {name: compute_version(name) for name in chosen}
    folder.mkdir(parents=True, exist_ok=True)
    output = folder / "results.jsonl"
    # What is healthy does not tell bounds apart: there is no reference.
    healthy = {fault.name for fault in FAULTS if fault.is_healthy} - {"clean"}
    without_healthy = set(BOUNDS) - {CLIPPING}
    every_key = [
        (size, seed, name, fault)
        for size, seed, name, fault in itertools.product(sizes, seeds, chosen, faults)
        if not (name in without_healthy and fault in healthy)
    ]
    own_families = {*BOUNDS, *(name for name, kind in ALL_WATCHERS.items() if kind.changes_rounding)}
    if not report:
        wanted = set(every_key) - set(read_results(output, versions))
        families = sorted(
            {(size, seed, name if name in own_families else CLIPPING) for size, seed, name, _ in wanted},
            key=lambda family: (list(SIZES).index(family[0]), family[1], family[2] != CLIPPING),
        )
        run_families(families, wanted, folder, versions, jobs)
    done = read_results(output, versions)
    results = {key: done[key] for key in every_key if key in done}
    if as_json:
        print(
            json.dumps(
                [
                    {"size": k[0], "seed": k[1], "contestant": k[2], "fault": k[3], **facts}
                    for k, facts in results.items()
                ]
            )
        )
    elif markdown:
        print(write_markdown(results), end="")
    else:
        show_tables(Console(width=max(150, Console().width)), results, len(every_key))
    if picture:
        draw_picture(picture, results)
    raise typer.Exit(0 if len(results) == len(every_key) else 1)


if __name__ == "__main__":
    typer.run(main)
