"""Wrong usage, such as an unknown option, in one line."""

import sys
from typing import NoReturn

import typer

from bpc_cli.console import note

__all__ = ["run_app"]


def run_app(app: typer.Typer) -> NoReturn:
    """Run the command line and exit; wrong usage is one line and exit status 2, in place of Typer's panel."""
    try:
        sys.exit(app(prog_name="bpc", standalone_mode=False) or 0)
    except typer.Abort:
        note("Aborted.")
        sys.exit(1)
    except Exception as fault:
        if not hasattr(fault, "format_message"):  # Typer has its errors from Click, as a part of it or from the package
            raise
        text, context = " ".join(fault.format_message().split()), getattr(fault, "ctx", None)
        if text:  # without, Typer has printed the help
            place = context.command_path if context is not None else "bpc"
            note(f"Error: {text.rstrip('.')} ({place} --help lists the options)")
        sys.exit(2)
