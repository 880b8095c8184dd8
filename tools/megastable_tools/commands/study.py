"""`megastable study`: experiments of many short training runs."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megastable.base.errors import FAILED, ConfigError
from megastable.commands.app import App
from megastable.commands.options import Json, Overrides, Picture, Recipe, put_json

if TYPE_CHECKING:
    from megastable.base.progress_bar import Bar
    from megastable_tools.study.study_directory import StudyReport
    from megastable_tools.study.trial import TrialResult

app = App(
    "Train many small models: loss against learning rate, scale of activations over widths, seeds compared."
)


RESUMED = (
    "A study that was stopped goes on with the same command; a run that is done is not done again. Overrides apply to "
    "all runs."
)

STUDIES = Path("runs/studies")
Output = Annotated[
    Path | None,
    typer.Option("--output", metavar="DIR", help="The study's directory. Default: a name below runs/studies"),
]
Jobs = Annotated[
    int | None,
    typer.Option(
        "--jobs", min=1, show_default="the GPUs, or the cores", help="Runs at a time, one core each"
    ),
]
Mup = Annotated[
    bool, typer.Option("--mup", help="Scale by muP from the smallest width (model.mup.base_width)")
]


@app.add_command(
    "lr-sensitivity",
    examples="""
    megastable study lr-sensitivity launch/recipes/quickstart.yaml --quick data.corpora.0.path=data/stdlib
    megastable study lr-sensitivity launch/recipes/quickstart.yaml --full data.corpora.0.path=data/stdlib
    megastable study lr-sensitivity launch/recipes/125m.yaml --widths 192,384 --rates 1e-3,3e-3,1e-2
        --interventions none,qk_norm+z_loss --interventions "after=model.norms=after" train.steps=400
    megastable study lr-sensitivity launch/recipes/quickstart.yaml --interventions all --mup
        data.corpora.0.path=data/stdlib
    """,
    more="Interventions: none (no QK-norm, no z-loss), qk_norm, z_loss, A+B, all; NAME=KEY=VALUE defines one. The "
    "recipe gives depth, head width and schedule; steps, batch and sequence length are short ones unless overrides say "
    f"otherwise. {RESUMED}",
)
def lr_sensitivity(
    recipe_path: Recipe,
    overrides: Overrides = None,
    widths: Annotated[
        str | None, typer.Option(help="Widths of the model, separated by commas", show_default="64,128,256")
    ] = None,
    rates: Annotated[
        str | None, typer.Option(help="Learning rates, separated by commas", show_default="3e-4 to 3e-1")
    ] = None,
    interventions: Annotated[
        list[str] | None,
        typer.Option(help="Names, separated by commas, or one NAME=KEY=VALUE; repeatable", show_default="every one"),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Seeds at every rate")] = 1,
    edge_seeds: Annotated[
        int | None,
        typer.Option(min=0, help="More, where a curve leaves its basin", show_default="0; --quick 1, --full 2"),
    ] = None,
    margin: Annotated[float, typer.Option(min=1e-6, help="Nats above the best loss that are usable")] = 0.1,
    mup: Mup = False,
    quick: Annotated[bool, typer.Option("--quick", help="100 steps, two interventions: minutes")] = False,
    full: Annotated[bool, typer.Option("--full", help="500 longer steps, three seeds at the edges: hours")] = False,
    jobs: Jobs = None,
    output: Output = None,
    picture: Picture = None,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Plot final loss against learning rate over widths and interventions (arXiv:2309.14322). Trains for real."""
    if quick and full:
        raise ConfigError("--quick and --full exclude each other")
    from megastable.base.progress_bar import show_bar
    from megastable.config import recipe
    from megastable_tools.study import lr_study
    from megastable_tools.study.study_directory import StudyDirectory, identity_of
    from megastable_tools.study.trial import TrialResult, usual_jobs
    from megastable_tools.study.variations import parse_interventions as named

    size_preset = lr_study.QUICK if quick else lr_study.FULL if full else lr_study.USUAL
    path = recipe.find_recipe(recipe_path)
    chosen_widths = tuple(_whole(widths, "--widths")) if widths else size_preset.widths
    mup_overrides = (f"model.mup.base_width={min(chosen_widths)}",) if mup else ()
    common = (*lr_study.common_overrides(path, size_preset, overrides or []), *mup_overrides)
    recipe_config = recipe.load_recipe(path, common)
    edge_seed_count = size_preset.edge_seeds if edge_seeds is None else edge_seeds
    grid = lr_study.LrGrid(
        path, recipe_config, common, chosen_widths, tuple(_rates(rates)) if rates else size_preset.rates,
        named(interventions or size_preset.interventions, recipe_config.model), tuple(range(1, seeds + 1)),
        tuple(range(seeds + 1, seeds + 1 + edge_seed_count)), margin,
    )  # fmt: skip
    grid.check_trials()
    size_suffix = "-quick" if quick else "-full" if full else ""
    folder = output or STUDIES / (f"lr-sensitivity-{path.stem}{size_suffix}{'-mup' if mup else ''}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with StudyDirectory.open_locked(
        folder, identity_of("lr-sensitivity", recipe_config, grid.axes), TrialResult
    ) as study:
        with show_bar(
            "training", len(study.list_missing(t.name for t in grid.whole_trials())), as_json, "runs"
        ) as progress:
            curves = lr_study.run_grid(
                grid, study, jobs or usual_jobs(), _watcher(progress), progress.extend_total
            )
        study_facts = {"kind": "lr-sensitivity", "recipe": str(path), "common": list(common)}
        study_report = lr_study.make_report(grid, curves, study_facts)
        _present(
            study_report, f"{path.name}, {recipe_config.train.steps} steps", study.root, picture, as_json
        )


