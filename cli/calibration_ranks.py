"""`bpc calibrate` under torchrun: each rank on its own GPU, and one line for all of them when the run fails."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import typer

from bpc_cli.console import note
from bpc_cli.opening import LoadOptions
from bpc_cli.ranks import ranks as started

if TYPE_CHECKING:
    from bpc_calib.calibration.ranks import Ranks

__all__ = ["joined_ranks", "on_own_device"]

SHOW_CURSOR = "\x1b[?25h"  # bars hide it


@contextmanager
def joined_ranks() -> Iterator["Ranks"]:
    """This process among the ranks of torchrun; alone without it. Of several errors one leaves the block as it is."""
    from bpc_calib.calibration.ranks import Ranks, join

    if started() == 1:
        yield Ranks()
        return
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # or its store warns where we say what to do
    from bpc_calib.calibration.watching import watching

    ranks = join()
    with watching(ranks, _say):
        try:
            yield ranks
        except Exception:
            if ranks.claim():
                raise
            raise typer.Exit(1) from None


def on_own_device(load: LoadOptions, ranks: "Ranks") -> LoadOptions:
    """The options for this rank: of several GPUs, the one with its number on this machine.

    Raises:
        InputError: every rank would spread its model over the same GPUs.
    """
    if ranks.count == 1:
        return load
    import torch

    from bpc_calib.errors import InputError

    if load.device_map is not None and os.environ.get("LOCAL_WORLD_SIZE", "1") != "1":
        raise InputError("--device-map spreads a model over all GPUs of a machine: start one rank per machine")
    if load.device_map is None and load.device in ("auto", "cuda") and torch.cuda.is_available():
        return replace(load, device=f"cuda:{os.environ.get('LOCAL_RANK', '0')}")
    return load


def _say(message: str) -> None:
    if sys.stderr.isatty():
        print(SHOW_CURSOR, end="", file=sys.stderr)
    note(f"Error: {message}")
