"""Text into corpora to train on: a tokenizer, Megatron shards, a manifest with counts and hashes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from megastable.base.errors import DataError, user_errors
from megastable.data.adopt import adopt_directory
from megastable.data.command_summary import Summary
from megastable.data.left_out import told
from megastable.data.prepare import SHARD_TOKENS, prepare_shards
from megastable.data.stdlib import prepare_stdlib
from megastable.data.text_files import TextFiles
from megastable.data.token_files import IdType
from megastable.data.train_tokenizer import ModelType, train_sentencepiece
from megastable.data.verify import verify_corpus

EXAMPLES = """Examples:

PREPARE stdlib --output data/stdlib

PREPARE tokenizer --input texts/ --output my.model --vocab-size 32000

PREPARE shards --input texts/ --input more.jsonl.zst --output data/mine --tokenizer my.model

PREPARE shards --input fineweb/ --glob '*.parquet' --glob 'extra/**/*.csv' --output data/web --tokenizer my.model

PREPARE shards --input reviews.tsv.xz --input saved_dataset/ --key review --output data/reviews --tokenizer my.model

PREPARE manifest megatron_shards/ --tokenizer tokenizer.json --validation 0.01

PREPARE manifest fineweb10B/ --output data/fineweb10B --tokenizer gpt2/tokenizer.json

PREPARE manifest nanogpt/data/ --raw uint16 --output data/nano --tokenizer gpt2/tokenizer.json

PREPARE plant data/stdlib data/stdlib-planted --recipe launch/recipes/quickstart.yaml

PREPARE plant data/stdlib data/logs --recipe launch/recipes/quickstart.yaml --text app.log --samples 480 --step 75

PREPARE plant data/stdlib data/trickle --recipe launch/recipes/quickstart.yaml --text app.log --samples 20 --of-each 1

PREPARE verify data/mine""".replace("PREPARE", "python tools/prepare_data.py")


def examples(command: str) -> str:
    """Those of one command."""
    return "\n\n".join(line for line in EXAMPLES.split("\n\n") if f"prepare_data.py {command} " in line)


app = typer.Typer(help=__doc__, epilog=EXAMPLES, add_completion=False, pretty_exceptions_enable=False)
Inputs = Annotated[
    list[Path], typer.Option("--input", help="File or folder: text, JSON lines, table, tar; repeatable")
]
Output = Annotated[Path, typer.Option(help="What to make; it appears whole or not at all")]
Vocabulary = Annotated[int, typer.Option("--vocab-size", min=1, help="Tokens")]
Tokenizer = Annotated[Path, typer.Option("--tokenizer", help="A .model, a tokenizer.json, or their folder")]
Eod = Annotated[str | None, typer.Option(help="End-of-document token, name or id; else the usual one")]
Bos = Annotated[
    bool, typer.Option("--bos", help="Begin every document with the tokenizer's own token, as Llama 3")
]
Name = Annotated[str | None, typer.Option(help="Name of the corpus; else that of its folder")]
Share = Annotated[float, typer.Option(help="Share to hold back for validation")]
Key = Annotated[
    str, typer.Option(help="JSON key, column (Parquet, Arrow, CSV) or WebDataset ending of the text")
]
Globs = Annotated[
    list[str] | None,
    typer.Option("--glob", help="Which files of a folder: '*.csv', 'train/**/*.csv'; repeatable"),
]
SkipBad = Annotated[
    bool, typer.Option("--skip-bad", help="Leave out broken documents and unknown archives, and count them")
]
Workers = Annotated[int, typer.Option(min=1, help="Processes", show_default="one per CPU")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what is there")]
Json = Annotated[bool, typer.Option("--json", help="Print a summary for machines")]
CPUS = len(os.sched_getaffinity(0))


@app.command("tokenizer", epilog=examples("tokenizer"))
@user_errors()
def train(inputs: Inputs, output: Output, vocab_size: Vocabulary, model: ModelType = "bpe",
          key: Key = "text", glob: Globs = None, skip_bad: SkipBad = False, overwrite: Overwrite = False,
          as_json: Json = False) -> None:  # fmt: skip
    """Train a SentencePiece tokenizer with byte fallback: every text survives encoding and decoding."""
    if output.exists() and not overwrite:
        raise DataError(f"{output} exists already: choose another --output, or replace it with --overwrite")
    corpus = TextFiles(inputs, key, skip_bad, glob or ())
    info = train_sentencepiece(corpus, output, vocab_size, model).info
    left_out = corpus.left_out
    if as_json:
        print(json.dumps(info.model_dump() | {"left_out": left_out.counts, "left_out_files": left_out.files}))
        return
    lines = [f"  left out: {text}" for text in told(left_out.counts, left_out.files)]
    print("\n".join([f"trained {output}: {vocab_size} tokens, {model}", *lines]))


@app.command(epilog=examples("shards"))
@user_errors()
def shards(inputs: Inputs, output: Output, tokenizer: Tokenizer, name: Name = None, validation: Share = 0.01,
           workers: Workers = CPUS, shard_tokens: int = SHARD_TOKENS, key: Key = "text", glob: Globs = None,
           eod: Eod = None, bos: Bos = False, seed: int = 0, skip_bad: SkipBad = False,
           overwrite: Overwrite = False, as_json: Json = False) -> None:  # fmt: skip
    """Encode text into a corpus of Megatron .bin/.idx shards."""
    show(as_json, prepare_shards(inputs, output, tokenizer, name=name, validation=validation, workers=workers,
         shard_tokens=shard_tokens, key=key, eod=eod, bos=bos, seed=seed, skip_bad=skip_bad,
         globs=glob or (), overwrite=overwrite))  # fmt: skip


@app.command(epilog=examples("stdlib"))
@user_errors()
def stdlib(output: Output, vocab_size: Vocabulary = 4096, workers: Workers = CPUS,
           overwrite: Overwrite = False, as_json: Json = False) -> None:  # fmt: skip
    """Make a corpus of the Python standard library's source, or reuse it: real text without a download."""
    show(as_json, prepare_stdlib(output, vocab_size=vocab_size, workers=workers, overwrite=overwrite))


