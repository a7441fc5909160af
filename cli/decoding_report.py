"""What is reported beside a decoded text: times, bytes read, where two texts differ, why an answer is empty."""

from typing import Any

from bpc_cli.console import printable

__all__ = [
    "answer_line",
    "bytes_line",
    "first_difference",
    "online_hint",
    "print_comparison",
    "prompt_line",
    "what_to_try",
    "why_empty",
]


PARTS = {
    "sliding": "sliding-window layers",
    "dense": "dense layers",
    "ranking": "codes",
    "chosen": "chosen keys and values",
}


def prompt_line(run: dict[str, Any], online: bool) -> str:
    """How long the prompt took, and what was made of it before the first step."""
    count, seconds = run["prefill_tokens"], run["prefill_seconds"]
    line = f"{count:,} tokens in {seconds:.1f} s ({count / seconds:,.0f} tokens/s)"
    if run["prepare_seconds"] < 0.05:
        return line
    return f"{line}, {'online projections' if online else 'hashing it'} {run['prepare_seconds']:.1f} s"


def answer_line(run: dict[str, Any]) -> str:
    """How long the answer took, and with BPC the bytes that its steps read."""
    speed = f"{run['tokens_per_second']:.1f} tokens/s" if run["tokens_per_second"] else "too few to measure tokens/s"
    line = f"{len(run['tokens']):,} tokens, {speed}"
    if run.get("kv_bytes_share") is None:
        return line
    return f"{line}, {run['kv_bytes_share']:.1%} of the KV bytes of full attention"


def online_hint(run: dict[str, Any], model: str) -> str | None:
    """One line if finding projections took a second or more, and a tenth of the run; else None."""
    prepare = run["prepare_seconds"]
    if prepare < 1 or prepare < 0.1 * (run["prefill_seconds"] + prepare + run["decode_seconds"]):
        return None
    return f"Online projections took {prepare:.1f} s; a calibrated file saves that: bpc calibrate -m {model}"


def bytes_line(result: dict[str, Any]) -> str:
    """The share of the bytes that BPC read, and what they are; parts of less than 0.05 % are left out."""
    parts = result["kv_bytes_parts"]
    if parts is None:
        return "too few tokens to count"
    more = f"at least {result['min_tokens']:,} tokens"
    if result["min_context"]:
        more += f" and all below {result['min_context']:,}"
    shown = [f"{name} {parts[part]:.1%}" for part, name in (PARTS | {"minimum": more}).items() if parts[part] >= 0.0005]
    return f"{result['kv_bytes_share']:.1%} of full attention's: {', '.join(shown)}"


def print_comparison(result: dict[str, Any], online: bool) -> None:
    """Print the first difference, the times of both runs, and the bytes that BPC read."""
    full = result["full_attention"]
    print("--- comparison ---")
    print(f"first difference: {_difference_text(result['first_difference'], len(result['tokens']))}")
    print(f"BPC: prompt {prompt_line(result, online)}; answer {answer_line(result | {'kv_bytes_share': None})}")
    print(f"full attention: prompt {prompt_line(full, online)}; answer {answer_line(full)}")
    print(f"KV bytes read: {bytes_line(result)}")


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
    return (
        f'token {difference["token"]:,}: "{_one_line(difference["bpc"])}" instead of "{_one_line(difference["full"])}"'
    )


def _one_line(text: str) -> str:
    """The text with its line breaks and tabs as \\n, \\r and \\t."""
    return printable(text.replace("\n", "\\n").replace("\r", "\\r").replace("\t", "\\t"))


def why_empty(run: dict[str, Any]) -> str | None:
    """One sentence about an answer without a visible character; None for any other, and for one that was stopped."""
    if run["text"].strip() or run["ended_by"] == "interrupt":
        return None
    count = len(run["tokens"])
    if count == 1 and run["ended_by"] == "model":
        what = "the model ended its text at once"
    elif run["text"]:
        what = f"the model wrote only white space, in {count:,} tokens"
    else:
        what = f"the model wrote only special tokens, {count:,} of them"
    return f"The answer is empty: {what}."


def what_to_try(templated: bool, template: bool) -> str:
    """One sentence for a prompt whose answer is empty.

    `templated`: it was sent in the chat template. `template`: the model has one.
    """
    if templated:
        return "A model that only continues text wants --raw; else change the prompt, or sample with --temperature 0.7."
    if template:
        return "This model has a chat template: leave --raw out."
    return "Change the end of the prompt, or sample with --temperature 0.7."
