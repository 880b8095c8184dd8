"""`megastable checkpoint`: verify, list, show, pin, accept and compare checkpoints, and make new runs of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from megastable.base.errors import BAD_INPUT, FAILED, CheckpointError, ConfigError, DataError
from megastable.commands.app import App
from megastable.commands.options import Csv, Html, Json, JsonFile, Overrides, Rows, Run, put_json

if TYPE_CHECKING:
    from megastable_tools.convert.derived_runs import Branch, Made

app = App(
    "Verify, list, show, pin, compare, reshape, branch, average, roll back to checkpoints. Needs no GPU."
)
Checkpoint = Annotated[Path, typer.Argument(help="RUN/checkpoints/step-N, or a run: its newest good one")]
Out = Annotated[Path, typer.Argument(help="A new run directory")]
Tensor = Annotated[
    int | None, typer.Option(min=1, show_default="unchanged", help="Ranks that share every layer")
]
Pipeline = Annotated[int | None, typer.Option(min=1, show_default="unchanged", help="Stages")]
Zero = Annotated[
    int | None, typer.Option(min=0, max=3, show_default="unchanged", help="Stage of ZeRO, 1 to 3")
]
Data = Annotated[int | None, typer.Option(min=1, show_default="unchanged", help="Data-parallel ranks")]
MicroBatch = Annotated[
    int | None, typer.Option(min=1, show_default="unchanged", help="Samples per rank and pass")
]
DecayShape = Literal["linear", "cosine", "sqrt"]
Recipe = Annotated[Path, typer.Option(help="Of the run; its model is the checkpoint's")]
Reason = Annotated[str, typer.Option(help="Why, for later readers")]
One = Annotated[Path, typer.Argument(help="RUN/checkpoints/step-N, or RUN/checkpoints/latest")]


@app.add_command(
    "verify",
    examples="""
    megastable checkpoint verify runs/7b
    megastable checkpoint verify runs/7b/checkpoints/step-500 runs/other --json
    """,
    more="Exit codes: 0 all good, 2 one is damaged, or there is none.",
)
def verify_checkpoints(paths: Annotated[list[Path], typer.Argument(help="Checkpoints, or runs for all of theirs")],
                       as_json: Json = False, output: JsonFile = None, csv: Csv = None, html: Html = None,
                       rows: Rows = 100) -> None:  # fmt: skip
    """Check every file against the manifests: torn, cut off, flipped bits, swapped, missing, of another checkpoint."""
    from megastable.report.sheet.output import Output
    from megastable_tools.convert import inspecting

    found_checkpoints = inspecting.verify_checkpoints(paths, as_json)
    Output(as_json, csv, html, rows, output=output).put_sheet(inspecting.verified_sheet(found_checkpoints))
    raise typer.Exit(
        BAD_INPUT if any(verified_checkpoint.problems for verified_checkpoint in found_checkpoints) else 0
    )


@app.add_command(
    "list",
    examples="""
    megastable checkpoint list runs/7b
    """,
)
def list_(run: Run, as_json: Json = False, output: JsonFile = None, csv: Csv = None, html: Html = None,
          rows: Rows = 100) -> None:  # fmt: skip
    """List a run's checkpoints: step, size, layout, fresh, healthy or suspect, pinned, loss, age. Hashes nothing."""
    from megastable.report.sheet.output import Output
    from megastable_tools.convert import catalogue

    Output(as_json, csv, html, rows, output=output).put_sheet(
        catalogue.make_catalogue_sheet(run, catalogue.list_entries(run))
    )


@app.add_command(
    "show",
    examples="""
    megastable checkpoint show runs/7b/checkpoints/step-500 --tensor "blocks.0.*"
    """,
)
def show_checkpoint(
    checkpoint: Checkpoint,
    tensor: Annotated[str | None, typer.Option(help="Only tensors whose name matches, e.g. 'blocks.0.*'")] = None,
    as_json: Json = False, output: JsonFile = None, csv: Csv = None, html: Html = None,
    rows: Rows = 30
) -> None:  # fmt: skip
    """Show a checkpoint: model, step, tokens, layout, versions, fingerprints, norm, maximum and mean of each tensor."""
    from megastable.report.sheet.output import Output
    from megastable_tools.convert.inspecting import show_checkpoint as look

    if as_json and (csv or html):
        raise DataError("--json of show is more than a table: leave out --csv and --html")
    sheet_output, shown_checkpoint = Output(False, csv, html, rows), look(checkpoint, tensor)
    if not as_json:
        sheet_output.put_sheet(shown_checkpoint.sheet)
    put_json(shown_checkpoint.facts, as_json, output)


