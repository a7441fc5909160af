"""The tasks of `bpc eval` by name.

A task is a function of a `random.Random` that returns a `Problem`. The tasks of `GROWING` also take a size.
RULER: Hsieh et al., "RULER: What's the Real Context Size of Your Long-Context Language Models?", 2024.
"""

from collections.abc import Callable

from bpc_calib.evaluation.fact_tasks import (
    haystack,
    key_values,
    multi_key,
    multi_query,
    multi_value,
    needle,
    single,
    tracking,
    uuids,
)
from bpc_calib.evaluation.passage_tasks import copying, passages
from bpc_calib.evaluation.problem import Problem
from bpc_calib.evaluation.word_tasks import common_words, frequent_words

__all__ = ["GROWING", "RULER", "TASKS", "TEXT"]

TEXT = "text"  # the task without a question: plain text

TASKS: dict[str, Callable[..., Problem]] = {
    "needle": needle,
    "single": single,
    "multi-key": multi_key,
    "multi-value": multi_value,
    "multi-query": multi_query,
    "tracking": tracking,
    "common-words": common_words,
    "frequent-words": frequent_words,
    "haystack": haystack,
    "uuids": uuids,
    "passages": passages,
    "key-values": key_values,
    "copying": copying,
}
# The tasks whose statements fill the prompt, with the smallest `size` that each takes; a larger size has more tokens.
GROWING = {
    "common-words": 15,
    "frequent-words": 16,
    "haystack": 1,
    "uuids": 1,
    "passages": 2,
    "key-values": 1,
    "copying": 1,
}
RULER = tuple(TASKS)[1:11]
