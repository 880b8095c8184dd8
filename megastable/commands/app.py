"""Gives every command -h, --version, its own examples, and errors without a traceback."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import typer
import typer.main
from typer.core import TyperCommand, TyperGroup

from megastable import __version__
from megastable.base.errors import user_errors

F = TypeVar("F", bound=Callable[..., Any])
SETTINGS = {"help_option_names": ["-h", "--help"]}


def _say_version(context: typer.Context, asked: bool) -> None:
    if asked and not context.resilient_parsing:
        typer.echo(f"megastable {__version__}")
        raise typer.Exit


def _with_version(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            is_eager=True,
            expose_value=False,
            callback=_say_version,
            help="Show the version and exit.",
        ),
    ] = False,
) -> None: ...


_BARE = typer.Typer(add_completion=False)
_BARE.command()(_with_version)
[VERSION] = typer.main.get_command(_BARE).params


class _Shared:
    """Mixed into typer's two command classes."""

    def get_params(self, context: Any) -> list[Any]:
        return [*super().get_params(context), VERSION]  # type: ignore[misc]

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        with user_errors():  # an option's callback may raise
            try:
                return super().make_context(*args, **kwargs)  # type: ignore[misc]
            except Exception as error:
                _keep_near_options(error)
                raise

    def invoke(self, context: Any) -> Any:
        with user_errors():
            return super().invoke(context)  # type: ignore[misc]


def _keep_near_options(error: Exception) -> None:
    """Of the options that an unknown one is answered with, those that resemble it: typer counts the dashes, too."""
    wrong_option, option_names = getattr(error, "option_name", ""), getattr(error, "possibilities", None)
    if wrong_option and option_names:
        bare_names = [name.lstrip("-") for name in option_names]
        near_names = difflib.get_close_matches(wrong_option.lstrip("-"), bare_names)
        error.possibilities = [name for name in option_names if name.lstrip("-") in near_names]  # type: ignore[attr-defined]


class Command(_Shared, TyperCommand):
    """A command that does something."""


class Group(_Shared, TyperGroup):
    """A command with subcommands."""


class WithLauncherArguments(Command):
    """Passes the arguments after -- on to the deepspeed launcher, in context.obj."""

    def collect_usage_pieces(self, context: Any) -> list[str]:
        return [*super().collect_usage_pieces(context), "[-- DEEPSPEED ARGUMENT...]"]

    def parse_args(self, context: Any, args: list[str]) -> list[str]:
        separator_index = args.index("--") if "--" in args else len(args)
        context.obj = args[separator_index + 1 :]
        return super().parse_args(context, args[:separator_index])


class App(typer.Typer):
    """A command, or a group of commands. about: of a group; a single command has its function's docstring."""

    def __init__(self, about: str | None = None) -> None:
        super().__init__(
            cls=Group,
            help=about,
            context_settings=SETTINGS,
            add_completion=False,
            pretty_exceptions_enable=False,
        )
        self.examples: list[str] = []  # one per command, for the group's own help

    def add_command(
        self,
        name: str | None = None,
        *,
        examples: str,
        more: str = "",
        cls: type[Command] = Command,
        **about: Any,
    ) -> Callable[[F], F]:
        """Add a function as a command. examples: one command per line; more: paragraphs below them."""
        example_lines = [line.strip() for line in examples.strip().splitlines()]
        self.examples.append(example_lines[0])
        self.info.epilog = _epilog(self.examples)

        def add_to_app(function: F) -> F:
            command = self.command(
                name, cls=cls, help=_paragraphs(function.__doc__ or ""), epilog=_epilog(example_lines, more),
                context_settings=SETTINGS, **about,
            )  # fmt: skip
            return command(function)

        return add_to_app


def _paragraphs(docstring: str) -> str:
    """The paragraphs of a docstring, a line each: typer would keep the line breaks of all but the first."""
    return "\n\n".join(" ".join(part.split()) for part in inspect.cleandoc(docstring).split("\n\n"))


def _epilog(examples: list[str], more: str = "") -> str:
    return "\n\n".join(["Examples:", *examples, *([more] if more else [])])