@app.add_command(
    "pin",
    examples="""
    megastable checkpoint pin runs/7b/checkpoints/step-500 --reason "before the new data"
    """,
)
def pin_checkpoint(checkpoint: One, reason: Reason = "") -> None:
    """Keep a checkpoint, whatever checkpoint.keep says."""
    from megastable_tools.convert.catalogue import pin_checkpoint as keep

    print(keep(checkpoint, reason))


@app.add_command(
    "unpin",
    examples="""
    megastable checkpoint unpin runs/7b/checkpoints/step-500
    """,
)
def unpin_checkpoint(checkpoint: One) -> None:
    """Undo pin: checkpoint.keep may delete it again."""
    from megastable_tools.convert.catalogue import unpin_checkpoint as let_go

    print(let_go(checkpoint))


@app.add_command(
    "accept",
    examples="""
    megastable checkpoint accept runs/7b/checkpoints/rejected-step-500 --reason "the kernels were wrong"
    """,
)
def accept_checkpoint(checkpoint: One, reason: Reason = "") -> None:
    """Allow runs to resume from a checkpoint that was rejected or set aside (rejected-step-N, suspect-step-N)."""
    from megastable_tools.convert.catalogue import accept_checkpoint as take

    print(take(checkpoint, reason))


@app.add_command(
    "rollback",
    examples="""
    megastable checkpoint rollback runs/7b/checkpoints/step-500 --reason "step 520 spiked"
    """,
)
def roll_back_run(checkpoint: One, reason: Reason = "") -> None:
    """Have a run that is not at work go on from an earlier checkpoint: newer ones are set aside, nothing is deleted."""
    from megastable_tools.convert.catalogue import roll_back

    print(roll_back(checkpoint, reason))


@app.add_command(
    "diff",
    examples="""
    megastable checkpoint diff runs/7b/checkpoints/step-500 runs/other
    """,
    more="Exit codes: 0 the same, 1 they differ, 2 bad input or a damaged checkpoint.",
)
def compare_checkpoints(
    a: Checkpoint, b: Checkpoint,
    weights_only: Annotated[bool, typer.Option("--weights-only", help="Ignore moments, step and cursor")] = False,
    as_json: Json = False, output: JsonFile = None, csv: Csv = None, html: Html = None,
    top: Annotated[int, typer.Option(min=0, help="Tensors to print")] = 20
) -> None:  # fmt: skip
    """Compare two checkpoints tensor by tensor, largest difference first. Layouts may differ. Exit code 1 if any."""
    from megastable.report.sheet.output import Output
    from megastable_tools.convert.inspecting import compare_checkpoints

    sheet_output = Output(as_json, csv, html, top, output=output)
    sheet, are_same = compare_checkpoints(
        a, b, weights_only, bool(as_json or output or csv or html), silent=as_json
    )
    sheet_output.put_sheet(sheet)
    raise typer.Exit(0 if are_same else FAILED)


# A new run from one or more checkpoints


@app.add_command(
    "reshape",
    examples="megastable checkpoint reshape runs/7b runs/7b-tp2 --tensor 2 --pipeline 1 --zero 1 --data 4",
)
def reshape_run(checkpoint: Checkpoint, out: Out, tensor: Tensor = None, pipeline: Pipeline = None, zero: Zero = None,
                data: Data = None, micro_batch: MicroBatch = None, as_json: Json = False) -> None:  # fmt: skip
    """Make OUT, a run that continues from the checkpoint in another layout: the same weights, moments, step, cursor."""
    from megastable_tools.convert import derived_runs

    layout_sizes = derived_runs.Sizes(tensor, pipeline, zero, data, micro_batch)
    with _writing([checkpoint], out, as_json) as ([good_checkpoint], watch_bytes):
        new_run = derived_runs.reshape_checkpoint(good_checkpoint, out, layout_sizes, watch=watch_bytes)
    _tell(new_run, as_json)


@app.add_command(
    "branch",
    examples="""
    megastable checkpoint branch runs/7b runs/7b-final --decay-steps 20000
    megastable checkpoint branch runs/7b/checkpoints/step-100000 runs/7b-100k --decay-steps 10000 --kind sqrt
    """,
)
def branch_run(
    checkpoint: Checkpoint, out: Out,
    decay_steps: Annotated[int, typer.Option(min=1, help="Updates until the new run's end")],
    kind: Annotated[DecayShape, typer.Option(help="Shape of the decay; sqrt: 1 - sqrt")] = "linear",
    floor: Annotated[float | None, typer.Option(min=0, max=1, show_default="the run's", help="Share of the peak "
                                                "rate at its end")] = None,
    as_json: Json = False
) -> None:  # fmt: skip
    """Make OUT, a run that continues from a checkpoint of the constant phase with a final decay of the learning rate.

    Moments, data order, skips and position continue; the parent stays as it is (arXiv:2404.06395, arXiv:2405.18392).
    """
    from megastable_tools.convert import derived_runs

    with _writing([checkpoint], out, as_json) as ([good_checkpoint], watch_bytes):
        new_run = derived_runs.branch_run(good_checkpoint, out, decay_steps, kind, floor, watch=watch_bytes)
    _tell(new_run, as_json)


