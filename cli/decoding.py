"""Decoding a prompt: compiling beforehand, measuring the parts, replaying steps as CUDA graphs on a GPU."""

import copy
import functools
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from bpc_cli.console import note
from bpc_cli.streaming import TextPrinter

FEW = 4  # tokens of a warm-up
COUNTED = 64  # steps whose bytes are counted
CHUNK = 2048  # tokens of a prompt that are fed at once where memory is scarce: keys and values lie elsewhere
SHORT = 64  # tokens of its prompt where no speeds are compared
COMPILED_FROM = 4096  # steps of one layer: a compilation takes as long as some ten thousand, but only once


@dataclass(frozen=True)
class Decoder:
    """A model with the settings that all its runs share."""

    model: Any
    tokenizer: Any
    seed: int
    sampling: dict[str, Any]  # arguments of `model.generate`
    ends: tuple[int, ...]  # tokens that end a text
    static: bool = False  # whether steps are captured and replayed as CUDA graphs
    verifying: dict[str, Any] = field(default_factory=dict)  # arguments of `model.generate`; none: nothing is verified


def make_decoder(
    model: Any, tokenizer: Any, sampling: dict[str, Any], seed: int, verifying: dict[str, Any] | None = None
) -> Decoder:
    """A decoder whose model streams one text, whatever generation settings came with the model."""
    own = model.generation_config
    own.num_beams, own.num_return_sequences, own.return_dict_in_generate, own.cache_implementation = 1, 1, False, None
    ends = own.eos_token_id if isinstance(own.eos_token_id, list) else [own.eos_token_id]
    # Some models for chats name the end of a turn in their tokenizer only.
    known = {token for token in (*ends, tokenizer.eos_token_id) if token is not None}
    return Decoder(model, tokenizer, seed, sampling, tuple(sorted(known)), verifying=verifying or {})


def captures(device: Any) -> bool:
    """Whether steps on this device can be captured as CUDA graphs."""
    return device.type == "cuda"


def full_attention(decoder: Decoder) -> Any:
    """A cache for full attention with the same kind of steps; None makes transformers use its own cache."""
    from bpc_calib import BPCCache

    return BPCCache(decoder.model.config, budget=1.0, dense_layers=()) if decoder.static else None


def compile_decoder(decoder: Decoder, new: int, quiet: bool) -> None:
    """Have a model on a CPU decode with compiled layers, or if it makes few new tokens, with faster linear layers."""
    from bpc_calib import BPCError, compile_layers, describe
    from bpc_calib.runtime.few_tokens import serve_few_tokens

    model = decoder.model
    if model.device.type != "cpu":
        return
    if new * describe(model.config).num_layers < COMPILED_FROM:
        serve_few_tokens(model)
        return

    several = "draft" in decoder.verifying  # passes that verify drafts, too

    def compiling() -> None:
        if not quiet:
            seconds = 20 if several else 10
            note(f"Compiling the model's layers for this processor, once: some {seconds} s (--no-compile goes without)")

    try:
        compile_layers(model, compiling, several=several)
    except BPCError as fault:
        if not quiet:
            note(f"Decoding without compiled layers: {fault}")
        serve_few_tokens(model)


def warm_up(decoder: Decoder, ids: Any, cache: Any, new: int, *, compare: bool, quiet: bool) -> tuple[Decoder, float]:
    """Compile what the runs need on a GPU; return the decoder to use, with CUDA graphs if they work, and the seconds.

    No figure then includes compilation, and steps that cannot be captured are found before any text is printed.
    `compare`: a run with full attention follows.
    """
    from bpc_calib import BPCError

    began = time.perf_counter()
    model = decoder.model
    if captures(model.device) and not decoder.verifying:
        static = replace(decoder, static=True)
        try:
            _decode_few(static, ids, cache, new, compare)
            decoder = static
        except BPCError as fault:
            if not quiet:
                note(f"Decoding without CUDA graphs: {fault}")
    if compare and not decoder.static:
        _decode_few(decoder, ids, cache, new, compare)
    seconds = time.perf_counter() - began
    if seconds >= 1 and captures(model.device) and not quiet:
        note(f"Compiled or loaded the kernels in {seconds:.1f} s")
    return decoder, seconds


