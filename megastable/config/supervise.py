"""Defines the supervisor's settings: hang limits, notifications, redaction. Part of the tree of config/tree.py."""

from __future__ import annotations

import re
from string import Template
from typing import Annotated

import yaml
from pydantic import (
    Field,
    FieldSerializationInfo,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    field_serializer,
)

from megastable.config.training import PositiveSeconds, Seconds
from megastable_guard.section import Section

REDACTED = "<redacted>"
SECRETS = ("webhook", "command")  # keys that may hold a password
# Of an address: what precedes the last @ of its host is a password, and so is what follows the host.
ADDRESS = r"\b\w+://(?:(?P<user>[^/?#{0}]*)@)?(?P<host>[^/?#@{0}]*)[/?#]?(?P<rest>[^{0}]*)"
WEBHOOK = re.compile(ADDRESS.format(r"\0"))
# In a command: addresses, headers and options with a token.
NAMES = r"[\w-]*(?:authorization|token|secret|passw(?:or)?d|api[-_]?key)"
BLANK = r"[\s\\]"  # also one that is escaped
COMMAND = re.compile(
    ADDRESS.format(r"\s'\"")
    + rf"|(?<![\w-])(?:{NAMES}['\"]?{BLANK}*[:=]{BLANK}*(?:(?:bearer|basic|token){BLANK}+)?"
    + rf"|-{NAMES}{BLANK}+|bearer{BLANK}+)(?P<token>'[^']*'|\"[^\"]*\"|[^\s'\"]+)",
    re.IGNORECASE,
)
HOST = re.compile(r"(?:[\w.${}-]*|\[[\w.:%]*\])(?::(?:\d|\$)[\w{}]*)?")


def find_passwords(key: str, text: str) -> list[tuple[int, int]]:
    """Spans of passwords in `text`, the value of `key`, in order. A $VARIABLE is none."""
    if key == "webhook":
        whole_match = WEBHOOK.fullmatch(text)
        password_spans = [(0, len(text))] if whole_match is None else _of(whole_match)
    else:
        password_spans = [span for address_match in COMMAND.finditer(text) for span in _of(address_match)]
    return [
        (range_begin, range_end)
        for range_begin, range_end in password_spans
        if _written_out(text[range_begin:range_end])
    ]


def _of(found: re.Match[str]) -> list[tuple[int, int]]:
    named_groups = found.groupdict()
    if named_groups["host"] is not None and HOST.fullmatch(named_groups["host"]):
        del named_groups["host"]
    return sorted(found.span(group_name) for group_name, group_text in named_groups.items() if group_text)


def _written_out(text: str) -> bool:
    """Whether it has more than variables and punctuation. $$ is a dollar."""
    rest = Template.pattern.sub(lambda found: "" if found["named"] or found["braced"] else found[0], text)
    return re.search(r"[^\W_]", rest.replace(REDACTED, "")) is not None


def redact_value(key: str, text: str) -> str:
    """`text`, the value of `key`, with passwords redacted."""
    for range_begin, range_end in reversed(find_passwords(key, text)):
        text = text[:range_begin] + REDACTED + text[range_end:]
    return text


def redact_override(assignment: str) -> str:
    """An override of the command line, safe to write down and to show to other users."""
    dotted_key, equals, text = assignment.partition("=")
    section_name, _, key = dotted_key.partition(".")
    if section_name != "supervise" or (key and key not in SECRETS):
        return assignment
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return f"{dotted_key}{equals}{REDACTED}"
    if key:
        shown_value = redact_value(key, value) if isinstance(value, str) else value
    elif isinstance(value, dict):
        shown_value = {
            k: redact_value(k, v) if k in SECRETS and isinstance(v, str) else v for k, v in value.items()
        }
    else:
        shown_value = value
    if shown_value == value:
        return assignment
    written_value = yaml.safe_dump(shown_value, default_flow_style=True, sort_keys=False, width=1 << 30)
    return f"{dotted_key}{equals}{written_value.strip().removesuffix('...').strip()}"


