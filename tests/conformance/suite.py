"""The conformance suite: an executable specification of a cache.

`check` runs an operation on a cache and on the masked reference, and compares the tokens and the logits of every step.
To test another backend or cache, pass its `make_cache`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import reference
import tiny
import torch
from torch import Tensor

from bpc_calib import BPCCache, describe, disable, enable, static_generate
from bpc_calib.compat import with_cache

DEFAULTS = {
    "budget": 0.15,
    "min_tokens": 1,
    "min_context": 0,
    "safeguard": 0.3,
    "recent": 1,
    "sink": 0,
    "dense_layers": (),
    "group": "relative",
    "gain": True,
    "bits": 64,
    "seed": 0,
}

Cache = Any
Model = Any
MakeCache = Callable[..., Cache]


@dataclass
class Trace:
    """The result of an operation: tokens, and the logits of every step."""

    tokens: list[Tensor]
    logits: list[Tensor]


class RoundingError(AssertionError):
    """The cache first differs from the reference at a step where rounding alone changes the reference too."""


def check(
    model: Model,
    operation: Callable[[Model, Cache], Trace],
    make_cache: MakeCache = BPCCache,
    *,
    online: bool = False,
    metric: bool = False,
    centred: bool = False,
    nibbles: bool = False,
    tolerance: float = 1e-5,
    nudges: int = 0,
    **settings: Any,
) -> None:
    """Raise `AssertionError` if a cache of `make_cache(config, artifact, **settings)` differs from the reference.

    The error is `RoundingError` if at least one of `nudges` nudged references first differs at the same step.
    """
    settings = DEFAULTS | settings
    artifact = None
    if not online:
        artifact = tiny.artifact(model.config, settings["bits"], nibbles=nibbles, metric=metric, centred=centred)
    sparse = [layer for layer in describe(model.config).full_layers if layer not in settings["dense_layers"]]
    rules = {name: value for name, value in settings.items() if name != "dense_layers"}

    def reference_trace(nudge: int | None = None) -> Trace:
        with reference.masked_reference(model):
            return operation(model, reference.ReferenceCache(model.config, artifact, sparse, nudge=nudge, **rules))

    expected = reference_trace()
    enable(model)
    try:
        found = operation(model, make_cache(model.config, artifact, **settings))
    finally:
        disable(model)
    apart = first_step_apart(found, expected, tolerance)
    if apart is None:
        return
    step, fault = apart
    for seed in range(nudges):
        moved = first_step_apart(reference_trace(seed), expected, tolerance)
        if moved is not None and moved[0] == step:
            raise RoundingError(f"step {step} hangs on rounding: {fault}")
    raise AssertionError(f"step {step}: {fault}")


def first_step_apart(found: Trace, expected: Trace, tolerance: float) -> tuple[int, str] | None:
    """Return the first step with other logits, and the difference; other tokens count as a last step. None: equal."""
    for step, (ours, theirs) in enumerate(zip(found.logits, expected.logits, strict=False)):
        try:
            torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
        except AssertionError as fault:
            return step, str(fault)
    steps = len(found.logits), len(expected.logits)
    if steps[0] != steps[1]:
        return min(steps), f"{steps[0]} steps instead of {steps[1]}"
    if len(found.tokens) != len(expected.tokens) or not all(map(torch.equal, found.tokens, expected.tokens)):
        return steps[0], "other tokens from the same logits"
    return None


def prompt(*lengths: int, vocab: int = 250) -> dict[str, Tensor]:
    """Return random sequences, padded on the left to the longest."""
    generator = torch.Generator().manual_seed(len(lengths))
    width = max(lengths)
    ids = torch.randint(vocab, (len(lengths), width), generator=generator)
    mask = torch.arange(width) >= width - torch.tensor(lengths).unsqueeze(-1)
    return {"input_ids": ids.masked_fill(~mask, 256), "attention_mask": mask.long()}


def _generate(model: Model, cache: Cache, tokens: int = 6, *, static: bool = False, **arguments: Any) -> Trace:
    settings = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False} | arguments
    settings |= {"output_logits": True, "return_dict_in_generate": True}
    torch.manual_seed(0)
    if static:
        made = static_generate(model, cache=cache, **settings)
    else:
        made = model.generate(**with_cache(cache), **settings)
    return Trace([made.sequences], list(made.logits))


@torch.no_grad()
def _forward(model: Model, cache: Cache, trace: Trace, ids: Tensor, mask: Tensor | None = None) -> None:
    positions = None if mask is None else (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
    logits = model(input_ids=ids, attention_mask=mask, position_ids=positions, **with_cache(cache)).logits
    trace.logits.append(logits[:, -1])


def _token_by_token(model: Model, cache: Cache, trace: Trace, ids: Tensor) -> None:
    for token in ids.split(1, dim=1):
        _forward(model, cache, trace, token)


def greedy(model: Model, cache: Cache) -> Trace:
    """One sequence."""
    return _generate(model, cache, **prompt(45))


def sampling(model: Model, cache: Cache) -> Trace:
    """One sequence with sampling."""
    return _generate(model, cache, do_sample=True, temperature=1.5, **prompt(41))


def ragged_batch(model: Model, cache: Cache) -> Trace:
    """Sequences of different lengths, padded on the left."""
    return _generate(model, cache, **prompt(40, 23, 31))


def static_batch(model: Model, cache: Cache) -> Trace:
    """Static steps, if the cache supports them, and then steps in growing buffers."""
    inputs = prompt(40, 31)
    first = _generate(model, cache, static=isinstance(cache, BPCCache), **inputs)
    mask = torch.nn.functional.pad(inputs["attention_mask"], (0, 6), value=1)
    second = _generate(model, cache, 3, input_ids=first.tokens[0], attention_mask=mask)
    return Trace(first.tokens + second.tokens, first.logits + second.logits)


def beams(model: Model, cache: Cache) -> Trace:
    """Beam search over a padded batch: sequences are reordered."""
    return _generate(model, cache, num_beams=3, **prompt(36, 27))


def several_returned(model: Model, cache: Cache) -> Trace:
    """Several samples per prompt."""
    return _generate(model, cache, do_sample=True, num_return_sequences=2, **prompt(30, 38))


def chunked_prefill(model: Model, cache: Cache) -> Trace:
    """The prompt in chunks."""
    return _generate(model, cache, prefill_chunk_size=16, **prompt(44, 35))


def padded_chunks(model: Model, cache: Cache) -> Trace:
    """Prompts padded to a fixed length, so that whole chunks are padding."""
    inputs = {name: torch.nn.functional.pad(tensor, (24, 0), value=256) for name, tensor in prompt(30, 21).items()}
    inputs["attention_mask"][:, :24] = 0
    return _generate(model, cache, prefill_chunk_size=16, **inputs)


def prompt_lookup(model: Model, cache: Cache) -> Trace:
    """Drafts from the prompt: steps with several tokens, part of them cropped."""
    # Drafts are found because the text repeats itself, and are rejected if the model continues differently.
    ids = torch.tensor([[5, 6, 7, 8, 9, 10] * 7 + [5, 6]])
    return _generate(model, cache, 10, prompt_lookup_num_tokens=3, input_ids=ids, attention_mask=torch.ones_like(ids))


def conversation(model: Model, cache: Cache) -> Trace:
    """Two turns on one cache, with padding."""
    inputs = prompt(34, 21)
    first = _generate(model, cache, 3, **inputs)
    ids = torch.cat([first.tokens[0], prompt(7, 7)["input_ids"]], dim=1)
    mask = torch.cat([inputs["attention_mask"], torch.ones(2, 10, dtype=torch.long)], dim=1)
    second = _generate(model, cache, 4, input_ids=ids, attention_mask=mask)
    return Trace(first.tokens + second.tokens, first.logits + second.logits)


def crop(model: Model, cache: Cache) -> Trace:
    """Two crops of different size, each followed by other tokens."""
    trace = Trace([], [])
    ids = prompt(48)["input_ids"]
    _forward(model, cache, trace, ids[:, :30])
    _token_by_token(model, cache, trace, ids[:, 30:36])
    cache.crop(-4)
    _token_by_token(model, cache, trace, ids[:, 36:42])
    cache.crop(-12)
    _token_by_token(model, cache, trace, ids[:, 42:46])
    return trace


def token_by_token(model: Model, cache: Cache) -> Trace:
    """One token at a time after a prefill, and again after a reset, from an empty cache."""
    trace = Trace([], [])
    ids = prompt(40)["input_ids"]
    _forward(model, cache, trace, ids[:, :20])
    _token_by_token(model, cache, trace, ids[:, 20:32])
    cache.reset()
    _token_by_token(model, cache, trace, ids[:, :12])
    return trace


def chunks_between_tokens(model: Model, cache: Cache) -> Trace:
    """Steps with several tokens between single ones, which renew the safeguard's list."""
    trace = Trace([], [])
    ids = prompt(48)["input_ids"]
    for start, end in ((0, 25), (25, 26), (26, 27), (27, 36), (36, 37), (37, 38), (38, 40), (40, 41)):
        _forward(model, cache, trace, ids[:, start:end])
    return trace


