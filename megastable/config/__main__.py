"""`python -m megastable.config`: print a recipe's resolved configuration and DeepSpeed JSON, or the key reference.

Generates docs/configuration.md from the tree: every key's type, default, unit, meaning and Megatron-LM name.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import re
import signal
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import yaml

from megastable.base.errors import ConfigError, MegastableError, user_errors
from megastable.base.text import count_noun
from megastable.config import deepspeed_json
from megastable.config.keys import REQUIRED, Key, keys_of, read_names, walk_sections
from megastable.config.lint import lint_recipe
from megastable.config.recipe import load_recipe
from megastable.config.tree import RunConfig
from megastable.data.corpora import describe_epochs, find_warnings, open_corpora
from megastable_guard.section import Section

COMMAND = "python -m megastable.config --reference > docs/configuration.md"
INTRODUCTION = f"""# Configuration

A recipe is a YAML file with the keys below; those that it leaves out have their defaults. `KEY=VALUE` on the command
line overrides it: `train.steps=2000`, `data.corpora='[{{path: data/mine}}]'`, `data.corpora.0.weight=2`,
`model.kv_heads=null`. `python -m megastable.config RECIPE [KEY=VALUE ...]` prints what comes of it. An unknown key is
an error, and so is a combination that cannot work. A whole number is at most 10^15; any other is 0, or from 1e-30 to
1e30 in size.

