"""Defines the evaluation of checkpoints by a program, beside the run (docs/evaluation.md). Part of config/tree.py."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Literal

from pydantic import Field, PositiveInt, field_validator

from megastable.config.section import PositiveSeconds, Section

LM_EVAL = (
    "lm_eval run --model hf --model_args pretrained={model} --tasks arc_easy --device {device} "
    "--output_path {results}"
)


class EvalConfig(Section):
    """The supervisor's evaluation of checkpoints by a program, such as lm-evaluation-harness: in processes of its own,
    which training never waits for."""

    command: str | None = Field(default=None, examples=[LM_EVAL])
    """The program; null: none. No shell reads it. {model} becomes the folder of the exported checkpoint, {results} the
    JSON file that it writes, {step} and {device} what they say."""
    interval: PositiveInt = 1000
    """The first checkpoint at or after each multiple of it is evaluated, and the last one. [steps]"""
    timeout: PositiveSeconds = 7200.0
    """Time limit of the export, and of the program. [seconds]"""
    device: str = Field(default="cpu", min_length=1, examples=["cuda:0"])
    """Passed on to the program; with `cpu` it sees no GPU."""
    threads: PositiveInt = 1
    """Threads that the program's numeric libraries may use. [threads]"""
    dtype: Literal["bf16", "fp32"] = "bf16"
    """Precision of the exported weights."""
    scratch: Path | None = Field(default=None, examples=["/tmp"])
    """Folder for the exported checkpoint, which is deleted afterwards; null: the run directory."""

    @field_validator("command")
    @classmethod
    def _can_be_split(cls, command: str | None) -> str | None:
        if command is None:
            return None
        try:
            words = shlex.split(command)
        except ValueError as error:
            raise ValueError(f"{error}: close the quotes") from None
        if not words:
            raise ValueError("it is empty: null for none")
        if missing := [name for name in ("{model}", "{results}") if name not in command]:
            raise ValueError(f"{' and '.join(missing)} must be in it: where the program finds or puts them")
        return command

    def words(self, model: Path, results: Path, step: int) -> list[str]:
        """The command with its places filled in."""
        known = {
            "{model}": str(model),
            "{results}": str(results),
            "{step}": str(step),
            "{device}": self.device,
        }
        words = shlex.split(self.command or "")
        for place, value in known.items():
            words = [word.replace(place, value) for word in words]
        return [os.path.expanduser(words[0]), *words[1:]]