@app.add_command(
    "coordinate-check",
    examples="""
    megastable study coordinate-check launch/recipes/quickstart.yaml data.corpora.0.path=data/stdlib
    megastable study coordinate-check launch/recipes/quickstart.yaml --widths 256,512,1024,2048 --mup --seeds 3
        data.corpora.0.path=data/stdlib
    megastable study coordinate-check launch/recipes/quickstart.yaml --depths 4,8,16 data.corpora.0.path=data/stdlib
    """,
    more="Without warm-up, at the recipe's rate; batches are small ones unless overrides say otherwise. Exit codes: 0 "
    f"flat, with --mup under muP; 1 not so; 2 bad input. {RESUMED}",
)
def coordinate_check(
    recipe_path: Recipe,
    overrides: Overrides = None,
    widths: Annotated[
        str | None,
        typer.Option(help="Widths of the model, separated by commas", show_default="128,256,512,1024"),
    ] = None,
    depths: Annotated[
        str | None, typer.Option(help="Numbers of blocks instead, at the recipe's width, separated by commas")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Updates; measured before each and after the last")] = 4,
    seeds: Annotated[int, typer.Option(min=1, help="Of weights and data; their geometric mean counts")] = 2,
    mup: Annotated[
        bool, typer.Option("--mup", help="Also by muP from the smallest one on, which then decides")
    ] = False,
    jobs: Jobs = None,
    output: Output = None,
    picture: Picture = None,
    as_json: Json = False,
) -> None:
    """Check whether activations keep their scale in wider or deeper models. Trains a few steps at each width."""
    if widths and depths:
        raise ConfigError("--widths and --depths exclude each other: one of them varies at a time")
    from megastable.base.progress_bar import show_bar
    from megastable.config import recipe
    from megastable_tools.study import coordinate_study as check
    from megastable_tools.study.coordinate_study import Coordinates
    from megastable_tools.study.study_directory import StudyDirectory, identity_of
    from megastable_tools.study.trial import usual_jobs

    path, common = recipe.find_recipe(recipe_path), check.common_overrides(overrides or [])
    run_config = recipe.load_recipe(path, common)
    model_sizes = _whole(depths, "--depths") if depths else _whole(widths or "128,256,512,1024", "--widths")
    ways = (check.PLAIN, check.MUP) if mup else (check.PLAIN,)
    grid = check.CoordinateGrid(
        path, run_config, common, tuple(model_sizes), bool(depths), ways, steps, tuple(range(1, seeds + 1))
    )
    if len(model_sizes) < 2:
        raise ConfigError("a slope needs two widths or depths at least")
    grid.check_models()
    study_folder = output or STUDIES / (
        f"coordinates-{path.stem}{'-depth' if depths else ''}{'-mup' if mup else ''}"
    )
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    study_identity = identity_of("coordinate-check", run_config, grid.axes) | {"steps": steps}
    with StudyDirectory.open_locked(study_folder, study_identity, Coordinates) as study:
        with show_bar("measuring", len(study.list_missing(grid.every)), as_json, "models") as progress_bar:
            check.run_grid(grid, study, jobs or usual_jobs(), lambda name, _: _done(progress_bar, name))
        scale_results = check.find_scales(grid, study.results)
        study_facts = {"kind": "coordinate-check", "recipe": str(path), "common": list(common)}
        study_report = check.make_report(grid, study.results, scale_results, study_facts)
        _present(study_report, f"{path.name}: {steps} steps", study.root, picture, as_json)
    raise typer.Exit(0 if all(one.flat for one in scale_results if one.way == ways[-1]) else FAILED)


@app.add_command(
    "compare",
    examples="""
    megastable study compare launch/recipes/quickstart.yaml --of "" --of model.qk_norm=false --seeds 5
        data.corpora.0.path=data/stdlib
    megastable study compare launch/recipes/quickstart.yaml --of optimizer.name=adamw
        --of "optimizer.name=muon optimizer.lr=4e-3" train.steps=400 data.corpora.0.path=data/stdlib
    """,
    more=f"The length of the runs is the recipe's. lr-sensitivity finds the rate of each. {RESUMED}",
)
def compare_candidates(
    recipe_path: Recipe,
    overrides: Overrides = None,
    candidates: Annotated[
        list[str] | None,
        typer.Option(
            "--of",
            help="Overrides of one candidate, separated by spaces; repeatable. The others are compared with the first",
        ),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each")] = 3,
    jobs: Jobs = None,
    output: Output = None,
    picture: Picture = None,
    as_json: Json = False,
) -> None:
    """Check whether overrides make a difference: paired seeds, with confidence intervals. Trains for real."""
    chosen_candidates = tuple(" ".join(one.split()) for one in candidates or [])
    if len(chosen_candidates) < 2 or len(set(chosen_candidates)) < len(chosen_candidates):
        raise ConfigError('give two different candidates or more, e.g. --of "" --of model.qk_norm=false')
    from megastable.base.progress_bar import show_bar
    from megastable.config import recipe
    from megastable_tools.study import compare_study as comparing
    from megastable_tools.study.study_directory import StudyDirectory, identity_of, run_missing
    from megastable_tools.study.trial import QUIET, TrialResult, usual_jobs

    recipe_file, shared_overrides = recipe.find_recipe(recipe_path), (*QUIET, *(overrides or []))
    run_config, seed_numbers = recipe.load_recipe(recipe_file, shared_overrides), tuple(range(1, seeds + 1))
    grid = comparing.CompareGrid(recipe_file, run_config, shared_overrides, chosen_candidates, seed_numbers)
    grid.check_candidates()
    folder = output or STUDIES / (f"compare-{recipe_file.stem}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with StudyDirectory.open_locked(
        folder, identity_of("compare", grid.config, grid.axes), TrialResult
    ) as study:
        trials = grid.make_trials()
        with show_bar(
            "training", len(study.list_missing(t.name for t in trials)), as_json, "runs"
        ) as progress_bar:
            run_missing(study, recipe_file, trials, jobs or usual_jobs(), _watcher(progress_bar))
        study_facts = {"kind": "compare", "recipe": str(recipe_file), "common": list(shared_overrides)}
        study_report = comparing.make_report(
            grid, comparing.compare_candidates(grid, study.results), study_facts
        )
        _present(study_report, f"{recipe_file.name}: {seeds} seeds", study.root, picture, as_json)


def _whole(text: str, option: str) -> list[int]:
    """Different whole numbers above 0, with commas between, in order. Raises ConfigError."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) for part in parts) or len(set(map(int, parts))) < len(parts):
        raise ConfigError(f"{option} {text}: give different whole numbers above 0, e.g. {option} 64,128,256")
    return sorted(map(int, parts))


def _rates(text: str) -> list[float]:
    """Learning rates, in order. Raises ConfigError."""
    try:
        found_rates = sorted({float(number_text) for number_text in text.split(",")})
    except ValueError:
        found_rates = []
    if not found_rates or not all(0 < found_rate < math.inf for found_rate in found_rates):
        raise ConfigError(f"--rates {text}: give learning rates above 0, e.g. --rates 1e-3,3e-3,1e-2")
    return found_rates


def _watcher(progress: Bar) -> Callable[[str, TrialResult], None]:
    def watch(name: str, result: TrialResult) -> None:
        _done(progress, f"{name}: loss {result.final:.3f}, {result.seconds:.0f} s")

    return watch


def _done(progress: Bar, what: str) -> None:
    """Tell of a run that is done: a study's log says where it is without a terminal, too."""
    progress()
    progress.print_line(what)


def _present(report: StudyReport, title: str, folder: Path, picture: Path | None, as_json: bool) -> None:
    """Its JSON and its picture into the directory of the study, and the rest to the terminal."""
    from megastable.report.figures import draw_figure
    from megastable.report.text_output import TextOutput

    put_json(report.facts, as_json, folder / "result.json")
    picture_path = picture or folder / "picture.png"
    with draw_figure(picture_path, *report.size) as study_figure:
        report.draw(study_figure)
        study_figure.suptitle(title, parse_math=False)
    text_output = TextOutput(as_json)
    text_output.show_table(report.table)
    text_output.say_lines(*report.sentences, f"picture: {picture_path}")
