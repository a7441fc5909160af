"""Reading the values of options: lists, numbers, budgets and layers."""

from decimal import Decimal

from bpc_cli.console import fail

__all__ = ["parse_budget", "parse_budgets", "parse_counts", "parse_layers", "split"]


def split(text: str) -> list[str]:
    """The parts of `a, b`, each once."""
    return list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


def parse_counts(text: str, option: str) -> tuple[int, ...]:
    """The numbers of `2048,8192`, each once."""
    found = split(text)
    if not found or not all(part.isdecimal() for part in found):
        fail(f"{option} {text}: expected numbers, like 2048,8192")
    return tuple(dict.fromkeys(map(int, found)))


def parse_budget(text: str, option: str = "--budget") -> float | int:
    """`2%` and `0.02` are a share of the tokens, `2048` is a number of tokens."""
    try:
        if text.endswith("%"):
            return float(Decimal(text[:-1]) / 100)
        return int(text) if text.lstrip("+-").isdecimal() else float(Decimal(text))
    except (ArithmeticError, ValueError):
        fail(f"{option} {text}: expected a share of the tokens (2% or 0.02) or a number of tokens (2048)")


def parse_budgets(text: str) -> tuple[float | int, ...]:
    """The budgets of `--budgets 2%,2048`, each once."""
    return tuple(dict.fromkeys(parse_budget(part, "--budgets") for part in split(text)))


def parse_layers(text: str) -> tuple[int, ...]:
    """The layers of `0,1`; `none` means no layer."""
    if text.strip() in ("", "none"):
        return ()
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        fail(f"--dense-layers {text}: expected layers like 0,1 or none")
