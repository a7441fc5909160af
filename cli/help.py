"""The help of a command on one screen: its common options; `--help-all` shows the others too."""

from typing import Annotated, Any

import typer
from typer.core import TyperCommand

# Of the commands that have more options than a screen shows.
COMMON = {
    "calibrate": "model corpus samples sequence-length output force device device-map dry-run json quiet",
    "generate": "model artifact prompt prompt-file prompt-cache preset budget exact max-new-tokens temperature device "
    "compare json quiet",
    "chat": "model artifact system prompt-file session preset budget exact max-new-tokens temperature device json "
    "quiet",
    "eval": "model artifact tasks lengths preset budgets methods prompts corpus output plot json quiet",
    "bench": "parts lengths budgets batch-sizes shape model output json quiet",
}


class Command(TyperCommand):
    """A command whose help is plain text, common options first."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the sections of options."""
        common = COMMON.get(str(self.name), "").split()
        records: dict[str, list[tuple[str, str]]] = {"Common options": [], "More options": []}
        for each in self.get_params(ctx):
            if (record := each.get_help_record(ctx)) is not None:
                is_common = not common or each.opts[0].lstrip("-") in (*common, "help", "help-all")
                records["Common options" if is_common else "More options"].append(record)
        for title, found in records.items():
            if found and (title == "Common options" or ctx.meta.get(ALL)):
                with formatter.section(title if common else "Options"):
                    formatter.write_dl(found)


ALL = "bpc_cli.help_all"


def _show_all(context: typer.Context, wanted: bool) -> None:
    if wanted:
        context.meta[ALL] = True
        print(context.get_help())
        raise typer.Exit


HelpAll = Annotated[
    bool,
    typer.Option("--help-all", callback=_show_all, is_eager=True, help="Show the less common options too, and exit."),
]
