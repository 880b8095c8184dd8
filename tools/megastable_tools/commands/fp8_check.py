"""`megastable fp8-check`: check whether a model would be stable in FP8. No FP8 hardware is needed."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from megastable.base.errors import FAILED
from megastable.commands.app import App
from megastable.commands.options import Json, JsonFile, Plot, put_json

app = App()


class Recipe(StrEnum):
    current = "current"
    delayed = "delayed"
    block = "block"


@app.add_command(
    examples="""
    megastable fp8-check runs/quickstart
    megastable fp8-check runs/7b/checkpoints/step-5000 --recipe delayed --samples 32 --output fp8.json
    megastable fp8-check runs/7b --recipe current --recipe block --plot fp8.png --all
    megastable fp8-check runs/7b --text book.txt --micro-batch 1
    """,
    more="Exit codes: 0 stable by some recipe, with the layers kept that it names; 1 by none; 2 bad input.",
)
def check_fp8(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint (RUN/checkpoints/step-N), or a run for its newest")],
    recipes: Annotated[
        list[Recipe] | None,
        typer.Option("--recipe", help="FP8 recipe to check; repeatable. Default: all"),
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="Samples to measure on, of the model's sequence length")] = 8,
    micro_batch: Annotated[int | None, typer.Option(min=1, show_default="the run's", help="Samples at a time")] = None,
    history: Annotated[
        int, typer.Option(min=1, max=1024, help="Micro-batches run first, for the scales of the delayed recipe")
    ] = 4,
    text: Annotated[
        Path | None, typer.Option(help="Measure on this text file instead of the run's samples")
    ] = None,
    tokenizer: Annotated[Path | None, typer.Option(help="Tokenizer for --text", show_default="the run's")] = None,
    formats: Annotated[
        Literal["auto", "hybrid", "e4m3"] | None,
        typer.Option(show_default="the run's, else auto", help="FP8 formats, as in precision.fp8.formats"),
    ] = None,
    dtype: Annotated[
        Literal["bf16", "fp32"] | None, typer.Option(show_default="as the run trains", help="Precision outside of FP8")
    ] = None,
    device: Annotated[str | None, typer.Option(show_default="cuda where there is one, else cpu")] = None,
    rows: Annotated[int, typer.Option(min=0, help="Layers to print in each table")] = 8,
    everything: Annotated[bool, typer.Option("--all", help="Print all layers and tensors")] = False,
    as_json: Json = False,
    output: JsonFile = None,
    plot: Plot = None,
) -> None:  # fmt: skip
    """Check whether a model would be stable in FP8, and which layers should stay out of it.

    No FP8 hardware is needed. --plot draws a map of the errors.
    """
    from megastable.base.progress_bar import show_bar
    from megastable.report.text_output import TextOutput
    from megastable_tools.fp8_check import advice as display
    from megastable_tools.fp8_check.effect import check_effect as measure
    from megastable_tools.fp8_check.effect import count_passes_of
    from megastable_tools.fp8_check.material import configs_of, describe_model, gather_material, open_model

    wanted_recipes = [recipe.value for recipe in dict.fromkeys(recipes or Recipe)]
    model = open_model(checkpoint, dtype, device)
    fp8_configs, said_settings = configs_of(model.run, wanted_recipes, formats, history)
    batch_size = min(micro_batch or model.run.train.micro_batch, samples)
    before = history * batch_size if "delayed" in fp8_configs else 0
    material = gather_material(model, before + samples, text, tokenizer)
    batches = material.micro_batches_of(model, batch_size)
    warm, measured = batches[: before // batch_size], batches[before // batch_size :]
    spread_text = f"; {samples} of them measured, {before} before these for delayed scales" if before else ""
    out = TextOutput(as_json)
    out.say_lines(
        describe_model(model),
        f"{material.origin}{spread_text}",
        *(f"note: {note}" for note in material.notes),
    )
    with show_bar(
        "measuring", count_passes_of(len(measured), len(warm), fp8_configs), as_json, "passes"
    ) as progress_bar:
        found = measure(model, measured, warm, fp8_configs, progress_bar, progress_bar.extend_total)
    out.say_lines("", display.LEGEND, "")
    for recipe_outcome in found.outcomes:
        out.show_table(
            display.draw_layers_table(recipe_outcome, len(recipe_outcome.layers) if everything else rows)
        )
        if everything:
            out.show_table(display.draw_tensors_table(recipe_outcome))
    out.show_table(display.draw_models_table(found.loss, found.outcomes))
    out.say_lines(*display.describe_advice(found.outcomes, said_settings))
    about_facts: dict[str, Any] = {
        "checkpoint": str(model.checkpoint), "step": model.step, "dtype": str(next(model.parameters()).dtype),
        "samples": samples, "micro_batch": batch_size, "history": history, "origin": material.origin,
        "notes": list(material.notes),
    }  # fmt: skip
    put_json(about_facts | display.advice_tree(found.loss, found.outcomes, said_settings), as_json, output)
    if plot is not None:
        display.draw_error_map(found.outcomes, f"FP8: {model.checkpoint}", plot)
    raise typer.Exit(0 if any(recipe_outcome.stable for recipe_outcome in found.outcomes) else FAILED)
