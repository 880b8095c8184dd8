"""Where a prompt comes from: an option, a file, a pipe, or a person at a terminal."""

from __future__ import annotations

import sys
from pathlib import Path

from megastable.base.errors import DataError


def read_prompt(text: str | None, file: Path | None) -> str | None:
    """The prompt; None where a person sits at the terminal and gave none. A last newline of a file or pipe is left out.

    Raises DataError for a file that cannot be read, or is no UTF-8, and for two prompts.
    """
    if text is not None and file is not None:
        raise DataError("give --prompt or --prompt-file, not both")
    if text is not None:
        return text
    if file is None and sys.stdin.isatty():
        return None
    try:
        content = sys.stdin.buffer.read() if file is None else file.read_bytes()
        return content.decode("utf-8").removesuffix("\n").removesuffix("\r")
    except OSError as error:
        raise DataError(f"the prompt {file or ''} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise DataError(
            f"{file or 'the standard input'}: byte {error.start} is no UTF-8: convert it first"
        ) from None


def ask() -> str:
    """A line of a person, without its end. Raises EOFError, KeyboardInterrupt."""
    if sys.stdout.isatty():
        import readline  # noqa: F401 (arrow keys, and the lines before)

        return input("> ")
    print("> ", end="", file=sys.stderr, flush=True)
    return input()
