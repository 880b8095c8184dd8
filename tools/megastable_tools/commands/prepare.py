"""`megastable prepare`: turn text into corpora for training."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from megastable.base.errors import DataError
from megastable.commands.app import App
from megastable.commands.options import Json, Overrides, put_json

if TYPE_CHECKING:
    from megastable_tools.prepare.reporting import Summary

app = App(
    "Turn text into corpora for training: a tokenizer, Megatron shards, a manifest with counts and hashes."
)
ModelType = Literal["bpe", "unigram"]
IdType = Literal["uint16", "uint32"]
SHARD_TOKENS = 1 << 30
MAX_LOST = 0.01
Inputs = Annotated[
    list[Path], typer.Option("--input", help="File or folder: text, JSON lines, table, tar; repeatable")
]
Output = Annotated[Path, typer.Option(help="What to make; it appears complete or not at all")]
Vocabulary = Annotated[int, typer.Option("--vocab-size", min=1, help="Tokens of the vocabulary")]
Tokenizer = Annotated[Path, typer.Option("--tokenizer", help="A .model, a tokenizer.json, or their folder")]
Eod = Annotated[
    str | None, typer.Option(help="End-of-document token, by name or id. Default: the tokenizer's usual one")
]
Bos = Annotated[
    bool, typer.Option("--bos", help="Begin every document with the tokenizer's own token, as Llama 3")
]
Name = Annotated[str | None, typer.Option(help="Name of the corpus. Default: that of its folder")]
Share = Annotated[float, typer.Option(help="Share to hold back for validation")]
ShardShare = Annotated[
    float | None,
    typer.Option(
        help="Share to hold back for validation. Default: 0.01; none with --validation-input",
        show_default=False,
    ),
]
ValidationInputs = Annotated[
    list[Path] | None,
    typer.Option(help="File or folder of documents for validation, all of them; repeatable"),
]
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
AsText = Annotated[
    bool, typer.Option("--as-text", help="A file whose name tells no format is one document, also JSON")
]
MaxLost = Annotated[float, typer.Option(help="Share of the text that the tokenizer may lose")]
Workers = Annotated[int, typer.Option(min=1, help="Processes", show_default="one per CPU")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what is there")]
CPUS = len(os.sched_getaffinity(0))


@app.add_command(
    "tokenizer", examples="megastable prepare tokenizer --input texts/ --output my.model --vocab-size 32000"
)
def train_text_tokenizer(
    inputs: Inputs, output: Output, vocab_size: Vocabulary, model: ModelType = "bpe",
    key: Key = "text", glob: Globs = None, skip_bad: SkipBad = False, as_text: AsText = False,
    overwrite: Overwrite = False, as_json: Json = False,
) -> None:  # fmt: skip
    """Train a SentencePiece tokenizer with byte fallback: every text survives encoding and decoding."""
    from megastable_tools.prepare.corpus_tokenizer import train_sentencepiece
    from megastable_tools.prepare.reporting import tell_counts
    from megastable_tools.prepare.text_files import TextFiles

    if output.exists() and not overwrite:
        raise DataError(f"{output} exists already: choose another --output, or replace it with --overwrite")
    text_files = TextFiles(inputs, key, skip_bad, glob or (), as_text)
    tokenizer_info = train_sentencepiece(text_files, output, vocab_size, model).info
    read_files, left_out = text_files.read, text_files.left_out
    if as_json:
        file_counts = {"read": read_files.counts, "read_files": read_files.files}
        file_counts |= {"left_out": left_out.counts, "left_out_files": left_out.files}
        put_json(tokenizer_info.model_dump() | file_counts, True, None)
        return
    text_lines = [f"  read: {told_text}" for told_text in tell_counts(read_files.counts, read_files.files)]
    text_lines += [f"  left out: {told_text}" for told_text in tell_counts(left_out.counts, left_out.files)]
    print("\n".join([f"trained {output}: {vocab_size} tokens, {model}", *text_lines]))


@app.add_command(
    "shards",
    examples="""
    megastable prepare shards --input texts/ --input more.jsonl.zst --output data/mine --tokenizer my.model
    megastable prepare shards --input texts/ --validation-input held-out/ --output data/mine --tokenizer my.model
    megastable prepare shards --input fineweb/ --glob '**/*.parquet' --output data/web --tokenizer my.model
    megastable prepare shards --input reviews.tsv.xz --key review --output data/reviews --tokenizer my.model
    """,
)
def prepare_shard_corpus(
    inputs: Inputs, output: Output, tokenizer: Tokenizer, name: Name = None, validation: ShardShare = None,
    validation_input: ValidationInputs = None, workers: Workers = CPUS,
    shard_tokens: int = SHARD_TOKENS, key: Key = "text", glob: Globs = None,
    eod: Eod = None, bos: Bos = False, seed: int = 0, skip_bad: SkipBad = False,
    as_text: AsText = False, max_lost: MaxLost = MAX_LOST, overwrite: Overwrite = False,
    as_json: Json = False
) -> None:  # fmt: skip
    """Encode text into a corpus of Megatron .bin/.idx shards."""
    from megastable_tools.prepare.prepare import prepare_shards

    made_corpus = prepare_shards(
        inputs, output, tokenizer, name=name, validation=validation, validation_inputs=validation_input or (),
        workers=workers, shard_tokens=shard_tokens, key=key, eod=eod, bos=bos, seed=seed, skip_bad=skip_bad,
        globs=glob or (), as_text=as_text, max_lost=max_lost, overwrite=overwrite,
    )  # fmt: skip
    print_summary(as_json, made_corpus)


@app.add_command("stdlib", examples="megastable prepare stdlib --output data/stdlib")
def prepare_stdlib_corpus(output: Output, vocab_size: Vocabulary = 4096, workers: Workers = CPUS,
                          overwrite: Overwrite = False, as_json: Json = False) -> None:  # fmt: skip
    """Make a corpus of the Python standard library's source, or reuse it: real text without a download."""
    from megastable_tools.prepare.stdlib import prepare_stdlib

    print_summary(
        as_json, prepare_stdlib(output, vocab_size=vocab_size, workers=workers, overwrite=overwrite)
    )


