"""A server's decoding step of a layer on a GPU: over pages beside over rows, and in a CUDA graph."""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from gpu_times import attempted, device

from bpc_calib.backends.triton import backend
from bpc_calib.bench.timing import captured, copies, summary, timed
from bpc_calib.method.budget import attended
from bpc_calib.method.choosing import Cached, Choice
from bpc_calib.method.encoding import Encoder, make_encoder
from bpc_calib.method.paging import CodePages, Fresh, Paged, Rows, read_codes, read_tokens

__all__ = ["rows"]

Row = dict[str, Any]

KV_HEADS, GROUP, DIM, BITS, PAGE, BUDGET = 8, 4, 128, 64, 16, 0.02
REQUESTS = ((1, 1 << 17), (8, 1 << 15), (64, 1 << 13))  # how many, and their tokens
FEW = ((2, 163),)
NEW = (1, 8, 64)  # keys that a step hashes
CHOICE = Choice(DIM**-0.5)


def rows(*, tiny: bool) -> Iterator[Row]:
    """Exactness and times for each batch, then hashing."""
    for requests, tokens in FEW if tiny else REQUESTS:
        for eight_bits in (False, True):
            what = f"{requests} x {tokens:,} tokens" + (", FP8 cache" if eight_bits else "")
            yield from attempted(what, functools.partial(_batch, what, requests, tokens, eight_bits, tiny))
    for count in NEW:
        what = f"hash {count} new keys per KV head"
        yield from attempted(what, lambda what=what, count=count: _timed({what: _hasher(count)}, tiny))  # type: ignore[misc]


@dataclass
class Batch:
    """Requests of the same length, whose pages lie in any order."""

    query: torch.Tensor
    projection: torch.Tensor
    paged: Paged
    rows: Rows

    @classmethod
    def drawn(cls, requests: int, tokens: int, eight_bits: bool) -> "Batch":
        """Random pages; with 8 bits a cache of float8_e4m3fn."""
        where, per_request = device(), -(-tokens // PAGE)
        count = requests * per_request
        generator = torch.Generator(where).manual_seed(0)
        draw = functools.partial(torch.randn, generator=generator, device=where)
        raw = torch.randint(256, (count, KV_HEADS * PAGE * 9), generator=generator, device=where, dtype=torch.uint8)
        codes = raw[:, : KV_HEADS * PAGE * 8].view(torch.int64).view(count, KV_HEADS, PAGE, 1)
        cache = draw(count, PAGE, KV_HEADS, 2 * DIM, dtype=torch.bfloat16).transpose(1, 2)
        scale = torch.ones(1, device=where)
        paged = Paged(
            CodePages(codes, raw[:, KV_HEADS * PAGE * 8 :].view(count, KV_HEADS, PAGE)),
            cache.to(torch.float8_e4m3fn) if eight_bits else cache,
            scales=(scale, scale) if eight_bits else None,
        )
        table = torch.randperm(count, generator=generator, device=where).int().view(requests, per_request)
        k = attended(tokens, BUDGET, 1)
        lengths, ks = (torch.full((requests,), each, device=where) for each in (tokens, k))
        query = draw(requests, KV_HEADS, GROUP, DIM).bfloat16()
        return cls(query, draw(KV_HEADS, BITS, DIM).bfloat16(), paged, Rows(table, lengths, ks, k))

    def step(self) -> tuple[torch.Tensor, torch.Tensor]:
        """A step over the pages."""
        return backend.attend_pages(self.query, self.projection, self.paged, self.rows, CHOICE)

    def in_rows(self) -> Callable[[], torch.Tensor]:
        """The same step over copies in rows."""
        rows, query = self.rows, self.query
        codes, gain = read_codes(self.paged.codes, rows.table, rows.lengths)
        every = torch.arange(codes.shape[2], device=codes.device).expand(codes.shape[:3])
        keys, values = (each.to(query.dtype) for each in read_tokens(self.paged, rows.table, every))
        cached = Cached(codes, gain, lengths=rows.lengths)

        def step() -> torch.Tensor:
            chosen = backend.choose(query, self.projection, cached, rows.k[:, None], CHOICE, width=rows.width)
            return backend.sparse_attention(query, keys, values, chosen, CHOICE.scaling)

        return step

    def floor(self) -> int:
        """The bytes that a step must read: codes and gains of all tokens, keys and values of the chosen."""
        requests, tokens = len(self.rows.k), int(self.rows.lengths[0])
        read = 2 * DIM * self.paged.cache.element_size() * self.rows.width
        return requests * KV_HEADS * (tokens * (BITS // 8 + 1) + read)


def _batch(what: str, requests: int, tokens: int, eight_bits: bool, tiny: bool) -> Iterator[Row]:
    batch = Batch.drawn(requests, tokens, eight_bits)
    in_rows = batch.in_rows()
    (found, _), expected = batch.step(), in_rows()
    error = float((found - expected).norm() / expected.norm())
    yield {"what": f"{what}: result over pages as over rows", "exact": error < 1e-2, "error": error}
    if torch.cuda.is_available():
        yield {"what": f"{what}: a CUDA graph, replayed with other lengths", "exact": _replays(batch)}
    floor = round(1e6 * batch.floor() / median(copies((4 if tiny else 4096) << 20, device())), 2)
    for row in _timed({f"{what}: a step over pages": batch.step, f"{what}: a step over rows": in_rows}, tiny):
        yield row | {"floor": floor}


def _timed(calls: dict[str, Callable[[], Any]], tiny: bool) -> Iterator[Row]:
    """Microseconds of each call, taken in turn."""
    for what, samples in timed({what: [call] for what, call in calls.items()}, 1 if tiny else 11, device()).items():
        taken = {"median": None, "note": samples} if isinstance(samples, str) else summary(samples)
        yield {"what": what, "unit": "us", **taken}


def _replays(batch: Batch) -> bool:
    """Whether a captured step gives what a step gives, after lengths and numbers changed in place."""
    held: list[tuple[torch.Tensor, torch.Tensor]] = []
    replay = captured([lambda: held.append(batch.step())], device())
    batch.rows.lengths.sub_(37)
    batch.rows.k.sub_(1)
    replay()
    torch.cuda.synchronize()
    found, chosen = (each.clone() for each in held[-1])
    expected, same = batch.step()
    batch.rows.lengths.add_(37)
    batch.rows.k.add_(1)
    return torch.equal(chosen, same) and torch.equal(found, expected)


def _hasher(count: int) -> Callable[[], None]:
    """Hashes keys into the pages of as many requests."""
    where = device()
    generator = torch.Generator(where).manual_seed(0)
    draw = functools.partial(torch.randn, generator=generator, device=where)
    encoder: Encoder = make_encoder(
        draw(KV_HEADS, BITS, DIM), torch.bfloat16, metric=torch.eye(DIM, device=where).expand(KV_HEADS, -1, -1)
    )
    pages = CodePages(
        torch.zeros(count, KV_HEADS, PAGE, 1, dtype=torch.int64, device=where),
        torch.zeros(count, KV_HEADS, PAGE, dtype=torch.uint8, device=where),
    )
    keys = draw(count, KV_HEADS, DIM).bfloat16().transpose(0, 1)[None]
    fresh = Fresh(encoder, keys, torch.arange(count, device=where) * PAGE)
    return lambda: backend.hash_into(fresh, pages)
