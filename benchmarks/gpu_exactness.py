"""Is every kernel exact at full size? From the same integers and products, all indices, codes and gains must match."""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import torch
from gpu_times import Row, attempted, seeded

from bpc_calib.backends.triton import pipeline
from bpc_calib.method import encoding, step
from bpc_calib.method.budget import attended
from bpc_calib.method.codebook import make_codebook
from bpc_calib.method.rules import Rules
from bpc_calib.method.selection import worst_first
from bpc_calib.method.state import Rows, State

__all__ = ["rows"]

DIM, KV_HEADS = 128, 8
TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-4}  # of the norm of the result

TOKENS = 1 << 17
ODD = (TOKENS - 77, 100_003)  # lengths that no block of a kernel divides

SWITCHES = ("tokens", "group", "gain", "bits", "heads", "more")
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
    (ODD[1], "max", True, 64, 4, ""),
    (TOKENS, "relative", True, 128, 8, ""),
    (TOKENS, "relative", True, 32, 1, ""),
    (TOKENS, "max", True, 128, 1, "ties"),
    (ODD[0], "relative", False, 32, 8, "safeguard"),
    (ODD[1], "relative", False, 64, 8, ""),
    (TOKENS, "max", True, 128, 5, "ragged"),
    (4 * TOKENS, "relative", True, 128, 8, ""),
]

WORKERS = 12  # side by side: most of the time goes to the compiler


def rows(*, tiny: bool) -> Iterator[Row]:
    """One row per check, in order of value, in case time runs out; `exact` is False where it failed."""
    checks: list[tuple[Callable[..., Row], Row]] = []
    checks += [(choice, dict(zip(SWITCHES, each, strict=True))) for each in CHOICES]
    for form, tokens in (("plain", TOKENS), ("metric and mean", TOKENS), ("metric and mean", ODD[1])):
        checks.append((encode, {"tokens": tokens, "form": form}))
    for bits, tokens in ((64, TOKENS), (64, ODD[0]), (32, TOKENS), (128, ODD[1])):
        checks.append((gram, {"tokens": tokens, "bits": bits}))
    for dtype in TOLERANCE:
        for form, tokens in (("list", TOKENS), ("ragged list", ODD[0]), ("dense", TOKENS), ("dense", ODD[1])):
            checks.append((attention, {"tokens": tokens, "dtype": dtype, "form": form}))
    if tiny:  # the interpreter is slow
        checks = [(check, given | {"tokens": _few(given["tokens"])}) for check, given in checks[::5]]
    with ProcessPoolExecutor(min(WORKERS, os.cpu_count() or 1), get_context("spawn")) as pool:
        yield from pool.map(_row, *zip(*checks, strict=True))


def _row(check: Callable[..., Row], given: Row) -> Row:
    what = f"{check.__name__}: " + ", ".join(f"{name} {value}" for name, value in given.items() if value != "")
    (row,) = attempted(what, lambda: [{"what": what, **check(**given)}])
    return row


def _few(tokens: int) -> int:
    """Few keys, as odd as many."""
    return 200 * (4 if tokens > TOKENS else 1) - (37 if tokens in ODD else 0)