@app.command(epilog=examples("manifest"))
@user_errors()
def manifest(directory: Path, tokenizer: Tokenizer, name: Name = None, validation: Share = 0.0,
             eod: Eod = None, overwrite: Overwrite = False, as_json: Json = False,
             output: Annotated[Path | None, typer.Option(help="The corpus, of files that are not Megatron's")] = None,
             raw: Annotated[IdType | None, typer.Option(help="Type of the ids in .bin files without a header")] = None,
             bos: Annotated[bool, typer.Option("--bos", help="Documents begin with the tokenizer's own token")] = False,
             ) -> None:  # fmt: skip
    """Adopt token ids that another program wrote: check them and write their manifest.

    Megatron's .bin/.idx stay where they are; datatrove's .ds and llm.c's .bin are copied to --output.
    """
    show(as_json, adopt_directory(directory, tokenizer, name, validation, eod, overwrite, output, raw, bos))


@app.command(epilog=examples("verify"))
@user_errors()
def verify(directory: Path, as_json: Json = False) -> None:
    """Read every byte of a corpus and compare it with the manifest; ends with 2 if it is damaged."""
    show(as_json, verify_corpus(directory))


@app.command("plant", epilog=examples("plant"))
@user_errors()
def plant_noise(corpus: Path, output: Path, recipe: Annotated[Path, typer.Option(help="Of the run on OUTPUT")],
                overrides: Annotated[list[str] | None, typer.Argument(help="Of the recipe: key=value")] = None,
                step: Annotated[int, typer.Option(help="Of the run, where it begins")] = 120,
                samples: Annotated[int, typer.Option(help="How many are replaced")] = 40,
                text: Annotated[Path | None, typer.Option(help="UTF-8 to replace them by; else noise")] = None,
                of_each: Annotated[int | None, typer.Option(help="Samples of each step; else consecutive ones")] = None,
                seed: Annotated[int, typer.Option(help="Of the noise, and of the places with --of-each")] = 0,
                overwrite: Overwrite = False, as_json: Json = False) -> None:  # fmt: skip
    """Copy a corpus with noise or a text in samples that a run reads from a step on: a spike to practise on.

    A text is encoded with the corpus's tokenizer, goes on from sample to sample, and begins again where it ends.
    """
    from megastable.config.recipe import load
    from megastable.data.plant import plant  # imports torch, which the other commands start faster without

    planted, reused = plant(corpus, output, load(recipe, overrides or ()), step=step, samples=samples, seed=seed,
                            kind="random" if text is None else "text", text=None if text is None else read_text(text),
                            of_each=of_each, overwrite=overwrite)  # fmt: skip
    told = f"{'reused' if reused else 'planted'} {output}: {planted}"
    print(planted.model_dump_json() if as_json else told)


def read_text(path: Path) -> str:
    """A whole file. Raises DataError where it cannot be read or is not UTF-8."""
    try:
        return path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise DataError(f"--text {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise DataError(
            f"--text {path} is not UTF-8 (byte {error.start}): convert it, e.g. with iconv -t UTF-8"
        ) from error


def show(as_json: bool, made: Summary) -> None:
    print(made.as_json() if as_json else made)


if __name__ == "__main__":
    app()
