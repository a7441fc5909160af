"""What `bpc calibrate` checks of its options before any work, and what it notes about options without effect."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bpc_calib.calibration.plan import Plan
    from bpc_calib.text.known_corpora import Corpus
    from bpc_cli.calibrate import PlanOptions

__all__ = ["idle_options", "open_text"]

FIELD_SUFFIXES = (".jsonl", ".json", ".gz", ".parquet")  # of files that have fields


def open_text(specs: list[str], text_field: str | None, samples: int) -> "list[Corpus]":
    """Open the corpora: each text once, each with a sample; those of the Hub stay unopened."""
    from bpc_calib.text.corpora import check_corpora, open_corpora

    corpora = open_corpora(specs, text_field=text_field or "text", hub=False)
    check_corpora(corpora, samples)
    return corpora


def idle_options(plan: "Plan", corpora: "list[Corpus]", text_field: str | None, given: "PlanOptions") -> list[str]:
    """Say which of the options that were given change nothing."""
    found = []
    files = [file.name.lower() for corpus in corpora for file in corpus.files]
    if text_field is not None and not any(name.endswith(FIELD_SUFFIXES) for name in files):
        found.append(f"--text-field {text_field} has no effect: no corpus is a local JSON or parquet file")
    if given.keys_per_head > plan.keys_per_head and given.keys_per_head != type(given).keys_per_head:
        found.append(
            f"--keys-per-head {given.keys_per_head:,} is more than there are: all {plan.keys_per_head:,} keys are kept"
        )
    room = (plan.model.context_limit or plan.sequence_length) - plan.sequence_length
    if given.position_shift and not room:
        found.append(f"--position-shift has no effect: {plan.sequence_length:,} tokens are all that the model allows")
    return found
