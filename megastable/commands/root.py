"""Defines `megastable` itself: lists all commands without importing them, and imports the requested one."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import typer.main

from megastable.commands.app import SETTINGS, Command, Group

# Each is a module of this package with an `app`, whose help begins with this line.
COMMANDS = {
    "train": "Train without a supervisor: start the deepspeed launcher on a recipe.",
    "supervise": "Train under a supervisor, which restarts after a crash or a hang from a good checkpoint.",
    "preflight": "Check every host before a run: code, versions, disks, GPUs, speed; is the run directory shared?",
    "status": "Show how a run stands, who watches it, and what to do next.",
    "watch": "A page of whole runs: how they stand, every curve, incident and second; live, or as one file.",
    "report": "The record of a run as a folder to publish: logbook, run page, post-mortems, cost; nothing private.",
    "goodput": "Where every second of a run went: training, or lost to which cause, incident and host.",
    "profile": "What a run's steps spend their time on: phases of all of them, operators of those that were traced.",
    "prepare": "Text into corpora to train on: a tokenizer, Megatron shards, a manifest with counts and hashes.",
    "inspect": "What was in that batch? From steps, incidents and documents to text, and back; which ones are bad.",
    "prune": "Documents, or spans of them, out of a corpus: a plan to edit, a new corpus, the proof of the rest.",
    "checkpoint": "Verify, list, show, pin, compare, reshape, branch and average checkpoints; no GPU is needed.",
    "convert": "Checkpoints to and from Hugging Face and llama.cpp, compared by logits each time.",
    "generate": "Text from a prompt, continued by a checkpoint, a run's newest one, or a Hugging Face folder.",
    "plan": "Memory, time and cost of a recipe on a cluster, and the layouts that would be faster.",
    "backtest": "Replay recorded losses through detector and policy: what would have been done, and when.",
    "fp8-check": "Would this model be stable in FP8, and which layers had better stay out of it?",
    "study": "Train many small models: loss against learning rate, scale of activations over widths, seeds compared.",
    "repeat": "Run the same steps twice: at which step, layer and operation do they first differ, bit for bit?",
    "bench": "What things cost, measured on this machine. Needs a checkout.",
    "chaos": "Let hosts, links, processes and storage fail under the supervisor, and compare. Needs a checkout.",
    "drill": "Train with planted faults under each policy, and compare with a clean run. Needs a checkout.",
}


class LazyGroup(Group):
    """Help and tab completion need only names and one line each."""

    def list_commands(self, context: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, context: Any, name: str) -> Any:
        return Command(name=name, help=COMMANDS[name]) if name in COMMANDS else None

    def resolve_command(self, context: Any, args: list[str]) -> Any:
        name, found, rest = super().resolve_command(context, args)
        return name, found and load(str(found.name)), rest


def load(name: str) -> Any:
    """Import the command of that name."""
    module = import_module(f"megastable.commands.{name.replace('-', '_')}")
    found = typer.main.get_command(module.app)
    found.name = name
    return found


app = typer.Typer(
    cls=LazyGroup, context_settings=SETTINGS, pretty_exceptions_enable=False, no_args_is_help=True,
    epilog="Examples: megastable COMMAND --help. Exit codes: docs/exit-codes.md.",
)  # fmt: skip


@app.callback()
def megastable() -> None:
    """GPT pretraining that detects loss spikes, rewinds, and skips the data that caused them."""


def command() -> Any:
    return typer.main.get_command(app)