class SuperviseConfig(Section):
    """The supervisor (docs/clusters.md). Budgets of restarts are in `stability.policy`, with all others.

    A step may take `hang_factor` times the median of the last ones, at least `hang_floor`; all else (the start, a
    checkpoint, a rewind) `hang_unknown`, or `hang_factor` times the longest of its kind where that is more. Once three
    of a kind were seen, 300 seconds take the place of a longer `hang_unknown`. Ten times is far beyond a slow file
    system and far below a night.

    A webhook is a password but for its host, and so are the addresses and tokens in `command`: written copies of this
    configuration have `<redacted>` instead.
    """

    hang_factor: PositiveFloat = 10.0
    """Multiple of the usual duration after which a step counts as hung."""
    hang_floor: PositiveSeconds = 30.0
    """Least duration of a step that counts as hung. [seconds]"""
    hang_unknown: PositiveSeconds = 1800.0
    """Duration after which anything but a step counts as hung. [seconds]"""
    grace_seconds: Seconds = 2.0
    """Time for last words between the death of a rank and the end of the others. [seconds]"""
    stop_seconds: PositiveSeconds = 900.0
    """Time for the checkpoint after SIGTERM. [seconds]"""
    host_silence: PositiveSeconds = 30.0
    """Time without a word from a host, after which it counts as gone if it cannot be reached either. [seconds]"""
    wait_for_hosts: Seconds = 1800.0
    """Time to wait for a host that is gone before the run ends (exit code 80). [seconds]"""
    spares: NonNegativeInt = 0
    """How many of the hosts, the last ones of the host file, only stand by to take the place of another."""
    shrink_after: Seconds | None = 120.0
    """Time to wait for a host without a spare before the run goes on with fewer data-parallel ranks, where the layout
    and the global batch allow it; it grows again when the host is back. null: never. [seconds]"""
    cool_off: Seconds = 600.0
    """Time for which a host that failed is the last choice, and does not make a smaller run grow; doubled with every
    failure. [seconds]"""
    burn_in: Seconds = 1800.0
    """Time of the burn-in that a host which computed wrong must pass, after its cool-off, before it is used again;
    0: none. [seconds]"""
    slow_host: Annotated[float, Field(gt=1.0)] | None = 1.1
    """How many times as long as on other hosts a rank's own work must take, for a hundred steps and more, for its host
    to be reported as slow. null: hosts are not compared."""
    replace_slow: NonNegativeFloat | None = 0.1
    """Share of a step that a slow host must cost for a spare to take its place. null: it is only reported."""
    interface: str | None = Field(default=None, examples=["eth0", "10.0.0.1"])
    """Network interface, or address (IPv4, or IPv6 that is not link-local), that the supervisor listens on for its
    ranks; null: 127.0.0.1 on one host, on several the one that leads to the others."""
    backoff_seconds: Seconds = 60.0
    """Longest pause between restarts that make no progress. [seconds]"""
    command: str | None = Field(default=None, examples=["mail -s incident me@example.org"])
    """Started on every incident, with JSON on its standard input."""
    webhook: str | None = Field(default=None, examples=["$WEBHOOK"])
    """Receives the same JSON by POST; best the name of an environment variable, as `$WEBHOOK`."""
    notify_seconds: Seconds = 60.0
    """Least time between two notifications; events in between are folded into one. [seconds]"""
    hook_timeout: PositiveSeconds = 10.0
    """Time limit of `command` and `webhook`. [seconds]"""
    metrics_port: NonNegativeInt = Field(default=0, le=65535)
    """Prometheus metrics on `metrics_address`; 0: none. [port]"""
    metrics_address: str = Field(default="127.0.0.1", examples=["10.0.0.1"])
    """Address that Prometheus metrics are served on; whoever reaches it can read them."""
    gpu_hour_price: PositiveFloat | None = Field(default=None, examples=[2.5])
    """For the cost in post-mortems; null: no cost. [`currency`]"""
    currency: str = "USD"
    """Currency of `gpu_hour_price`."""

    @field_serializer(*SECRETS)
    def _without_secrets(self, value: str | None, info: FieldSerializationInfo) -> str | None:
        return None if value is None else redact_value(info.field_name, value)

    @property
    def exposed(self) -> list[str]:
        """Warnings about passwords in plain text, without showing them."""
        return [
            f"supervise.{key} holds a password that is written out: whoever sees the recipe, the command line or the "
            f"list of processes has it. Export it as a variable and name that: supervise.{key}='$NAME'. It is left out "
            "of everything that is written here; make a recipe that holds it private (chmod 600)"
            for key in SECRETS
            if (value := getattr(self, key)) is not None and find_passwords(key, value)
        ]
