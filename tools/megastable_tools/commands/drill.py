"""`megastable drill`: train small models with planted faults."""

from __future__ import annotations

import signal
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from megastable.base.errors import FAILED, OK, ConfigError
from megastable.base.process import ROOT
from megastable.commands.app import App
from megastable.commands.options import Json, JsonFile, put_json

if TYPE_CHECKING:
    from drills.exercise import Drill

app = App()
CORRUPTION, COURT = "sdc", "court"
# Options that these do not have.
FOREIGN = {
    CORRUPTION: ("text", "ranks", "layers", "jobs", "control", "settings"),
    COURT: ("text", "ranks", "layers", "jobs", "quick"),
}
SHOWN = {"settings": "set"}
OWN = {CORRUPTION: "layouts", COURT: "texts"}


@app.add_command(
    examples="""
    megastable drill all --output drills.json
    megastable drill thin --seeds 1,2,3 --keep drills --output drills.json
    megastable drill trickle rate-x10 --control --ranks 1 --layers 3 --text my.txt
    megastable drill experts --ranks 2 --set parallel.expert=2
    megastable drill --quick
    megastable drill --list
    megastable drill sdc --output sdc.json
    megastable drill sdc --quick
    megastable drill sdc dp2 tp2 master weight/sign --seeds 1,2 --keep drills
    megastable drill court --control --keep court --output before.json
    megastable drill court --only switch,repeats --seeds 1,2,3 --keep court
    megastable drill court --set "model.experts={count: 8, top_k: 2}" --set stability.trends.start=60
    """,
    more="Groups: all, gross (what stands out), thin (what hardly does), "
    "slow (what must be warned of before the loss shows it; not in all), experts (faults of a mixture; not in all), "
    "healthy (strange mixtures without a fault, 400 steps each; not in all). Called again with the same --keep, the "
    "runs that are finished there, by the same code, are not done again. A run takes about 40 s on two cores with two "
    "ranks, and 25 s with one.\n\n"
    "sdc plants silent corruption instead: wrong gradients, flipped bits of weights, masters, moments, activations, "
    "products and messages, and the like, three of every kind in every layout, each in a run of 40 steps, which takes "
    "5 to 15 s on two cores that others use as well. It tells whether each is found, how soon and by what, whether the "
    "right rank is named, and whether it is undone to the bytes of a clean run. What follows names layouts and kinds "
    "(sdc --list); of the options it takes --quick, --seeds, --keep (all runs are done again), --json and "
    "--output.\n\n"
    "court measures judgement: text that is new, easy or repeated must be trained on, bad samples and spoilt updates "
    "must be found. Runs of a minute or two on one rank. Of the options it takes --only, --set, --control (done once "
    "for the same --keep), --seeds, --keep, --list, --json and --output.\n\n"
    "Exit codes: 0 all runs end within 0.02 nat of the clean one, no clean sample is lost for good, and at "
    "most one cause in 12 is wrong, and nothing is done without a fault; with sdc: 95 % of the faults that must be "
    "found are, 95 % of those found name the right rank, alone or among suspects, and no run has a finding without a "
    "fault; with court: all runs are as wanted; 1 not so; 2 bad input.",
)
def run_drill(
    context: typer.Context,
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[SCENARIO|GROUP]... | sdc [LAYOUT|KIND]... | court [SCENARIO]...",
            help="What to run. Default: all",
        ),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Only two scenarios; sdc: six faults")] = False,
    seeds: Annotated[str, typer.Option(help="Seeds of model, data and faults, e.g. 1,2,3")] = "1",
    text: Annotated[
        Path | None,
        typer.Option(help="Text to train on, a file or folder. Default: Python's standard library"),
    ] = None,
    ranks: Annotated[int, typer.Option(help="Processes of a run: a divisor of 16")] = 2,
    layers: Annotated[int, typer.Option(min=1, help="Layers of the model")] = 2,
    jobs: Annotated[int, typer.Option(min=1, help="Runs at the same time")] = 1,
    only: Annotated[str, typer.Option(help="court: only these scenarios, e.g. switch,repeats")] = "",
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="A setting of every run's recipe; may be repeated"),
    ] = None,
    control: Annotated[
        bool, typer.Option("--control", help="Each run also with the guard off: stability.enabled=false")
    ] = False,
    keep: Annotated[Path | None, typer.Option(help="Keep corpora and runs here, and reuse them")] = None,
    listed: Annotated[bool, typer.Option("--list", help="List the scenarios and exit")] = False,
    as_json: Json = False,
    output: JsonFile = None,
) -> None:
    """Train with planted faults, and compare with a clean run. Needs a checkout.

    On the CPU. JSON: the numbers of every run.
    """
    import_from_checkout("drills")
    if keep is not None and keep.exists() and not keep.is_dir():
        raise ConfigError(f"--keep {keep} is no directory: choose another name")
    kind = names[0] if names and names[0] in FOREIGN else ""
    chosen_names = (names or [])[bool(kind) :]
    if given_options := [
        f"--{SHOWN.get(name, name)}" for name in FOREIGN.get(kind, ()) if _was_given(context, name)
    ]:
        raise ConfigError(
            f"{', '.join(given_options)}: drill {kind} has its own models and {OWN[kind]}: leave it out"
        )
    if kind != COURT and only:
        raise ConfigError(f"--only is of drill {COURT}: leave it out")
    drill: Drill[Any]
    if kind == CORRUPTION:
        from drills.corruption import CorruptionDrill, list_kinds

        if listed:
            return print("\n".join(list_kinds()))
        drill = CorruptionDrill(chosen_names, read_seeds(seeds), quick)
    elif kind == COURT:
        from drills.court import CourtDrill, list_cases

        case_names = [*chosen_names, *filter(None, only.split(","))]
        if listed:
            return print("\n".join(list_cases(case_names)))
        drill = CourtDrill(case_names, read_seeds(seeds), control, tuple(settings or ()))
    else:
        from drills.learning import LearningDrill, list_scenarios
        from drills.stage import Stage

        if listed:
            return print("\n".join(list_scenarios(chosen_names)))
        stage = Stage(Path(), 0, ranks=ranks, layers=layers, text=text, settings=tuple(settings or ()))
        drill = LearningDrill(chosen_names, read_seeds(seeds), stage, control, jobs, quick)
    conduct_drill(drill, keep, as_json, output)