def batch_changes(model: Model, cache: Cache) -> Trace:
    """Sequences are repeated, reordered and removed, with padding inside and on the right."""
    trace = Trace([], [])
    inputs = prompt(28, 28)
    mask = inputs["attention_mask"].clone()
    mask[0, :5] = mask[1, 9:13] = mask[1, 25:] = 0
    _forward(model, cache, trace, inputs["input_ids"], mask)

    def one_more(rows: int) -> None:
        nonlocal mask
        mask = torch.cat([mask, mask.new_ones(rows, 1)], dim=1)
        _forward(model, cache, trace, torch.arange(rows).unsqueeze(1) + 10 * mask.shape[1] % 240, mask)

    one_more(2)
    cache.batch_repeat_interleave(2)
    mask = mask.repeat_interleave(2, dim=0)
    one_more(4)
    cache.reorder_cache(torch.tensor([3, 0, 2, 2]))
    mask = mask[[3, 0, 2, 2]]
    one_more(4)
    cache.batch_select_indices(torch.tensor([1, 3]))
    mask = mask[[1, 3]]
    one_more(2)
    one_more(2)
    return trace


OPERATIONS = [
    greedy,
    sampling,
    ragged_batch,
    static_batch,
    beams,
    several_returned,
    chunked_prefill,
    padded_chunks,
    prompt_lookup,
    conversation,
    crop,
    token_by_token,
    chunks_between_tokens,
    batch_changes,
]
