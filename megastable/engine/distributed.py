"""Join and leave the process group, and choose this rank's device."""

from __future__ import annotations

import contextlib
import datetime
import gc
import io
import os
import socket
from collections.abc import Iterator

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch.distributed.rendezvous import rendezvous as meet

from megastable.base.errors import MegastableError, RendezvousError
from megastable.base.hardware import ranks_of_host
from megastable.base.reproducible import prepare_determinism
from megastable.engine import patches


def start_distributed(timeout: float, deterministic: bool = False, rendezvous: float = 60.0) -> None:
    """Join the process group that the launcher describes in the environment.

    timeout: seconds before a collective counts as hung. rendezvous: ... before the ranks must have met. deterministic:
    `run.deterministic`, for this process from now on. Raises RendezvousError.
    """
    if deterministic:
        prepare_determinism()
    # DeepSpeed runs the garbage collector repeatedly while it builds an engine: imported modules are not garbage.
    gc.freeze()
    patches.patch_at_start()
    if choose_device().type == "cuda":
        _take_gpu()
        if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
            # Evaluation and recomputation allocate other sizes than training: without it the memory fragments.
            # The second name warns in newer torch, and older versions have no other.
            allocator_settings = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
            (allocator_settings or torch.cuda.memory._set_allocator_settings)("expandable_segments:True")
    else:
        patches.patch_for_cpu()
        if "OMP_NUM_THREADS" not in os.environ:
            # Ranks of one host share its cores; by default every rank would start a thread per core.
            torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ranks_of_host()))
    backend_name = "nccl" if choose_device().type == "cuda" else "gloo"
    try:
        # A limit of its own: torch would wait for a host that is gone as long as for a collective.
        store, rank, world = next(meet("env://", timeout=datetime.timedelta(seconds=rendezvous)))
        collective_limit = datetime.timedelta(seconds=timeout)
        store.set_timeout(collective_limit)
        dist.init_process_group(
            backend_name, store=store, rank=rank, world_size=world, timeout=collective_limit
        )
        with silence_stdout():
            deepspeed.init_distributed(dist_backend=backend_name, timeout=collective_limit, verbose=False)
    except (dist.DistNetworkError, dist.DistStoreError) as network_error:
        meeting_place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise RendezvousError(
            f"the ranks cannot meet at {meeting_place}: {str(network_error).splitlines()[0]}. If another run is on "
            "this host, give this one a port of its own: deepspeed --master_port 29600 ...; if some only start slowly, "
            "a longer run.rendezvous"
        ) from None


def _take_gpu() -> None:
    """Make this rank's GPU the current one: NCCL's object collectives use the current device, by default GPU 0."""
    try:
        torch.cuda.set_device(choose_device())
    except RuntimeError as cuda_error:  # too old a driver, more ranks than GPUs, a GPU that fell off the bus
        raise MegastableError(
            f"rank {os.environ.get('RANK', '0')} on {socket.gethostname()} cannot use {choose_device()} of "
            f"{torch.cuda.device_count()}: {str(cuda_error).splitlines()[0]} (nvidia-smi shows the driver and "
            "the GPUs; every rank must see all of its host; DS_ACCELERATOR=cpu trains without)"
        ) from None


def stop_distributed() -> None:
    """Leave the process group in step; without the barrier ranks sometimes abort at exit."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def choose_device() -> torch.device:
    """The device of this rank: DS_ACCELERATOR=cpu keeps a run off the GPUs."""
    if get_accelerator().device_name() == "cpu":
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


@contextlib.contextmanager
def silence_stdout() -> Iterator[None]:
    """Silence DeepSpeed's partitioning and settings on stdout; ours are in the run directory."""
    with contextlib.redirect_stdout(io.StringIO()):
        yield
