"""What things cost, measured on this machine."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

# benchmarks/ is no part of the installed package: it lies beside this folder.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from megastable.base import durable
from megastable.base.errors import ConfigError, user_errors
from megastable.config import deepspeed_json, recipe
from megastable.run.directory import as_json

EXAMPLES = """Examples:

BENCH stability

BENCH stability --rounds 100 --json cost.json

BENCH stability --recipe launch/recipes/125m.yaml model.vocab_size=32000 train.global_batch=32

BENCH noise

BENCH noise --steps 6000 --seeds 4 --kind ar-0.7 --kind levels-20 --json noise.json

BENCH noise stability.detector.false_alarms=0.1

BENCH noise --no-norms --faults 20 --kind bursts

BENCH samples --steps 6000 --delays 3

BENCH attribution --text a.txt --text b/ --text a.txt+b/:0.05 --seeds 2

BENCH checkpoint

BENCH checkpoint --recipe launch/recipes/125m.yaml --dir /scratch --rounds 9 --json checkpoint.json

BENCH data

BENCH data --only found --seeds 3 --json found.json

BENCH train --rounds 9 --json train.json

BENCH train --recipe launch/recipes/125m.yaml train.micro_batch=1 --peers plain --peers transformers

BENCH train --recipe launch/recipes/1.3b.yaml model.vocab_size=32000 --device cuda --profile profile

BENCH scaling --layout TP2 --layout PP4

