"""Run `bpc` as a rank of torchrun, with a fault in one rank: `BPC_FAULT` is RANK:STAGE:STEP:KIND.

STAGE is keys or layers, STEP counts the steps of that rank from 0, and KIND is what happens then: kill, stop, hang or
error. The file `fault` gets the time.
"""

import os
import signal
import time
from pathlib import Path

from bpc_calib.calibration import collecting, projecting, watching
from bpc_calib.errors import ModelError
from bpc_cli.main import main


def fault(kind: str) -> None:
    Path("fault").write_text(str(time.time()))
    if kind == "error":
        raise ModelError("the moon is full: wait until it wanes")
    if kind == "hang":
        watching.FIRST_STEP = watching.STEP = 3.0
        time.sleep(1000)
    os.kill(os.getpid(), signal.SIGSTOP if kind == "stop" else signal.SIGKILL)


def spoil(module, name, step, kind):
    """Replace a function by one that fails at its call number `step`."""
    function, calls = getattr(module, name), []

    def spoilt(*arguments, **settings):
        calls.append(name)
        if len(calls) == step + 1:
            fault(kind)
        return function(*arguments, **settings)

    setattr(module, name, spoilt)


if __name__ == "__main__":
    rank, stage, step, kind = os.environ["BPC_FAULT"].split(":")
    if rank == os.environ["RANK"]:
        spoil(*((collecting, "sample_keys") if stage == "keys" else (projecting, "write_layer")), int(step), kind)
    main()
