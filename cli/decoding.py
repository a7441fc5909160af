"""Decoding a prompt: compiling beforehand, measuring the parts, replaying steps as CUDA graphs on a GPU."""

import copy
import functools
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from bpc_cli.console import note, printable

__all__ = ["Decoder", "captures", "decode", "full_attention", "kv_bytes", "make_decoder", "warm_up"]


FEW = 4  # tokens of a warm-up
COUNTED = 64  # steps whose bytes are counted
SHORT = 64  # tokens of its prompt where no speeds are compared


@dataclass(frozen=True)
class Decoder:
    """A model with the settings that all its runs share."""

    model: Any
    tokenizer: Any
    seed: int
    sampling: dict[str, Any]  # arguments of `model.generate`
    ends: tuple[int, ...]  # tokens that end a text
    static: bool = False  # whether steps are captured and replayed as CUDA graphs


def make_decoder(model: Any, tokenizer: Any, sampling: dict[str, Any], seed: int) -> Decoder:
    """A decoder whose model streams one text, whatever generation settings came with the model."""
    own = model.generation_config
    own.num_beams, own.num_return_sequences, own.return_dict_in_generate, own.cache_implementation = 1, 1, False, None
    ends = own.eos_token_id if isinstance(own.eos_token_id, list) else [own.eos_token_id]
    # Some models for chats name the end of a turn in their tokenizer only.
    known = {token for token in (*ends, tokenizer.eos_token_id) if token is not None}
    return Decoder(model, tokenizer, seed, sampling, tuple(sorted(known)))


def captures(device: Any) -> bool:
    """Whether steps on this device can be captured as CUDA graphs."""
    return device.type == "cuda"


def full_attention(decoder: Decoder) -> Any:
    """A cache for full attention with the same kind of steps; None makes transformers use its own cache."""
    from bpc_calib import BPCCache

    return BPCCache(decoder.model.config, budget=1.0, dense_layers=()) if decoder.static else None


def warm_up(
    decoder: Decoder, ids: Any, cache: Any, new: int, *, online: bool, compare: bool, quiet: bool
) -> tuple[Decoder, float]:
    """Compile what the runs need; return the decoder to use, with CUDA graphs if they work, and the seconds.

    No figure then includes compilation, and steps that cannot be captured are found before any text is printed.
    `online`: projections will be fitted. `compare`: a run with full attention follows.
    """
    from bpc_calib.backends.dispatch import make_ready

    began = time.perf_counter()
    model = decoder.model
    make_ready(model.device, model.dtype, fitting=online)
    if captures(model.device):
        decoder = _with_graphs(decoder, ids, cache, new, compare, quiet)
    if compare and not decoder.static:
        _decode_few(decoder, ids, cache, new, compare)
    seconds = time.perf_counter() - began
    if seconds >= 1 and not quiet:
        note(f"Compiled or loaded the kernels in {seconds:.1f} s")
    return decoder, seconds


def _with_graphs(decoder: Decoder, ids: Any, cache: Any, new: int, compare: bool, quiet: bool) -> Decoder:
    """A decoder that replays its steps as CUDA graphs if that works for this model, else the same decoder."""
    from bpc_calib import BPCError

    static = replace(decoder, static=True)
    try:
        _decode_few(static, ids, cache, new, compare)
    except BPCError as fault:
        if not quiet:
            note(f"Decoding without CUDA graphs: {fault}")
        return decoder
    return static


def _decode_few(decoder: Decoder, ids: Any, cache: Any, new: int, compare: bool) -> None:
    """Decode a few tokens with every kind of cache that will be used, and throw them away."""
    from bpc_calib import BPCCache

    new, short = min(FEW, new), ids[:, :SHORT]
    # Kernels for a GPU are compiled for sizes, so compared runs need the prompt's own.
    whole = ids if compare and captures(decoder.model.device) else short
    sparse = BPCCache(decoder.model.config, budget=1, min_tokens=1, dense_layers=())
    for inputs, past in ((short, sparse), (whole, copy.deepcopy(cache)), (whole, full_attention(decoder))):
        decode(decoder, inputs, past, new, show=False, min_new_tokens=new)


