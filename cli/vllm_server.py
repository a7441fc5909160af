"""The process of `bpc serve`: vLLM's server, where a usage error is one line instead of all of vLLM's options."""

import difflib
import sys
from dataclasses import fields
from typing import NoReturn

from vllm.entrypoints.launchers.api_server import entry
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

from bpc_cli.options import CacheOptions


class OneLine(FlexibleArgumentParser):  # type: ignore[misc]
    """vLLM's parser, which suggests options of vLLM and of `bpc serve` with a similar name."""

    def error(self, message: str) -> NoReturn:
        """Print what is wrong and exit 2."""
        name = message.removeprefix("unrecognized arguments: ").split("=")[0].split(maxsplit=1)[0]
        own = [f"--{field.name.replace('_', '-')}" for field in fields(CacheOptions)]
        similar = difflib.get_close_matches(name, [*own, *self._option_string_actions])
        possible = f" (Possible options: {', '.join(similar)})" if name.startswith("-") and similar else ""
        print(f"Error: vLLM: {' '.join(message.split())}{possible}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    make_arg_parser(OneLine()).parse_args()
    entry.main()
