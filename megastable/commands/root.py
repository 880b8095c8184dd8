"""Defines `megastable` itself: lists all commands without importing them, and imports the requested one."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import typer.main

from megastable.commands.app import SETTINGS, Command, Group

# Each is a module with an `app`, whose help begins with this line: of this package, or of the tools, which are looked
# for only when one of their commands is asked for.
COMMANDS = {
    "train": "Train without a supervisor, by the deepspeed launcher.",
    "supervise": "Train under a supervisor, which restarts the run from a good checkpoint after a crash or a hang.",
    "preflight": "Check every host before a run: code, versions, disks, GPUs, speed, and the shared run directory.",
    "status": "Show the state of a run, who supervises it, and what to do next.",
    "watch": "Serve the run page, or write it to a file: every curve, incident and second of one or more runs.",
    "change": "Change settings of a run that trains, such as its learning rate; the journal says who, why, what came.",
    "note": "Write a note in the journal of a run: who, when, at which step; the run page and the record show it.",
    "report": "Write the record of a run for publication: run page, post-mortems, recipe; nothing private.",
    "goodput": "Account for every second of a run: training, or lost to which cause, incident and host.",
    "profile": "Show where the time of a run's steps goes: phases of every step, operators of the traced ones.",
    "prepare": "Turn text into corpora for training: a tokenizer, Megatron shards, a manifest with counts and hashes.",
    "inspect": "Find the text behind a step or an incident, the steps that read a document, and bad documents.",
    "prune": "Remove documents or spans from a corpus: a plan to edit, a new corpus, a check of what is left.",
    "checkpoint": "Verify, list, show, pin, compare, reshape, branch, average, roll back to checkpoints. Needs no GPU.",
    "convert": "Convert checkpoints to and from Hugging Face and llama.cpp, and compare the logits.",
    "generate": "Continue a prompt with a checkpoint, a run's newest one, or a Hugging Face folder.",
    "plan": "Estimate memory, time and cost of a recipe on a cluster, and suggest faster layouts.",
    "backtest": "Replay recorded losses through detector and policy, and show what they would have done, and when.",
    "court": "Try an incident's remedies again, and more of them, from a checkpoint: did the run choose well?",
    "skips": "Try again what a run skips, on its newest checkpoint, and give back what does no harm.",
    "fp8-check": "Check whether a model would be stable in FP8, and which layers should stay out of it.",
    "study": "Train many small models: loss against learning rate, scale of activations over widths, seeds compared.",
    "repeat": "Run the same steps twice, and find the first step, layer and operation that differ, bit for bit.",
    "bench": "Measure costs and error rates of megastable on this machine. Needs a checkout.",
    "chaos": "Make hosts, links, processes and storage fail under the supervisor. Needs a checkout.",
    "drill": "Train with planted faults, and compare with a clean run. Needs a checkout.",
}
# By what a person wants to do.
PANELS = {
    "Train": ("plan", "preflight", "train", "supervise"),
    "Follow a run, and step in": ("status", "watch", "change", "note", "goodput", "profile", "report"),
    "Look after data": ("prepare", "inspect", "prune", "skips"),
    "Look after checkpoints": ("checkpoint", "convert", "generate"),
    "Ask why, or what if": ("court", "backtest", "repeat", "study", "fp8-check"),
    "Measure megastable itself": ("bench", "drill", "chaos"),
}


class LazyGroup(Group):
    """Help, tab completion and corrections of a misspelled command need only names and one line each."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = {
            name: Command(name=name, help=COMMANDS[name], rich_help_panel=panel)
            for panel, names in PANELS.items()
            for name in names
        }

    def resolve_command(self, context: Any, args: list[str]) -> Any:
        name, command_stub, other_words = super().resolve_command(context, args)
        return name, command_stub and load_command(str(command_stub.name)), other_words


def load_command(name: str) -> Any:
    """Import the command of that name."""
    module_name = name.replace("-", "_")
    package = "megastable" if find_spec(f"megastable.commands.{module_name}") else "megastable_tools"
    module = import_module(f"{package}.commands.{module_name}")
    typer_command = typer.main.get_command(module.app)
    typer_command.name = name
    return typer_command


app = typer.Typer(
    cls=LazyGroup, context_settings=SETTINGS, pretty_exceptions_enable=False, no_args_is_help=True,
    epilog="Examples: megastable COMMAND --help. Exit codes: docs/exit-codes.md.",
)  # fmt: skip


@app.callback()
def megastable() -> None:
    """GPT pretraining that detects loss spikes, rewinds, and skips the data that caused them."""


def build_command() -> Any:
    return typer.main.get_command(app)
