"""Names of the kernels that compute the model."""

from __future__ import annotations

from dataclasses import dataclass

import torch

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class Kernels:
    """attention: of `cores.CORES`; loss: "reference" or "chunked"; compile: every block by torch.compile. fp8: "off",
    "emulated" or "te".

    notes: requested kernels that are unavailable, each with the reason and the fallback.
    """

    attention: str = "sdpa"
    loss: str = "reference"
    compile: bool = False
    fp8: str = "off"
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        blocks = "compiled" if self.compile else "not compiled"
        fp8 = f", FP8 {self.fp8}" if self.fp8 != "off" else ""
        return f"attention {self.attention}, loss {self.loss}, blocks {blocks}{fp8}"

    @property
    def replaceable(self) -> dict[str, str]:
        """What plain PyTorch can compute in place of each kind of these kernels, by kind: its name. A
        name has torch's version: after an update it is another kernel."""
        of = f"of torch {torch.__version__}"
        names = {
            "compile": f"torch.compile {of}" if self.compile else "",
            "attention": f"attention {self.attention} {of}" if self.attention != "reference" else "",
            "loss": f"chunked loss {of}" if self.loss == "chunked" else "",
        }
        return {kind: name for kind, name in names.items() if name}

    @property
    def whole_blocks(self) -> bool:
        """Whether a block is compiled as one graph: Transformer Engine's attention cannot be part of one."""
        return self.attention != "te"


PLAIN = Kernels()
