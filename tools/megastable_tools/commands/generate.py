"""`megastable generate`: generate text from a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from megastable.base.errors import DataError
from megastable.commands.app import App
from megastable.commands.options import Json

app = App()


@app.add_command(
    examples="""
    megastable generate runs/quickstart --prompt "def main(" --max-tokens 100
    megastable generate runs/quickstart --prompt "import " --number 3 --seed 1
    megastable generate exported --prompt-file text.txt --temperature 0 --json
    megastable generate runs/quickstart      (at a terminal: continues each line typed)
    """
)
def generate_text(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint, a run (its newest), or a Hugging Face folder")],
    prompt: Annotated[str | None, typer.Option(help="Default: --prompt-file, else standard input")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="File of the prompt, without its last newline")] = None,
    temperature: Annotated[float, typer.Option(help="0: always the most likely; 1: as the model says")] = 0.8,
    top_k: Annotated[int, typer.Option(help="Among the K most likely tokens; 0: among all")] = 0,
    top_p: Annotated[float, typer.Option(help="Among the most likely tokens of this probability")] = 0.95,
    seed: Annotated[int | None, typer.Option(min=0, show_default="a new one", help="Same seed, same text")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate for each sample, at most")] = 200,
    number: Annotated[int, typer.Option(min=1, max=10_000, help="Samples to generate")] = 1,
    stop: Annotated[list[str] | None, typer.Option(help="Stop at this text; repeatable")] = None,
    past_eod: Annotated[bool, typer.Option("--past-eod", help="Continue after the end of a document")] = False,
    document_start: Annotated[
        bool, typer.Option("--document-start", help="The prompt begins a document; an empty one always does")
    ] = False,
    tokenizer: Annotated[Path | None, typer.Option(show_default="that of the corpus or the folder")] = None,
    dtype: Annotated[
        Literal["fp32", "bf16", "fp16"] | None, typer.Option(show_default="fp32 on a CPU, else the run's")
    ] = None,
    device: Annotated[str | None, typer.Option(show_default="cuda where there is one, else cpu")] = None,
    accept: Annotated[list[str] | None, typer.Option(help="Ignore this key of config.json; repeatable")] = None,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Continue a prompt with a checkpoint, a run's newest one, or a Hugging Face folder.

    JSON: texts, tokens and log-probabilities.
    """
    from rich.console import Console

    from megastable_tools.generate.talk import Talk, Wishes, ask_line, read_prompt

    prompt_text = read_prompt(prompt, prompt_file)
    if prompt_text is None and as_json:
        raise DataError("--json: give --prompt, --prompt-file or a pipe")

    from megastable_tools.generate.decode import Sampling
    from megastable_tools.generate.load import open_speaker

    sampling = Sampling(temperature, top_k, top_p)
    talk_wishes = Wishes(sampling, max_tokens, number, seed, tuple(stop or ()), past_eod, document_start)
    model_talk = Talk(open_speaker(checkpoint, tokenizer, dtype, device, accept or ()), talk_wishes)
    rich_console = Console(highlight=False)
    if prompt_text is not None:
        model_talk.continue_once(prompt_text, rich_console, as_json)
    else:
        model_talk.continue_lines(rich_console, ask_line)
