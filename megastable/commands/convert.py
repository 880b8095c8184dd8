"""`megastable convert`: convert checkpoints to and from Hugging Face folders, and to GGUF."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megastable.commands.app import App
from megastable.commands.options import Json, Overrides

app = App("Convert checkpoints to and from Hugging Face and llama.cpp, and compare the logits.")
Checkpoint = Annotated[
    Path, typer.Argument(help="A checkpoint (RUN/checkpoints/step-N), or a run for its newest")
]
Folder = Annotated[Path, typer.Argument(help="A folder with config.json and .safetensors files")]
Out = Annotated[Path, typer.Argument(help="Must not exist; appears complete or not at all")]
NoCheck = Annotated[bool, typer.Option("--no-check", help="Do not compare logits afterwards")]
Accept = Annotated[list[str] | None, typer.Option(help="Ignore this key of config.json; repeatable")]


@app.add(
    "to-hf",
    examples="""
    megastable convert to-hf runs/quickstart exported
    megastable convert to-hf runs/7b/checkpoints/step-90000 exported --dtype fp32 --shard-size 10GB
    """,
)
def to_hf(
    checkpoint: Checkpoint, out: Out,
    dtype: Annotated[str, typer.Option(help="bf16 or fp32")] = "bf16",
    shard_size: Annotated[str, typer.Option(help="Largest size of a file")] = "5GB",
    tokenizer: Annotated[Path | None, typer.Option(help="File or folder. Default: that of the corpora")] = None,
    no_tokenizer: Annotated[bool, typer.Option("--no-tokenizer", help="Export without a tokenizer")] = False,
    inexact_tokenizer: Annotated[bool, typer.Option("--inexact-tokenizer", help="Accept some other ids")] = False,
    no_check: NoCheck = False, as_json: Json = False,
) -> None:  # fmt: skip
    """Write OUT: weights, config.json, tokenizer and a README, and compare its logits with the checkpoint's."""
    from megastable.convert.huggingface import command

    command.export(
        checkpoint, out, dtype, shard_size, tokenizer, no_tokenizer, inexact_tokenizer, not no_check, as_json
    )


@app.add("to-gguf", examples="megastable convert to-gguf exported exported.gguf")
def to_gguf(folder: Folder, out: Out, as_json: Json = False) -> None:
    """Write OUT, a file for llama.cpp, from a folder that to-hf made: the same weights, and the tokenizer's own ids."""
    from megastable.convert.huggingface import command

    command.gguf(folder, out, as_json)


@app.add(
    "from-hf",
    examples="megastable convert from-hf exported runs/more --recipe launch/recipes/quickstart.yaml train.steps=100",
)
def from_hf(
    folder: Folder, out: Out,
    overrides: Overrides = None,
    recipe: Annotated[Path, typer.Option(help="For data, optimizer, schedule and layout; its model is replaced")] = ...,  # type: ignore[assignment]
    accept: Accept = None,
    any_tokenizer: Annotated[
        bool, typer.Option("--any-tokenizer", help="Do not compare the corpora's tokenizer with the folder's")
    ] = False,
    no_check: NoCheck = False, as_json: Json = False,
) -> None:  # fmt: skip
    """Make OUT, a run directory whose training begins with the folder's weights, and compare logits."""
    from megastable.convert.huggingface import command

    command.make_run(folder, out, recipe, overrides or [], accept or [], any_tokenizer, not no_check, as_json)


@app.add(
    examples="megastable convert check runs/quickstart exported",
    more="Exit codes: 0 the same, 1 they differ or could not be compared, 2 bad input or a damaged checkpoint.",
)
def check(checkpoint: Checkpoint, folder: Folder, accept: Accept = None, as_json: Json = False) -> None:
    """Compare logits on random tokens and on text, and all tensors. Exit code 1 unless they are the same."""
    from megastable.convert.huggingface import command

    command.check(checkpoint, folder, accept or [], as_json)
