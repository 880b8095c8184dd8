"""Talk to what was trained: a prompt, continued by a checkpoint, a run's newest one, or a Hugging Face folder."""

# ruff: noqa: E402 (imports take a while, and Ctrl-C must end them quietly)
from __future__ import annotations

import signal

signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during the imports below ends it without a traceback

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from megastable.base.errors import DataError, user_errors

signal.signal(signal.SIGINT, signal.default_int_handler)

EXAMPLES = """Examples:

GENERATE runs/quickstart --prompt "def main(" --max-tokens 100

GENERATE runs/quickstart --prompt "import " --number 3 --seed 1

GENERATE exported --prompt-file text.txt --temperature 0 --json

GENERATE runs/quickstart      (at a terminal: a loop, each line is continued)""".replace(
    "GENERATE", "python tools/generate.py"
)
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command(help=__doc__, epilog=EXAMPLES)
@user_errors()
def generate(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint, a run (its newest), or a Hugging Face folder")],
    prompt: Annotated[str | None, typer.Option(help="Else --prompt-file, else the standard input")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="Its last newline is left out")] = None,
    temperature: Annotated[float, typer.Option(help="0: the most likely token always; 1: as the model says")] = 0.8,
    top_k: Annotated[int, typer.Option(help="Only so many most likely tokens; 0: all")] = 0,
    top_p: Annotated[float, typer.Option(help="Only the most likely ones that have this share together")] = 0.95,
    seed: Annotated[int | None, typer.Option(min=0, show_default="a new one", help="Same seed, same text")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Of each sample")] = 200,
    number: Annotated[int, typer.Option(min=1, max=10_000, help="Samples, side by side")] = 1,
    stop: Annotated[list[str] | None, typer.Option(help="End where this text appears; repeatable")] = None,
    past_eod: Annotated[bool, typer.Option("--past-eod", help="Go on behind the end of a document")] = False,
    document_start: Annotated[
        bool, typer.Option("--document-start", help="The prompt begins a document, as an empty one always does")
    ] = False,
    tokenizer: Annotated[Path | None, typer.Option(show_default="that of the run's corpus, or in the folder")] = None,
    dtype: Annotated[
        Literal["fp32", "bf16", "fp16"] | None, typer.Option(show_default="fp32 on a CPU, else the run's")
    ] = None,
    device: Annotated[str | None, typer.Option(show_default="cuda where there is one, else cpu")] = None,
    accept: Annotated[list[str] | None, typer.Option(help="A key of config.json that does not matter")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Texts, tokens and log-probabilities, for machines")] = False,
) -> None:  # fmt: skip
    """See the module."""
    from megastable.generate.decode import Sampling
    from megastable.generate.load import open_speaker
    from megastable.generate.talk import Talk, Wishes, ask, read_prompt

    text = read_prompt(prompt, prompt_file)
    if text is None and as_json:
        raise DataError("--json: give --prompt, --prompt-file or a pipe")

    sampling = Sampling(temperature, top_k, top_p)
    wishes = Wishes(sampling, max_tokens, number, seed, tuple(stop or ()), past_eod, document_start)
    talk = Talk(open_speaker(checkpoint, tokenizer, dtype, device, accept or ()), wishes)
    console = Console(highlight=False)
    if text is not None:
        talk.once(text, console, as_json)
    else:
        talk.loop(console, ask)


if __name__ == "__main__":
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:  # a locale that lacks a character must not end it
        reconfigure(errors="backslashreplace")
    app()
