"""`megastable bench`: measure costs and error rates on this machine."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from megastable.base.errors import FAILED, ConfigError
from megastable.commands.app import App
from megastable.commands.options import Json, JsonFile, Overrides, put_json
from megastable_tools.commands.drill import import_from_checkout

if TYPE_CHECKING:
    from rich.console import Console

    from megastable.config.stability import StabilityConfig

app = App("Measure costs and error rates of megastable on this machine. Needs a checkout.")
QUICKSTART = Path("launch/recipes/quickstart.yaml")


def _console(as_json: bool, errors: bool = False) -> Console:
    from rich.console import Console

    return Console(quiet=as_json, stderr=errors)


def _settings(overrides: list[str] | None, section: str) -> StabilityConfig:
    """The default StabilityConfig with overrides of one of its sections. Raises ConfigError."""
    from megastable.config import recipe
    from megastable.config.recipe import override_key

    if foreign_overrides := [item for item in overrides or [] if not item.startswith(f"{section}.")]:
        raise ConfigError(f"{foreign_overrides[0]}: only {section}.KEY=VALUE has an influence here")
    settings_tree: dict[str, Any] = {}
    for given_override in overrides or []:
        override_key(settings_tree, given_override)
    return recipe.validate_tree(settings_tree, "the overrides").stability


@app.add_command(
    "stability",
    examples="""
    megastable bench stability
    megastable bench stability --rounds 100 --output cost.json
    megastable bench stability --recipe launch/recipes/125m.yaml model.vocab_size=32000 train.global_batch=32
    """,
)
def bench_stability(
    overrides: Overrides = None,
    recipe_path: Annotated[
        Path, typer.Option("--recipe", help="Whose model, batch and precision to measure with")
    ] = QUICKSTART,
    rounds: Annotated[int, typer.Option(min=2, help="Each does every kind of step once")] = 30,
    as_json: Json = False,
    output: JsonFile = None,
) -> None:
    """Measure what gate, detector, snapshots and statistics add to a step. On random tokens: no corpus is needed."""
    from megastable.config import recipe

    import_from_checkout("benchmarks")
    recipe_config = recipe.load_recipe(
        recipe_path, overrides or []
    )  # mistakes show before the slow import of DeepSpeed
    _form_group_of_one()
    from benchmarks.costs import cost_table
    from benchmarks.stability_cost import measure_costs, steps_needed
    from megastable.base.progress_bar import show_bar
    from megastable.engine import distributed

    distributed.start_distributed(recipe_config.run.timeout, recipe_config.run.deterministic)
    with show_bar("measuring", steps_needed(rounds), unit="steps") as progress_bar:
        found_costs = measure_costs(recipe_config, rounds, progress_bar, progress_bar.print_line)
    distributed.stop_distributed()
    result_console = _console(as_json)
    result_console.print(cost_table(found_costs.costs))
    result_console.print(
        ", ".join(f"{key} {value}" for key, value in (found_costs.run | found_costs.machine).items())
    )
    if found_costs.disturbed:
        result_console.print(
            f"note: the guard did not simply pass {found_costs.disturbed} steps: measure again"
        )
    put_json(asdict(found_costs), as_json, output)


@app.add_command(
    "noise",
    examples="""
    megastable bench noise
    megastable bench noise --steps 6000 --seeds 4 --kind ar-0.7 --kind levels-20 --output noise.json
    megastable bench noise stability.detector.false_alarms=0.1
    megastable bench noise --no-norms --faults 20 --kind bursts
    """,
)
def bench_noise(
    overrides: Annotated[list[str] | None, typer.Argument(help="stability.KEY=VALUE ...")] = None,
    steps: Annotated[int, typer.Option(min=200, help="Of every healthy run")] = 60_000,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of every kind")] = 1,
    first: Annotated[int, typer.Option("--first-seed", min=0, help="The others follow it")] = 1,
    kinds: Annotated[list[str] | None, typer.Option("--kind", help="Repeatable. Default: all")] = None,
    norms: Annotated[bool, typer.Option(help="Whether gradient norms were recorded")] = True,
    planted: Annotated[
        int, typer.Option("--faults", min=0, help="Of each sort, planted into another run of every kind")
    ] = 0,
    as_json: Json = False,
    output: JsonFile = None,
) -> None:
    """Count false alarms of detector and policy in healthy runs whose noise is not white, and measure how soon planted
    faults are acted on. About 10 s a kind; no GPU."""
    from rich.table import Table

    from megastable.base.progress_bar import show_bar

    import_from_checkout("benchmarks")
    from benchmarks.noise import FAULTS, KINDS, Delays, count_actions, measure_delays

    run_config = _settings(overrides, "stability")
    if unknown_kinds := set(kinds or ()) - set(KINDS):
        raise ConfigError(f"--kind {sorted(unknown_kinds)[0]}: one of {', '.join(KINDS)}")
    result_table = Table(
        "noise", "steps", "rewinds", "discards", "irreversible", "alerts", "levels let pass", "resets"
    )
    late = Table("noise", *FAULTS, title="acted on in time, of those planted (median of the steps it took)")
    noise_counts = []
    seen_delays: list[Delays] = []
    chosen_kinds = kinds or list(KINDS)
    with show_bar("judging", len(chosen_kinds), unit="kinds") as progress_bar:
        for chosen_kind in chosen_kinds:
            if planted:
                took = measure_delays(chosen_kind, planted, first, run_config, norms)
                late.add_row(chosen_kind, *(f"{d.in_time} of {d.planted} ({d.median})" for d in took))
                seen_delays += took
            f = count_actions(chosen_kind, steps, range(first, first + seeds), run_config, norms)
            noise_counts.append(f)
            noise_numbers = f.steps, f.rewinds, f.discards, f.irreversible, f.alerts, f.watched, f.resets
            result_table.add_row(chosen_kind, *(f"{count_number:,}" for count_number in noise_numbers))
            progress_bar()
    _console(as_json).print(result_table)
    if planted:
        _console(as_json).print(late)
    put_json([*map(asdict, noise_counts), *map(asdict, seen_delays)], as_json, output)


@app.add_command(
    "train",
    examples="""
    megastable bench train --rounds 9 --output train.json
    megastable bench train --recipe launch/recipes/125m.yaml train.micro_batch=1 --peers plain --peers transformers
    megastable bench train --recipe launch/recipes/1.3b.yaml model.vocab_size=32000 --device cuda
    """,
)
def bench_training(
    overrides: Overrides = None,
    recipe_path: Annotated[
        Path, typer.Option("--recipe", help="Whose model, micro-batch and precision to measure with")
    ] = QUICKSTART,
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
    as_json: Json = False,
    output: JsonFile = None,
) -> None:
    """Compare our training speed with that of others, on the same model and random tokens: no corpus is needed.

    On one device: of a model that does not fit, as many blocks as there is memory for. A step is of at most 4
    micro-batches, and compiled where the recipe leaves it open. All that is said in the output.
    """
    from megastable.config import recipe

    import_from_checkout("benchmarks")
    run_config = recipe.load_recipe(recipe_path, overrides or [])
    device = _on(device)
    from benchmarks.peers import PEERS, chosen_peers

    if names:
        for peer_name, peer in PEERS.items():
            print(
                f"{peer_name}: {peer.meaning}"
                + (f" (default: {', '.join(peer.default)})" if peer.default else "")
            )
        return
    wanted_peers = chosen_peers(peers or [], device)
    _form_group_of_one()
    begin_time = time.monotonic()
    from benchmarks import speed
    from benchmarks.train_speed import measure_speed, steps_needed
    from megastable.base.progress_bar import show_bar
    from megastable.engine import distributed

    def write(now: speed.Speed) -> None:
        """After every contestant, so that an interrupted run keeps its measurements."""
        put_json(asdict(now), False, output)

    distributed.start_distributed(run_config.run.timeout, run_config.run.deterministic)
    try:
        with show_bar("measuring", steps_needed(wanted_peers, rounds), unit="steps") as progress_bar:
            found_speed = measure_speed(
                run_config, wanted_peers, rounds, apart, progress_bar, progress_bar.set_description,
                seconds and seconds - (time.monotonic() - begin_time), write,
            )  # fmt: skip
    finally:
        distributed.stop_distributed()
    result_console = _console(as_json)
    result_console.print(speed.speed_table(found_speed))
    about_text = ", ".join(f"{key} {value}" for key, value in (found_speed.run | found_speed.machine).items())
    for result_line in (*speed.describe_speed(found_speed), about_text):
        result_console.print(result_line, markup=False, highlight=False, soft_wrap=True)
    put_json(asdict(found_speed), as_json, output)


def _on(device: str | None) -> str:
    """The device, cpu or cuda. Before any import of DeepSpeed, which chooses its accelerator once."""
    if device not in (None, "cpu", "cuda"):
        raise ConfigError(f"--device {device}: it is cpu or cuda")
    # Messages of the profiler, which counts memory, when it starts and stops.
    os.environ.update(KINETO_LOG_LEVEL="99", TORCH_CPP_LOG_LEVEL="ERROR")
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch finds no GPU here (nvidia-smi; is it a torch for CPUs?)")
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    os.environ["DS_ACCELERATOR"] = device
    return device


@app.add_command(
    "scaling",
    examples="""
    megastable bench scaling --layout TP2 --layout PP4
    megastable bench scaling --recipe launch/recipes/70b.yaml model.vocab_size=128000 --ranks 256
    """,
)
def bench_scaling(
    overrides: Overrides = None,
    layouts: Annotated[
        list[str] | None, typer.Option("--layout", help="Which to count, e.g. TP2; repeatable. Default: all")
    ] = None,
    recipe_path: Annotated[
        Path | None, typer.Option("--recipe", help="Count nothing: what the formulas say of this recipe")
    ] = None,
    ranks: Annotated[int, typer.Option(min=1, help="With --recipe: on so many")] = 8,
    as_json: Json = False,
    output: JsonFile = None,
) -> None:
    """Count the traffic between ranks in real steps of tiny models, and compare it with the formulas.

    Exits with 1 where they differ.
    """
    from megastable.config import recipe

    import_from_checkout("benchmarks")
    from benchmarks import scaling

    if recipe_path is not None:
        forecast = scaling.predict_step(recipe.load_recipe(recipe_path, overrides or []), ranks)
        shown_table, result_tree, counts_differ = scaling.forecast_table(forecast), asdict(forecast), False
    elif overrides:
        raise ConfigError(
            f"{overrides[0]}: the layouts that are counted have models of their own; give --recipe"
        )
    else:
        error_console = _console(False, errors=True)
        found_layouts = scaling.count_layouts(
            layouts or [], lambda text: error_console.print(f"counting: {text}")
        )
        shown_table, result_tree, counts_differ = (
            scaling.scaling_table(found_layouts),
            asdict(found_layouts),
            found_layouts.differs,
        )
    _console(as_json).print(shown_table)
    put_json(result_tree, as_json, output)
    if counts_differ:
        raise typer.Exit(FAILED)


@app.add_command(
    "overlap",
    examples="""
    megastable bench overlap --picture overlap.png
    megastable bench overlap --ranks 4 --rate 2 --latency 0.2
    megastable bench overlap --dimension tensor
    """,
)
def bench_overlap(
    dimension: Annotated[Literal["data", "tensor"], typer.Option(help="Whose messages")] = "data",
    ranks: Annotated[
        int | None, typer.Option(min=2, help="Processes; by default 4, and 2 for tensor", show_default=False)
    ] = None,
    rate: Annotated[float, typer.Option(min=0.001, help="Of every rank's link, Gbit/s")] = 1.0,
    latency: Annotated[float, typer.Option(min=0, help="Of every message, ms")] = 1.0,
    rounds: Annotated[
        int | None,
        typer.Option(
            min=1, help="Steps with and without overlap; by default 10, and 3 for tensor", show_default=False
        ),
    ] = None,
    chunks: Annotated[int, typer.Option(min=1, help="tensor: parallel.tensor_overlap")] = 4,
    wall: Annotated[
        bool,
        typer.Option("--wall", help="tensor: by the time of the day, not by processor time; for quiet cores"),
    ] = False,
    picture: Annotated[Path | None, typer.Option(help="Draw the time lines there, as PNG")] = None,
    as_json: Json = False,
    output: JsonFile = None,
) -> None:
    """Measure how much of the messages is hidden over a slowed link: of sums of gradients behind the backward pass, and
    gathers of weights behind the next forward pass; or of those of tensor parallelism behind products."""
    import_from_checkout("benchmarks")
    from benchmarks import overlap, overlap_tensor

    link_speed: dict[str, Any] = {"rate": rate * 125e6, "latency": latency * 1e-3}
    found_overlap: Any
    draw_spans: Callable[[Any, Path], None]
    if dimension == "data":
        data_case = overlap.OverlapCase(ranks or 4, rounds=rounds or 10, **link_speed)
        found_overlap = overlap.measure_overlap(data_case)
        shown_table, draw_spans = overlap.overlap_table(found_overlap), overlap.draw_overlap
    else:
        tensor_case = overlap_tensor.TensorCase(
            ranks or 2, rounds=rounds or 3, chunks=chunks, wall=wall, **link_speed
        )
        found_overlap = overlap_tensor.measure_tensor_overlap(tensor_case)
        shown_table, draw_spans = (
            overlap_tensor.tensor_table(found_overlap),
            overlap_tensor.draw_tensor_overlap,
        )
    _console(as_json).print(shown_table)
    if picture is not None:
        draw_spans(found_overlap, picture)
    put_json(asdict(found_overlap) | {"hidden": found_overlap.hidden}, as_json, output)


@app.add_command(
    "pipeline",
    examples="""
    megastable bench pipeline --picture pipeline.png
    megastable bench pipeline --stages 4 --micro-batches 16
    """,
)
def bench_pipeline(
    stages: Annotated[int, typer.Option(min=2, help="Stages, each a process")] = 4,
    micro_batches: Annotated[
        int, typer.Option(min=1, help="Micro-batches of a step, at least the stages")
    ] = 8,
    chunks: Annotated[int, typer.Option(min=2, help="Chunks of the model on a stage, interleaved")] = 2,
    rounds: Annotated[int, typer.Option(min=1, help="Steps of each schedule")] = 3,
    picture: Annotated[Path | None, typer.Option(help="Draw the time lines there, as PNG")] = None,
    as_json: Json = False,
    output: JsonFile = None,
) -> None:
    """Measure the bubble of a pipeline by each schedule, in steps whose passes take a known time."""
    import_from_checkout("benchmarks")
    from benchmarks import pipeline

    if micro_batches < stages:
        raise ConfigError(
            f"--micro-batches {micro_batches} is below --stages {stages}: the formulas are for a full pipeline; give "
            "more micro-batches, or fewer stages"
        )
    pipeline_case = pipeline.PipelineCase(stages, micro_batches, rounds=rounds, chunks=chunks)
    found_bubbles = pipeline.measure_bubbles(pipeline_case)
    _console(as_json).print(pipeline.bubble_table(found_bubbles))
    if picture is not None:
        pipeline.draw_bubbles(found_bubbles, picture)
    bubble_seconds = {schedule: found_bubbles.bubble(schedule) for schedule in pipeline.SCHEDULES}
    put_json(asdict(found_bubbles) | {"bubbles": bubble_seconds}, as_json, output)


@app.add_command(
    "watch",
    examples="""
    megastable bench watch --rounds 3 --output watch.json
    megastable bench watch --recipe launch/recipes/350m.yaml model.vocab_size=32000 train.global_batch=32
    """,
)
def bench_watch(
    overrides: Overrides = None,
    recipe_path: Annotated[Path, typer.Option("--recipe", help="What to train")] = QUICKSTART,
    rounds: Annotated[int, typer.Option(min=1, help="Pairs of runs, with the watch and without")] = 3,
    steps: Annotated[int, typer.Option(min=6, help="Of every run; the first 5 do not count")] = 30,
    device: Annotated[str | None, typer.Option(help="cpu or cuda. Default: a GPU where there is one")] = None,
    as_json: Json = False,
    output: JsonFile = None,
) -> None:
    """Measure what the watch over memory adds to a step of train.py, on one rank. On random tokens: no corpus is
    needed."""
    import_from_checkout("benchmarks")
    device = _on(device)
    from benchmarks.watch_price import WatchCase, measure_watch, watch_table
    from megastable.base.progress_bar import show_bar

    with show_bar("training", 2 * rounds, unit="runs") as progress_bar:
        found_price = measure_watch(
            recipe_path, overrides or [], WatchCase(rounds, steps), device, progress_bar
        )
    _console(as_json).print(watch_table(found_price))
    put_json(asdict(found_price) | {"price": found_price.price}, as_json, output)


def _form_group_of_one() -> None:
    """A process group of this process alone, if none is started."""
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
