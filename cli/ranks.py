"""Many processes of torchrun, each on its own device, of which the leader alone prints."""

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

from bpc_cli.command import Terminated
from bpc_cli.console import drop, fail, note

if TYPE_CHECKING:
    from bpc_calib.calibration.ranks import Ranks

IN_SEVERAL = ("calibrate", "generate")  # the commands that run in several processes
LEADER_SECONDS = 30  # for the leader: it may still be importing
REPORT_SECONDS = 1  # for the process that says why the run ends: torchrun ends it when another one has ended
SIGNALS = {
    signal.SIGINT: "interrupted",
    signal.SIGTERM: "torchrun has ended the run (SIGTERM), as it does when a process has died",
}


def ranks() -> int:
    """The number of processes that torchrun has started; 1 without torchrun."""
    return int(os.environ["WORLD_SIZE"]) if "TORCHELASTIC_RUN_ID" in os.environ else 1


def only_leader_prints() -> None:
    """From here on, rank 0 alone prints results, and one process per machine prints messages."""
    if ranks() == 1:
        return
    if os.environ["RANK"] == "0":
        _results_apart()
    else:
        drop(sys.stdout)
    if os.environ["LOCAL_RANK"] != "0":
        _be_silent()


def wait_for_leader() -> None:
    """Let the leader print its error first: torchrun ends all processes when one has failed."""
    if ranks() > 1 and sys.stderr is not sys.__stderr__:  # this process is silent
        time.sleep(LEADER_SECONDS)  # torchrun's SIGTERM ends it


def check_command(name: str | None) -> None:
    """End the process unless this command runs in as many processes as torchrun has started."""
    if ranks() > 1 and name not in IN_SEVERAL:
        runs = " and ".join(IN_SEVERAL)
        note(f"Error: bpc {name} runs in one process, and torchrun has started {ranks()}: only {runs} run in several")
        raise typer.Exit(1)


def check_shared(shared: bool) -> None:
    """Refuse --tensor-parallel in one process."""
    if shared and ranks() == 1:
        raise typer.BadParameter(
            "--tensor-parallel shards a model over several processes: start them with "
            "torchrun --nproc-per-node N -m bpc_cli calibrate ... --tensor-parallel"
        )


@contextmanager
def joined_ranks() -> Iterator["Ranks"]:
    """This process among the ranks of torchrun, where rank 0 alone prints; alone without torchrun.

    Of the errors of all ranks, the first one leaves the block as it is, and its process may print; a signal of
    `SIGNALS` is such an error. The other processes end with status 1.
    """
    from bpc_calib.calibration.ranks import Ranks, join

    if ranks() == 1:
        yield Ranks()
        return
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # or its store warns where we say what to do
    joined = join()
    if joined.rank:
        _be_silent()
    before = {each: signal.signal(each, _end) for each in SIGNALS}
    try:
        yield joined
        _leave()
    except (Exception, Terminated) as fault:
        _ignore_signals()
        if not joined.claim():
            time.sleep(REPORT_SECONDS)
            os._exit(1)
        if sys.__stderr__ is not None:
            sys.stderr = sys.__stderr__
        if isinstance(fault, Terminated):
            fail(f"{fault}: {joined.advice}")
        if _is_lost_rank(fault):
            fail(f"a rank has ended, or cannot be reached: {joined.advice}")
        raise
    for each, handler in before.items():
        signal.signal(each, handler)


def _end(number: int, frame: object) -> None:
    """Raise what stands for a signal, once: torchrun may send a second one."""
    _ignore_signals()
    raise Terminated(SIGNALS[signal.Signals(number)])


def _ignore_signals() -> None:
    for each in SIGNALS:
        signal.signal(each, signal.SIG_IGN)


def own_device(name: str, *, shared: bool) -> str:
    """The device of this process among several: the GPU of its number on its machine, or the CPU.

    `shared`: transformers places the parts of one model, on GPUs where there are some.
    """
    import torch

    gpus, here = torch.cuda.device_count(), int(os.environ["LOCAL_WORLD_SIZE"])
    if name == "cpu" and not (gpus and shared):
        return name
    if name not in ("auto", "cuda" if gpus else "cpu"):
        hide = " (CUDA_VISIBLE_DEVICES= hides the GPUs)" if gpus else ""
        fail(f"--device {name}: under torchrun each process takes {'a GPU' if gpus else 'the CPU'}: leave it out{hide}")
    if here > gpus > 0:
        fail(f"torchrun started {here} processes on this machine, which has {gpus} GPUs: --nproc-per-node {gpus}")
    return f"cuda:{os.environ['LOCAL_RANK']}" if gpus else "cpu"


def _results_apart() -> None:
    """Let only Python write to stdout, and C libraries to stderr: gloo of torch 2.8 reports its connections."""
    sys.stdout.flush()
    sys.stdout = os.fdopen(os.dup(1), "w", encoding=sys.stdout.encoding, errors="replace")
    os.dup2(2, 1)


def _be_silent() -> None:
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115 (until the process ends)


def _is_lost_rank(fault: Exception) -> bool:
    """Whether an error says that another process does not answer: NCCL has a type for it, gloo only its name."""
    import torch

    return isinstance(fault, torch.distributed.DistError) or (type(fault) is RuntimeError and "gloo" in str(fault))


def _leave() -> None:
    """Leave the process group, if this process is in one; NCCL warns otherwise."""
    import torch

    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