BENCH scaling --recipe launch/recipes/70b.yaml model.vocab_size=128000 --ranks 256""".replace(
    "BENCH", "python tools/bench.py"
)
SHORT = ("train.global_batch=1", "train.micro_batch=1", "model.sequence_length=64")  # steps beside a save
app = typer.Typer(help=__doc__, epilog=EXAMPLES, add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def benchmarks() -> None:
    """Commands that measure; each runs in this one process."""


@app.command(epilog=EXAMPLES)
@user_errors()
def stability(
    overrides: Annotated[list[str] | None, typer.Argument(help="KEY=VALUE ... of the recipe")] = None,
    recipe_path: Annotated[
        Path, typer.Option("--recipe", help="Whose model, batch and precision to measure with")
    ] = Path("launch/recipes/quickstart.yaml"),
    rounds: Annotated[int, typer.Option(min=2, help="Each does every kind of step once")] = 30,
    json: Annotated[Path | None, typer.Option(help="All numbers, and the machine")] = None,
) -> None:
    """What gate, detector, snapshots and statistics add to a step. On random tokens: no corpus is needed."""
    config = recipe.load(recipe_path, overrides or [])
    _alone()
    # Not above: --help and mistakes in a recipe need no DeepSpeed, which takes seconds to import.
    from benchmarks.costs import table
    from benchmarks.stability_cost import measure, steps_needed
    from megastable.engine import distributed

    columns = TextColumn("measuring"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    distributed.start_distributed(config.run.timeout, config.run.deterministic)
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=steps_needed(rounds))
        found = measure(config, rounds, lambda: progress.advance(task), progress.console.print)
    distributed.stop_distributed()
    console = Console()
    console.print(table(found.costs))
    console.print(", ".join(f"{key} {value}" for key, value in (found.run | found.machine).items()))
    if found.disturbed:
        console.print(f"note: the guard did not simply pass {found.disturbed} steps: measure again")
    if json is not None:
        durable.write_output(json, as_json(asdict(found), indent=1) + "\n")


@app.command(epilog=EXAMPLES)
@user_errors()
def noise(
    overrides: Annotated[list[str] | None, typer.Argument(help="stability.KEY=VALUE ...")] = None,
    steps: Annotated[int, typer.Option(min=200, help="Of every healthy run")] = 60_000,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of every kind")] = 1,
    first: Annotated[int, typer.Option("--first-seed", min=0, help="The others follow it")] = 1,
    kinds: Annotated[list[str] | None, typer.Option("--kind", help="Repeatable. Default: all")] = None,
    norms: Annotated[bool, typer.Option(help="Whether gradient norms were recorded")] = True,
    planted: Annotated[
        int, typer.Option("--faults", min=0, help="Of each sort, planted into another run of every kind")
    ] = 0,
    json: Annotated[Path | None, typer.Option(help="All numbers")] = None,
) -> None:
    """False alarms of detector and policy in healthy runs whose noise is not white, and how soon planted faults are
    acted on. About 10 s a kind; no GPU."""
    from benchmarks.noise import FAULTS, KINDS, Delays, count, delays

    if foreign := [item for item in overrides or [] if not item.startswith("stability.")]:
        raise ConfigError(f"{foreign[0]}: only stability.KEY=VALUE has an influence here")
    if unknown := set(kinds or ()) - set(KINDS):
        raise ConfigError(f"--kind {sorted(unknown)[0]}: one of {', '.join(KINDS)}")
    tree: dict[str, Any] = {}
    for assignment in overrides or []:
        recipe.override(tree, assignment)
    config = recipe.validate(tree, "the overrides").stability
    table = Table(
        "noise", "steps", "rewinds", "discards", "irreversible", "alerts", "levels let pass", "resets"
    )
    late = Table("noise", *FAULTS, title="acted on in time, of those planted (median of the steps it took)")
    found = []
    seen: list[Delays] = []
    columns = TextColumn("judging"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True)) as progress:
        for kind in progress.track(kinds or list(KINDS)):
            if planted:
                took = delays(kind, planted, first, config, norms)
                late.add_row(kind, *(f"{d.in_time} of {d.planted} ({d.median})" for d in took))
                seen += took
            f = count(kind, steps, range(first, first + seeds), config, norms)
            found.append(f)
            numbers = f.steps, f.rewinds, f.discards, f.irreversible, f.alerts, f.watched, f.resets
            table.add_row(kind, *(f"{number:,}" for number in numbers))
    Console().print(table)
    if planted:
        Console().print(late)
    if json is not None:
        numbers_of_all = [*map(asdict, found), *map(asdict, seen)]
        durable.write_output(json, as_json(numbers_of_all, indent=1) + "\n")


def _alone() -> None:
    """A process group of this process, if one is started."""
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")


@app.command(epilog=EXAMPLES)
@user_errors()
def samples(
    overrides: Annotated[list[str] | None, typer.Argument(help="stability.samples.KEY=VALUE ...")] = None,
    steps: Annotated[int, typer.Option(min=200, help="Of every healthy run")] = 60_000,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of every mixture")] = 1,
    first: Annotated[int, typer.Option("--first-seed", min=0, help="The others follow it")] = 1,
    delays: Annotated[int, typer.Option(min=0, help="Runs with bad samples, of every kind")] = 9,
    json: Annotated[Path | None, typer.Option(help="All numbers")] = None,
) -> None:
    """False alarms of the running test of single samples, and how soon it notices bad ones. About 1 min a mixture."""
    from benchmarks.mixtures import BAD, HEALTHY, TAILS, delay, false_alarms

    if foreign := [item for item in overrides or [] if not item.startswith("stability.samples.")]:
        raise ConfigError(f"{foreign[0]}: only stability.samples.KEY=VALUE has an influence here")
    tree: dict[str, Any] = {}
    for assignment in overrides or []:
        recipe.override(tree, assignment)
    config = recipe.validate(tree, "the overrides").stability.samples
    healthy, noticed = Table("healthy", "steps", "trickle", "batch"), Table("bad", *TAILS)
    found = []
    columns = TextColumn("judging"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True)) as progress:
        for name in progress.track(list(HEALTHY)):
            f = false_alarms(name, steps, range(first, first + seeds), config)
            found.append(asdict(f))
            healthy.add_row(name, f"{f.steps:,}", f"{f.trickle:,}", f"{f.batch:,}")
        for bad in progress.track(list(BAD)) if delays else ():
            cells = []
            for tails in TAILS:
                d = delay(tails, bad, range(first, first + delays), config)
                found.append(asdict(d))
                known = sorted(steps for steps in d.delays if steps is not None)
                middle = str(known[len(known) // 2]) if len(known) > delays // 2 else "never"
                missed = f" ({delays - len(known)} of {delays} missed)" if len(known) < delays else ""
                cells.append(f"{middle}{missed}")
            noticed.add_row(bad, *cells)
    Console().print(healthy)
    if delays:
        Console().print("Steps until bad samples are noticed, median of the seeds:", noticed)
    if json is not None:
        durable.write_output(json, as_json(found, indent=1) + "\n")


@app.command(epilog=EXAMPLES)
@user_errors()
def attribution(
    overrides: Annotated[list[str] | None, typer.Argument(help="stability.attribution.KEY=VALUE ...")] = None,
    given: Annotated[
        list[str] | None,
        typer.Option(
            "--text",
            help="A file or folder to train on; repeatable. A+B:0.05: two corpora, B with that share of the samples",
        ),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Runs on every text")] = 1,
    first: Annotated[int, typer.Option("--first-seed", min=0, help="The others follow it")] = 1,
    windows: Annotated[int, typer.Option(min=0, help="Healthy ones, on each of two states of a run")] = 24,
    planted: Annotated[int, typer.Option(min=0, help="Of each kind, on each state")] = 2,
    json: Annotated[Path | None, typer.Option(help="All numbers")] = None,
) -> None:
    """How often attribution convicts innocent samples, and finds bad ones: real small runs. Some 5 min a run."""
    if foreign := [item for item in overrides or [] if not item.startswith("stability.attribution.")]:
        raise ConfigError(f"{foreign[0]}: only stability.attribution.KEY=VALUE has an influence here")
    if not given:
        raise ConfigError("--text: which text? One that no constant was chosen on")
    tree: dict[str, Any] = {}
    for assignment in overrides or []:
        recipe.override(tree, assignment)
    settings = recipe.validate(tree, "the overrides").stability.attribution
    _alone()
    # Not above, as in `stability`.
    from benchmarks.attribution_errors import PLANTS, STATES, Found, measure, pooled
    from megastable.engine import distributed

    found = list[Found]()
    columns = TextColumn("examining"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    distributed.start_distributed(timeout=600, deterministic=False)
    with Progress(*columns, console=Console(stderr=True)) as progress:
        each = len(STATES) * (windows + planted * len(PLANTS))
        task = progress.add_task("", total=len(given) * seeds * each)
        for text in given:
            for seed in range(first, first + seeds):
                with tempfile.TemporaryDirectory(prefix="megastable-bench-") as folder:
                    found += measure(
                        text, seed, windows, planted, Path(folder), settings, lambda: progress.advance(task)
                    )
                if json is not None:
                    durable.write_output(json, as_json([asdict(f) for f in found], indent=1) + "\n")
    distributed.stop_distributed()
    table = Table(
        "text",
        "kind",
        "windows",
        "with innocents convicted",
        "innocents",
        "of samples",
        "share, mean",
        "bad found",
    )
    for f in pooled(found):
        table.add_row(
            f.text, f.kind, f"{f.windows}", f"{f.wrong}", f"{f.innocent}", f"{f.samples:,}",
            f"{sum(f.shares) / len(f.shares):.1%}", f"{f.named} of {f.bad}" if f.bad else "",
        )  # fmt: skip
    Console().print(table)


@app.command(epilog=EXAMPLES)
@user_errors()
def train(
    overrides: Annotated[list[str] | None, typer.Argument(help="KEY=VALUE ... of the recipe")] = None,
    recipe_path: Annotated[
        Path, typer.Option("--recipe", help="Whose model, micro-batch and precision to measure with")
    ] = Path("launch/recipes/quickstart.yaml"),
    peers: Annotated[
        list[str] | None,
        typer.Option(help="With whom to compare; repeatable; megastable: ours alone. `--list` names them"),
    ] = None,
    names: Annotated[bool, typer.Option("--list", help="Name the peers, and measure nothing")] = False,
    device: Annotated[str | None, typer.Option(help="cpu or cuda. Default: a GPU where there is one")] = None,
    rounds: Annotated[int, typer.Option(min=2, help="Each measures everyone once, in random order")] = 9,
    apart: Annotated[
        bool | None,
        typer.Option(
            "--apart/--together", help="One in memory at a time, or all. Default: what memory allows"
        ),
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option(min=1, help="About how long all may take: who is not warm in time is left out"),
    ] = None,
    json: Annotated[Path | None, typer.Option(help="All numbers, and the machine")] = None,
    folder: Annotated[
        Path | None,
        typer.Option("--profile", help="Afterwards: a trace of some steps, where their time goes"),
    ] = None,
    profiled: Annotated[str, typer.Option("--profile-peer", help="Whose steps")] = "megastable",
) -> None:
    """How fast we train, beside others on the same model and tokens. On random tokens: no corpus is needed.

    A step is of at most 4 micro-batches, and compiled where the recipe leaves it open; both are said in the output.
    """
    config = recipe.load(recipe_path, overrides or [])
    deepspeed_json.build(config, 1)
    device = _on(device)
    from benchmarks.peers import PEERS, chosen_peers

    if names:
        for name, peer in PEERS.items():
            print(
                f"{name}: {peer.meaning}" + (f" (default: {', '.join(peer.default)})" if peer.default else "")
            )
        return
    wanted = chosen_peers(peers or [], device)
    if folder:
        wanted = chosen_peers([*wanted, profiled], device)
    _alone()
    begun = time.monotonic()
    # Not above, as in `stability`.
    from benchmarks import profiling, speed
    from benchmarks.train_speed import measure, steps_needed
    from megastable.engine import distributed

    console = Console()
    tables = []

    def after(name, contestant, on):  # type: ignore[no-untyped-def]
        if folder and name == profiled:
            tables.append(profiling.table(name, profiling.profile(contestant.step, on, folder)))

    def write(now: speed.Speed) -> None:
        """After every contestant: whoever is ended leaves what was measured."""
        if json is not None:
            durable.write_output(json, as_json(asdict(now), indent=1) + "\n")

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    distributed.start_distributed(config.run.timeout, config.run.deterministic)
    try:
        with Progress(*columns, console=Console(stderr=True)) as progress:
            task = progress.add_task("", total=steps_needed(wanted, rounds))
            found = measure(
                config, wanted, rounds, apart, lambda: progress.advance(task),
                lambda text: progress.update(task, description=text), after,
                seconds and seconds - (time.monotonic() - begun), write,
            )  # fmt: skip
    finally:
        distributed.stop_distributed()
    for shown in (speed.table(found), *tables):
        console.print(shown)
    for line in speed.lines(found):
        print(line)
    print(", ".join(f"{key} {value}" for key, value in (found.run | found.machine).items()))
    write(found)


def _on(device: str | None) -> str:
    """The device, cpu or cuda. Before anything of DeepSpeed is imported: it looks for its accelerator once."""
    if device not in (None, "cpu", "cuda"):
        raise ConfigError(f"--device {device}: it is cpu or cuda")
    # What the profiler has to say when it starts and stops.
    os.environ.update(KINETO_LOG_LEVEL="99", TORCH_CPP_LOG_LEVEL="ERROR")
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch finds no GPU here (nvidia-smi; is it a torch for CPUs?)")
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    os.environ["DS_ACCELERATOR"] = device
    return device


@app.command(epilog=EXAMPLES)
@user_errors()
def scaling(
    overrides: Annotated[list[str] | None, typer.Argument(help="KEY=VALUE ... of the recipe")] = None,
    layouts: Annotated[
        list[str] | None, typer.Option("--layout", help="Which to count, e.g. TP2; repeatable. Default: all")
    ] = None,
    recipe_path: Annotated[
        Path | None, typer.Option("--recipe", help="Count nothing: what the formulas say of this recipe")
    ] = None,
    ranks: Annotated[int, typer.Option(min=1, help="With --recipe: on so many")] = 8,
    json: Annotated[Path | None, typer.Option(help="All numbers, and the machine")] = None,
) -> None:
    """What ranks say to one another in a step: counted in real steps of tiny models, held against formulas.

    Exits with 1 where they differ.
    """
    from benchmarks import scaling

    if recipe_path is not None:
        forecast = scaling.predict(recipe.load(recipe_path, overrides or []), ranks)
        shown, tree, differs = scaling.forecast_table(forecast), asdict(forecast), False
    elif overrides:
        raise ConfigError(
            f"{overrides[0]}: the layouts that are counted have models of their own; give --recipe"
        )
    else:
        stderr = Console(stderr=True)
        found = scaling.measure(layouts or [], lambda text: stderr.print(f"counting: {text}"))
        shown, tree, differs = scaling.table(found), asdict(found), found.differs
    Console().print(shown)
    if json is not None:
        durable.write_output(json, as_json(tree, indent=1) + "\n")
    if differs:
        raise SystemExit(1)


@app.command(epilog=EXAMPLES)
@user_errors()
def checkpoint(
    overrides: Annotated[list[str] | None, typer.Argument(help="KEY=VALUE ... of all recipes")] = None,
    recipes: Annotated[
        list[Path] | None,
        typer.Option("--recipe", help="Whose model to save; repeatable. Quickstart's and 125M's if none is"),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Each saves in both ways, copies and resumes")] = 5,
    folder: Annotated[
        Path | None,
        typer.Option("--dir", help="On the disk to measure; left as it was. Default: temporary files'"),
    ] = None,
    json: Annotated[Path | None, typer.Option(help="All numbers, and the machine")] = None,
) -> None:
    """How long steps wait for a checkpoint, what is done behind them, and what it takes to go on from one.

    Steps are of one short sample, the state is that of the recipe's model; no corpus is needed. Six checkpoints must
    fit on the disk; 125M takes 5.5 GB of memory.
    """
    named = recipes or [Path("launch/recipes/quickstart.yaml"), Path("launch/recipes/125m.yaml")]
    configs = {str(path): recipe.load(path, [*SHORT, *(overrides or [])]) for path in named}
    _alone()
    from benchmarks.checkpoint_speed import measure_all
    from benchmarks.saves import table

    stderr = Console(stderr=True)
    found = measure_all(configs, folder, rounds, lambda text: stderr.print(f"measuring: {text}"))
    for name, measurement in found.of.items():
        Console().print(table(name, measurement))
    if json is not None:
        durable.write_output(json, as_json(asdict(found), indent=1) + "\n")


@app.command(epilog=EXAMPLES)
@user_errors()
def data(
    corpus: Annotated[Path, typer.Option(help="Real text, which is scanned")] = Path("data/stdlib"),
    only: Annotated[list[str] | None, typer.Option(help="inspect, scan, prune or found; repeatable")] = None,
    tokens: Annotated[
        int, typer.Option(min=1000, help="Of the larger scan, and of what is pruned")
    ] = 80_000_000,
    seeds: Annotated[int, typer.Option(min=1, help="Times that corruption is planted")] = 2,
    json: Annotated[Path | None, typer.Option(help="All numbers, and the machine")] = None,
) -> None:
    """What it costs to inspect, scan and prune, and how much of planted corruption a scan finds; takes minutes."""
    import torch

    from benchmarks.common import machine
    from benchmarks.hunting import PARTS, hunt, tables

    if unknown := set(only or ()) - set(PARTS):
        raise ConfigError(f"--only {sorted(unknown)[0]}: choose among {', '.join(PARTS)}")
    stderr = Console(stderr=True)
    hunted = hunt(
        corpus, tuple(only or PARTS), tokens, seeds, lambda text: stderr.print(f"measuring: {text}")
    )
    for table in tables(hunted):
        Console().print(table)
    if json is not None:
        about = {"machine": machine(torch.device("cpu"))}
        durable.write_output(json, as_json(asdict(hunted) | about, indent=1) + "\n")


if __name__ == "__main__":
    app()
