"""`python -m megastable.config`: print a recipe's resolved configuration and DeepSpeed JSON, or the key reference."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Sequence
from typing import Any

import yaml

from megastable.base.errors import ConfigError, MegastableError, user_errors
from megastable.base.text import plural
from megastable.config import deepspeed_json, reference
from megastable.config.lint import lint
from megastable.config.recipe import load
from megastable.config.tree import RunConfig
from megastable.data.corpora import open_corpora
from megastable.data.coverage import describe_epochs, find_warnings

EXAMPLES = f"""python -m megastable.config launch/recipes/7b.yaml parallel.tensor=8 --world 64 --no-data
  python -m megastable.config launch/recipes/quickstart.yaml --json
  {reference.COMMAND}"""


def _check_corpora(config: RunConfig) -> tuple[str, list[str]]:
    """The epochs of the run, and warnings. Raises ConfigError if the corpora cannot be used on this host."""
    try:
        data, length = config.data, config.model.sequence_length
        corpora = open_corpora(data.corpora, length, config.run.seed, validation=data.validation)
    except MegastableError as error:
        raise ConfigError(f"{error}. To look at a recipe on a host without its data: --no-data") from None
    given = config.model.vocab_size
    if given is not None and given < corpora.vocab_size:
        raise ConfigError(
            f"model.vocab_size={given} is smaller than the tokenizer's {corpora.vocab_size}: leave it out"
        )
    samples = config.batches.reach(0, config.train.steps)
    return (
        describe_epochs(corpora.train, samples),
        find_warnings(corpora, samples, bool(config.train.eval_samples)),
    )


class _Reference(argparse.Action):
    """Prints the reference and ends, as --help does: no recipe is needed."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        print(reference.page(), end="")
        parser.exit()


def main(arguments: Sequence[str] | None = None) -> None:
    """`python -m megastable.config`: print the resolved tree and the DeepSpeed JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m megastable.config",
        description="Print the resolved configuration of a recipe and the DeepSpeed JSON that follows from it.",
        epilog=f"examples:\n  {EXAMPLES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*", help="dotted overrides, e.g. model.layers=12")
    parser.add_argument("--world", type=int, help="number of ranks (default: one data-parallel replica)")
    parser.add_argument(
        "--no-data", action="store_true", help="do not open the corpora, which lie on another host"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of YAML and JSON")
    parser.add_argument(
        "--reference",
        action=_Reference,
        nargs=0,
        help="print docs/configuration.md, every key there is, and end",
    )
    args = parser.parse_intermixed_args(arguments)
    with user_errors():
        config = load(args.recipe, args.overrides)
        replica = config.parallel.tensor * config.parallel.pipeline * config.parallel.context
        world = replica if args.world is None else args.world
        ds = deepspeed_json.build(config, world)
        epochs, odd = ("", []) if args.no_data else _check_corpora(config)
        warnings = [*config.supervise.exposed, *lint(config), *odd]
        tree = config.model_dump(mode="json")
        if args.json:
            print(json.dumps({"config": tree, "deepspeed": ds, "warnings": warnings}, indent=2))
        else:
            print(f"# {args.recipe}, resolved\n{yaml.safe_dump(tree, sort_keys=False)}")
            print(f"# DeepSpeed, {plural(world, 'rank')}\n{json.dumps(ds, indent=2)}", flush=True)
        if epochs:
            print(epochs, file=sys.stderr)
        for text in warnings:  # behind the long page, where a terminal shows them
            print(f"WARNING: {text}", file=sys.stderr)
        print(
            f"{args.recipe}: valid on {plural(world, 'rank')}, {plural(len(warnings), 'warning')}",
            file=sys.stderr,
        )


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # the page is long: `| head` must not end in a traceback
    main()