The last column has Megatron-LM's name, with how it differs where it does not mean the same. Names of
[other trainers](#names-of-other-trainers) are at the end.

This page is made from `megastable/config/`: `{COMMAND}`.
"""
MEANING = re.compile(r"(?P<meaning>.*?)(?: \[(?P<unit>[^\[\]]+)\])?")


def write_reference() -> str:
    """The whole page."""
    (root, *parts) = walk_sections()  # the root comes last: it has one key of its own besides the sections
    chapters = [(path.replace(".0", ".N"), path, section) for path, section in parts]
    contents = [f"{'  ' * _depth(title)}- [{title}](#{_anchor(title)})" for title, _, _ in chapters]
    contents += ["- [At the top](#at-the-top)", "- [Names of other trainers](#names-of-other-trainers)"]
    blocks = [INTRODUCTION, "\n".join(contents) + "\n"]
    blocks += [_chapter(title, path, section) for title, path, section in chapters]
    blocks += [_chapter("At the top", *root), _other_trainers()]
    return "\n".join(blocks)


def read_meanings(section: type[Section]) -> dict[str, str]:
    """The strings below a section's keys, read from its source: by pydantic it would cost time at every start."""
    (class_node,) = ast.parse(inspect.getsource(section)).body
    assert isinstance(class_node, ast.ClassDef)
    return {
        key_node.target.id: " ".join(str(meaning_node.value.value).split())
        for key_node, meaning_node in pairwise(class_node.body)
        if isinstance(key_node, ast.AnnAssign) and isinstance(key_node.target, ast.Name)
        and isinstance(meaning_node, ast.Expr) and isinstance(meaning_node.value, ast.Constant)
    }  # fmt: skip


def values_of(path: str, section: type[Section]) -> list[Key]:
    """Keys of a section with a value of their own, not just a section that is always there."""
    return [key for key in keys_of(path, section) if key.field.annotation is not key.section]


def _chapter(title: str, path: str, section: type[Section]) -> str:
    table_rows, meaning_by_key = [], read_meanings(section)
    for value_key in values_of(path, section):
        meaning_and_unit = MEANING.fullmatch(meaning_by_key[value_key.name])
        assert meaning_and_unit is not None  # anything matches
        table_rows.append(
            {
                "Key": f"`{value_key.name}`",
                "Type": value_key.expected,
                "Default": value_key.default if value_key.default == REQUIRED else f"`{value_key.default}`",
                "Unit": meaning_and_unit["unit"] or "",
                "Meaning": meaning_and_unit["meaning"],
                "Megatron-LM": "<br>".join(_megatron(value_key.path)),
            }
        )
    section_introduction = inspect.cleandoc(section.__doc__ or "") + "\n"
    return f"{'#' * (2 + _depth(title))} {title}\n\n{_linked(section_introduction)}\n{_table(table_rows)}"


def _megatron(path: str) -> Iterator[str]:
    for megatron_name, ours in read_names()["megatron"].items():
        own_key, _, note = ours.partition("; ")
        remark_parts = [f"`{own_key}`"] if "=" in own_key else []
        remark_parts += [note] if note else []
        if own_key.partition("=")[0] == path:
            remark = f" ({'; '.join(remark_parts)})" if remark_parts else ""
            yield f"`--{megatron_name.replace('_', '-')}`{remark}"


def _other_trainers() -> str:
    name_tables = read_names()
    return f"""## Names of other trainers

Wherever such a name stands in a recipe or an override, the error says what it is here.

Arguments of Megatron-LM without a key:

{_table(_grouped(name_tables["megatron_without_key"], "--"))}
DeepSpeed, torchtitan, nanoGPT, Llama's `params.json`, Hugging Face's `config.json` and `TrainingArguments`:

{_table(_grouped(name_tables["others"] | name_tables["others_without_key"]))}"""


def _grouped(names: Mapping[str, str], dashes: str = "") -> list[dict[str, str]]:
    """Names with the same meaning, in one row."""
    alike = defaultdict[str, list[str]](list)
    for name, here in names.items():
        alike[here].append(f"`{dashes}{name.replace('_', '-') if dashes else name}`")
    return [
        {"There": ", ".join(theirs), "Here": re.sub(r"^([\w.]+\.[\w.=]+|deepspeed)(?=;|$)", r"`\1`", here)}
        for here, theirs in alike.items()
    ]


def _table(rows: list[dict[str, str]]) -> str:
    """A Markdown table, without empty columns."""
    heads = [head for head in rows[0] if any(row[head] for row in rows)]
    lines = [heads, ["---"] * len(heads)]
    lines += [[_linked(row[head]).replace("|", "\\|") for head in heads] for row in rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def _linked(text: str) -> str:
    text = re.sub(r"arXiv:(\d{4}\.\d{4,5})", r"[arXiv:\1](https://arxiv.org/abs/\1)", text)
    text = re.sub(r"(?<![\w/])docs/([\w-]+\.md)(#[\w-]+)?", r"[\1](\1\2)", text)
    text = re.sub(r"(?<![\w/])(megastable_guard/\w+\.py)", r"[\1](../guard/\1)", text)
    room_names = "attribution|hardware|warnings|recovery|checkpoint|model"
    return re.sub(rf"(?<![\w/])((?:{room_names})/\w+\.py)", r"[\1](../megastable/\1)", text)


def _depth(title: str) -> int:
    return title.removesuffix(".N").count(".")


def _anchor(title: str) -> str:
    return title.lower().replace(".", "").replace(" ", "-")


EXAMPLES = f"""python -m megastable.config launch/recipes/7b.yaml parallel.tensor=8 --world 64 --no-data
  python -m megastable.config launch/recipes/quickstart.yaml --json
  {COMMAND}"""


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
    samples = config.batches.reach_after(0, config.train.steps)
    warnings = find_warnings(corpora, samples, bool(config.train.eval_samples))
    return describe_epochs(corpora.train, samples), warnings


class _Reference(argparse.Action):
    """Prints the reference and ends, as --help does: no recipe is needed."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        print(write_reference(), end="")
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
    parser.add_argument(
        "--world", type=int, help="number of ranks (default: the fewest that it can be laid out on)"
    )
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
        recipe_config = load_recipe(args.recipe, args.overrides)
        world = recipe_config.parallel.least_ranks if args.world is None else args.world
        ds = deepspeed_json.build_deepspeed_json(recipe_config, world)
        epochs, odd = ("", []) if args.no_data else _check_corpora(recipe_config)
        warnings = [*recipe_config.supervise.exposed, *lint_recipe(recipe_config), *odd]
        tree = recipe_config.model_dump(mode="json")
        if args.json:
            print(json.dumps({"config": tree, "deepspeed": ds, "warnings": warnings}, indent=2))
        else:
            print(f"# {args.recipe}, resolved\n{yaml.safe_dump(tree, sort_keys=False)}")
            print(f"# DeepSpeed, {count_noun(world, 'rank')}\n{json.dumps(ds, indent=2)}", flush=True)
        if epochs:
            print(epochs, file=sys.stderr)
        for warning_text in warnings:  # behind the long page, where a terminal shows them
            print(f"WARNING: {warning_text}", file=sys.stderr)
        found = f"valid on {count_noun(world, 'rank')}, {count_noun(len(warnings), 'warning')}"
        print(f"{args.recipe}: {found}", file=sys.stderr)


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # the page is long: `| head` must not end in a traceback
    main()
