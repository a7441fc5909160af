"""Why nothing was printed, and what to try."""

from typing import Any

__all__ = ["what_to_try", "why_empty"]


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
