"""`megastable convert`: convert checkpoints to and from Hugging Face folders, and to GGUF."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from megastable.base.errors import FAILED, ConfigError
from megastable.commands.app import App
from megastable.commands.options import Json, Overrides

if TYPE_CHECKING:
    from megastable_tools.convert.huggingface.parity import ParityReport

app = App("Convert checkpoints to and from Hugging Face and llama.cpp, and compare the logits.")
Checkpoint = Annotated[
    Path, typer.Argument(help="A checkpoint (RUN/checkpoints/step-N), or a run for its newest")
]
Folder = Annotated[Path, typer.Argument(help="A folder with config.json and .safetensors files")]
Out = Annotated[Path, typer.Argument(help="Must not exist; appears complete or not at all")]
NoCheck = Annotated[bool, typer.Option("--no-check", help="Do not compare logits afterwards")]
DropBias = Annotated[
    bool,
    typer.Option(
        "--drop-expert-bias",
        help="Leave out the bias with which experts are chosen, if the architecture has none",
    ),
]
Accept = Annotated[list[str] | None, typer.Option(help="Ignore this key of config.json; repeatable")]


@app.add_command(
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
    drop_expert_bias: DropBias = False,
    no_check: NoCheck = False, as_json: Json = False,
) -> None:  # fmt: skip
    """Write OUT: weights, config.json, tokenizer and a README, and compare its logits with the checkpoint's."""
    from megastable.base.text import count_noun, show_size
    from megastable_tools.convert.huggingface import export
    from megastable_tools.convert.huggingface.folder import read_size
    from megastable_tools.convert.huggingface.parity import compare_logits

    if dtype not in export.DTYPES:
        raise ConfigError(f"--dtype {dtype}: choose among {', '.join(export.DTYPES)}")
    with _watching(as_json) as watch_bytes:
        made = export.to_hf(
            checkpoint, out, dtype=cast(Any, dtype), shard_size=read_size(shard_size), tokenizer=tokenizer,
            without_tokenizer=no_tokenizer, inexact_tokenizer=inexact_tokenizer, drop_expert_bias=drop_expert_bias,
            check=None if no_check else lambda a, b: compare_logits(
                a, b, _say(as_json), drop_expert_bias=drop_expert_bias
            ),
            watch=watch_bytes,
        )  # fmt: skip
    if made.checked is not None:
        made.checked.folder = out
    result_facts = {
        "out": str(out), "checkpoint": str(made.checkpoint), "step": made.step, "manifest": made.manifest,
        "dtype": dtype, "tensors": made.tensors, "files": made.files, "bytes": made.bytes,
        "tokenizer": made.tokenizer, "notes": made.notes,
    }  # fmt: skip
    result_line = (
        f"exported {out}: step {made.step} of {made.checkpoint}, {count_noun(made.tensors, 'tensor')} in {dtype}, "
        f"{show_size(made.bytes)} in {count_noun(made.files, 'file')}"
    )
    _end(result_facts, result_line, made.checked, as_json)


@app.add_command("to-gguf", examples="megastable convert to-gguf exported exported.gguf")
def to_gguf(folder: Folder, out: Out, as_json: Json = False) -> None:
    """Write OUT, a file for llama.cpp, from a folder that to-hf made: the same weights, and the tokenizer's own ids."""
    from dataclasses import asdict

    from megastable.base.text import count_noun, show_size
    from megastable_tools.convert.huggingface import gguf

    with _watching(as_json) as watch_bytes:
        made = gguf.to_gguf(folder, out, watch_bytes)
    tensors_text = f"{count_noun(made.tensors, 'tensor')} in {made.dtype}"
    result_line = f"made {out}: {tensors_text}, {show_size(made.bytes)}, as {made.architecture}"
    _tell(asdict(made) | {"out": str(made.out)}, result_line, as_json)


