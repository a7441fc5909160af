"""What `bpc generate` reports beside the text: speeds, bytes read, and where two texts differ."""

from typing import Any

from bpc_cli.console import printable

__all__ = ["first_difference", "print_comparison", "summary"]


def summary(result: dict[str, Any]) -> str:
    """One line about a run with BPC."""
    share = "-" if result["kv_bytes_share"] is None else f"{result['kv_bytes_share']:.1%}"
    return f"{_speed(result)}, {share} of the KV bytes of full attention"


def print_comparison(result: dict[str, Any]) -> None:
    """Print the first difference and both speeds."""
    print("--- comparison ---")
    print(f"first difference: {_difference_text(result['first_difference'], len(result['tokens']))}")
    print(f"BPC: {summary(result)}")
    print(f"full attention: {_speed(result['full_attention'])}")


def first_difference(tokenizer: Any, ours: list[int], theirs: list[int]) -> dict[str, Any] | None:
    """The number of the first token that differs, counted from 1, and both texts from there; None for equal texts."""
    for i in range(max(len(ours), len(theirs))):
        if ours[i : i + 1] != theirs[i : i + 1]:
            return {
                "token": i + 1,
                "bpc": tokenizer.decode(ours[i : i + 8]),
                "full": tokenizer.decode(theirs[i : i + 8]),
            }
    return None


def _difference_text(difference: dict[str, Any] | None, count: int) -> str:
    if difference is None:
        return f"none in {count:,} tokens"
    ours, theirs = printable(difference["bpc"]), printable(difference["full"])
    return f'token {difference["token"]:,}: "{ours}" instead of "{theirs}"'


def _speed(run: dict[str, Any]) -> str:
    speed = f"{run['tokens_per_second']:.1f} tokens/s" if run["tokens_per_second"] else "too few to measure tokens/s"
    return f"{len(run['tokens']):,} tokens, {speed}, first token after {run['seconds_to_first_token']:.1f} s"
