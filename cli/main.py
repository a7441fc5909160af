"""The `bpc` entry point."""

import errno
import io
import os
import sys
from typing import Annotated

import typer

from bpc_cli.bench import bench
from bpc_cli.calibrate import calibrate
from bpc_cli.chat import chat
from bpc_cli.command import Commands
from bpc_cli.console import drop, note
from bpc_cli.demo import demo
from bpc_cli.doctor import doctor
from bpc_cli.eval import eval_
from bpc_cli.generate import generate
from bpc_cli.help import Command
from bpc_cli.hub import pull, push
from bpc_cli.inspect import inspect
from bpc_cli.ranks import check_command, only_leader_prints, wait_for_leader
from bpc_cli.serve import serve

app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="BPC: rank the KV cache by 64-bit codes, attend to the best 2 %.",
)
COMMANDS = (demo, doctor, calibrate, inspect, generate, chat, serve, eval_, bench, push, pull)
for each in COMMANDS:
    passed_on = {"allow_extra_args": True, "ignore_unknown_options": True} if each is serve else None
    app.command(each.__name__.rstrip("_"), cls=Command, context_settings=passed_on)(each)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"bpc {version('bpc-calib')}")
        raise typer.Exit


@app.callback()
def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    check_command(context.invoked_subcommand)


def _open_standard_streams() -> None:
    """Send what was closed, as by `>&-`, to nowhere: a file would get its number, and what is printed."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(number)
    sys.stdout = sys.stdout or open(1, "w")  # noqa: SIM115 (until the process ends)
    sys.stderr = sys.stderr or open(2, "w")  # noqa: SIM115


def main() -> None:
    """Run the command line."""
    _open_standard_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # print ? where the terminal lacks a character
            stream.reconfigure(errors="replace")
    only_leader_prints()
    try:
        app()
    except KeyboardInterrupt:  # before or after a command
        sys.exit(130)
    except OSError as fault:  # of the help, which stands before a command
        if fault.errno != errno.ENOSPC:
            raise
        drop(sys.stdout)
        note(f"Error: the output cannot be written: {fault.strerror}")
        sys.exit(1)
    except SystemExit as ended:
        if isinstance(ended.__context__, BrokenPipeError):  # the reader of the help, or of a table, has left
            sys.exit(0)
        if ended.code in (1, 2):
            wait_for_leader()
        raise
