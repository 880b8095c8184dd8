"""What the process above the training is told: when it loses patience, whom it tells. Part of the tree of config.py."""

from __future__ import annotations

import re

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, field_serializer

from megastable.part import Part

# Of an address: what follows the host is a password, and so is what stands before an @.
ADDRESS = re.compile(r"""(\w+://)([^/?#\s'"@]*@)?([^/?#\s'"@]*)([/?#][^\s'",}\]]+)?""")
REDACTED = "<redacted>"
SECRETS = ("webhook", "command")  # keys that may hold an address


def redacted(text: str) -> str:
    """`text` without the secrets of the addresses in it. One that names a $VARIABLE holds none."""

    def shown(found: re.Match[str]) -> str:
        scheme, user, host, rest = found.groups(default="")
        if "$" in user + rest or not (user or rest):
            return found[0]
        return f"{scheme}{host}/{REDACTED}"

    return ADDRESS.sub(shown, text)


def redacted_override(assignment: str) -> str:
    """An override of the command line, as it may be written down and shown to other users."""
    key, equals, value = assignment.partition("=")
    return f"{key}{equals}{redacted(value)}" if key.split(".")[0] == "supervise" else assignment


class SuperviseConfig(Part):
    """Budgets of restarts are in stability.policy, like all others.

    Hangs: a step may take hang_factor times the median of the last ones, never less than hang_floor; all else (the
    start, a checkpoint, a rewind) hang_unknown, or hang_factor times the longest of its kind where that is more. Ten
    times is far beyond a slow file system and far below a night. grace_seconds: from a rank's death to the end of the
    others, for their last words. stop_seconds: for the checkpoint after SIGTERM. backoff_seconds: at most, between
    restarts that lead nowhere.

    An address in `webhook` or `command` is a password: what is written of this configuration has `REDACTED` instead.
    """

    hang_factor: PositiveFloat = 10.0
    hang_floor: PositiveFloat = 30.0
    hang_unknown: PositiveFloat = 1800.0
    grace_seconds: NonNegativeFloat = 2.0
    stop_seconds: PositiveFloat = 900.0
    backoff_seconds: NonNegativeFloat = 60.0
    command: str | None = None  # started on every incident: JSON on its standard input
    webhook: str | None = None  # gets the same JSON by POST; best a $VARIABLE of the environment
    notify_seconds: NonNegativeFloat = (
        60.0  # at least, between two notifications; what comes in between is folded
    )
    hook_timeout: PositiveFloat = 10.0
    metrics_port: NonNegativeInt = Field(default=0, le=65535)  # Prometheus on 127.0.0.1; 0 = none
    gpu_hour_price: PositiveFloat | None = None  # for the costs in post-mortems
    currency: str = "USD"

    @field_serializer(*SECRETS)
    def _without_secrets(self, value: str | None) -> str | None:
        return None if value is None else redacted(value)

    @property
    def exposed(self) -> list[str]:
        """Warnings about passwords that are written out, without them."""
        return [
            f"supervise.{key} holds an address that is written out: whoever sees the recipe, the command line or the "
            f"list of processes has it. Export it as a variable and name that: supervise.{key}='$NAME'. It is left out "
            "of everything that is written here; make a recipe that holds it private (chmod 600)"
            for key in SECRETS
            if (value := getattr(self, key)) is not None and redacted(value) != value
        ]
