"""`megastable repeat`: do the same steps give the same bits?"""

from __future__ import annotations

import signal
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megastable.base.errors import FAILED, ConfigError, DataError
from megastable.commands.app import App, WithLauncherArguments
from megastable.commands.options import Json, Overrides, Recipe, put_json

if TYPE_CHECKING:
    from megastable.config.tree import RunConfig

app = App()
TOLERANCES = {"bf16": 0.05, "fp16": 0.05, "fp32": 1e-4}  # measured: docs/hardware.md
ELSEWHERE = ("--hostfile", "-H", "--num_nodes", "--include", "--launcher")  # ranks on other hosts, maybe


@app.add_command(
    cls=WithLauncherArguments,
    examples="""
    megastable repeat launch/recipes/quickstart.yaml data.corpora.0.path=data/stdlib
    megastable repeat launch/recipes/quickstart.yaml --steps 50 --ranks 2 parallel.zero=2
    megastable repeat launch/recipes/7b.yaml run.deterministic=true --output /shared/repeat -- --hostfile hostfile
    megastable repeat launch/recipes/quickstart.yaml --ranks 2 --against parallel.tensor=2 --tolerance 0.05
    megastable repeat launch/recipes/quickstart.yaml --ranks 1 --against-ranks 2 --against parallel.pipeline=2
    megastable repeat launch/recipes/quickstart.yaml --steps 8 --plant "7:blocks.1.mlp.down output"
    """,
    more="The steps are the recipe's first ones: its data, weights, learning rates and updates. Recorded are 64 bits "
    "of every tensor: inputs, what each module gives, gradients through each, gradients after their sum over ranks, "
    "their norm, fp32 masters, moments and weights after the update. The first difference is the first in the order in "
    "which one can cause another, over all ranks. Blocks are not compiled, so that their operations can be seen; "
    "--blocks leaves them as they are.\n\n"
    "--against: overrides of the second run. Another layout rounds differently, so whole tensors are compared by their "
    "statistics, and the losses sample by sample; not seen is what changes places within a tensor. The "
    "largest element of a tensor may differ by 4 times the tolerance. Rounding grows in training: few steps say more, "
    "and precision.kind=fp32 says most.\n\n"
    "Exit codes: 0 no difference, 1 a difference, 2 bad input, or a run that failed.",
)
def repeat_steps(
    context: typer.Context,
    recipe_path: Recipe,
    overrides: Overrides = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps of each run, from the recipe's first one on")] = 20,
    ranks: Annotated[
        int | None, typer.Option(min=1, show_default="1", help="Processes on this host, a GPU each if there are some")
    ] = None,
    against: Annotated[
        list[str] | None, typer.Option(help="Overrides of the second run, spaces between; repeatable")
    ] = None,
    against_ranks: Annotated[
        int | None, typer.Option(min=1, show_default="those of the first", help="Processes of the second run")
    ] = None,
    tolerance: Annotated[
        float | None,
        typer.Option(
            min=0, show_default="with --against 0.05; of fp32 1e-4", help="Relative difference allowed; 0: bit for bit"
        ),
    ] = None,
    blocks: Annotated[
        bool, typer.Option("--blocks", help="Watch whole blocks only, compiled as the recipe says")
    ] = False,
    again: Annotated[
        bool, typer.Option("--again/--no-again", help="Run a difference again: which bits, and does it repeat?")
    ] = True,
    plant: Annotated[
        str | None,
        typer.Option(
            metavar="STEP:OPERATION[:RANK]",
            help="For a demonstration: flip a bit of one number of this operation in the second run (micro-batch 0)",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", metavar="DIR", help="Keep the traces here; with several hosts on a shared disk"),
    ] = None,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Run the same steps twice, and find the first step, layer and operation that differ, bit for bit."""
    import os

    from megastable.base.progress_bar import show_bar
    from megastable.config import recipe
    from megastable.report.text_output import TextOutput
    from megastable.run.membership import check_alone
    from megastable_tools.repeat.repeating import (
        UNCOMPILED,
        RepeatPlan,
        Way,
        describe_result,
        result_tree,
        run_twice,
    )
    from megastable_tools.repeat.trace_file import CPU, PlantSpot

    check_alone(os.environ)
    given: list[str] = context.obj
    if given and (ranks or against_ranks):
        raise ConfigError(
            f"--ranks is for this host alone: say it to the launcher, after -- ({' '.join(given)})"
        )
    if output is None and any(word.startswith(ELSEWHERE) for word in given):
        raise ConfigError("with other hosts give --output, a folder on a file system that all of them share")
    path, common = recipe.find_recipe(recipe_path), tuple(overrides or [])
    changed = tuple(word for one in against or [] for word in one.split())
    launched = [tuple(given) or ("--num_gpus", str(n or ranks or 1)) for n in (None, against_ranks)]
    forced = () if blocks else (UNCOMPILED,)
    configs = [recipe.load_recipe(path, [*common, *more, *forced]) for more in ((), changed)]
    for config, n in zip(configs, (ranks, against_ranks or ranks), strict=True):
        _check(config, None if given else n or 1)
    usual = max(TOLERANCES[config.precision.kind] for config in configs)
    allowed = (usual if changed or against_ranks else 0.0) if tolerance is None else tolerance
    planted = None if plant is None else PlantSpot.parse_spot(plant, steps)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with ExitStack() as during:
        folder = output or Path(during.enter_context(tempfile.TemporaryDirectory(prefix="repeat-")))
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if any(folder.iterdir()):
                raise ConfigError(f"--output {folder} is not empty: choose another")
        except OSError as error:
            raise ConfigError(f"--output {folder} cannot be used: {error}") from None
        plan = RepeatPlan(
            path, (Way(common, launched[0]), Way((*common, *changed), launched[1])), steps, folder,
            allowed or None, planted, blocks, again,
        )  # fmt: skip
        progress = during.enter_context(show_bar("tracing", 2 * steps, as_json, "steps"))
        result = run_twice(plan, progress)
    out = TextOutput(as_json)
    compiled, header = recipe.load_recipe(path, common).kernels.compile, result.headers[0][0]
    if not blocks and (compiled is True or (compiled == "auto" and not header.device.startswith(CPU))):
        out.say_lines(f"{UNCOMPILED} for this, so that operations can be seen; --blocks compiles")
    out.say_lines(*describe_result(result))
    put_json(result_tree(result), as_json, None)
    raise typer.Exit(0 if result.same else FAILED)


def _check(config: RunConfig, ranks: int | None) -> None:
    """What would fail on the ranks, before any starts. Raises ConfigError and DataError."""
    from megastable.config import deepspeed_json
    from megastable.data.corpora import open_corpora

    if ranks is not None:
        deepspeed_json.size_of_data_parallel(config, ranks)
    try:
        open_corpora(config.data.corpora, config.model.sequence_length, config.run.seed)
    except DataError as error:
        raise DataError(
            f"{error}. Any corpus will do: megastable prepare stdlib --output data/stdlib, then "
            "data.corpora.0.path=data/stdlib"
        ) from None