def _decode_few(decoder: Decoder, ids: Any, cache: Any, new: int, compare: bool) -> None:
    """Decode a few tokens with every kind of cache that will be used, and throw them away."""
    from bpc_calib import BPCCache

    new, short, decoder = min(FEW, new), ids[:, :SHORT], replace(decoder, verifying={})
    # Kernels for a GPU are compiled for sizes, so compared runs need the prompt's own.
    whole = ids if compare and captures(decoder.model.device) else short
    sparse = BPCCache(decoder.model.config, budget=1, min_tokens=1, dense_layers=(), min_context=0)
    for inputs, past in ((short, sparse), (whole, copy.deepcopy(cache)), (whole, full_attention(decoder))):
        decode(decoder, inputs, past, new, show=False, min_new_tokens=new)


def decode(
    decoder: Decoder,
    ids: Any,
    cache: Any,
    new: int,
    show: bool,
    keep: Callable[[], None] | None = None,
    **more: Any,
) -> dict[str, Any]:
    """Generate at most `new` tokens with a cache, print the text as it comes if `show`, and measure.

    `ids` are `[1, N]`, of which the cache may hold the first. `keep` is called when the cache holds all of them. `more`
    are further arguments of `model.generate`.
    """
    import torch

    from bpc_calib import static_generate
    from bpc_calib.compat import with_cache

    model, tokenizer = decoder.model, decoder.tokenizer
    if decoder.static:
        generate = functools.partial(static_generate, model, cache=cache)
    else:
        generate = functools.partial(model.generate, **with_cache(cache))
    held = 0 if cache is None else cache.get_seq_length()
    if not held and getattr(cache, "kv_device", None):
        more["prefill_chunk_size"] = CHUNK
    stream = _Stream(decoder, cache, new, TextPrinter(tokenizer) if show else None, keep)
    verifying = dict(decoder.verifying)
    if verifying:  # transformers passes no streamer on
        verifying["custom_generate"] = functools.partial(verifying["custom_generate"], streamer=stream)
    torch.manual_seed(decoder.seed)
    more["logits_processor"] = [*more.get("logits_processor", ()), _Finite(model)]
    try:
        made = generate(
            ids.to(model.device),
            attention_mask=torch.ones_like(ids, device=model.device),
            pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
            eos_token_id=list(decoder.ends) or None,
            streamer=stream,
            max_new_tokens=new,
            **decoder.sampling,
            **verifying,
            **more,
        )
    except BaseException:  # Ctrl-C too: what came is shown, and the message that follows has a line of its own
        stream.end()
        raise
    tokens = made[0, ids.shape[1] :].tolist()
    began, first, last = stream.arrived[0], stream.arrived[1], stream.arrived[-1]
    seconds = max(0.0, last - first - stream.preparing - stream.keeping)
    return {
        "text": tokenizer.decode(tokens, skip_special_tokens=True),
        "tokens": tokens,
        "ended_by": "model" if tokens[-1] in decoder.ends else "limit" if len(tokens) == new else "interrupt",
        "prefill_tokens": ids.shape[1] - held,
        "prefill_seconds": round(first - began, 4),
        "prepare_seconds": round(stream.preparing, 4),
        "decode_seconds": round(seconds, 4),
        "tokens_per_second": round((len(tokens) - 1) / seconds, 3) if seconds else None,
    }


class _Finite:
    """A logits processor that refuses a model whose first predictions are no numbers."""

    def __init__(self, model: Any) -> None:
        self.model: Any = model  # None: checked

    def __call__(self, ids: Any, scores: Any) -> Any:
        """Return the scores as they are."""
        from bpc_calib.models.finite import check_finite

        if self.model is not None:
            check_finite(scores, self.model)
            self.model = None
        return scores


