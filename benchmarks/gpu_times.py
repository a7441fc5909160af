"""Times on a GPU: what `bpc bench` measures, a step through transformers as users call it, and fitting."""

import functools
import gc
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from report import ROOT

from bpc_calib import BPCCache, enable, static_steps
from bpc_calib.bench import decode as bench_decode
from bpc_calib.bench import inputs, measure, timing
from bpc_calib.bench.random_models import random_artifact, random_model, shape_config
from bpc_calib.bench.settings import Settings
from bpc_calib.bench.timing import reason, summary
from bpc_calib.calibration.projection_method import PROJECTION_METHODS
from bpc_calib.compat import with_cache
from bpc_calib.errors import BPCError
from bpc_calib.method.fitting import fit, mean_key

sys.path.insert(0, str(ROOT / "tests"))
import tiny as tiny_models

__all__ = ["attempted", "calibrate", "decode", "device", "layer", "prefill"]

Row = dict[str, Any]
KV_HEADS, DIM = 8, 128
LENGTHS = (1 << 17, 1 << 19, (1 << 17) - 77, 1 << 15, 1 << 13, 100_003)
DECODED = (1 << 17, 1 << 18, 1 << 19)


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


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
    """A layer by stage, the paper's pipeline, and every form of dense attention."""
    for tokens in (163,) if tiny else LENGTHS:
        yield from _bench(Settings(parts=("layer",), lengths=(tokens,), repeats=1 if tiny else 11), tiny)


def prefill(*, tiny: bool) -> Iterator[Row]:
    """Hashing the keys of a prompt, alone and as a share of the prefill."""
    tokens, prompt, repeats = ((40,), 40, 1) if tiny else ((1 << 17,), 1 << 15, 15)
    settings = Settings(parts=("prefill",), lengths=tokens, prefill_tokens=prompt, repeats=repeats)
    yield from _bench(settings, tiny, layers=2)


def decode(*, tiny: bool) -> Iterator[Row]:
    """Steps as CUDA graphs in the same buffers, as `bpc bench` compares them; then through transformers."""
    for tokens in (150,) if tiny else DECODED:
        yield from _bench(Settings(parts=("decode",), lengths=(tokens,), repeats=1 if tiny else 7), tiny)
    yield from attempted("through transformers", functools.partial(_through_transformers, tiny))


def _bench(settings: Settings, tiny: bool, layers: int | None = None) -> Iterator[Row]:
    """The rows of `bpc bench`, with random weights of Llama 3.1 8B's shape."""
    what = f"{settings.parts[0]}, {settings.lengths} tokens"
    yield from attempted(what, functools.partial(_benched, settings, tiny, layers))


def _benched(settings: Settings, tiny: bool, layers: int | None) -> Iterator[Row]:
    if tiny:
        inputs.cache_bytes = lambda device: 1  # type: ignore[attr-defined]  # few working sets: the interpreter is slow
    config = tiny_models.model().config if tiny else shape_config("llama-3.1-8b", layers)
    load = tiny_models.model if tiny else functools.partial(random_model, config, torch.bfloat16, device())
    result = measure.run(settings, config, load, None, torch.bfloat16, device())
    for row in result.get("layer", []):
        what = f"{row['method']}, {row.get('form', row['stage'])}" + ("" if row["cold"] else ", not cold")
        yield {"what": what, "unit": "us", **row}
    for row in result.get("decode", {}).get("rows", []):
        sides = {name: row[name] for name in ("bpc", "free")} | row["dense_forms"]
        for name, figures in sides.items():
            about = {"tokens": row["tokens"], "what": f"a step, {name}", "unit": "ms"}
            yield about | figures | {"median": figures["milliseconds"]}
    for row in result.get("prefill", {}).get("rows", []):
        for side in ("full", "bpc", "hashing"):
            if side in row:
                yield {"tokens": row["tokens"], "what": f"{row['what']}: {side}", "unit": "s", **row[side]}
    for each in result.get("left_out", []):
        yield {"what": each["what"], "median": None, "note": each["note"]}


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
    bpc = BPCCache(config, random_artifact(config), dense_layers=(0,) if tiny else (0, 1))
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


def calibrate(*, tiny: bool) -> Iterator[Row]:
    """Finding the projections of a layer, by method."""
    for name, method in PROJECTION_METHODS.items():
        yield from attempted(
            f"fit, {name}", functools.partial(_fit, name, method, *((300, 1) if tiny else (1 << 16, 3)))
        )


def _fit(name: str, method: Any, tokens: int, repeats: int) -> Iterator[Row]:
    generator, where = torch.Generator(device()).manual_seed(0), device()
    keys = torch.randn(KV_HEADS, tokens, DIM, generator=generator, device=where)
    keys = (keys * torch.logspace(0, -1, DIM, device=where)).bfloat16()
    root = torch.randn(KV_HEADS, 2 * DIM, DIM, generator=generator, device=where)
    run = functools.partial(
        fit, keys, 64, iterations=method.iterations, rounds=method.rounds,
        metric=root.mT @ root / (2 * DIM) if method.metric else None, mean=mean_key(keys) if method.centred else None,
    )  # fmt: skip
    run()
    what = f"fit, {name}: {KV_HEADS} KV heads, {tokens:,} keys, D={DIM}, 64 bits"
    yield {"what": what, "unit": "s", **summary([timing.clock(run, where) for _ in range(repeats)], 4)}
