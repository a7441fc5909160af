"""Times on a GPU: what `bpc bench` measures, a step through transformers and one of a server, and fitting."""

import functools
import gc
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from report import ROOT, Row

from bpc_calib import BPCCache, enable, static_steps
from bpc_calib.backends.triton import backend
from bpc_calib.bench import decode as bench_decode
from bpc_calib.bench import inputs, measure, timing
from bpc_calib.bench.layer import figures
from bpc_calib.bench.random_models import random_artifact, random_model, shape_config
from bpc_calib.bench.settings import Settings
from bpc_calib.bench.timing import reason, summary
from bpc_calib.calibration.projection_method import PROJECTION_METHODS
from bpc_calib.compat import with_cache
from bpc_calib.errors import BPCError
from bpc_calib.method.budget import attended
from bpc_calib.method.codebook import make_codebook
from bpc_calib.method.fitting import fit, mean_key
from bpc_calib.method.rules import Rules
from bpc_calib.method.state import Rows, State, read_codes, read_tokens

sys.path.insert(0, str(ROOT / "tests"))
import tiny as tiny_models

__all__ = ["Row", "attempted", "calibrate", "decode", "device", "layer", "prefill", "seeded", "serving"]

KV_HEADS, GROUP, DIM, BITS = 8, 4, 128, 64
LENGTHS = (1 << 17, 1 << 19, (1 << 17) - 77, 1 << 15, 1 << 13, 100_003)
DECODED = (1 << 17, 1 << 18, 1 << 19)
# Of a server: tokens of a page, how many requests with their tokens, and keys that a step hashes.
PAGE, REQUESTS, NEW = 16, ((1, 1 << 17), (8, 1 << 15), (64, 1 << 13)), (1, 8, 64)


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def seeded() -> torch.device:
    """A context of random tensors on the device, seeded anew: no measurement hangs on those before it."""
    torch.manual_seed(0)
    return device()


def attempted(what: str, run: Callable[[], Iterable[Row]]) -> Iterator[Row]:
    """The rows of `run`; a row that says why if it fails, or that memory was short, which is no failure."""
    gc.collect()  # what an earlier measurement held
    torch.cuda.empty_cache()
    try:
        yield from run()
    except (BPCError, torch.OutOfMemoryError) as error:
        yield {"what": what, "median": None, "note": reason(error)}
    except Exception as error:
        yield {"what": what, "failed": 1, "note": reason(error)}


def layer(*, tiny: bool) -> Iterator[Row]:
    """A layer by stage, and every form of dense attention."""
    yield from _bench("layer", LENGTHS, 11, tiny)


def prefill(*, tiny: bool) -> Iterator[Row]:
    """Hashing the keys of a prompt, alone and as a share of the prefill."""
    yield from _bench("prefill", DECODED[:1], 15, tiny, layers=3)  # the first two attend to everything


def decode(*, tiny: bool) -> Iterator[Row]:
    """Steps as CUDA graphs in the same buffers, as `bpc bench` compares them; then through transformers."""
    yield from _bench("decode", DECODED, 7, tiny)
    yield from attempted("through transformers", functools.partial(_through_transformers, tiny))


def _bench(part: str, lengths: Iterable[int], repeats: int, tiny: bool, layers: int | None = None) -> Iterator[Row]:
    """The results of `bpc bench` with random weights of Llama 3.1 8B's shape, at one length after the other."""
    config = tiny_models.model().config if tiny else shape_config("llama-3.1-8b", layers)
    load = tiny_models.model if tiny else functools.partial(random_model, config, torch.bfloat16, device())
    if tiny:
        inputs.cache_bytes = lambda device: 1  # type: ignore[attr-defined]  # few working sets: the interpreter is slow
        lengths, repeats = (163,), 1
    for tokens in lengths:
        settings = Settings((part,), lengths=(tokens,), prefill_tokens=40 if tiny else 1 << 15, repeats=repeats)

        def run(settings: Settings = settings) -> list[Row]:
            return [
                {"what": part, "result": measure.run(settings, measure.Subject(config, load, torch.bfloat16, device()))}
            ]

        yield from attempted(f"{part}, {tokens:,} tokens", run)


