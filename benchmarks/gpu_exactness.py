"""Is every kernel exact at full size? From the same integers and products, all indices, codes and gains must match."""

import functools
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import torch
from gpu_times import attempted, device
from torch import Tensor

from bpc_calib.backends.triton import pipeline
from bpc_calib.method import encoding
from bpc_calib.method.budget import attended
from bpc_calib.method.choosing import Cached, Choice, choose_quantized
from bpc_calib.method.encoding import make_encoder
from bpc_calib.method.selection import worst_first
from bpc_calib.method.sparse_attention import sparse_attention

__all__ = ["rows"]

DIM, KV_HEADS = 128, 8
TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-4}  # of the norm of the result

TOKENS = 1 << 17
ODD = (TOKENS - 77, 100_003)  # lengths that no block of a kernel divides

# What is ranked: how many keys, group, gain, bits, query heads; then special conditions.
# Every value of every switch appears at least twice, the defaults first.
CHOICES: list[tuple[int, str, bool, int, int, str]] = [
    (TOKENS, "relative", True, 64, 4, ""),
    (ODD[0], "relative", True, 64, 4, ""),
    (4 * TOKENS, "relative", True, 64, 4, ""),
    (TOKENS, "max", False, 64, 4, ""),
    (4 * TOKENS, "max", False, 64, 4, ""),
    (ODD[1], "max", False, 64, 4, ""),
    (TOKENS, "relative", True, 64, 4, "ragged"),
    (TOKENS, "relative", True, 64, 4, "padded"),
    (TOKENS, "relative", True, 64, 4, "safeguard"),
    (TOKENS, "max", False, 64, 4, "safeguard, ragged, padded"),
    (TOKENS, "relative", True, 64, 4, "ties"),
    (ODD[1], "sum", True, 64, 4, ""),
    (TOKENS, "relative", True, 128, 8, ""),
    (TOKENS, "relative", True, 32, 1, ""),
    (TOKENS, "max", True, 128, 1, "ties"),
    (ODD[0], "sum", False, 32, 8, "safeguard"),
    (ODD[1], "relative", False, 64, 8, ""),
    (TOKENS, "sum", True, 128, 5, "ragged"),
    (4 * TOKENS, "sum", True, 128, 8, ""),
]

Check = Callable[[], dict[str, Any]]
WORKERS = 4  # side by side: most of the time goes to the compiler


def rows(*, tiny: bool) -> Iterator[dict[str, Any]]:
    """One row per check; `exact` is False where it failed."""
    with ProcessPoolExecutor(min(WORKERS, os.cpu_count() or 1), get_context("spawn")) as pool:
        yield from pool.map(_row, *zip(*_checks(tiny=tiny), strict=True))


def _row(what: str, check: Check) -> dict[str, Any]:
    (row,) = attempted(what, lambda: [{"what": what, **check()}])
    return row


def _checks(*, tiny: bool) -> list[tuple[str, Check]]:
    """What is checked, in order of value, in case time runs out."""
    checks: list[tuple[str, Check]] = []
    for tokens, group, gain, bits, heads, more in CHOICES:
        tokens = _few(tokens) if tiny else tokens
        switches = f"group {group}, gain {'on' if gain else 'off'}, {bits} bits, {heads} query heads"
        run = functools.partial(choice, tokens, group, gain, bits, heads, more)
        checks.append((f"choose, {tokens:,} keys, {switches}" + (f", {more}" if more else ""), run))
    whole, odd, least = (_few(each) if tiny else each for each in (TOKENS, *ODD))
    for form, tokens in (("plain", whole), ("metric and mean", whole), ("metric and mean", least)):
        what = f"encode_with, {tokens:,} keys, bfloat16, {form}"
        checks.append((what, functools.partial(encode, tokens, form)))
    for bits, tokens in ((64, whole), (64, odd), (32, whole), (128, least)):
        checks.append((f"encode_gram, {tokens:,} keys, {bits} bits", functools.partial(gram, tokens, bits)))
    for dtype in TOLERANCE:
        for form, tokens in (("list", whole), ("ragged list", odd), ("dense", whole), ("dense", least)):
            what = f"attention, {tokens:,} keys, {str(dtype).removeprefix('torch.')}, {form}"
            checks.append((what, functools.partial(attention, tokens, dtype, form)))
    return checks[:: 5 if tiny else 1]  # the interpreter is slow


