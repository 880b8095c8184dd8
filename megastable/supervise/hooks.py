"""Starts the hooks of a recipe: a command, or a webhook (posted by our own command, webhook.py).

A hook gets a notice as JSON on standard input, and event, text and scalar facts in the environment (MEGASTABLE_EVENT,
MEGASTABLE_TEXT, MEGASTABLE_RUN, ...); no shell reads it. $VARIABLES in the recipe come from the environment at run
time, so that recipes hold no secrets; $$ is a dollar. A command should still read its secrets from the environment
itself: arguments are visible to other users, and the last output of a failing command is reported.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any
from urllib.parse import urlsplit

from megastable.base.errors import ConfigError
from megastable.base.text import visible
from megastable.cluster.child_process import ChildProcess, Result
from megastable.config.supervise import REDACTED, SuperviseConfig, hidden
from megastable.run.directory import as_json

WEBHOOK = Path(__file__).with_name("webhook.py")


@dataclass(frozen=True)
class Hook:
    """kind: command or webhook, as in the recipe; text: its value there; seconds: time limit."""

    kind: str
    text: str
    seconds: float

    def check(self) -> None:
        """Raises ConfigError if the hook cannot work."""
        if REDACTED in self.text:
            raise ConfigError(
                f"supervise.{self.kind}: its password was left out when this recipe was written: give it again, best "
                f"as a variable of the environment (supervise.{self.kind}='$NAME'), or supervise.{self.kind}=null for "
                "none"
            )
        words, _ = self._resolved()
        if shutil.which(words[0]) is None:
            raise ConfigError(
                f"supervise.command: {visible(shlex.split(self.text)[0], 200)!r} is not a program that can be "
                "started: give its path, and make it executable"
            )

    def start(self, content: Mapping[str, Any]) -> ChildProcess:
        """Raises ConfigError, OSError or ValueError when it cannot be started."""
        words, more = self._resolved()
        environment = {**os.environ, **_variables(content), **more}
        return ChildProcess(words, self.seconds, as_json(content).encode(), environment)

    def problem(self, result: Result) -> str:
        """Why it failed, safe to show; "" if it did not."""
        webhook = self.kind == "webhook"
        where = f"{urlsplit(_address(self.text)).hostname}: " if webhook else ""
        code, tail = result.code, result.tail
        if code is None:
            return f"{where}not done after {self.seconds:g} s, and ended (supervise.hook_timeout)"
        if code == 0:
            return ""
        if webhook and code == 1:
            return self.safe(where + tail)
        how = f"ended with code {code}" if code > 0 else f"was killed by signal {-code}"
        return self.safe(f"{where}{how}{': ' if tail else ''}{tail}")

    def safe(self, problem: str) -> str:
        """`problem` without secrets: neither values of variables nor anything else that is redacted."""
        values = [os.environ.get(name, "") for name in Template(self.text).get_identifiers()]
        for used in [self.text, Template(self.text).safe_substitute(os.environ)]:
            parts = [used[begin:end] for begin, end in hidden(self.kind, used)]
            values += [v for part in parts for v in (part, part.partition("?")[2])]
        for secret in sorted({v for v in values if len(v) > 3}, key=len, reverse=True):
            problem = problem.replace(secret, "…")
        return visible(problem, 500)

    def _resolved(self) -> tuple[list[str], dict[str, str]]:
        """The words of the command and the variables added to its environment. Raises ConfigError."""
        if self.kind == "webhook":
            words = [sys.executable, "-I", str(WEBHOOK), f"{self.seconds:.3f}"]
            return words, {"MEGASTABLE_WEBHOOK": _address(self.text)}
        return _words(self.text), {}


def hooks_of(config: SuperviseConfig) -> list[Hook]:
    """The hooks of a recipe."""
    texts = {"command": config.command, "webhook": config.webhook}
    return [Hook(kind, text, config.hook_timeout) for kind, text in texts.items() if text is not None]


def check(config: SuperviseConfig) -> None:
    """Raises ConfigError if a hook cannot work, before an unattended run relies on it."""
    for hook in hooks_of(config):
        hook.check()


def _words(text: str) -> list[str]:
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"supervise.command: {error}: close the quotes") from None
    if not words:
        raise ConfigError("supervise.command is empty: leave it out to have none")
    # Split first: a value with blanks or quotes stays one word.
    first, *rest = [_expanded(word, "command") for word in words]
    return [os.path.expanduser(first), *rest]


def _address(text: str) -> str:
    url = _expanded(text, "webhook")
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    # Not shown: beyond the host, a webhook's address is a password.
    if not host or parts.scheme not in ("http", "https") or port == 0:
        raise ConfigError(
            "supervise.webhook is not an address: it must begin with https:// or http:// and a host"
        )
    if parts.username is not None or not url.isascii() or not url.isprintable() or " " in url:
        raise ConfigError(
            f"supervise.webhook at {visible(host)}: no user, blanks or special characters may stand in the address: "
            "percent-encode them"
        )
    return url


def _expanded(text: str, key: str) -> str:
    try:
        return Template(text).substitute(os.environ)
    except KeyError as error:
        raise ConfigError(
            f"supervise.{key}: the environment has no variable {error.args[0]}: export it, or write it out"
        ) from None
    except ValueError:
        raise ConfigError(f"supervise.{key}: a $ without a name: write $$ for a dollar") from None


def _variables(content: Mapping[str, Any]) -> dict[str, str]:
    """Scalar facts as environment variables."""
    plain = {k: v for k, v in content["facts"].items() if isinstance(v, str | int | float)}
    named = {
        re.sub(r"\W", "_", str(key), flags=re.ASCII).upper(): visible(v, 8000) for key, v in plain.items()
    }
    named |= {"EVENT": content["event"], "TEXT": content["text"]}
    return {f"MEGASTABLE_{key}": value for key, value in named.items()}
