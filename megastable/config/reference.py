"""Generates docs/configuration.md from the tree: every key's type, default, unit, meaning and Megatron-LM name."""

from __future__ import annotations

import ast
import inspect
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import pairwise

from megastable.config.keys import REQUIRED, Key, keys_of, sections
from megastable.config.other_names import read_names
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


def page() -> str:
    """The whole page."""
    (root, *parts) = sections()  # the root comes last: it has one key of its own besides the sections
    chapters = [(path.replace(".0", ".N"), path, section) for path, section in parts]
    contents = [f"{'  ' * _depth(title)}- [{title}](#{_anchor(title)})" for title, _, _ in chapters]
    contents += ["- [At the top](#at-the-top)", "- [Names of other trainers](#names-of-other-trainers)"]
    blocks = [INTRODUCTION, "\n".join(contents) + "\n"]
    blocks += [_chapter(title, path, section) for title, path, section in chapters]
    blocks += [_chapter("At the top", *root), _other_trainers()]
    return "\n".join(blocks)


def meanings(section: type[Section]) -> dict[str, str]:
    """The strings below a section's keys, read from its source: by pydantic it would cost time at every start."""
    (body,) = ast.parse(inspect.getsource(section)).body
    assert isinstance(body, ast.ClassDef)
    return {
        key.target.id: " ".join(str(below.value.value).split())
        for key, below in pairwise(body.body)
        if isinstance(key, ast.AnnAssign) and isinstance(key.target, ast.Name)
        and isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
    }  # fmt: skip


def values_of(path: str, section: type[Section]) -> list[Key]:
    """Keys of a section with a value of their own, not just a section that is always there."""
    return [
        key
        for key in keys_of(path, section)
        if key.section is None or key.field.annotation is not key.section
    ]


def _chapter(title: str, path: str, section: type[Section]) -> str:
    rows, said = [], meanings(section)
    for key in values_of(path, section):
        meaning = MEANING.fullmatch(said[key.name])
        assert meaning is not None  # anything matches
        rows.append(
            {
                "Key": f"`{key.name}`",
                "Type": key.expected,
                "Default": key.default if key.default == REQUIRED else f"`{key.default}`",
                "Unit": meaning["unit"] or "",
                "Meaning": meaning["meaning"],
                "Megatron-LM": "<br>".join(_megatron(key.path)),
            }
        )
    introduction = inspect.cleandoc(section.__doc__ or "") + "\n"
    return f"{'#' * (2 + _depth(title))} {title}\n\n{_linked(introduction)}\n{_table(rows)}"


def _megatron(path: str) -> Iterator[str]:
    for name, ours in read_names()["megatron"].items():
        key, _, note = ours.partition("; ")
        said = [f"`{key}`"] if "=" in key else []
        said += [note] if note else []
        if key.partition("=")[0] == path:
            yield f"`--{name.replace('_', '-')}`" + (f" ({'; '.join(said)})" if said else "")


def _other_trainers() -> str:
    tables = read_names()
    return f"""## Names of other trainers

Wherever such a name stands in a recipe or an override, the error says what it is here.

Arguments of Megatron-LM without a key:

{_table(_grouped(tables["megatron_without_key"], "--"))}
DeepSpeed, torchtitan, nanoGPT, Llama's `params.json`, Hugging Face's `config.json` and `TrainingArguments`:

{_table(_grouped(tables["others"] | tables["others_without_key"]))}"""


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
    lines = [heads, ["---"] * len(heads)] + [
        [_linked(row[head]).replace("|", "\\|") for head in heads] for row in rows
    ]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def _linked(text: str) -> str:
    text = re.sub(r"arXiv:(\d{4}\.\d{4,5})", r"[arXiv:\1](https://arxiv.org/abs/\1)", text)
    text = re.sub(r"(?<![\w/])docs/([\w-]+\.md)", r"[\1](\1)", text)
    text = re.sub(r"(?<![\w/])(megastable_guard/\w+\.py)", r"[\1](../guard/\1)", text)
    rooms = "attribution|hardware|warnings|recovery|checkpoint|model"
    return re.sub(rf"(?<![\w/])((?:{rooms})/\w+\.py)", r"[\1](../megastable/\1)", text)


def _depth(title: str) -> int:
    return title.removesuffix(".N").count(".")


def _anchor(title: str) -> str:
    return title.lower().replace(".", "").replace(" ", "-")