@torch.inference_mode()
def _through_transformers(tiny: bool) -> Iterator[Row]:
    """What a user's own loop gets: eager steps with BPC and with a `DynamicCache`, and BPC's static steps."""
    from transformers import DynamicCache

    tokens, repeats = (150, 1) if tiny else (DECODED[0], 7)
    if tiny:
        model = tiny_models.model(num_hidden_layers=2, max_position_embeddings=1024).to(device())
    else:
        model = random_model(shape_config("llama-3.1-8b"), torch.bfloat16, device())
    enable(model)
    config, ids = model.config, torch.zeros(1, 1, dtype=torch.long, device=model.device)
    bpc = BPCCache(config, random_artifact(config), dense_layers=(0,) if tiny else (0, 1), min_context=0)
    for name, cache in (("DynamicCache, SDPA", DynamicCache(config=config)), ("BPC", bpc)):
        bench_decode.fill(cache, config, 1, tokens, model.dtype, model.device)
        step = functools.partial(model, ids, **with_cache(cache))
        first = timing.clock(step, device())
        samples = [1e3 * timing.clock(step, device()) for _ in range(repeats)]
        yield {"tokens": tokens, "what": f"{name}, eager", "unit": "ms", **summary(samples, 3)}
    yield {"tokens": tokens, "what": "BPC, first step: hashes all", "unit": "ms", "median": round(1e3 * first, 1)}
    with static_steps(model, bpc, repeats + 3) as static:
        for _ in range(3):  # an ordinary step, the capture, a replay
            static(ids)
        samples = [1e3 * timing.clock(functools.partial(static, ids), device()) for _ in range(repeats)]
    yield {"tokens": tokens, "what": "BPC, static steps", "unit": "ms", **summary(samples, 3)}


def serving(*, tiny: bool) -> Iterator[Row]:
    """A server's step of a layer over pages, beside the same step over rows; then hashing new keys into pages."""
    rate = timing.bandwidth(device())["bytes_per_second"]
    for requests, tokens in ((2, 163),) if tiny else REQUESTS:
        for eight_bits in (False, True):
            what = f"{requests} x {tokens:,} tokens" + (", FP8 cache" if eight_bits else "")
            run = functools.partial(_over_pages, what, requests, tokens, eight_bits, rate, 1 if tiny else 11)
            yield from attempted(what, run)
    for count in NEW[:1] if tiny else NEW:
        what = f"hash {count} new keys per KV head"
        run = functools.partial(_hashing, what, count, 1 if tiny else 11)
        yield from attempted(what, run)