def choice(tokens: int, group: str, gain: bool, bits: int, heads: int, more: str) -> Row:
    """Compare the kernels' choice with that of plain torch from the same int8 queries."""
    batch = 3 if "ragged" in more or "padded" in more else 1
    valid = worst = None
    forced: dict[str, Any] = {}
    with seeded():
        query = torch.randn(batch, KV_HEADS, heads, DIM).bfloat16()
        projection = torch.randn(KV_HEADS, bits, DIM)
        ends = (0, 1 << 32) if bits == 32 else (-(1 << 63), (1 << 63) - 1)
        codes = torch.randint(*ends, (batch, KV_HEADS, tokens, -(-bits // 64)))
        gains = torch.randint(256, (batch, KV_HEADS, tokens), dtype=torch.uint8)
        if "ties" in more:  # eight codes and two gains in all
            codes, gains = codes[:, :, torch.arange(tokens) % 8], gains % 2
        if "padded" in more:
            forced |= {"recent": 3, "sink": 2}
            valid = torch.rand(batch, tokens) > 0.2
        if "safeguard" in more:
            forced |= {"recent": 1, "sink": 4, "safeguard": 0.1}
            worst = worst_first(torch.rand(batch, KV_HEADS, tokens))
        lengths = torch.full((batch,), tokens)
        k = torch.full((batch, 1), attended(tokens, 0.02))
        if "ragged" in more:
            lengths = torch.tensor([tokens, tokens * 2 // 3, tokens // 2 + 1])
            k = torch.tensor([[attended(int(n), 0.02)] for n in lengths // 2])
        codebook = make_codebook(projection, query.dtype)
    state = State(query, query, codes, gains, worst=worst)
    rows, rules = Rows(lengths, k, tokens, int(k.max()), valid), Rules(group=group, gain=gain, **forced)
    rounded = pipeline.quantized(pipeline.score(query, codebook, state, rows, rules), batch)
    expected = step.best(rounded, state, rows, rules, DIM)
    twice = (pipeline.choose(query, codebook, state, rows, rules) for _ in range(2))  # no order of atomics shows
    return _compared(max(int((found != expected).sum()) for found in twice), expected.numel())


def gram(tokens: int, bits: int) -> Row:
    """Compare codes, errors and gains from the same products."""
    with seeded():
        scores, projection = torch.randn(KV_HEADS, tokens, bits), torch.randn(KV_HEADS, bits, DIM) / DIM**0.5
        norm = 8 * torch.rand(KV_HEADS, tokens)
    norm[:, ::1000] = 0
    found, expected = (room.encode_gram(scores, projection @ projection.mT, norm) for room in (pipeline, encoding))
    parts = (getattr(found, name) != getattr(expected, name) for name in ("codes", "error", "gain"))
    return _compared(sum(int(part.sum()) for part in parts), 3 * norm.numel())


def encode(tokens: int, form: str) -> Row:
    """Compare codes across a matrix product, which rounds differently: at most one in a thousand may differ."""
    metric = mean = None
    with seeded():
        keys = torch.randn(1, KV_HEADS, tokens, DIM).bfloat16()
        projection = 0.3 * torch.randn(KV_HEADS, 64, DIM)
        if form != "plain":
            root, mean = torch.randn(KV_HEADS, 2 * DIM, DIM), torch.randn(KV_HEADS, DIM)
            metric = root.mT @ root / (2 * DIM)
    codebook = make_codebook(projection, keys.dtype, metric=metric, mean=mean)
    found, expected = (room.encode_with(codebook, keys) for room in (pipeline, encoding))
    codes = int((found.codes != expected.codes).any(-1).sum())
    gains = int(((found.gain.int() - expected.gain.int()).abs() > 1).sum())
    count = found.gain.numel()
    return _compared(codes, count) | {"exact": max(codes, gains) <= max(1, count // 1000)}


def attention(tokens: int, dtype: torch.dtype, form: str) -> Row:
    """Compare attention with float64; also report the error of torch's own attention in the same dtype."""
    batch = 2
    with seeded():
        query = torch.randn(batch, KV_HEADS, 4, DIM).to(dtype)
        keys, values = (torch.randn(batch, KV_HEADS, tokens, DIM).to(dtype) for _ in range(2))
        lengths = torch.tensor([tokens, tokens * 2 // 3 + 1]) if form == "dense" else torch.full((batch,), tokens)
        if form == "dense":
            listed = torch.arange(tokens).expand(batch, KV_HEADS, -1)
            listed = listed.masked_fill(listed >= lengths[:, None, None], -1)
        else:
            k = attended(tokens, 0.02)
            listed = torch.rand(batch, KV_HEADS, tokens).topk(k).indices.sort(-1).values
            if form == "ragged list":
                listed[1, :, k // 2 :] = -1
    state, rows = State(keys, values), Rows(lengths, lengths.unsqueeze(-1), tokens, tokens)
    found = pipeline.attend(query, state, rows, None if form == "dense" else listed)
    one_by_one = zip(query.split(1), keys.split(1), values.split(1), listed.split(1), strict=True)  # float64 is large
    exact = torch.cat(
        [step.attend(q.double(), State(k.double(), v.double()), rows, each) for q, k, v, each in one_by_one]
    )
    ours, torchs = (
        float((result.double() - exact).norm() / exact.norm())
        for result in (found, step.attend(query, state, rows, listed))
    )
    note = f"relative error {ours:.1e}, torch's own {torchs:.1e}"
    return {"exact": ours <= max(TOLERANCE[dtype], 2 * torchs), "note": note}


def _compared(differing: int, of: int) -> Row:
    return {"exact": differing == 0, "differing": differing, "of": of}