def conduct_drill(drill: Drill[Any], keep: Path | None, as_json: bool, output: Path | None) -> None:
    """Do a drill, and exit as it says.

    Args:
        drill: what to do.
        keep: the folder for corpora and runs, which are left there; None: one that goes.
        as_json: print JSON, and nothing else.
        output: a file for the JSON.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with ExitStack() as exit_stack:
        drill_folder = keep or Path(exit_stack.enter_context(tempfile.TemporaryDirectory(prefix="drill-")))
        drill_outcomes = drill.conduct_drill(drill_folder.resolve(), as_json)
    put_json(drill.report_outcomes(drill_outcomes), as_json, output)
    raise typer.Exit(OK if drill.is_met(drill_outcomes) else FAILED)


def _was_given(context: typer.Context, name: str) -> bool:
    parameter_source = context.get_parameter_source(name)
    return parameter_source is not None and parameter_source.name == "COMMANDLINE"


def read_seeds(seeds: str) -> list[int]:
    """The seeds of a list. Raises ConfigError."""
    seed_texts = [seed_text.strip() for seed_text in seeds.split(",")]
    if not all(seed_text.isdecimal() for seed_text in seed_texts) or len(set(seed_texts)) < len(seed_texts):
        raise ConfigError(f"--seeds {seeds}: give different whole numbers, e.g. --seeds 1,2,3")
    return [int(seed_text) for seed_text in seed_texts]


def import_from_checkout(folder: str) -> None:
    """Make a folder beside the package importable. Raises ConfigError if it is missing."""
    if not (ROOT / folder / "__init__.py").is_file():
        raise ConfigError(
            f"{folder}/ is not installed with megastable: this command needs a checkout of its repository; there, "
            "bash launch/install.sh, then the same command with .venv/bin/megastable"
        )
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