@app.add_command(
    "manifest",
    examples="""
    megastable prepare manifest megatron_shards/ --tokenizer tokenizer.json --validation 0.01
    megastable prepare manifest fineweb10B/ --output data/fineweb10B --tokenizer gpt2/tokenizer.json
    megastable prepare manifest nanogpt/data/ --raw uint16 --output data/nano --tokenizer gpt2/tokenizer.json
    """,
)
def adopt_shards(
    directory: Path, tokenizer: Tokenizer, name: Name = None, validation: Share = 0.0,
    eod: Eod = None, overwrite: Overwrite = False, as_json: Json = False,
    output: Annotated[Path | None, typer.Option(help="The corpus, of files that are not Megatron's")] = None,
    raw: Annotated[IdType | None, typer.Option(help="Type of the ids in .bin files without a header")] = None,
    bos: Annotated[bool, typer.Option("--bos", help="Documents begin with the tokenizer's own token")] = False,
) -> None:  # fmt: skip
    """Adopt token ids that another program wrote: check them and write their manifest.

    Megatron's .bin/.idx stay where they are; datatrove's .ds and llm.c's .bin are copied to --output.
    """
    from megastable_tools.prepare.adopt import adopt_directory

    print_summary(
        as_json, adopt_directory(directory, tokenizer, name, validation, eod, overwrite, output, raw, bos)
    )


@app.add_command("verify", examples="megastable prepare verify data/mine")
def verify_shards(directory: Path, as_json: Json = False) -> None:
    """Read every byte of a corpus and compare it with the manifest; ends with 2 if it is damaged."""
    from megastable_tools.prepare.adopt import verify_corpus

    print_summary(as_json, verify_corpus(directory, silent=as_json))


@app.add_command(
    "plant",
    examples="""
    megastable prepare plant data/stdlib data/stdlib-planted --recipe launch/recipes/quickstart.yaml
    megastable prepare plant data/stdlib data/logs --recipe runs/mine/recipe.yaml --text app.log --samples 480 --step 75
    megastable prepare plant data/stdlib data/few --recipe runs/mine/recipe.yaml --text app.log --samples 20 --of-each 1
    """,
)
def plant_noise(corpus: Path, output: Path, recipe: Annotated[Path, typer.Option(help="Recipe of the run on OUTPUT")],
                overrides: Overrides = None,
                step: Annotated[int, typer.Option(help="Step of the run at which it begins")] = 120,
                samples: Annotated[int, typer.Option(help="Samples to replace")] = 40,
                text: Annotated[Path | None, typer.Option(help="UTF-8 text to replace them by. Default: noise")] = None,
                of_each: Annotated[int | None, typer.Option(help="Spread: so many of each step")] = None,
                seed: Annotated[int, typer.Option(help="Seed of the noise, and of the places with --of-each")] = 0,
                overwrite: Overwrite = False, as_json: Json = False) -> None:  # fmt: skip
    """Copy a corpus with noise or a text in samples that a run reads from a step on: a spike to practise on.

    A text is encoded with the corpus's tokenizer, goes on from sample to sample, and begins again where it ends.
    """
    from megastable.config.recipe import load_recipe
    from megastable.data.plant import plant_corruption

    planted, reused = plant_corruption(corpus, output, load_recipe(recipe, overrides or ()), step=step,
    samples=samples, seed=seed,
                            kind="random" if text is None else "text", text=None if text is None else read_text(text),
                            of_each=of_each, overwrite=overwrite)  # fmt: skip
    result_text = f"{'reused' if reused else 'planted'} {output}: {planted}"
    if as_json:
        put_json(planted.model_dump(mode="json"), True, None)
    else:
        print(result_text)


def read_text(path: Path) -> str:
    """A whole text file. Raises DataError if it cannot be read or is not UTF-8."""
    try:
        return path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise DataError(f"--text {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise DataError(
            f"--text {path} is not UTF-8 (byte {error.start}): convert it, e.g. with iconv -t UTF-8"
        ) from error


def print_summary(as_json: bool, made: Summary) -> None:
    if as_json:
        put_json(asdict(made), True, None)
    else:
        print(made)