@app.add_command(
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
    import shlex
    import shutil

    from megastable_tools.convert.huggingface import importing
    from megastable_tools.convert.huggingface.parity import compare_logits

    with _watching(as_json) as watch_bytes:
        made = importing.from_hf(
            folder,
            out,
            recipe,
            overrides or [],
            accept=accept or [],
            any_tokenizer=any_tokenizer,
            watch=watch_bytes,
        )
    try:
        parity_report = (
            None
            if no_check
            else compare_logits(made.checkpoint, made.folder, _say(as_json), accept=accept or [])
        )
    except BaseException:
        shutil.rmtree(out)
        raise
    result_facts = {
        "out": str(out), "folder": str(made.folder), "checkpoint": str(made.checkpoint), "parameters": made.numel,
        "notes": made.notes,
    }  # fmt: skip
    result_line = (
        f"made {out}: {made.numel:,} parameters of {made.folder}, at step 0 without optimizer state; train with:\n"
        f"deepspeed --module megastable.train {shlex.quote(f'{out}/recipe.yaml')} {shlex.quote(f'run.dir={out}')}"
    )
    if parity_report is not None and parity_report.failed:
        # Nobody should train on wrong weights.
        shutil.rmtree(out)
        result_line = f"{out} was removed again (--no-check keeps it for inspection)"
    _end(result_facts, result_line, parity_report, as_json)


@app.add_command(
    "check",
    examples="megastable convert check runs/quickstart exported",
    more="Exit codes: 0 the same, 1 they differ or could not be compared, 2 bad input or a damaged checkpoint.",
)
def check_folder(
    checkpoint: Checkpoint, folder: Folder, accept: Accept = None, drop_expert_bias: DropBias = False,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Compare logits on random tokens and on text, and all tensors. Exit code 1 unless they are the same."""
    from megastable_tools.convert.huggingface.parity import compare_logits
    from megastable_tools.convert.inspecting import find_good_checkpoint

    parity_report = compare_logits(
        find_good_checkpoint(checkpoint, as_json), folder, _say(as_json), accept or [], drop_expert_bias
    )
    _end({}, "", parity_report, as_json, asked=True)


def _tell(facts: dict[str, Any], line: str, as_json: bool) -> None:
    """Print the result: facts as JSON, or the line and the notes."""
    from megastable.base.text import make_visible
    from megastable.run.directory import as_json as to_json

    if as_json:
        print(to_json(facts))
        return
    if line:
        print(make_visible(line, keep="\n"))
    for user_note in facts.get("notes", ()):
        print(f"note: {make_visible(user_note)}")


def _end(
    facts: dict[str, Any], line: str, found: ParityReport | None, as_json: bool, asked: bool = False
) -> None:
    """Print the result and what was compared, and exit with 1 if the logits differ (or could not be compared although
    `asked` for)."""
    from megastable.base.text import make_visible
    from megastable.report.sheet.output import Output
    from megastable_tools.convert.huggingface.parity import make_parity_sheet

    _tell(facts | ({"check": found and found.facts} if as_json else {}), line, as_json)
    if not as_json and found is None:
        print("NOT CHECKED, as you asked: no logits were compared")
    elif not as_json and found is not None and not found.why:
        Output().put_sheet(make_parity_sheet(found))
    sys.stdout.flush()
    if found is not None and found.why:
        print(f"WARNING: {make_visible(found.verdict)}", file=sys.stderr, flush=True)
    if found is not None and (found.failed or (asked and found.why)):
        raise typer.Exit(FAILED)


def _say(silent: bool) -> Callable[[str], None]:
    return lambda text: None if silent else print(f"comparing: {text} ...", file=sys.stderr, flush=True)


@contextmanager
def _watching(silent: bool) -> Iterator[Callable[[int, int], None]]:
    """A function to call with (bytes done, total); shows a bar from the first call to the last byte."""
    from megastable.base.progress_bar import show_bar

    with ExitStack() as stack:
        tick: Callable[[int], None] | None = None
        last = 0

        def watch(done: int, total: int) -> None:
            nonlocal tick, last
            tick = tick or stack.enter_context(show_bar("writing", total, silent))
            tick(done - last)
            last = done
            if done >= total:
                stack.close()

        yield watch