def kv_bytes(cache: Any, prompt: int, new: int) -> dict[str, Any]:
    """What the steps after the first token read, as shares of the KV bytes of full attention: in all, and by part.

    Of many steps about `COUNTED` are counted, evenly spaced: the bytes grow with the length almost along a line.
    """
    lengths = range(prompt + 1, prompt + new)
    steps = [cache.kv_parts(length) for length in lengths[:: max(1, len(lengths) // COUNTED)]]
    if not steps:
        return {"kv_bytes_share": None, "kv_bytes_parts": None}
    total = sum(steps[1:], steps[0])
    parts = {part: getattr(total, part) / total.full for part in ("sliding", "dense", "ranking", "chosen", "minimum")}
    return {"kv_bytes_share": total.read / total.full, "kv_bytes_parts": parts}


def agreement(decoder: Decoder, cache: Any) -> dict[str, Any]:
    """How often sparse steps and full attention chose the same token since the cache was made, if that was checked.

    Then the KV bytes are not counted: passes of full attention read more than the steps do.
    """
    if not decoder.verifying:
        return {}
    found = cache.agreement
    counts = {"checked": found.checked, "agreed": found.agreed, "kl": found.divergence, "ties": found.ties}
    return {"agreement": counts | {"fell_back": found.fell_back}, "kv_bytes_share": None, "kv_bytes_parts": None}


def agreement_line(run: dict[str, Any]) -> str:
    """What `agreement` found."""
    found = run["agreement"]
    line = "No token was drafted or checked"
    if found["checked"]:
        line = (
            f"{found['agreed']:,} of {found['checked']:,} checked tokens were full attention's "
            f"({found['agreed'] / found['checked']:.1%}), KL divergence {found['kl']:.4f}"
        )
    if found["ties"]:
        line += f"; near ties: {found['ties']:,} (other kernels may decide them otherwise)"
    return line if found["fell_back"] is None else f"{line}; full attention alone from token {found['fell_back']:,} on"


def residual(cache: Any) -> dict[str, Any]:
    """How much of the length of the newest keys their codes leave unexplained, and what calibration saw, if known."""
    from bpc_calib.runtime.drift import mean

    found = mean(cache.residuals())
    return {"residual": None if found is None else {"newest_keys": found[0], "calibration": found[1]}}


@dataclass
class _Stream:
    """The streamer of `model.generate`, which gives it the prompt and then each token.

    It hashes the prompt and finds online projections before the step that would do so first, to time that apart.
    """

    decoder: Decoder
    cache: Any  # a BPCCache, or None
    new: int  # most tokens
    shown: TextPrinter | None  # None: nothing is printed
    keep: Callable[[], None] | None = None  # is called once, after the prompt
    arrived: list[float] = field(default_factory=list)  # when the prompt came, and each token
    preparing: float = 0.0  # seconds
    keeping: float = 0.0  # seconds

    def put(self, value: Any) -> None:
        """Take the next tokens."""
        self.arrived.append(time.perf_counter())
        if self.keep is not None and len(self.arrived) == 2:  # before the text: a message would stand in its middle
            self._prepare()
            began = time.perf_counter()
            self.keep()
            self.keeping = time.perf_counter() - began
        if self.shown is not None and len(self.arrived) > 1:
            self.shown.put(int(value[0]))
        another = 1 < len(self.arrived) <= self.new and int(value[0]) not in self.decoder.ends
        if another and self.cache is not None:
            self._prepare()

    def _prepare(self) -> None:
        """Hash what the cache has not hashed yet."""
        import torch

        began = time.perf_counter()
        self.cache.prepare()
        if self.decoder.model.device.type == "cuda":
            torch.cuda.synchronize(self.decoder.model.device)
        self.preparing += time.perf_counter() - began

    def end(self) -> None:
        """Print what is left of the text."""
        if self.shown is not None and len(self.arrived) > 1:
            self.shown.end()


def answer_line(run: dict[str, Any]) -> str:
    """How long an answer took, and with BPC the bytes that its steps read."""
    speed = f"{run['tokens_per_second']:.1f} tokens/s" if run["tokens_per_second"] else "too few to measure tokens/s"
    line = f"{len(run['tokens']):,} tokens, {speed}"
    if run.get("kv_bytes_share") is None:
        return line
    return f"{line}, {run['kv_bytes_share']:.1%} of the KV bytes of full attention"


def why_dense(run: dict[str, Any]) -> str | None:
    """One sentence about an answer whose steps all attended to everything because the context is short, else None."""
    length, start = run["prompt_tokens"] + len(run["tokens"]), run["min_context"]
    if length >= start:
        return None
    return (
        f"Every step attended to all tokens: choosing is faster from {start:,} tokens on here, and this context has "
        f"{length:,} (--min-context 0 always chooses)."
    )


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
