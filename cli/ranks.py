"""Many processes of torchrun that speak with one voice, each on its own device."""

import io
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from bpc_cli.console import drop, fail, note

__all__ = ["one_voice", "rank_device", "ranks"]

ALONE = 5.0  # seconds; torchrun ends the other processes within a fraction of one when a process has failed


def ranks() -> int:
    """The number of processes that torchrun has started; 1 without torchrun."""
    return int(os.environ["WORLD_SIZE"]) if "TORCHELASTIC_RUN_ID" in os.environ else 1


@contextmanager
def one_voice() -> Iterator[None]:
    """In the block, which ends by `SystemExit`, only rank 0 prints; another rank says the error that it alone has."""
    if ranks() == 1:
        yield
        return
    rank = int(os.environ["RANK"])
    _results_apart() if rank == 0 else drop(sys.stdout)
    stderr, held = sys.stderr, io.StringIO()
    if rank:
        sys.stderr = held
    try:
        yield
    except SystemExit as end:
        if not end.code:
            _leave()
        elif said := held.getvalue().strip():
            time.sleep(ALONE)
            sys.stderr = stderr
            note(f"Rank {rank}: {said.splitlines()[-1]}")
        raise
    finally:
        sys.stderr = stderr


def _results_apart() -> None:
    """Let only Python write to stdout, and C libraries to stderr: gloo of torch 2.8 reports its connections."""
    sys.stdout.flush()
    sys.stdout = os.fdopen(os.dup(1), "w", encoding=sys.stdout.encoding, errors="replace")
    os.dup2(2, 1)


def _leave() -> None:
    """Leave the process group, if this process is in one; NCCL warns otherwise."""
    if "torch.distributed" in sys.modules:
        import torch

        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def rank_device(name: str) -> str:
    """The device of this process: transformers gives each process on a machine the GPU of its number, or the CPU."""
    import torch

    gpus, here = torch.cuda.device_count(), int(os.environ["LOCAL_WORLD_SIZE"])
    kind = "cuda" if gpus else "cpu"
    if name not in ("auto", kind):
        hide = " (CUDA_VISIBLE_DEVICES= hides the GPUs)" if gpus else ""
        fail(f"--device {name}: under torchrun each process takes {'a GPU' if gpus else 'the CPU'}: leave it out{hide}")
    if not gpus:
        return kind
    if here > gpus:
        fail(f"torchrun started {here} processes on this machine, which has {gpus} GPUs: --nproc-per-node {gpus}")
    return f"cuda:{os.environ['LOCAL_RANK']}"
