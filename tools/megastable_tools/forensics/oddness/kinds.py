"""Label the kind of an odd piece by a small table of rules over its features; the first that holds wins."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from megastable_tools.forensics.oddness.features import NAMES, Floats

ODD = 1.0  # minimum score of a piece that is not usual
KINDS = (
    "usual",
    "outside of the vocabulary",
    "binary data",
    "wrong encoding",
    "repetition",
    "encoded data",
    "random tokens",
    "shuffled text",
    "another language or register",
    "odd",
)
# The features that define a kind and explain its pieces. For other kinds, the oddest feature.
MADE_BY: dict[str, tuple[str, ...]] = {
    "outside of the vocabulary": ("outside",),
    "binary data": ("replacements", "controls", "nulls"),
    "wrong encoding": ("nulls", "latin1", "replacements", "foreign"),
    "repetition": ("repeats", "period", "run"),
    "encoded data": ("unbroken",),
    "random tokens": ("unlikely", "order"),
    "shuffled text": ("order", "unlikely"),
    "another language or register": ("unlikely", "order", "foreign"),
}


def looks_like(
    score: Floats,
    medians: npt.NDArray[np.float32],
    scores: npt.NDArray[np.float32],
    features: Mapping[str, Floats],
) -> npt.NDArray[np.int16]:
    """The index in KINDS of each of k pieces. score: [k]; medians: [k, f], the baseline of each; scores: [f, k], of
    every feature; features: name -> [k], with "length"."""
    f = features
    usual = {name: medians[:, number] for number, name in enumerate(NAMES)}
    odd = {name: scores[number] > 0 for number, name in enumerate(NAMES)}
    # Text with two bytes per character has a NUL for each.
    doubled = (f["nulls"] > 0.4) & (f["nulls"] < 0.6)
    rules = {
        "usual": score < ODD,
        "outside of the vocabulary": f["outside"] > 0,
        "binary data": ((f["replacements"] > 0.05) | (f["controls"] > 0.02) | (f["nulls"] > 0.05)) & ~doubled,
        # The last: U+6100 for "a", whose UTF-8 always ends with the same byte.
        "wrong encoding": doubled
        | (odd["latin1"] & (f["latin1"] > 0.01))
        | (odd["replacements"])
        | ((f["foreign"] > 0.95) & (f["top"] > 0.25)),
        "repetition": (odd["repeats"] & (f["repeats"] > 0.5))
        | (odd["period"] & (f["period"] > 0.7))
        | (f["run"] > 0.3 * f["length"]),
        "encoded data": (f["spaces"] < 0.06)
        & (f["letters"] + f["digits"] > 0.8)
        & ((f["capitals"] > 0.2) | (f["digits"] > 0.2)),
        "random tokens": odd["surprise"]
        & (f["gain"] < 0.15 * usual["gain"])
        & (f["entropy"] > usual["entropy"])
        & (f["pairs"] < 0.05),
        "shuffled text": (odd["gain"] | odd["order"]) & ~odd["surprise"] & (f["gain"] < 0.25 * usual["gain"]),
        "another language or register": odd["surprise"] | odd["unlikely"] | odd["foreign"],
    }
    return np.select(list(rules.values()), [KINDS.index(name) for name in rules], KINDS.index("odd")).astype(
        np.int16
    )
