"""What every method decodes for a batch of prompts, kept part by part, so that a stopped evaluation goes on.

The prefix of a batch is computed once, densely, and copied to every method.
"""

import functools
import hashlib
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from bpc_calib.evaluation.fidelity import probe
from bpc_calib.evaluation.forcing import compare, complete, fork, keep, prefill
from bpc_calib.evaluation.methods import Variant, method_of
from bpc_calib.runtime.cache import BPCCache

__all__ = ["Batch", "Finished", "Makers", "decode", "steps"]

MEASURED = 64  # decoding steps per text at which choices are compared: measuring one costs as much as several steps
PROBING = 1.5  # steps that a measured choice of one method takes
PREFIX = 1 / 16  # steps that a token of the prefix takes
LONG = 8192  # cached tokens with which a step takes twice as long

Makers = Mapping[Variant, Callable[[], BPCCache]]  # of an empty cache
Finished = MutableMapping[str, Any]  # results as JSON knows them, by the name of their part


@dataclass(frozen=True, eq=False)
class Batch:
    """Prompts of one length that are decoded at once, and what is kept of them."""

    task: str
    ids: Tensor  # int64 [prompts, N]
    prefix: int  # tokens computed at once; the others are fed one at a time
    new: int  # tokens of an answer; 0: plain text, of which choices and predictions are compared

    def answers(self, variant: Variant) -> str:
        """The name of what a method said or predicted."""
        return self._name("answers", variant)

    def choices(self, variant: Variant) -> str:
        """The name of what a method chose, beside full attention."""
        return self._name("choices", variant)

    @functools.cached_property
    def digest(self) -> str:
        """What tells batches apart."""
        shape = f"{self.task} {self.prefix} {self.new} {self.ids.shape} "
        return hashlib.sha256(shape.encode() + self.ids.numpy().tobytes()).hexdigest()[:32]

    def _name(self, what: str, variant: Variant) -> str:
        return f"{what} {variant[0]} {variant[1]} {self.digest}"


def steps(batch: Batch, variants: Sequence[Variant], finished: Finished) -> float:
    """How much is left to do for a batch, about as many decoding steps."""
    asked, probed = _missing(batch, variants, finished)
    if not asked and not probed:
        return 0.0
    each = batch.ids.shape[1] - batch.prefix + batch.new
    one_text = batch.prefix * PREFIX + each * (len(asked) + PROBING * len(probed))
    return len(batch.ids) * one_text * (1 + batch.prefix / LONG)


def decode(
    model: Any, tokenizer: Any, batch: Batch, makers: Makers, finished: Finished, done: Callable[[], None]
) -> None:
    """Compute the parts of a batch that are not in `finished`, and put them there; `done` is called after each.

    `answers` have `read`, the share of the KV bytes that a step reads. With a question: `texts` of the answers. Of
    plain text: the figures of `compare` for each prompt, None where there is nothing to compare with. `choices` have
    `layers` and `kept`, the `METRICS` by layer, prompt and KV head.
    """
    asked, probed = _missing(batch, list(makers), finished)
    if not asked and not probed:
        return
    ids = batch.ids.to(model.device)
    prefix, tail = prefill(model, ids[:, : batch.prefix]), ids[:, batch.prefix :]
    predicted = list[Tensor]()
    if _choosing(batch, list(makers)):
        caches = {each: makers[each]() for each in probed}
        full = probe(model.config, caches, -(-tail.shape[1] // MEASURED))
        predicted = keep(model, fork(prefix, full), tail)
        for each, metrics in full.found().items() if probed else ():
            finished[batch.choices(each)] = {"layers": full.asked_layers(), "kept": metrics.tolist()}
        done()
    for each in asked:
        cache = fork(prefix, makers[each]())
        if batch.new:
            tokens = complete(model, cache, tail, batch.new)
            found: dict[str, Any] = {"texts": tokenizer.batch_decode(tokens, skip_special_tokens=True)}
        else:
            made = compare(model, cache, tail, predicted)
            found = {"likelihood": made.likelihood.tolist()}
            found |= {name: getattr(made, name).tolist() if predicted else None for name in ("divergence", "agreement")}
        read, all_bytes = cache.kv_bytes(batch.ids.shape[1] + batch.new)
        finished[batch.answers(each)] = found | {"read": round(read / all_bytes, 6)}
        done()


def _missing(batch: Batch, variants: Sequence[Variant], finished: Finished) -> tuple[list[Variant], list[Variant]]:
    """The variants whose answers are not finished, and those whose choices are not.

    Where choices are compared, an answer counts that was compared with full attention's predictions.
    """
    choosing = _choosing(batch, variants)

    def answered(variant: Variant) -> bool:
        found = finished.get(batch.answers(variant))
        return found is not None and not (choosing and found.get("agreement") is None)

    asked = [each for each in variants if not answered(each)]
    return asked, [each for each in choosing if batch.choices(each) not in finished]


def _choosing(batch: Batch, variants: Sequence[Variant]) -> list[Variant]:
    """The variants whose choices are compared with full attention: of plain text, those that have a budget."""
    return [each for each in variants if method_of(each[0]).takes_budget] if not batch.new else []
