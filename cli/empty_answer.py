"""Why nothing was printed, and what to try."""

from typing import Any

__all__ = ["why_empty"]


def why_empty(run: dict[str, Any], templated: bool, template: bool) -> str | None:
    """One line about an answer without a visible character; None for any other.

    `templated`: the prompt was sent in the chat template. `template`: the model has one.
    """
    if run["text"].strip():
        return None
    count = len(run["tokens"])
    if count == 1 and run["ended_by"] == "model":
        what = "the model ended its text at once"
    elif run["text"]:
        what = f"the model wrote only white space, in {count:,} tokens"
    else:
        what = f"the model wrote only special tokens, {count:,} of them"
    return f"The answer is empty: {what}. {_advice(templated, template)}"


def _advice(templated: bool, template: bool) -> str:
    if templated:
        return "A model that only continues text wants --raw; else change the prompt, or sample with --temperature 0.7."
    if template:
        return "This model has a chat template: leave --raw out."
    return "Change the end of the prompt, or sample with --temperature 0.7."
