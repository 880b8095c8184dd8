"""Commands of `megastable convert`: what they do and print."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

from megastable.base.errors import FAILED, ConfigError
from megastable.base.progress_bar import bar
from megastable.base.text import plural, size, visible
from megastable.convert.huggingface.export import DTYPES, Dtype, to_hf
from megastable.convert.huggingface.gguf import to_gguf
from megastable.convert.huggingface.importing import from_hf
from megastable.convert.huggingface.parity import ParityReport, compare, sheet
from megastable.convert.huggingface.weight_files import read_size
from megastable.convert.tool.verifying import good
from megastable.report.sheet.output import Output
from megastable.run.directory import as_json as to_json


def export(
    checkpoint: Path,
    out: Path,
    dtype: str,
    shard_size: str,
    tokenizer: Path | None,
    no_tokenizer: bool,
    inexact_tokenizer: bool,
    check: bool,
    as_json: bool,
) -> None:
    if dtype not in DTYPES:
        raise ConfigError(f"--dtype {dtype}: choose among {', '.join(DTYPES)}")
    limit = read_size(shard_size)
    with _watching("writing", as_json) as watch:
        made = to_hf(
            checkpoint, out, dtype=cast(Dtype, dtype), shard_size=limit, tokenizer=tokenizer,
            without_tokenizer=no_tokenizer, inexact_tokenizer=inexact_tokenizer,
            check=(lambda a, b: compare(a, b, _say(as_json))) if check else None, watch=watch,
        )  # fmt: skip
    if made.checked is not None:
        made.checked.folder = out
    told = {
        "out": str(out), "checkpoint": str(made.checkpoint), "step": made.step, "manifest": made.manifest,
        "dtype": dtype, "tensors": made.tensors, "files": made.files, "bytes": made.bytes,
        "tokenizer": made.tokenizer, "notes": made.notes,
    }  # fmt: skip
    line = (
        f"exported {out}: step {made.step} of {made.checkpoint}, {plural(made.tensors, 'tensor')} in {dtype}, "
        f"{size(made.bytes)} in {plural(made.files, 'file')}"
    )
    _end(told, line, made.notes, made.checked, as_json)


def make_run(
    folder: Path,
    out: Path,
    recipe: Path,
    overrides: Sequence[str],
    accept: Sequence[str],
    any_tokenizer: bool,
    check: bool,
    as_json: bool,
) -> None:
    with _watching("writing", as_json) as watch:
        made = from_hf(
            folder, out, recipe, overrides, accept=accept, any_tokenizer=any_tokenizer, watch=watch
        )
    try:
        found = compare(made.checkpoint, made.folder, _say(as_json), accept=accept) if check else None
    except BaseException:
        shutil.rmtree(out)
        raise
    told = {
        "out": str(out), "folder": str(made.folder), "checkpoint": str(made.checkpoint), "parameters": made.numel,
        "notes": made.notes,
    }  # fmt: skip
    line = (
        f"made {out}: {made.numel:,} parameters of {made.folder}, at step 0 without optimizer state; train with:\n"
        f"deepspeed --module megastable.train {shlex.quote(f'{out}/recipe.yaml')} {shlex.quote(f'run.dir={out}')}"
    )
    if found is not None and found.failed:
        # Nobody should train on wrong weights.
        shutil.rmtree(out)
        line = f"{out} was removed again (--no-check keeps it for inspection)"
    _end(told, line, made.notes, found, as_json)


def gguf(folder: Path, out: Path, as_json: bool) -> None:
    with _watching("writing", as_json) as watch:
        made = to_gguf(folder, out, watch)
    if as_json:
        print(to_json(asdict(made) | {"out": str(made.out)}))
        return
    line = f"made {out}: {plural(made.tensors, 'tensor')} in {made.dtype}, {size(made.bytes)}, as {made.architecture}"
    print(visible(line))
    for note in made.notes:
        print(f"note: {visible(note)}")


def check(checkpoint: Path, folder: Path, accept: Sequence[str], as_json: bool) -> None:
    found = compare(good(checkpoint, as_json), folder, _say(as_json), accept)
    _end({}, "", [], found, as_json, asked=True)


def _end(
    told: dict[str, Any],
    line: str,
    notes: Sequence[str],
    found: ParityReport | None,
    as_json: bool,
    asked: bool = False,
) -> None:
    """Print the result, and exit with 1 if the logits differ (or could not be compared although `asked` for)."""
    if as_json:
        told |= {"check": _plain(found) if found is not None else None}
        print(to_json(told))
    else:
        if line:
            print(visible(line, keep="\n"))
        for note in notes:
            print(f"note: {visible(note)}")
        if found is not None and not found.why:
            Output().put(sheet(found))
        elif found is None:
            print("NOT CHECKED, as you asked: no logits were compared")
    sys.stdout.flush()
    if found is not None and found.why:
        print(f"WARNING: {visible(found.verdict)}", file=sys.stderr, flush=True)
    if found is not None and (found.failed or (asked and found.why)):
        raise SystemExit(FAILED)


def _plain(found: ParityReport) -> dict[str, Any]:
    held = json.loads(to_json(asdict(found)))
    return {**held, "same": not found.failed and not found.why, "verdict": found.verdict}


def _say(silent: bool) -> Callable[[str], None]:
    return lambda text: None if silent else print(f"comparing: {text} ...", file=sys.stderr, flush=True)


@contextmanager
def _watching(what: str, silent: bool) -> Iterator[Callable[[int, int], None]]:
    """A function to call with (bytes done, total); shows a bar from the first call to the last byte."""
    with ExitStack() as stack:
        tick: Callable[[int], None] | None = None
        last = 0

        def watch(done: int, total: int) -> None:
            nonlocal tick, last
            tick = tick or stack.enter_context(bar(what, total, silent))
            tick(done - last)
            last = done
            if done >= total:
                stack.close()

        yield watch
