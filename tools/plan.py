"""Plan a run before it costs anything: does it fit, how fast is it, what would be faster."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from megastable.base import durable
from megastable.base.errors import ConfigError, user_errors
from megastable.base.text import plural, visible
from megastable.config import deepspeed_json, recipe
from megastable.config.tree import Fp8Config, RunConfig
from megastable.model.flops import parameters
from megastable.plan import cluster as clusters
from megastable.plan import search, show
from megastable.plan.cluster import ClusterConfig
from megastable.run.directory import as_json

EXAMPLES = """Examples:

PLAN launch/recipes/70b.yaml --gpus 512

PLAN launch/recipes/7b.yaml parallel.zero=3 --gpus 64 --fixed

PLAN launch/recipes/405b.yaml --gpus 8192 --tokens 15T --top 10 --json plan.json --plot plan.png

PLAN launch/recipes/7b.yaml --vocab 32000 --cluster launch/clusters/a100.yaml --gpus 64

PLAN launch/recipes/70b.yaml --gpus 512 --fp8

Exit codes: 0 something fits (with --fixed: the recipe's own layout), 1 nothing does, 2 bad input.""".replace(
    "PLAN", "python tools/plan.py"
)
PICTURES = (".png", ".svg", ".pdf")
UNITS = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
ASSUMED = 128_000
MOST = 1e18  # tokens
WIDEST = 200  # characters of a table
app = typer.Typer(help=__doc__, add_completion=False, pretty_exceptions_enable=False)


@app.command(epilog=EXAMPLES)
@user_errors()
def plan(
    recipe_path: Annotated[Path, typer.Argument(metavar="RECIPE", help="A recipe, or a run's recipe.yaml")],
    overrides: Annotated[list[str] | None, typer.Argument(help="KEY=VALUE ... of the recipe")] = None,
    cluster_path: Annotated[
        Path, typer.Option("--cluster", help="Its GPUs, memory, links and price; write one for yours")
    ] = Path("launch/clusters/h100.yaml"),
    gpus: Annotated[
        int | None,
        typer.Option(
            min=1, max=1_000_000, help="How many. Default: the fewest on which the recipe's layout fits"
        ),
    ] = None,
    tokens: Annotated[
        str | None, typer.Option(help="To train on, e.g. 15T or 300B. Default: the recipe's steps")
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="How many suggestions")] = 5,
    vocab: Annotated[
        int | None, typer.Option(min=1, help="Vocabulary. Default: the recipe's, the corpus's, an assumption")
    ] = None,
    fixed: Annotated[
        bool, typer.Option("--fixed", help="Only the recipe's own layout; suggest none")
    ] = False,
    fp8: Annotated[bool, typer.Option("--fp8", help="Compare with and without FP8")] = False,
    json: Annotated[Path | None, typer.Option(help="All numbers")] = None,
    plot: Annotated[
        Path | None, typer.Option(help="A picture of memory and time: .png, .svg or .pdf")
    ] = None,
) -> None:
    """Memory, time and cost of a recipe on a cluster, and the layouts that would be faster. Nothing is started."""
    if plot is not None and (plot.suffix not in PICTURES or not plot.parent.is_dir()):
        raise ConfigError(
            f"--plot {plot}: a name ending in {', '.join(PICTURES)}, in a directory that exists"
        )
    config = recipe.load(recipe_path, overrides or [])
    if fp8 and (kind := config.precision.kind) != "bf16":
        raise ConfigError(f"--fp8: Transformer Engine's FP8 is beside bf16, and precision.kind is {kind}")
    cluster = clusters.load(cluster_path)
    if cluster.tflops.fp8 is None and (fp8 or config.precision.fp8):
        key = "--fp8" if fp8 else "precision.fp8"
        raise ConfigError(
            f"{key}: a GPU of {cluster.name} ({cluster_path}) does not compute in it: leave it out"
        )
    if json is not None and not json.parent.is_dir():
        raise ConfigError(f"--json {json}: there is no directory {json.parent}")
    if (price := config.supervise.gpu_hour_price) is not None:
        cluster = cluster.model_copy(update={"dollars_per_gpu_hour": price})
    total = float(config.train.steps * config.train.global_batch * config.model.sequence_length)
    total = total if tokens is None else _number(tokens)
    config, vocabulary = _with_vocabulary(config, recipe_path, vocab)
    notes = [vocabulary]
    if gpus is None:
        gpus = search.smallest(config, cluster)
        notes.append(
            f"--gpus is not given: {gpus}, the fewest on which the recipe's layout fits, or else one replica of it"
        )
    size = f"{show.in_short(parameters(config.model))} parameters"
    _say(f"{recipe_path}: {size} on {gpus:,} x {cluster.name}", *(f"note: {note}" for note in notes))
    own = _own(config, gpus, cluster, fixed)
    if own is not None:
        _show(own, total)
        if fp8:
            precision = config.precision.model_copy(
                update={"fp8": None if config.precision.fp8 else Fp8Config()}
            )
            other = search.plan(config.model_copy(update={"precision": precision}), gpus, cluster)
            _say("", show.with_and_without(own, other))
    found = None
    if not fixed:
        precisions = [config.precision.fp8]
        if fp8:
            precisions.append(None if config.precision.fp8 else Fp8Config())
        found = search.search(config, gpus, cluster, precisions)
        _suggest(found, own, config, top, cluster, total)
    if json is not None:
        described = {
            "recipe": str(recipe_path), "cluster": cluster.name, "gpus": gpus, "notes": notes,
            "parameters": parameters(config.model), "vocabulary": config.model.vocab_size,
            "own": own and show.tree(own, config, total),
            "fitting": found and len(found.plans),
            "suggestions": found and [show.tree(plan, config, total) for plan in found.best()[:top]],
        }  # fmt: skip
        durable.write_output(json, as_json(described, indent=1) + "\n")
    if plot is not None:
        _picture(own, found, str(recipe_path), plot)
    if not (found.plans if found is not None else own is not None and own.fits):
        raise SystemExit(1)


