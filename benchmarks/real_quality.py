"""The parts of `real_suite.py` that compare BPC with other methods: on text, on questions, with other settings."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from real_subjects import Subject

__all__ = ["budgets", "defaults", "losses", "methods", "others", "quality", "tasks"]

Row = dict[str, Any]
# Full attention, its best approximation, BPC and the least that one can do.
BEST = ("full", "oracle", "bpc")
FIRST = (*BEST, "bpc-online")
MAIN = (*FIRST, "random")
ASKED_TOKENS = 1 << 14  # of the prompts of a batch: every method has a copy of their cache


def quality(subject: Subject, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The first methods on text at one budget, with many forced tokens."""
    return _compared(subject, settings, FIRST, subject.lengths[:2])


def budgets(subject: Subject, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The exact best tokens and BPC at other budgets, with fewer forced tokens."""
    return _compared(subject, settings, BEST, subject.lengths[:2])


def losses(subject: Subject, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The exact best tokens and BPC on more texts of one length: of all figures, the loss varies most between texts."""
    return _compared(subject, settings, BEST, subject.lengths[1:2])


def others(subject: Subject, settings: Mapping[str, Any]) -> dict[str, Any]:
    """With fewer forced tokens: the paper's projections, the worst that one can do, longer texts."""
    evaluated, common = _Evaluated(subject), (settings["forced"], settings["texts"])
    rows = evaluated.text(("full", "random"), settings["budgets"], subject.lengths[:2], *common, ["paper"])
    if long := subject.lengths[2:]:
        rows += evaluated.text(FIRST, settings["budgets"], long, *common, ["bpc-product", "paper"])
    return {"rows": rows}


def methods(subject: Subject, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Every method of `bpc eval` at one budget and the first length."""
    rows = _Evaluated(subject).text(
        None, settings["budgets"], subject.lengths[:1], settings["forced"], settings["texts"], ["bpc-product", "paper"]
    )
    return {"rows": rows}


def defaults(subject: Subject, settings: Mapping[str, Any]) -> dict[str, Any]:
    """BPC as `bpc generate` decodes, with its dense layers and its least number of tokens; and without them."""
    lengths, rows = subject.lengths[:2], list[Row]()
    for is_default, rules in ((True, {}), (False, None)):
        evaluated = _Evaluated(subject, rules)
        found = evaluated.text(BEST, settings["budgets"], lengths, settings["forced"], settings["texts"])
        rows += [row | {"default_rules": is_default} for row in found]
    return {"rows": rows}


def tasks(subject: Subject, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The questions of which full attention answers at least `least`; `asked` has its share of all that were tried."""
    from bpc_calib.evaluation.tasks import TASKS

    evaluated, left, asked, rows = _Evaluated(subject), list(settings["tasks"] or TASKS), [], []
    for length in subject.lengths[: settings["lengths"]]:
        tried = evaluated.questions(left, ("full",), length, settings["tried"], settings["budgets"])
        asked += [{name: row[name] for name in ("task", "tokens", "prompts", "score")} for row in tried]
        left = [row["task"] for row in tried if row["score"]["value"] >= settings["least"]]
        if not left:
            break
        rows += evaluated.questions(left, MAIN, length, settings["prompts"], settings["budgets"])
        rows += evaluated.questions(left, ("bpc",), length, settings["prompts"], settings["budgets"], "bpc-product")
    return {"asked": asked, "rows": rows}


def _compared(
    subject: Subject, settings: Mapping[str, Any], names: Sequence[str], lengths: Sequence[int]
) -> dict[str, Any]:
    """These methods on text, and BPC with product codes."""
    forced, texts = settings["forced"], settings["texts"]
    return {"rows": _Evaluated(subject).text(names, settings["budgets"], lengths, forced, texts, ["bpc-product"])}


class _Evaluated:
    """A model in memory, with its projections."""

    def __init__(self, subject: Subject, rules: Mapping[str, Any] | None = None) -> None:
        from bpc_artifacts import load
        from bpc_calib import enable
        from bpc_calib.evaluation.comparison import HARD
        from bpc_calib.models.loading import load_model, load_tokenizer
        from bpc_calib.text.corpora import open_corpus

        self.model, self.tokenizer = load_model(subject.model), load_tokenizer(subject.model)
        enable(self.model)
        self.artifact = lambda name: load(subject.artifact(name))
        self.corpora = [open_corpus(spec) for spec in subject.corpora("held-out")]
        self.rules = HARD if rules is None else rules

    def text(
        self,
        names: Sequence[str] | None,
        budgets: Sequence[float],
        lengths: Sequence[int],
        forced: int,
        texts: int,
        projections: Sequence[str] = (),
    ) -> list[Row]:
        """Rows on text of these methods, and of BPC with these other projections on the same text."""
        common = {"tasks": ("text",), "budgets": budgets, "lengths": lengths, "forced": forced, "prompts": texts}
        rows = self._rows("bpc", methods=names, **common)
        for name in projections:
            for row in self._rows(name, methods=("bpc",), **common):
                compare(
                    row, next(each for each in rows if each["method"] == "full" and each["tokens"] == row["tokens"])
                )
                rows.append(row)
        return [row | {"forced": forced} for row in rows]

    def questions(
        self,
        names: Sequence[str],
        methods: Sequence[str],
        length: int,
        prompts: int,
        budgets: Sequence[float],
        artifact: str = "bpc",
    ) -> list[Row]:
        """Rows of these tasks; BPC has these projections."""
        return self._rows(
            artifact, methods=methods, tasks=names, lengths=[length], prompts=prompts, budgets=budgets,
            batch=max(1, ASKED_TOKENS // length),
        )  # fmt: skip

    def _rows(self, artifact: str, **settings: Any) -> list[Row]:
        """Rows of `evaluate`; BPC has the name of its artifact."""
        from bpc_calib.evaluation.comparison import Comparison
        from bpc_calib.evaluation.evaluate import evaluate

        comparison = Comparison(corpora=self.corpora, rules=dict(self.rules), **settings)
        rows = evaluate(self.model, self.tokenizer, self.artifact(artifact), comparison, progress=_Steps())
        return [row | {"method": artifact if row["method"] == "bpc" else row["method"]} for row in rows]


class _Steps:
    """Prints a line when a task or a length begins; a log keeps them all."""

    shown = ""

    def __call__(self, share: float, what: str) -> None:
        if what != self.shown and share < 1:
            print(f"  {what}", file=sys.stderr, flush=True)
            self.shown = what


def compare(row: Row, full: Row) -> None:
    """Add the difference in loss to a row of another evaluation of the same texts."""
    from bpc_calib.evaluation.statistics import mean

    pairs = list(zip(full["log_likelihoods"], row["log_likelihoods"], strict=True))
    differences = [exact - found for exact, found in pairs]
    row["loss_difference"] = mean(differences)
    for figures in row.get("by_corpus", {}).values():  # in the order of the texts
        figures["loss_difference"] = mean(differences[: figures["prompts"]])
        del differences[: figures["prompts"]]
