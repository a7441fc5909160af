"""The decorator of every command: groups of options, and one line for an error."""

import errno
import functools
import os
import sys
from collections.abc import Callable
from typing import Any

import typer

from bpc_cli.console import drop, note
from bpc_cli.interrupts import Terminated, terminating
from bpc_cli.option_groups import collect_groups, option_signature

__all__ = ["command"]


def command(function: Callable[..., None]) -> Callable[..., None]:
    """Make a function a command for Typer.

    A parameter that is annotated with a dataclass becomes one option per field. An exception becomes one line on stderr
    and an exit status; BPC_DEBUG=1 shows the traceback instead.
    """

    @functools.wraps(function)
    def run(**options: Any) -> None:
        try:
            with terminating():
                function(**collect_groups(function, options))
            sys.stdout.flush()
        except (typer.Exit, typer.Abort, typer.BadParameter):
            raise
        except KeyboardInterrupt:
            note("Interrupted.")
            raise typer.Exit(130) from None
        except Terminated:
            note("Stopped by SIGTERM.")
            raise typer.Exit(143) from None
        except BrokenPipeError:  # the reader, such as `head`, has stopped reading
            drop(sys.stdout)
            raise typer.Exit(0) from None
        except Exception as fault:
            if os.environ.get("BPC_DEBUG"):
                raise
            note(f"Error: {_line(fault)}")
            raise typer.Exit(1) from None

    signature = option_signature(function)
    run.__signature__ = signature  # type: ignore[attr-defined]
    run.__annotations__ = {name: parameter.annotation for name, parameter in signature.parameters.items()}
    return run


def _line(fault: Exception) -> str:
    """What went wrong, in one line."""
    from bpc_artifacts.errors import BPCError

    text = " ".join(str(fault).split())
    if isinstance(fault, OSError) and fault.errno == errno.ENOSPC:
        drop(sys.stdout)
        return f"the output cannot be written: {fault.strerror}"
    if isinstance(fault, BPCError):
        return text
    if isinstance(fault, MemoryError) or type(fault).__name__ == "OutOfMemoryError":  # torch's, without importing torch
        return "out of memory: try shorter texts, smaller batches, or --device cpu (--help lists the options)"
    return f"unexpected {type(fault).__name__}: {text[:300]} (BPC_DEBUG=1 shows the traceback; please report it)"
