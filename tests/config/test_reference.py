"""docs/configuration.md is what the tree says, and has every key."""

from __future__ import annotations

import re

import pytest

from megastable.base.installation import ROOT
from megastable.config import __main__
from megastable.config.keys import sections
from megastable.config.reference import COMMAND, page, values_of

WRITTEN = ROOT / "docs/configuration.md"


def test_the_page_is_current() -> None:
    assert WRITTEN.read_text(encoding="utf-8") == page(), (
        f"docs/configuration.md is old, write it anew: {COMMAND}"
    )


def test_the_command_prints_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        __main__.main(["--reference"])
    assert end.value.code == 0 and capsys.readouterr().out == page()


def chapters() -> dict[str, str]:
    parts = re.split(r"^#{2,} (.+)\n", page(), flags=re.M)[1:]
    return dict(zip(parts[::2], parts[1::2]))


def test_every_key_has_a_row_in_its_chapter() -> None:
    found = chapters()
    for path, section in sections():
        chapter = found[path.replace(".0", ".N") or "At the top"]
        rows = re.findall(r"^\| `(\w+)` \| ", chapter, re.M)
        assert rows == [key.name for key in values_of(path, section)]
        assert all(
            row.count(" | ") == chapter.count(" --- ") - 1 for row in chapter.splitlines() if row[:2] == "| "
        )


@pytest.mark.quick("data*", "parallel*")
@pytest.mark.parametrize(
    ("chapter", "row"),
    [
        ("model", "| `layers` | whole number above 0 | `12` |  | Transformer blocks. | `--num-layers`<br>"),
        (
            "run",
            "| `timeout` | whole number from 1 to 1e+09 | `1800` | seconds | When a collective counts as hung. | `--",
        ),
        ("run", "`--distributed-timeout-minutes` (in seconds: multiply by 60) |"),
        ("precision", "`--bf16` (`precision.kind=bf16`)"),
        ("parallel", "([arXiv:2205.05198](https://arxiv.org/abs/2205.05198))"),
        ("data.corpora.N", "| `path` | path | required | The folder. |"),
        ("data", "Ranges [first, end) of the sample order that are never trained on, `end` not included. |"),
        ("parallel", "`pipeline` is at most `model.layers`"),
        ("Names of other trainers", "| `--swiglu`, "),
        ("Names of other trainers", "| `n_layer`, `n_layers`, `num_hidden_layers` | `model.layers` |"),
    ],
)
def test_what_stands_there(chapter: str, row: str) -> None:
    assert row in chapters()[chapter]


def test_the_contents_lead_to_every_chapter() -> None:
    contents = re.findall(r"^ *- \[(.+)\]\(#(.+)\)$", page(), re.M)
    assert [title for title, _ in contents] == list(chapters())
    for title, anchor in contents:  # as GitHub makes them
        assert anchor == re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")
