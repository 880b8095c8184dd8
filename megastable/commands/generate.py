"""`megastable generate`: generate text from a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from megastable.base.errors import DataError
from megastable.commands.app import App
from megastable.commands.options import Json

app = App()


@app.add(
    examples="""
    megastable generate runs/quickstart --prompt "def main(" --max-tokens 100
    megastable generate runs/quickstart --prompt "import " --number 3 --seed 1
    megastable generate exported --prompt-file text.txt --temperature 0 --json
    megastable generate runs/quickstart      (at a terminal: a loop, each line is continued)
    """
)
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
    as_json: Json = False,
) -> None:  # fmt: skip
    """Text from a prompt, continued by a checkpoint, a run's newest one, or a Hugging Face folder.

    JSON: texts, tokens and log-probabilities.
    """
    from rich.console import Console

    from megastable.generate.talk import Talk, Wishes, ask, read_prompt

    text = read_prompt(prompt, prompt_file)
    if text is None and as_json:
        raise DataError("--json: give --prompt, --prompt-file or a pipe")

    from megastable.generate.decode import Sampling
    from megastable.generate.load import open_speaker

    sampling = Sampling(temperature, top_k, top_p)
    wishes = Wishes(sampling, max_tokens, number, seed, tuple(stop or ()), past_eod, document_start)
    talk = Talk(open_speaker(checkpoint, tokenizer, dtype, device, accept or ()), wishes)
    console = Console(highlight=False)
    if text is not None:
        talk.once(text, console, as_json)
    else:
        talk.loop(console, ask)