def decode(decoder: Decoder, ids: Any, cache: Any, new: int, show: bool, **more: Any) -> dict[str, Any]:
    """Generate at most `new` tokens with a cache, print the text as it comes if `show`, and measure.

    `ids` are `[1, N]`, of which the cache may hold the first. `more` are further arguments of `model.generate`.
    """
    import torch

    from bpc_calib import BPCCache, static_generate
    from bpc_calib.compat import with_cache

    model, tokenizer = decoder.model, decoder.tokenizer
    if decoder.static:
        generate = functools.partial(static_generate, model, cache=cache)
    else:
        generate = functools.partial(model.generate, **with_cache(cache))
    held = 0 if cache is None else cache.get_seq_length()

    def prepare() -> None:
        if isinstance(cache, BPCCache):
            cache.prepare()
            if model.device.type == "cuda":
                torch.cuda.synchronize(model.device)

    timing = _Timing()
    torch.manual_seed(decoder.seed)
    made = generate(
        ids.to(model.device),
        attention_mask=torch.ones_like(ids, device=model.device),
        pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
        eos_token_id=list(decoder.ends) or None,
        streamer=_token_stream(
            tokenizer,
            timing,
            show=show,
            goes_on=lambda token, count: count < new and token not in decoder.ends,
            prepare=prepare,
        ),
        max_new_tokens=new,
        **decoder.sampling,
        **more,
    )
    tokens = made[0, ids.shape[1] :].tolist()
    ended = "model" if tokens[-1] in decoder.ends else "limit" if len(tokens) == new else "interrupt"
    return {
        "text": tokenizer.decode(tokens, skip_special_tokens=True),
        "tokens": tokens,
        "ended_by": ended,
        "prefill_tokens": ids.shape[1] - held,
        "prefill_seconds": round(timing.prefill, 4),
        "prepare_seconds": round(timing.preparing, 4),
        "decode_seconds": round(timing.decoding, 4),
        "tokens_per_second": round((len(tokens) - 1) / timing.decoding, 3) if timing.decoding else None,
    }


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


@dataclass
class _Timing:
    """When things happened in one generation, in seconds."""

    arrived: list[float] = field(default_factory=list)  # the prompt, then each token
    preparing: float = 0.0  # what hashing the prompt and finding online projections took in all

    @property
    def prefill(self) -> float:
        """Seconds from the prompt to the first token."""
        return self.arrived[1] - self.arrived[0]

    @property
    def decoding(self) -> float:
        """Seconds from the first token to the last, without preparing."""
        return max(0.0, self.arrived[-1] - self.arrived[1] - self.preparing)


def _token_stream(
    tokenizer: Any, timing: _Timing, *, show: bool, goes_on: Callable[[int, int], bool], prepare: Callable[[], None]
) -> Any:
    """What `model.generate` gives the prompt and then each token, as its streamer.

    `goes_on` takes a token and how many there are, and says whether a step follows; `prepare` is called before each
    step, so that work which a step would do first is timed apart.
    """
    from transformers import TextStreamer

    class Stream(TextStreamer):  # type: ignore[misc]
        def put(self, value: Any) -> None:
            timing.arrived.append(time.perf_counter())
            if show:
                super().put(value)
            if (count := len(timing.arrived) - 1) and goes_on(int(value[0]), count):
                began = time.perf_counter()
                prepare()
                timing.preparing += time.perf_counter() - began

        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            print(printable(text, keep="\n\t"), end="\n" if stream_end else "", flush=True)

        def end(self) -> None:
            if show:
                super().end()

    return Stream(tokenizer, skip_prompt=True, skip_special_tokens=True)
