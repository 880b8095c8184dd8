"""Count how often a sound rank's gradient stands out, and how often one that is wrong does.

    python -m benchmarks.gradient_doubts --ranks 16 --samples 2 --steps 2500
    python -m benchmarks.gradient_doubts --ranks 3 --samples 4 --steps 6000 --corpora 2

Trains a tiny GPT in one process that plays all data ranks, on samples of 32 tokens: random walks, and with two corpora
also runs of a few ids. --resume 60: what was learnt is forgotten again and again. A doubt is no blame: repeating the
step would clear it.
"""

from __future__ import annotations

import argparse
import math

import numpy as np
import torch
from torch import Tensor
from torch.func import grad, vmap
from torch.nn import functional as F

from megastable.engine.local_gradients import RankGradient
from megastable.hardware.gradient_consistency import Consistency, Kind

LENGTH, IDS, HIDDEN, HEADS, LAYERS = 32, 256, 32, 4, 2
BETAS, DECAY = (0.9, 0.95), 0.1
Weights = dict[str, Tensor]


def weights() -> Weights:
    shapes = {"embedding": (IDS, HIDDEN), "head": (IDS, HIDDEN)}
    for i in range(LAYERS):
        shapes |= {f"qkv{i}": (3 * HIDDEN, HIDDEN), f"out{i}": (HIDDEN, HIDDEN)}
        shapes |= {f"up{i}": (2 * HIDDEN, HIDDEN), f"down{i}": (HIDDEN, 2 * HIDDEN)}
    return {name: 0.02 * torch.randn(shape) for name, shape in shapes.items()}


def loss(w: Weights, tokens: Tensor) -> Tensor:
    """tokens: int64 [samples, LENGTH + 1]."""
    x = F.embedding(tokens[:, :-1], w["embedding"])
    hidden = torch.ones(LENGTH, LENGTH).triu(1).bool()
    for i in range(LAYERS):
        y = F.rms_norm(x, (HIDDEN,))
        q, k, v = (y @ w[f"qkv{i}"].T).unflatten(2, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        scores = (q @ k.transpose(-1, -2)) / math.sqrt(HIDDEN // HEADS)
        mixed = scores.masked_fill(hidden, -1e9).softmax(-1) @ v
        x = x + mixed.transpose(1, 2).flatten(2) @ w[f"out{i}"].T
        x = x + F.silu(F.rms_norm(x, (HIDDEN,)) @ w[f"up{i}"].T) @ w[f"down{i}"].T
    logits = F.rms_norm(x, (HIDDEN,)) @ w["head"].T
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def samples(random: np.random.Generator, count: int, corpora: int) -> Tensor:
    walks = (
        random.integers(1, 250, (count, 1)) + random.integers(-3, 4, (count, LENGTH + 1)).cumsum(1)
    ) % 249
    runs = (random.integers(1, 12, (count, 1)) + random.integers(0, 2, (count, LENGTH + 1)).cumsum(1)) % 11
    return torch.from_numpy(np.where((random.random((count, 1)) < 0.5) & (corpora > 1), runs, walks) + 1)


def seen(gradients: Tensor) -> list[RankGradient]:
    """gradients: fp32 [ranks, parameters]."""
    found, squares, total = [], gradients.double().square().sum(1), gradients.sum(0)
    slices = gradients.shape[1] // len(gradients)
    for d, own in enumerate(gradients):
        part = slice(d * slices, (d + 1) * slices)
        mine, others = own[part].double(), (total - own)[part].double()
        dot, square, rest = float(mine @ others), float(mine @ mine), float(others @ others)
        found.append(RankGradient(0.0, 1.0, float(squares[d]), dot, square, rest, 0.0, 0.0))
    return found


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    for name, value in (("ranks", 4), ("samples", 4), ("steps", 500), ("corpora", 1), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument(
        "--resume", type=int, help="start judging anew every so many steps, as after a resume"
    )
    args = parser.parse_args(arguments)
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    random, w = np.random.default_rng(args.seed), weights()
    first, second = ({name: torch.zeros_like(x) for name, x in w.items()} for _ in range(2))
    backward, judge = vmap(grad(loss), in_dims=(None, 0)), Consistency()
    doubts, judged, hits = 0, 0, dict.fromkeys((Kind.SCALED, Kind.NEGATED), 0)
    for step in range(1, args.steps + 1):
        found = backward(
            w, samples(random, args.ranks * args.samples, args.corpora).unflatten(0, (args.ranks, -1))
        )
        flat = torch.cat([g.flatten(1) for g in found.values()], 1)
        doubts += len(judge.find_doubts(seen(flat)))
        wrong = step % args.ranks
        if step > 30:
            judged += 1
            for kind, times in ((Kind.SCALED, 3.0), (Kind.NEGATED, -1.0)):
                flat[wrong] *= times
                hits[kind] += any(d.kind is kind for d in judge.find_doubts(seen(flat)))
                flat[wrong] /= times
        judge.accept(seen(flat))
        if args.resume and step % args.resume == 0:
            judge = Consistency()
        norm = float(flat.mean(0).norm())
        rate = args.lr * min(1.0, step / 20) * (0.55 + 0.45 * math.cos(math.pi * step / args.steps))
        for name, g in found.items():
            mean = g.mean(0) * min(1.0, 1 / norm)
            first[name].lerp_(mean, 1 - BETAS[0])
            second[name].lerp_(mean.square(), 1 - BETAS[1])
            size = (second[name] / (1 - BETAS[1] ** step)).sqrt() + 1e-8
            w[name] = w[name] - rate * (first[name] / (1 - BETAS[0] ** step) / size + DECAY * w[name])
    print(f"{doubts} doubts in {args.ranks * args.steps:,} clean rank-steps")
    print(", ".join(f"{kind}: {count / max(judged, 1):.1%} found" for kind, count in hits.items()))


if __name__ == "__main__":
    main()