@app.add_command("export", examples="megastable checkpoint export runs/7b runs/7b-weights")
def export_weights(checkpoint: Checkpoint, out: Out, as_json: Json = False) -> None:
    """Make OUT, a run without optimizer state, a third of the size: to evaluate, or to continue with fresh moments."""
    from megastable_tools.convert import derived_runs

    with _writing([checkpoint], out, as_json, optimizer=False) as ([good_checkpoint], watch_bytes):
        new_run = derived_runs.reshape_checkpoint(good_checkpoint, out, optimizer=False, watch=watch_bytes)
    _tell(new_run, as_json)


@app.add_command(
    "upcycle",
    examples="""
    megastable checkpoint upcycle runs/dense runs/moe model.experts.count=8 model.experts.top_k=2
    megastable checkpoint upcycle runs/dense runs/fine model.experts='{count: 32, top_k: 8, ffn: 512}'
    """,
)
def upcycle_run(
    checkpoint: Checkpoint, out: Out, overrides: Overrides = None,
    noise: Annotated[float, typer.Option(min=0, help="Noise added to experts, as a share of each matrix's rms")] = 0.0,
    as_json: Json = False
) -> None:  # fmt: skip
    """Make OUT, a run whose experts are copies or slices of a dense MLP (arXiv:2212.05055, arXiv:2410.07524).

    It computes what the checkpoint does, and continues at its step with fresh moments.
    """
    from megastable.base.progress_bar import show_bar
    from megastable.checkpoint.new_run import refuse_existing
    from megastable.model.sizes import count_parameters
    from megastable_tools.convert.inspecting import find_good_checkpoint
    from megastable_tools.convert.upcycling import make_upcycled_config, upcycle_checkpoint

    refuse_existing(out)
    good_checkpoint = find_good_checkpoint(checkpoint, as_json)
    run = make_upcycled_config(good_checkpoint, overrides or ())
    with show_bar("writing", 4 * count_parameters(run.model), as_json) as watch_bytes:
        new_run = upcycle_checkpoint(good_checkpoint, out, run, noise, watch=watch_bytes)
    _tell(new_run, as_json)


@app.add_command(
    "average",
    examples="""
    megastable checkpoint average --last 5 runs/7b runs/7b-mean
    megastable checkpoint average --weights 0.3,0.7 runs/a runs/b runs/ab
    """,
)
def average_checkpoints(
    paths: Annotated[list[Path], typer.Argument(metavar="CHECKPOINT... OUT")],
    weights: Annotated[str | None, typer.Option(help="Weight of each, e.g. 0.1,0.2,0.7")] = None,
    last: Annotated[int | None, typer.Option(min=2, help="The newest of a run: --last 5 RUN OUT")] = None,
    as_json: Json = False
) -> None:  # fmt: skip
    """Make OUT from the mean of weights (LAWA, arXiv:2209.14981; model soups, arXiv:2203.05482), without moments."""
    from megastable.checkpoint.new_run import refuse_existing
    from megastable_tools.convert import derived_runs
    from megastable_tools.convert.inspecting import checkpoints_of

    *given, out = paths
    if not given:
        raise ConfigError("name the checkpoints, then the new directory: average A B OUT")
    refuse_existing(out)
    if last is not None:
        if len(given) != 1:
            raise ConfigError("--last K takes one run: average --last 5 RUN OUT")
        run_checkpoints = checkpoints_of(given[0])
        if len(run_checkpoints) < last:
            raise CheckpointError(
                f"{given[0]}: {len(run_checkpoints)} checkpoints, --last {last} needs more: give fewer"
            )
        given = run_checkpoints[:last][::-1]
    try:
        numbers = None if weights is None else [float(weight_text) for weight_text in weights.split(",")]
    except ValueError:
        raise ConfigError(
            f"--weights {weights}: expected numbers with commas between, e.g. 0.1,0.2,0.7"
        ) from None
    with _writing(given, out, as_json, optimizer=False, what="averaging") as (good_checkpoints, watch_bytes):
        new_run = derived_runs.average_checkpoints(good_checkpoints, out, numbers, watch_bytes)
    _tell(new_run, as_json)