def _over_pages(what: str, requests: int, tokens: int, eight_bits: bool, rate: float, repeats: int) -> Iterator[Row]:
    """Whether the results are right, and the times; pages of requests of one length lie in any order."""
    count = requests * -(-tokens // PAGE)
    k, rules = attended(tokens, 0.02, 1), Rules()
    with seeded():
        raw = torch.randint(256, (count, KV_HEADS * PAGE * 9), dtype=torch.uint8)
        cache = torch.randn(count, PAGE, KV_HEADS, 2 * DIM, dtype=torch.bfloat16).transpose(1, 2)
        one = torch.ones(1)
        rows = Rows(
            torch.full((requests,), tokens), torch.full((requests, 1), k), tokens, k,
            block_table=torch.randperm(count).int().view(requests, -1),
        )  # fmt: skip
        query = torch.randn(requests, KV_HEADS, GROUP, DIM).bfloat16()
        codebook = make_codebook(torch.randn(KV_HEADS, BITS, DIM), query.dtype)
    codes, gain = raw.split((KV_HEADS * PAGE * 8, KV_HEADS * PAGE), 1)
    codes, gain = codes.view(torch.int64).unflatten(1, (KV_HEADS, PAGE, 1)), gain.unflatten(1, (KV_HEADS, PAGE))
    cache = cache.to(torch.float8_e4m3fn) if eight_bits else cache
    pages = State(cache[..., :DIM], cache[..., DIM:], codes, gain, scales=(one, one) if eight_bits else None)
    every = torch.arange(tokens, device=device()).expand(requests, KV_HEADS, -1)
    keys, values = (each.to(query.dtype) for each in read_tokens(pages, rows, every))
    copied, in_rows = State(keys, values, *read_codes(pages, rows)), replace(rows, block_table=None)

    def over_pages() -> tuple[torch.Tensor, torch.Tensor]:
        return backend.sparse_decode(query, codebook, pages, rows, rules)

    def over_rows() -> tuple[torch.Tensor, torch.Tensor]:
        return backend.sparse_decode(query, codebook, copied, in_rows, rules)

    expected, _ = over_rows()
    error = float((over_pages()[0] - expected).norm() / expected.norm())
    yield {"what": f"{what}: result over pages as over rows", "exact": error < 1e-2, "error": error}
    if torch.cuda.is_available():
        yield {"what": f"{what}: a CUDA graph, replayed with other lengths", "exact": _replays(over_pages, rows)}
    # Codes and gains of all tokens, keys and values of the chosen.
    least = requests * KV_HEADS * (tokens * (BITS // 8 + 1) + 2 * DIM * cache.element_size() * k)
    calls = {f"{what}: a step over pages": over_pages, f"{what}: a step over rows": over_rows}
    yield from _timed(calls, repeats, least, rate)


def _replays(step: Callable[[], Any], rows: Rows) -> bool:
    """Whether a captured step gives what a step gives, after lengths and numbers changed in place."""
    held: list[Any] = []
    replay = timing.captured([lambda: held.append(step())], device())
    rows.lengths.sub_(37)
    rows.k.sub_(1)
    replay()
    torch.cuda.synchronize()
    found = [each.clone() for each in held[-1]]
    same = all(torch.equal(ours, theirs) for ours, theirs in zip(found, step(), strict=True))
    rows.lengths.add_(37)
    rows.k.add_(1)
    return same


def _hashing(what: str, count: int, repeats: int) -> Iterator[Row]:
    """Hash keys into the pages of as many requests."""
    with seeded():
        keys = torch.randn(count, KV_HEADS, DIM).bfloat16().transpose(0, 1)[None]
        codes = torch.zeros(count, KV_HEADS, PAGE, 1, dtype=torch.int64)
        gain = torch.zeros(count, KV_HEADS, PAGE, dtype=torch.uint8)
        metric, slots = torch.eye(DIM).expand(KV_HEADS, -1, -1), torch.arange(count) * PAGE
        codebook = make_codebook(torch.randn(KV_HEADS, BITS, DIM), keys.dtype, metric=metric)
    pages = State(keys, keys, codes, gain)
    yield from _timed({what: functools.partial(backend.append, pages, codebook, keys, None, slots)}, repeats)


def _timed(
    calls: dict[str, Callable[[], Any]], repeats: int, size: int | None = None, rate: float = 1.0
) -> Iterator[Row]:
    """Microseconds of each call, taken in turn, and the floor of `size` bytes at this rate."""
    for what, samples in timing.timed({what: [call] for what, call in calls.items()}, repeats, device()).items():
        yield {"what": what, "unit": "us", **figures(samples, size, rate)}


def calibrate(*, tiny: bool) -> Iterator[Row]:
    """Finding the projections of a layer, by method."""
    for name in PROJECTION_METHODS:
        yield from attempted(f"fit, {name}", functools.partial(_fit, name, *((300, 1) if tiny else (1 << 16, 3))))


def _fit(name: str, tokens: int, repeats: int) -> Iterator[Row]:
    method = PROJECTION_METHODS[name]
    with seeded():
        keys = (torch.randn(KV_HEADS, tokens, DIM) * torch.logspace(0, -1, DIM)).bfloat16()
        root = torch.randn(KV_HEADS, 2 * DIM, DIM)
    run = functools.partial(
        fit, keys, BITS, iterations=method.iterations, rounds=method.rounds,
        metric=root.mT @ root / (2 * DIM) if method.metric else None, mean=mean_key(keys) if method.centred else None,
    )  # fmt: skip
    run()
    what = f"fit, {name}: {KV_HEADS} KV heads, {tokens:,} keys, D={DIM}, {BITS} bits"
    yield {"what": what, "unit": "s", **summary([timing.clock(run, device()) for _ in range(repeats)], 4)}
