"""Is every kernel exact at full size? From the same integers and products, all indices, codes and gains must match."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from gpu_timing import device, reason
from torch import Tensor

from bpc_calib.backends.triton import pipeline
from bpc_calib.method import encoding
from bpc_calib.method.choosing import Cached, Choice, choose_quantized
from bpc_calib.method.encoding import make_encoder
from bpc_calib.method.selection import attended, worst_first
from bpc_calib.method.sparse_attention import sparse_attention

__all__ = ["exactness"]

DIM, KV_HEADS = 128, 8
TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-4}  # of the norm of the result

# What is ranked: multiple of the full size, group, gain, bits, query heads; then special conditions.
# Every value of every switch appears at least twice, the defaults first.
CHOICES: list[tuple[int, str, bool, int, int, str]] = [
    (1, "relative", True, 64, 4, ""),
    (4, "relative", True, 64, 4, ""),
    (1, "max", False, 64, 4, ""),
    (4, "max", False, 64, 4, ""),
    (1, "relative", True, 64, 4, "ragged"),
    (1, "relative", True, 64, 4, "padded"),
    (1, "relative", True, 64, 4, "safeguard"),
    (1, "max", False, 64, 4, "safeguard, ragged, padded"),
    (1, "relative", True, 64, 4, "ties"),
    (1, "sum", True, 64, 4, "odd"),
    (1, "relative", True, 128, 8, ""),
    (1, "relative", True, 32, 1, ""),
    (1, "max", True, 128, 1, "ties"),
    (1, "sum", False, 32, 8, "safeguard"),
    (1, "relative", False, 64, 8, "odd"),
    (1, "sum", True, 128, 5, "ragged"),
    (4, "sum", True, 128, 8, ""),
]
FIRST = 7  # this many run before codes and attention, the others after


def exactness(emit: Callable[[dict[str, Any]], None], *, tiny: bool) -> None:
    """Emit one row per check; `exact` is False if it failed."""
    tokens = 200 if tiny else 1 << 17
    generator = torch.Generator(device()).manual_seed(0)
    checks: list[tuple[str, Callable[[], dict[str, Any]]]] = []
    later: list[tuple[str, Callable[[], dict[str, Any]]]] = []  # not needed by any default, in case time runs out
    for place, (times, group, gain, bits, heads, more) in enumerate(CHOICES):
        switches = f"group {group}, gain {'on' if gain else 'off'}, {bits} bits, {heads} query heads"
        what = f"choose, {tokens * times:,} keys, {switches}" + (f", {more}" if more else "")
        arguments = (tokens * times, group, gain, bits, heads, more, generator)
        (checks if place < FIRST else later).append((what, functools.partial(choice, *arguments)))
    for bits in (64, 32, 128):
        what = f"encode_gram, {tokens:,} keys, {bits} bits"
        (checks if bits == 64 else later).append((what, functools.partial(gram, tokens, bits, generator)))
    for form in ("plain", "metric and mean"):
        what = f"encode_with, {tokens:,} keys, bfloat16, {form}"
        checks.append((what, functools.partial(encode, tokens, form, generator)))
    for dtype in TOLERANCE:
        for form in ("list", "ragged list", "dense"):
            what = f"attention, {tokens:,} keys, {str(dtype).removeprefix('torch.')}, {form}"
            (checks if dtype == torch.bfloat16 else later).append(
                (what, functools.partial(attention, tokens, dtype, form, generator))
            )
    for what, check in checks + later:
        try:
            row = check()
        except Exception as error:
            row = {"exact": False, "note": reason(error)}
        emit({"what": what, **row})


def random_codes(*shape: int, bits: int, generator: torch.Generator) -> Tensor:
    """int64 `[*shape, W]`."""
    words = torch.randint(-(1 << 31), 1 << 31, (*shape, bits // 32), generator=generator, device=device())
    words = words.to(torch.int32)
    if bits == 32:
        words = torch.cat([words, torch.zeros_like(words)], -1)
    return words.view(torch.int64)


def choice(
    tokens: int, group: str, gain: bool, bits: int, heads: int, more: str, generator: torch.Generator
) -> dict[str, Any]:
    """Compare the kernels' choice with that of plain torch from the same int8 queries."""
    where = device()
    batch = 3 if "ragged" in more or "padded" in more else 1
    tokens -= 37 if "odd" in more else 0
    query = torch.randn(batch, KV_HEADS, heads, DIM, generator=generator, device=where).bfloat16()
    projection = torch.randn(KV_HEADS, bits, DIM, generator=generator, device=where)
    codes = random_codes(batch, KV_HEADS, tokens, bits=bits, generator=generator)
    gains = torch.randint(256, (batch, KV_HEADS, tokens), generator=generator, device=where).to(torch.uint8)
    if "ties" in more:  # eight codes and two gains in all
        codes, gains = codes[:, :, torch.arange(tokens, device=where) % 8], gains % 2
    k: int | Tensor = attended(tokens, 0.02)
    cached: dict[str, Tensor | None] = {"gain": gains if gain else None}
    forced: dict[str, Any] = {}
    if "padded" in more:
        forced |= {"recent": 3, "sink": 2}
        cached["valid"] = torch.rand(batch, tokens, generator=generator, device=where) > 0.2
    if "ragged" in more:
        lengths = torch.tensor([tokens, tokens * 2 // 3, tokens // 2 + 1], device=where)
        cached["lengths"] = lengths
        k = torch.tensor([[attended(int(n), 0.02)] for n in lengths // 2], device=where)
    if "safeguard" in more:
        forced |= {"recent": 1, "sink": 4, "safeguard": 0.1}
        cached["worst"] = worst_first(torch.rand(batch, KV_HEADS, tokens, generator=generator, device=where))

    given = (Cached(codes, **cached), k, Choice(DIM**-0.5, group, **forced))
    rounded = pipeline.quantized(pipeline.prepare(query, projection, *given), batch)
    expected = choose_quantized(rounded, *given)
    differing = 0
    for _ in range(2):  # and the same again: no order of atomics shows
        found = pipeline.choose(query, projection, *given)
        differing = max(differing, int((found != expected).sum()))
    return {"exact": differing == 0, "differing": differing, "of": expected.numel()}


def gram(tokens: int, bits: int, generator: torch.Generator) -> dict[str, Any]:
    """Compare codes, errors and gains from the same products."""
    scores = torch.randn(KV_HEADS, tokens, bits, generator=generator, device=device())
    projection = torch.randn(KV_HEADS, bits, DIM, generator=generator, device=device()) / DIM**0.5
    norm = 8 * torch.rand(KV_HEADS, tokens, generator=generator, device=device())
    norm[:, ::1000] = 0
    expected = encoding.encode_gram(scores, projection @ projection.mT, norm)
    found = pipeline.encode_gram(scores, projection @ projection.mT, norm)
    parts = [(getattr(found, name) != getattr(expected, name)).sum() for name in ("codes", "error", "gain")]
    differing = int(sum(parts))
    return {"exact": differing == 0, "differing": differing, "of": 3 * norm.numel()}


def encode(tokens: int, form: str, generator: torch.Generator) -> dict[str, Any]:
    """Compare codes across a matrix product, which rounds differently: at most one in a thousand may differ."""
    keys = torch.randn(1, KV_HEADS, tokens, DIM, generator=generator, device=device()).bfloat16()
    projection = 0.3 * torch.randn(KV_HEADS, 64, DIM, generator=generator, device=device())
    metric = mean = None
    if form != "plain":
        root = torch.randn(KV_HEADS, 2 * DIM, DIM, generator=generator, device=device())
        metric, mean = root.mT @ root / (2 * DIM), torch.randn(KV_HEADS, DIM, generator=generator, device=device())
    encoder = make_encoder(projection, keys.dtype, metric=metric, mean=mean)
    expected, found = encoding.encode_with(encoder, keys), pipeline.encode_with(encoder, keys)
    codes = int((found.codes != expected.codes).any(-1).sum())
    gains = int(((found.gain.int() - expected.gain.int()).abs() > 1).sum())
    most = max(1, found.gain.numel() // 1000)
    return {"exact": codes <= most and gains <= most, "differing": codes, "of": found.gain.numel()}


def attention(tokens: int, dtype: torch.dtype, form: str, generator: torch.Generator) -> dict[str, Any]:
    """Compare attention with float64; also report the error of torch's own attention in the same dtype."""
    where, batch = device(), 2
    query = torch.randn(batch, KV_HEADS, 4, DIM, generator=generator, device=where).to(dtype)
    keys, values = (
        torch.randn(batch, KV_HEADS, tokens, DIM, generator=generator, device=where).to(dtype) for _ in range(2)
    )
    if form == "dense":
        lengths = torch.tensor([tokens, tokens * 2 // 3 + 1], device=where)
        found = pipeline.dense_attention(query, keys, values, lengths)
        listed = torch.arange(tokens, device=where).expand(batch, KV_HEADS, -1)
        listed = listed.masked_fill(listed >= lengths[:, None, None], -1)
    else:
        k = attended(tokens, 0.02)
        listed = torch.rand(batch, KV_HEADS, tokens, generator=generator, device=where).topk(k).indices.sort(-1).values
        if form == "ragged list":
            listed[1, :, k // 2 :] = -1
        found = pipeline.sparse_attention(query, keys, values, listed)
    exact = torch.empty(found.shape, dtype=torch.float64, device=where)
    for b in range(batch):  # one at a time: float64 takes much memory
        one = slice(b, b + 1)
        exact[one] = sparse_attention(query[one].double(), keys[one].double(), values[one].double(), listed[one])
    ours, torchs = (
        float((result.double() - exact).norm() / exact.norm())
        for result in (found, sparse_attention(query, keys, values, listed))
    )
    note = f"relative error {ours:.1e}, torch's own {torchs:.1e}"
    return {"exact": ours <= max(TOLERANCE[dtype], 2 * torchs), "note": note}
