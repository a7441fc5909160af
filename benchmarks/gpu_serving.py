"""A server's decoding step of a layer on a GPU: over pages beside over rows, in a CUDA graph, and vLLM where it is."""

import functools
import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from gpu_part import Emit, Limits, Step, free, lacking
from gpu_times import device, rate

from bpc_calib.backends.triton import backend
from bpc_calib.bench.timing import captured, summary, timed
from bpc_calib.method.budget import attended
from bpc_calib.method.choosing import Cached, Choice
from bpc_calib.method.encoding import Encoder, make_encoder
from bpc_calib.method.paging import CodePages, Fresh, Paged, Rows, read_codes, read_tokens

__all__ = ["cases", "steps"]

KV_HEADS, GROUP, DIM, BITS, PAGE, BUDGET = 8, 4, 128, 64, 16, 0.02
REQUESTS = ((1, 1 << 17), (8, 1 << 15), (64, 1 << 13))  # how many, and their tokens
FEW = ((2, 163),)
NEW = (1, 8, 64)  # keys that a step hashes
CHOICE = Choice(DIM**-0.5)


def steps(limits: Limits) -> list[Step]:
    """Exactness and times for each batch; then vLLM."""
    made: list[Step] = []
    for requests, tokens in FEW if limits.tiny else REQUESTS:
        for eight_bits in (False, True):
            what = _what(requests, tokens, eight_bits)
            made.append((what, functools.partial(_batch, what, requests, tokens, eight_bits, limits.tiny)))
    for count in NEW:
        made.append((f"hash {count} new keys per KV head", functools.partial(_hash, count, limits.tiny)))
    return [*made, ("vLLM with BPC", functools.partial(_vllm, limits))]


def cases(*, tiny: bool) -> list[tuple[str, Callable[[], Any]]]:
    """The same kernels, to be compiled."""
    batches = [(requests, tokens, eight) for requests, tokens in (FEW if tiny else REQUESTS) for eight in (False, True)]
    found: list[tuple[str, Callable[[], Any]]] = [
        (_what(*each), functools.partial(_compile, *each)) for each in batches
    ]
    return [*found, *((f"hash {count} new keys", _hasher(count)) for count in NEW)]


def _compile(requests: int, tokens: int, eight_bits: bool) -> None:
    Batch.drawn(requests, tokens, eight_bits).step()


def _what(requests: int, tokens: int, eight_bits: bool) -> str:
    return f"{requests} x {tokens:,} tokens" + (", FP8 cache" if eight_bits else "")


@dataclass
class Batch:
    """Requests of the same length, whose pages lie in any order."""

    query: torch.Tensor
    projection: torch.Tensor
    paged: Paged
    rows: Rows

    @classmethod
    def drawn(cls, requests: int, tokens: int, eight_bits: bool) -> "Batch":
        """Random pages; with 8 bits a cache of float8_e4m3fn.

        Raises:
            MemoryError: there is too little.
        """
        where, per_request = device(), -(-tokens // PAGE)
        count = requests * per_request
        if why := lacking(count * PAGE * KV_HEADS * (DIM * (8 if eight_bits else 6) + 60), free()):
            raise MemoryError(why)
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


def _batch(what: str, requests: int, tokens: int, eight_bits: bool, tiny: bool, emit: Emit) -> None:
    batch = Batch.drawn(requests, tokens, eight_bits)
    in_rows = batch.in_rows()
    (found, _), expected = batch.step(), in_rows()
    error = float((found - expected).norm() / expected.norm())
    emit({"what": f"{what}: result over pages as over rows", "exact": error < 1e-2, "error": error})
    if torch.cuda.is_available():
        emit({"what": f"{what}: a CUDA graph, replayed with other lengths", "exact": _replays(batch)})
    samples = timed({"pages": [batch.step], "rows": [in_rows]}, 1 if tiny else 11, device())
    for form, each in samples.items():
        floor = round(1e6 * batch.floor() / rate(tiny=tiny), 2)
        row: dict[str, Any] = {"what": f"{what}: a step over {form}", "unit": "us", "floor": floor}
        emit(row | (summary(each) if isinstance(each, list) else {"median": None, "note": each}))


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


def _hash(count: int, tiny: bool, emit: Emit) -> None:
    (samples,) = timed({"hash": [_hasher(count)]}, 1 if tiny else 11, device()).values()
    row: dict[str, Any] = {"what": f"hash {count} new keys per KV head", "unit": "us"}
    emit(row | (summary(samples) if isinstance(samples, list) else {"median": None, "note": samples}))


def _vllm(limits: Limits, emit: Emit) -> None:
    """The bundled model behind vLLM's server: stock, plugin installed and BPC, in tokens per second."""
    what = "vLLM with BPC"
    if importlib.util.find_spec("vllm") is None or limits.tiny:
        emit({"what": what, "median": None, "note": "not measured: vLLM is not installed"})
        return
    artifact, result = limits.folder / "demo.safetensors", limits.folder / "serving.json"
    script = Path(__file__).parent / "serving.py"
    for words in (
        ["-c", "from bpc_cli.main import main; main()", "calibrate", "-m", "demo", "-o", artifact, "--force", "-q"],
        [script, "-a", artifact, "-o", result, "--lengths", 2000, "--requests", 1, 8, "--repeats", 3],
    ):
        command = [sys.executable, *map(str, words)]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=limits.left, check=False)
        if ran.returncode:
            said = (ran.stderr + ran.stdout).strip().splitlines() or [f"exit {ran.returncode}"]
            emit({"what": what, "failed": 1, "note": said[-1][:200]})
            return
    for row in json.loads(result.read_text())["rows"]:
        name = f"vLLM, {row['server']}, {row['requests']} x {row['prompt']:,} tokens"
        emit({"what": name, "unit": "tokens/s", "median": row["tokens_per_second"], "ratio": row["ratio"]})