@app.add_command(
    "import-deepspeed",
    examples="megastable checkpoint import-deepspeed old/checkpoints runs/new --recipe launch/recipes/7b.yaml "
    "model.vocab_size=50304",
)
def import_deepspeed(folder: Annotated[Path, typer.Argument(help="With latest, or one global_step*")], out: Out,
                     recipe: Recipe, overrides: Overrides = None, as_json: Json = False) -> None:  # fmt: skip
    """Make OUT, a run that continues from a checkpoint written by DeepSpeed itself (ZeRO 1 to 3)."""
    from megastable.checkpoint.new_run import refuse_existing
    from megastable.config import recipe as recipes
    from megastable_tools.convert.derived_runs import describe_import
    from megastable_tools.convert.foreign.deepspeed import import_deepspeed as bring_in

    refuse_existing(out)
    _tell(
        describe_import(out, bring_in(folder, out, recipes.load_recipe(recipe, overrides or ()), _say)),
        as_json,
    )


@app.add_command(
    "import-megatron",
    examples="megastable checkpoint import-megatron megatron/checkpoints runs/new --recipe launch/recipes/7b.yaml "
    "model.vocab_size=50304",
)
def import_megatron(folder: Annotated[Path, typer.Argument(help="With its tracker file, or one iter_*")], out: Out,
                    recipe: Annotated[Path | None, typer.Option(show_default="from its arguments")] = None,
                    overrides: Overrides = None, as_json: Json = False) -> None:  # fmt: skip
    """Make OUT, a run that starts from weights in Megatron-core's "torch" format; moments are not imported."""
    from megastable.checkpoint.new_run import refuse_existing
    from megastable.config import recipe as recipes
    from megastable_tools.convert.derived_runs import describe_import
    from megastable_tools.convert.foreign.megatron import import_megatron as bring_in

    refuse_existing(out)
    if recipe is None and overrides:
        raise ConfigError(f"{overrides[0]}: overrides need a recipe: give one with --recipe")
    run = None if recipe is None else recipes.load_recipe(recipe, overrides or ())
    new_run = describe_import(out, bring_in(folder, out, run, _say))
    if run is None:
        _say(
            "note: its recipe has the model of Megatron's arguments, and defaults for everything else: to train, add "
            "data.corpora='[{path: data/...}]', optimizer.lr=... and train.steps=..."
        )
    _tell(new_run, as_json)


@app.add_command(
    "export-megatron",
    examples="megastable checkpoint export-megatron runs/7b megatron/checkpoints --tensor 2 --pipeline 2",
)
def export_megatron(checkpoint: Checkpoint, out: Annotated[Path, typer.Argument(help="A new folder")],
                    tensor: Annotated[int, typer.Option(min=1)] = 1, pipeline: Annotated[int, typer.Option(min=1)] = 1,
                    local: Annotated[bool, typer.Option("--local", help="For --transformer-impl local")] = False,
                    as_json: Json = False) -> None:  # fmt: skip
    """Write the weights as Megatron-core's "torch" format, for that many tensor and pipeline ranks."""
    import shlex

    from megastable.base.text import make_visible
    from megastable.checkpoint.new_run import refuse_existing
    from megastable_tools.convert.foreign.megatron import export_megatron as write
    from megastable_tools.convert.foreign.megatron import options_to_load
    from megastable_tools.convert.inspecting import find_good_checkpoint

    refuse_existing(out)
    good_checkpoint = find_good_checkpoint(checkpoint, as_json)
    written = write(good_checkpoint, out, tensor, pipeline, local=local)
    load_options = options_to_load(good_checkpoint, out, local)
    if as_json:
        put_json({"folder": str(out), "checkpoint": str(written), "options": load_options}, True, None)
    else:
        print(make_visible(f"{written}: load it with {shlex.join(load_options)}"))


@contextmanager
def _writing(
    checkpoints: list[Path], out: Path, silent: bool, optimizer: bool = True, what: str = "writing"
) -> Iterator[tuple[list[Path], Callable[[int], None]]]:
    """The verified checkpoints, and a progress bar of what is written to `out`: the optimizer's state, too."""
    import math

    from megastable.base.progress_bar import show_bar
    from megastable.checkpoint.new_run import refuse_existing
    from megastable.checkpoint.whole import WholeState
    from megastable_tools.convert.inspecting import find_good_checkpoint

    refuse_existing(out)
    good_checkpoints = [find_good_checkpoint(given_path, silent) for given_path in checkpoints]
    whole = WholeState(good_checkpoints[0])
    written_bytes = 4 * sum(
        math.prod(whole.shape_of(name)) * (len(whole.kinds_of(name)) if optimizer else 1)
        for name in whole.names
    )
    with show_bar(what, written_bytes, silent) as watch_bytes:
        yield good_checkpoints, watch_bytes


def _tell(made: Made | Branch, as_json: bool) -> None:
    from megastable.base.text import make_visible

    if as_json:
        put_json(made.facts, True, None)
    else:
        print(make_visible(made.text, keep="\n"))


def _say(text: str) -> None:
    """Print to stderr: stdout is for the result."""
    import sys

    from megastable.base.text import make_visible

    print(make_visible(text), file=sys.stderr, flush=True)