def _say(*lines: str) -> None:
    """Lines that a terminal may wrap, and a pipe gets whole: commands are copied from them."""
    console = Console(markup=False, emoji=False, highlight=False)
    for line in lines:
        console.print(visible(line, keep="\n"), soft_wrap=True)


def _own(config: RunConfig, gpus: int, cluster: ClusterConfig, fixed: bool) -> search.LayoutPlan | None:
    """The recipe's layout as it stands; None where it cannot be laid out on these GPUs, which is said."""
    try:
        deepspeed_json.data_parallel(config, gpus)
    except ConfigError as error:
        if fixed:
            raise
        _say("", f"the recipe's own layout is not possible here: {error}")
        return None
    return search.plan(config, gpus, cluster)


def _show(own: search.LayoutPlan, total: float) -> None:
    console = Console(markup=False, emoji=False, highlight=False)
    _say("", f"THE RECIPE'S LAYOUT: {show.layout_in_words(own)}", "")
    console.print(show.memory(own))
    _say(show.verdict(own))
    if not own.fits:
        for other in search.remedies(own):
            more = "" if other.layout.world == own.layout.world else f"{other.layout.world:,} GPUs"
            change = " ".join(search.overrides(other.config, own.config)) or more
            _say(
                f"  would fit with {change}: {other.left / search.GIB:.2f} GiB left, {other.time.seconds:.3g} s a step"
            )
    _say(show.host(own)[0], "")
    console.print(show.timing(own))
    _say(show.summary(own, total))


def _suggest(
    found: search.SearchResult,
    own: search.LayoutPlan | None,
    config: RunConfig,
    top: int,
    cluster: ClusterConfig,
    total: float,
) -> None:
    console = Console(markup=False, emoji=False, highlight=False)
    if best := found.best()[:top]:
        _say("", f"SUGGESTIONS: the fastest of each tensor x pipeline, of {len(found.plans):,} that fit", "")
        table = show.suggestions(best, own if own is not None and own.fits else None, total)
        # As wide as it is: a number that is cut off says nothing, and a pipe has 80 columns.
        wide = console.measure(table, options=console.options.update(max_width=WIDEST)).maximum
        Console(markup=False, emoji=False, highlight=False, width=max(console.width, wide)).print(table)
        if any(plan.tight for plan in best):
            _say(f"! {show.TIGHT}", "")
        _say("what to say after the recipe:", *show.commands(best, config))
        return
    if found.nearest is None:
        why = f"nothing that the model allows divides train.global_batch={config.train.global_batch}"
        _say("", f"NO LAYOUT IS POSSIBLE on {plural(found.gpus, 'GPU')}: {why}")
        if (other := search.other_batch(config, found.gpus, cluster)) is not None:
            batch = f"train.global_batch={other.config.train.global_batch}"
            _say(f"with another batch it fits: {' '.join([batch, *search.overrides(other.config, config)])}")
    else:
        nearest = f"{show.layout_in_words(found.nearest)}: it {show.verdict(found.nearest)}"
        _say("", f"NOTHING FITS on {plural(found.gpus, 'GPU')}. Nearest is {nearest}")
    if (other := search.elsewhere(config, found, cluster)) is not None:
        said = " ".join(search.overrides(other.config, config)) or "the recipe as it is"
        _say(f"on {plural(other.layout.world, 'GPU')} it fits: --gpus {other.layout.world}, {said}")


def _picture(
    own: search.LayoutPlan | None, found: search.SearchResult | None, title: str, path: Path
) -> None:
    if own is None and found is not None:
        own = next(iter(found.best()), found.nearest)
    if own is None:
        raise ConfigError(f"--plot {path}: there is no layout to show")
    show.picture(own, title, path)


def _number(text: str) -> float:
    """15T, 300B, 2e12."""
    match = re.fullmatch(r"([0-9]+\.?[0-9]*(?:[eE][0-9]+)?)\s*([KMBT]?)", text.strip(), re.IGNORECASE)
    number = float(match[1]) * UNITS[match[2].upper()] if match else 0.0
    if not 0 < number <= MOST:
        raise ConfigError(f"--tokens {text}: a number such as 15T, 300B or 2e12")
    return number


def _with_vocabulary(config: RunConfig, path: Path, given: int | None) -> tuple[RunConfig, str]:
    """The configuration with a size of the vocabulary, and where that comes from."""
    size, said = given or config.model.vocab_size, "as --vocab says" if given else "the recipe's"
    folders = [recipe.find(corpus.path) for corpus in config.data.corpora]
    if size is None and (there := [folder for folder in folders if (folder / "manifest.json").is_file()]):
        from megastable.data.manifest import Manifest

        size, said = Manifest.load(there[0]).tokenizer.vocab_size, f"of the corpus {there[0]}"
    if size is None:
        # The recipes that come along say in their first lines what they are meant for.
        words = re.search(r"vocabulary of ([\d,]+)", recipe.find(path).read_text(encoding="utf-8"))
        size = int(words[1].replace(",", "")) if words else ASSUMED
        said = (
            "as the recipe's comment says"
            if words
            else "assumed: there is no corpus yet; --vocab says another"
        )
    model = config.model.model_copy(update={"vocab_size": size})
    return config.model_copy(update={"model": model}), f"vocabulary {size:,}, {said}"


if __name__ == "__main__":
    app()
