"""What every command shares: groups of options, one line for an error, and an end in order on Ctrl-C and SIGTERM.

A command's parameter that is annotated with a dataclass stands for one option per field: Typer reads the options from
the signature, and with groups commands share options and keep short signatures. What is wrong whatever the files, the
model and the machine are is wrong usage: `checked` refuses a value, the `__post_init__` of a group refuses values that
do not go together, and a command refuses others in its first lines with `typer.BadParameter`.
"""

import errno
import functools
import inspect
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, NoReturn

import typer
from typer.core import TyperGroup

from bpc_cli.console import drop, note
from bpc_cli.help import COMMON, HelpAll


def command(function: Callable[..., None]) -> Callable[..., None]:
    """Make a function a command for Typer.

    A parameter that is annotated with a dataclass becomes one option per field. An exception becomes one line on stderr
    and an exit status; BPC_DEBUG=1 shows the traceback instead. --help-all joins the options.
    """
    parameters = inspect.signature(function).parameters.values()
    groups: dict[str, Any] = {each.name: each.annotation for each in parameters if is_dataclass(each.annotation)}

    options = {each.name: _options(each) for each in parameters}

    @functools.wraps(function)
    def run(**given: Any) -> None:
        arguments = {}
        for each in parameters:
            values = {option.name: _at_home(given[option.name]) for option in options[each.name]}
            arguments[each.name] = groups[each.name](**values) if each.name in groups else values[each.name]
        try:
            with _terminating():
                function(**arguments)
            sys.stdout.flush()
        except (typer.Exit, typer.Abort, typer.BadParameter):
            raise
        except KeyboardInterrupt:
            note("Interrupted.")
            raise typer.Exit(130) from None
        except Terminated as end:
            note(f"Stopped by {end.signal.name}.")
            raise typer.Exit(128 + end.signal) from None
        except BrokenPipeError:  # the reader, such as `head`, has stopped reading
            drop(sys.stdout)
            raise typer.Exit(0) from None
        except Exception as fault:
            if os.environ.get("BPC_DEBUG"):
                raise
            note(f"Error: {_line(fault)}")
            raise typer.Exit(1) from None

    flat = [option for each in parameters for option in options[each.name]]
    if function.__name__.rstrip("_") in COMMON:
        flat.append(inspect.Parameter("help_all", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=HelpAll))
    run.__signature__ = inspect.Signature(flat)  # type: ignore[attr-defined]
    run.__annotations__ = {option.name: option.annotation for option in flat}
    return run


def _at_home(value: Any) -> Any:
    """Replace a ~ that the shell has left in a path, as in --output=~/file."""
    return Path(os.path.expanduser(value)) if isinstance(value, Path) else value


def _options(parameter: inspect.Parameter) -> list[inspect.Parameter]:
    """The options that a parameter stands for: the fields of a group, or itself."""
    if not is_dataclass(parameter.annotation):
        return [parameter]
    fields = inspect.signature(parameter.annotation).parameters.values()  # type: ignore[arg-type]
    return [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in fields]


def _line(fault: Exception) -> str:
    """What went wrong, in one line."""
    from bpc_artifacts.errors import BPCError
    from bpc_calib.errors import is_out_of_memory

    text = " ".join(str(fault).split())
    if isinstance(fault, OSError) and fault.errno == errno.ENOSPC:
        drop(sys.stdout)
        return f"the output cannot be written: {fault.strerror}"
    if isinstance(fault, BPCError):
        return text
    if is_out_of_memory(fault):
        return "out of memory: try shorter texts, smaller batches, or --device cpu in place of a GPU"
    return f"unexpected {type(fault).__name__}: {text[:300]} (BPC_DEBUG=1 shows the traceback; please report it)"


class Commands(TyperGroup):
    """All commands; wrong usage is one line and exit status 2, in place of Typer's panel."""

    def main(self, *args: Any, **how: Any) -> NoReturn:
        """Run the command line and exit."""
        try:
            sys.exit(super().main(*args, **how | {"prog_name": "bpc", "standalone_mode": False}) or 0)
        except typer.Abort:
            note("Aborted.")
            sys.exit(1)
        except Exception as fault:
            if not hasattr(fault, "format_message"):  # Typer has its errors from Click, as a part of it or the package
                raise
            text, context = " ".join(fault.format_message().split()), getattr(fault, "ctx", None)
            if type(fault).__name__ == "NoArgsIsHelpError":  # its message is the help, whose lines stay
                for line in fault.format_message().splitlines():
                    note(line)
            elif text:
                place = context.command_path if context is not None else "bpc"
                text = text.replace("Value error, ", "").removeprefix("Invalid value: ").rstrip(".")
                note(f"Error: {text} ({place} --help lists the options)")
            sys.exit(2)


@contextmanager
def usage() -> Iterator[None]:
    """In the block, what BPC refuses is wrong usage."""
    from bpc_artifacts.errors import BPCError

    try:
        yield
    except BPCError as fault:
        raise typer.BadParameter(str(fault)) from None


def checked(check: Callable[[Any], object]) -> Callable[[Any], Any]:
    """A callback for an option: `check` may refuse the value before the command begins."""

    def callback(value: Any) -> Any:
        if value is not None:
            with usage():
                check(value)
        return value

    return callback


class Terminated(BaseException):
    """SIGTERM, as from `kill`, a container that stops, or a queue whose time is over; SIGHUP, of a closed terminal."""

    def __init__(self, message: str = "", number: int = signal.SIGTERM) -> None:
        super().__init__(message)
        self.signal = signal.Signals(number)


@contextmanager
def _terminating() -> Iterator[None]:
    """In the block, such a signal raises `Terminated`, so that locks are released and temporary files removed."""

    def end(number: int, frame: Any) -> None:
        signal.signal(number, signal.SIG_DFL)  # a second one ends the process at once
        raise Terminated(number=number)

    numbers = [signal.SIGTERM]
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as of nohup
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, end) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