def _few(tokens: int) -> int:
    """Few keys, as odd as many."""
    return 200 * (4 if tokens > TOKENS else 1) - (37 if tokens in ODD else 0)


def _generator() -> torch.Generator:
    """Seeded anew, so that a check does not hang on those before it."""
    return torch.Generator(device()).manual_seed(0)


def random_codes(*shape: int, bits: int, generator: torch.Generator) -> Tensor:
    """int64 `[*shape, W]`."""
    words = torch.randint(-(1 << 31), 1 << 31, (*shape, bits // 32), generator=generator, device=device())
    words = words.to(torch.int32)
    if bits == 32:
        words = torch.cat([words, torch.zeros_like(words)], -1)
    return words.view(torch.int64)


def choice(tokens: int, group: str, gain: bool, bits: int, heads: int, more: str) -> dict[str, Any]:
    """Compare the kernels' choice with that of plain torch from the same int8 queries."""
    where, generator = device(), _generator()
    batch = 3 if "ragged" in more or "padded" in more else 1
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
    found = pipeline.choose(query, projection, *given)
    rounded = pipeline.quantize_query(query, projection)
    expected = choose_quantized(rounded, *given)
    differing = int((found != expected).sum())
    again = pipeline.choose(query, projection, *given)  # no order of atomics shows
    differing = max(differing, int((again != expected).sum()))
    return {"exact": differing == 0, "differing": differing, "of": expected.numel()}


def gram(tokens: int, bits: int) -> dict[str, Any]:
    """Compare codes, errors and gains from the same products."""
    generator = _generator()
    scores = torch.randn(KV_HEADS, tokens, bits, generator=generator, device=device())
    projection = torch.randn(KV_HEADS, bits, DIM, generator=generator, device=device()) / DIM**0.5
    norm = 8 * torch.rand(KV_HEADS, tokens, generator=generator, device=device())
    norm[:, ::1000] = 0
    found = pipeline.encode_gram(scores, projection @ projection.mT, norm)
    expected = encoding.encode_gram(scores, projection @ projection.mT, norm)
    parts = [(getattr(found, name) != getattr(expected, name)).sum() for name in ("codes", "error", "gain")]
    differing = int(sum(parts))
    return {"exact": differing == 0, "differing": differing, "of": 3 * norm.numel()}


def encode(tokens: int, form: str) -> dict[str, Any]:
    """Compare codes across a matrix product, which rounds differently: at most one in a thousand may differ."""
    generator = _generator()
    keys = torch.randn(1, KV_HEADS, tokens, DIM, generator=generator, device=device()).bfloat16()
    projection = 0.3 * torch.randn(KV_HEADS, 64, DIM, generator=generator, device=device())
    metric = mean = None
    if form != "plain":
        root = torch.randn(KV_HEADS, 2 * DIM, DIM, generator=generator, device=device())
        metric, mean = root.mT @ root / (2 * DIM), torch.randn(KV_HEADS, DIM, generator=generator, device=device())
    encoder = make_encoder(projection, keys.dtype, metric=metric, mean=mean)
    found = pipeline.encode_with(encoder, keys)
    expected = encoding.encode_with(encoder, keys)
    codes = int((found.codes != expected.codes).any(-1).sum())
    gains = int(((found.gain.int() - expected.gain.int()).abs() > 1).sum())
    most = max(1, found.gain.numel() // 1000)
    return {"exact": codes <= most and gains <= most, "differing": codes, "of": found.gain.numel()}


def attention(tokens: int, dtype: torch.dtype, form: str) -> dict[str, Any]:
    """Compare attention with float64; also report the error of torch's own attention in the same dtype."""
    where, batch, generator = device(), 2, _generator()
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
