"""DeepSpeed's engines and optimizer wrappers behind a narrow interface; the only folder that imports deepspeed."""

import os

from megastable.base.hardware import has_gpu

# Set before anything imports deepspeed: otherwise it calls torch.cuda.is_available(), which initialises CUDA, and warns
# on every rank without a GPU.
os.environ.setdefault("DS_ACCELERATOR", "cuda" if has_gpu() else "cpu")
