"""What `megastable plan` answers: the recipe's layout, what would be faster, in words and as numbers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megastable.base.errors import ConfigError
from megastable.base.text import plural
from megastable.config import deepspeed_json, recipe
from megastable.config.training import Fp8Config
from megastable.config.tree import RunConfig
from megastable.model.flops import parameters
from megastable.report.text_output import TextOutput
from megastable_tools.plan import cluster as clusters
from megastable_tools.plan import search, show
from megastable_tools.plan.cluster import ClusterConfig

UNITS = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
ASSUMED = 128_000
MOST = 1e18  # tokens


@dataclass(frozen=True)
class Answer:
    """facts: all numbers, for programs. fits: whether something does, or the recipe's own layout if that was asked."""

    facts: dict[str, Any]
    fits: bool
    own: search.LayoutPlan | None
    found: search.SearchResult | None


def answer(
    recipe_path: Path,
    overrides: Sequence[str],
    cluster_path: Path,
    gpus: int | None,
    tokens: str | None,
    top: int,
    vocab: int | None,
    fixed: bool,
    fp8: bool,
    quiet: bool = False,
) -> Answer:
    """Print and return it. Raises ConfigError."""
    out = TextOutput(quiet)
    config = recipe.load(recipe_path, overrides)
    if fp8 and (kind := config.precision.kind) != "bf16":
        raise ConfigError(f"--fp8: Transformer Engine's FP8 is beside bf16, and precision.kind is {kind}")
    cluster = clusters.load(cluster_path)
    if cluster.tflops.fp8 is None and (fp8 or config.precision.fp8):
        key = "--fp8" if fp8 else "precision.fp8"
        raise ConfigError(
            f"{key}: a GPU of {cluster.name} ({cluster_path}) does not compute in it: leave it out"
        )
    if (price := config.supervise.gpu_hour_price) is not None:
        cluster = cluster.model_copy(update={"dollars_per_gpu_hour": price})
    total = float(config.tokens)
    total = total if tokens is None else _number(tokens)
    config, vocabulary = _with_vocabulary(config, recipe_path, vocab)
    notes = [vocabulary]
    if gpus is None:
        gpus = search.smallest(config, cluster)
        notes.append(
            f"--gpus is not given: {gpus}, the fewest on which the recipe's layout fits, or else one replica of it"
        )
    size = f"{show.in_short(parameters(config.model))} parameters"
    out.say(f"{recipe_path}: {size} on {gpus:,} x {cluster.name}", *(f"note: {note}" for note in notes))
    own = _own(config, gpus, cluster, fixed, out)
    if own is not None:
        _show(own, total, out)
        if fp8:
            precision = config.precision.model_copy(
                update={"fp8": None if config.precision.fp8 else Fp8Config()}
            )
            other = search.plan(config.model_copy(update={"precision": precision}), gpus, cluster)
            out.say("", show.with_and_without(own, other))
    found = None
    if not fixed:
        precisions = [config.precision.fp8]
        if fp8:
            precisions.append(None if config.precision.fp8 else Fp8Config())
        found = search.search(config, gpus, cluster, precisions)
        _suggest(found, own, config, top, cluster, total, out)
    facts = {
        "recipe": str(recipe_path), "cluster": cluster.name, "gpus": gpus, "notes": notes,
        "parameters": parameters(config.model), "vocabulary": config.model.vocab_size,
        "own": own and show.tree(own, config, total),
        "fitting": found and len(found.plans),
        "suggestions": found and [show.tree(plan, config, total) for plan in found.best()[:top]],
    }  # fmt: skip
    return Answer(facts, bool(found.plans) if found is not None else own is not None and own.fits, own, found)


def picture(answer: Answer, title: str, path: Path) -> None:
    """Of the recipe's own layout, else of the best. Raises ConfigError where there is none."""
    own = answer.own
    if own is None and answer.found is not None:
        own = next(iter(answer.found.best()), answer.found.nearest)
    if own is None:
        raise ConfigError(f"--plot {path}: there is no layout to show")
    show.picture(own, title, path)


def _own(
    config: RunConfig, gpus: int, cluster: ClusterConfig, fixed: bool, out: TextOutput
) -> search.LayoutPlan | None:
    """The recipe's layout as it stands; None where it cannot be laid out on these GPUs, which is said."""
    try:
        deepspeed_json.data_parallel(config, gpus)
    except ConfigError as error:
        if fixed:
            raise
        out.say("", f"the recipe's own layout is not possible here: {error}")
        return None
    return search.plan(config, gpus, cluster)


def _show(own: search.LayoutPlan, total: float, out: TextOutput) -> None:
    out.say("", f"THE RECIPE'S LAYOUT: {show.layout_in_words(own)}", "")
    out.show(show.memory(own))
    out.say(show.verdict(own))
    if not own.fits:
        for other in search.remedies(own):
            more = "" if other.layout.world == own.layout.world else f"{other.layout.world:,} GPUs"
            change = " ".join(search.overrides(other.config, own.config)) or more
            out.say(
                f"  would fit with {change}: {other.left / search.GIB:.2f} GiB left, {other.time.seconds:.3g} s a step"
            )
    out.say(show.host(own)[0], "")
    out.show(show.timing(own))
    out.say(show.summary(own, total))


def _suggest(
    found: search.SearchResult,
    own: search.LayoutPlan | None,
    config: RunConfig,
    top: int,
    cluster: ClusterConfig,
    total: float,
    out: TextOutput,
) -> None:
    if best := found.best()[:top]:
        out.say(
            "", f"SUGGESTIONS: the fastest of each tensor x pipeline, of {len(found.plans):,} that fit", ""
        )
        table = show.suggestions(best, own if own is not None and own.fits else None, total)
        out.show(table, whole=True)
        if any(plan.tight for plan in best):
            out.say(f"! {show.TIGHT}", "")
        out.say("what to say after the recipe:", *show.commands(best, config))
        return
    if found.nearest is None:
        why = f"nothing that the model allows divides train.global_batch={config.train.global_batch}"
        out.say("", f"NO LAYOUT IS POSSIBLE on {plural(found.gpus, 'GPU')}: {why}")
        if (other := search.other_batch(config, found.gpus, cluster)) is not None:
            batch = f"train.global_batch={other.config.train.global_batch}"
            out.say(
                f"with another batch it fits: {' '.join([batch, *search.overrides(other.config, config)])}"
            )
    else:
        nearest = f"{show.layout_in_words(found.nearest)}: it {show.verdict(found.nearest)}"
        out.say("", f"NOTHING FITS on {plural(found.gpus, 'GPU')}. Nearest is {nearest}")
    if (other := search.elsewhere(config, found, cluster)) is not None:
        said = " ".join(search.overrides(other.config, config)) or "the recipe as it is"
        out.say(f"on {plural(other.layout.world, 'GPU')} it fits: --gpus {other.layout.world}, {said}")


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
    if there := [folder for folder in folders if (folder / "manifest.json").is_file()]:
        from megastable.data.manifest import Manifest

        of_corpus = {folder: Manifest.load(folder).tokenizer.vocab_size for folder in there}
        largest = max(there, key=lambda folder: of_corpus[folder])
        if size is None:
            size, said = of_corpus[largest], f"of the corpus {largest}"
        elif size < of_corpus[largest]:
            raise ConfigError(
                f"a vocabulary of {size}, {said}, is smaller than the {of_corpus[largest]} of the corpus {largest}: "
                "leave it out"
            )
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
