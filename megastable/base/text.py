"""Text for people: untrusted text made safe to print; counts, ranges, sizes and time spans in words."""

from __future__ import annotations

from collections.abc import Sequence

FOREVER = 1e12  # seconds; its square is more than all bytes there are


def make_visible(text: object, most: int | None = None, keep: str = "") -> str:
    """`text` with invisible characters, and those that change how others are shown, as escapes such as \\x1b or
    \\u202e.

    The result is one line unless `keep` (characters left alone) has the newline. most: number of characters; longer
    text is cut, with an ellipsis.
    """
    whole_text = str(text)
    cut = whole_text if most is None else whole_text[: most + 1]
    shown_text = cut
    if not cut.isprintable():
        shown_text = "".join(c if c.isprintable() or c in keep else escape_character(c) for c in cut)
    return shown_text if most is None or len(shown_text) <= most else shown_text[: most - 1] + "…"


def escape_character(character: str) -> str:
    """One character as an ASCII escape of Python."""
    return character.encode("unicode_escape").decode()


def count_noun(n: int, noun: str) -> str:
    """A count and its noun."""
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}s"


def show_ranges(given: Sequence[tuple[int, int]], most: int = 12) -> str:
    """Half-open ranges [first, end) as text, with both ends included."""
    shown_ranges = ", ".join(str(a) if b == a + 1 else f"{a}-{b - 1}" for a, b in given[:most])
    return shown_ranges + (f" and {count_noun(len(given) - most, 'more range')}" if len(given) > most else "")


def describe_deferral(
    deferred: Sequence[tuple[int, int]],
    returns: Sequence[tuple[int, int]],
    lost: int = 0,
    step: int | None = None,
) -> str:
    """The fate of samples skipped or deferred without being bad; "" if there are none. Ranges [first, end);
    step: about when they are read again."""
    count, fate_texts = sum(range_end - range_first for range_first, range_end in deferred), list[str]()
    if count:
        return_text = f"; read again from position {min(returns)[0]:,}" if returns else ""
        return_text += f" (about step {step:,})" if returns and step is not None else ""
        fate_texts.append(f"{count_noun(count, 'sample')} deferred{return_text}")
    if lost:
        fate_texts.append(f"{count_noun(lost, 'sample')} skipped in this epoch: no room to read them later")
    return ", ".join(fate_texts)


def show_duration(seconds: float) -> str:
    """A time span as text: 0.4 s, 59 s, 3 min 14 s, 12 min, 3 h 20 min, 4 d 3 h; a question mark if it is no number
    that a clock tells."""
    if not abs(seconds) < FOREVER:
        return "?"
    if seconds < 59.5:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    if seconds < 599.5:
        minutes, rest_seconds = divmod(round(seconds), 60)
        return f"{minutes} min {rest_seconds} s" if rest_seconds else f"{minutes} min"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def show_number(value: object, form: str = ".3f") -> str:
    """A number of an event as text; a question mark if it is not a number ("nan" and "inf" are numbers)."""
    try:
        return format(float(value), form)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return "?"


def show_size(of: object) -> str:
    """Bytes as text; a question mark if it is not a number of bytes."""
    if isinstance(of, bool) or not isinstance(of, int | float) or not abs(of) < FOREVER**2:
        return "?"
    return f"{of / 1e9:.3g} GB" if of >= 1e9 else f"{of / 1e6:.3g} MB"


def ranks_on(ranks: Sequence[int], hosts: Sequence[str], most: int = 3) -> str:
    """Ranks with their hosts, as in "ranks 2, 3 on node-1". hosts: of all ranks; most: that are named."""
    hosts_named = list(dict.fromkeys(hosts[rank] for rank in ranks))
    rank_names, host_names = (
        ", ".join(map(str, found[:most])) + (f" and {len(found) - most} more" if len(found) > most else "")
        for found in (ranks, hosts_named)
    )
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {rank_names} on {host_names}"


def show_share(share: float) -> str:
    """A share as a percentage with three figures, however small."""
    return f"{100 * share:.3g} %"
