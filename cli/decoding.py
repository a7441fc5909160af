"""Decoding a prompt: streaming the text, measuring the speed, replaying steps as CUDA graphs on a GPU."""

import copy
import time
from dataclasses import dataclass, replace
from typing import Any

from bpc_cli.console import note, printable

__all__ = ["Decoder", "captures", "decode", "full_attention", "kv_bytes_share", "make_decoder", "warm_up"]

FEW = 4  # tokens of a warm-up
SHORT = 64  # tokens of its prompt where no speeds are compared


@dataclass(frozen=True)
class Decoder:
    """A model with the settings that all its runs share."""

    model: Any
    tokenizer: Any
    seed: int
    sampling: dict[str, Any]  # arguments of `model.generate`
    static: bool = False  # whether steps are captured and replayed as CUDA graphs


def make_decoder(model: Any, tokenizer: Any, temperature: float, seed: int) -> Decoder:
    """A decoder whose model streams one text, whatever generation settings came with the model."""
    own = model.generation_config
    own.num_beams, own.num_return_sequences, own.return_dict_in_generate, own.cache_implementation = 1, 1, False, None
    sampling: dict[str, Any] = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    if temperature > 0:
        sampling = {"do_sample": True, "temperature": temperature}
    return Decoder(model, tokenizer, seed, sampling)


def captures(device: Any) -> bool:
    """Whether steps on this device can be captured as CUDA graphs."""
    return device.type == "cuda"


def full_attention(decoder: Decoder) -> Any:
    """A cache for full attention with the same kind of steps; None makes transformers use its own cache."""
    from bpc_calib import BPCCache

    return BPCCache(decoder.model.config, budget=1.0, dense_layers=()) if decoder.static else None


def warm_up(decoder: Decoder, ids: Any, cache: Any, new: int, compare: bool, quiet: bool) -> Decoder:
    """Decode a few tokens where that matters, and return the decoder to use: one with CUDA graphs if they work.

    No figure then includes compilation, and steps that cannot be captured are found before any text is printed.
    """
    from bpc_calib import BPCError

    if captures(decoder.model.device):
        static = replace(decoder, static=True)
        try:
            _decode_few(static, ids, cache, new, compare)
        except BPCError as fault:
            if not quiet:
                note(f"Decoding without CUDA graphs: {fault}")
        else:
            return static
    if compare:
        _decode_few(decoder, ids, cache, new, compare)
    return decoder


def _decode_few(decoder: Decoder, ids: Any, cache: Any, new: int, compare: bool) -> None:
    """Decode a few tokens with every kind of cache that will be used, and throw them away."""
    from bpc_calib import BPCCache

    new, short = min(FEW, new), ids[:, :SHORT]
    whole = ids if compare else short  # kernels are compiled for sizes, so compared runs need the prompt's own
    sparse = BPCCache(decoder.model.config, budget=1, min_tokens=1, dense_layers=())
    for inputs, past in ((short, sparse), (whole, copy.deepcopy(cache)), (whole, full_attention(decoder))):
        decode(decoder, inputs, past, new, show=False, min_new_tokens=new)


def decode(decoder: Decoder, ids: Any, cache: Any, new: int, show: bool, **more: Any) -> dict[str, Any]:
    """Generate at most `new` tokens with a cache, print the text as it comes if `show`, and measure.

    `more` are further arguments of `model.generate`.
    """
    import torch

    model, tokenizer = decoder.model, decoder.tokenizer
    if decoder.static:
        from bpc_calib import static_decoding

        more["custom_generate"] = static_decoding
    times: list[float] = []
    torch.manual_seed(decoder.seed)
    made = model.generate(
        ids.to(model.device),
        attention_mask=torch.ones_like(ids, device=model.device),
        pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
        streamer=_streamer(tokenizer, times, show),
        past_key_values=cache,
        max_new_tokens=new,
        **decoder.sampling,
        **more,
    )
    tokens = made[0, ids.shape[1] :].tolist()
    decoding = times[-1] - times[1]
    return {
        "text": tokenizer.decode(tokens, skip_special_tokens=True),
        "tokens": tokens,
        "seconds_to_first_token": round(times[1] - times[0], 4),
        "tokens_per_second": round((len(tokens) - 1) / decoding, 3) if len(tokens) > 1 else None,
    }


def _streamer(tokenizer: Any, times: list[float], show: bool) -> Any:
    """What `model.generate` gives the prompt and then each token: notes the times, and prints the text if `show`."""
    from transformers import TextStreamer

    class Printer(TextStreamer):  # type: ignore[misc]
        def put(self, value: Any) -> None:
            times.append(time.perf_counter())
            if show:
                super().put(value)

        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            print(printable(text, keep="\n\t"), end="\n" if stream_end else "", flush=True)

        def end(self) -> None:
            if show:
                super().end()

    return Printer(tokenizer, skip_prompt=True, skip_special_tokens=True)


def kv_bytes_share(cache: Any, prompt: int, new: int) -> float | None:
    """The share of the KV bytes of full attention that the steps after the first token read."""
    steps = [cache.kv_bytes(length) for length in range(prompt + 1, prompt + new)]
    return sum(read for read, _ in steps) / sum(full for _, full in steps) if steps else None
