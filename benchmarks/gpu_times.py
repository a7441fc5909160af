"""Times on a GPU: a layer and hashing as `bpc bench` measures them, static steps of a model, and fitting."""

import functools
import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from gpu_part import Emit, Limits, Step, free, lacking
from report import ROOT
from torch import Tensor

from bpc_calib import BPCCache, enable, static_steps
from bpc_calib.bench import decode as bench_decode
from bpc_calib.bench import inputs, layer, measure, timing
from bpc_calib.bench.random_models import random_artifact, random_model, shape_config
from bpc_calib.bench.settings import Settings
from bpc_calib.bench.timing import reason, summary
from bpc_calib.calibration.projection_method import PROJECTION_METHODS
from bpc_calib.compat import with_cache
from bpc_calib.errors import BPCError
from bpc_calib.method.fitting import fit, mean_key

sys.path.insert(0, str(ROOT / "tests"))
import tiny as tiny_models

__all__ = ["calibrate", "cases", "decode", "device", "encode", "kernels"]

KV_HEADS, GROUP, DIM = 8, 4, 128
LENGTHS = (1 << 17, 1 << 19, (1 << 17) - 77, 1 << 15, 1 << 13, 100_003)
FEW = (163,)
DECODED = ((1 << 17,), (1 << 19, 3 << 17, 1 << 18))  # of each list, the first that fits
DECODED_FEW = ((150,),)
WEIGHTS = 17_000_000_000  # bytes of the 8B model, with what it needs while it is drawn
FORMS: tuple[tuple[str, float | None], ...] = (
    ("BPC, 2 %", 0.02),
    ("full attention, BPCCache", 1.0),
    ("full attention, DynamicCache, SDPA", None),
)


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def clock(run: Callable[[], Any]) -> float:
    """Seconds."""
    return timing.clock(run, device())


@functools.cache
def rate(*, tiny: bool) -> float:
    """Bytes per second of a copy within the memory; measured once in a process."""
    return statistics.median(timing.copies((4 if tiny else 4096) << 20, device()))


def kernels(limits: Limits) -> list[Step]:
    """One step per length: a layer by stage, the paper's pipeline, and every form of dense attention."""
    settings = Settings(parts=("layer",), repeats=1 if limits.tiny else 11)
    return [
        (f"a step at {tokens:,} tokens", functools.partial(_bench, replace(settings, lengths=(tokens,)), limits.tiny))
        for tokens in (FEW if limits.tiny else LENGTHS)
    ]


def encode(limits: Limits) -> list[Step]:
    """Hashing the keys of a prompt, alone and as a share of the prefill."""
    tokens, prompt, repeats = ((40,), 40, 1) if limits.tiny else ((1 << 17,), 1 << 15, 15)
    settings = Settings(parts=("prefill",), lengths=tokens, prefill_tokens=prompt, repeats=repeats)
    return [("hashing a prompt", functools.partial(_bench, settings, limits.tiny))]


def _bench(settings: Settings, tiny: bool, emit: Emit) -> None:
    """Emit the rows of `bpc bench`, with random weights of two layers of Llama 3.1 8B's shape."""
    if tiny:
        inputs.cache_bytes = lambda device: 1  # type: ignore[attr-defined]  # few working sets: the interpreter is slow
    config = tiny_models.model().config if tiny else shape_config("llama-3.1-8b", 2)
    load = tiny_models.model if tiny else functools.partial(random_model, config, torch.bfloat16, device())
    try:
        result = measure.run(settings, config, load, None, torch.bfloat16, device())
    except BPCError as error:
        emit({"what": ", ".join(settings.parts), "median": None, "note": f"not measured: {error}"})
        return
    emit({"what": "memory, GB/s", "median": round(result["memory_bandwidth"]["bytes_per_second"] / 1e9, 1)})
    for row in result.get("layer", []):
        what = f"{row['method']}, {row.get('form', row['stage'])}" + ("" if row["cold"] else ", not cold")
        kept = {name: row[name] for name in ("median", "spread", "floor", "note") if name in row}
        if row.get("floor") and row["median"]:
            kept["times_floor"] = round(row["median"] / row["floor"], 2)
        emit({"tokens": row["tokens"], "what": what, "unit": "us", **kept})
        for other in ("dense", "paper"):
            if row.get(f"times_{other}"):
                about = {"tokens": row["tokens"], "what": f"best {other} / BPC, step", "unit": "times"}
                emit(about | {"median": row[f"times_{other}"]})
    for row in result.get("prefill", {}).get("rows", []):
        for side in ("full", "bpc", "hashing"):
            if side in row:
                emit({"tokens": row["tokens"], "what": f"{row['what']}: {side}", "unit": "s", **row[side]})
    for each in result.get("left_out", []):
        emit({"what": each["what"], "median": None, "note": each["note"]})


def decode(limits: Limits) -> list[Step]:
    """One step per length and form of attention."""
    tiny = limits.tiny
    return [
        (f"{name}, at most {lengths[0]:,} tokens", functools.partial(_form, lengths, name, budget, tiny))
        for lengths in (DECODED_FEW if tiny else DECODED)
        for name, budget in FORMS
    ]


@functools.cache
def _model(tiny: bool) -> Any:
    """Random bf16 weights, drawn once in a process.

    Raises:
        MemoryError: the weights do not fit.
    """
    if not tiny and (why := lacking(WEIGHTS, free())):
        raise MemoryError(f"the weights: {why}")
    return _enabled(tiny)


def _enabled(tiny: bool, layers: int | None = None) -> Any:
    """A model that BPC serves; with fewer layers also with a narrower MLP."""
    if tiny:
        model = tiny_models.model(num_hidden_layers=2, max_position_embeddings=1024).to(device())
    else:
        config = shape_config("llama-3.1-8b", layers, None if layers is None else 256)
        model = random_model(config, torch.bfloat16, device())
    enable(model)
    return model


def _fits(model: Any, tokens: int, copies: int = 1) -> str | None:
    """Why there is too little memory beside the weights for so many caches; None: there is enough."""
    try:
        free()
        bench_decode.check_memory(model.config, 0, copies, tokens, model.dtype, device())
    except BPCError as error:
        return f"not measured: {error}"
    return None


def _form(lengths: Sequence[int], name: str, budget: float | None, tiny: bool, emit: Emit) -> None:
    """A step, eager (dense layers use SDPA) and as a CUDA graph, beside its floor."""
    model = _model(tiny)
    tokens = next((each for each in lengths if _fits(model, each) is None), None)
    for longer in lengths[: lengths.index(tokens) if tokens else None]:
        emit({"what": f"{name}, {longer:,} tokens", "unit": "ms", "median": None, "note": _fits(model, longer)})
    if tokens is None:
        return
    cache = _cache(model, 1.0 if budget is None else budget)
    floor = 1e3 * (bench_decode.weight_bytes_read(model) + cache.kv_bytes(tokens + 1)[0]) / rate(tiny=tiny)
    try:
        with torch.inference_mode():
            rows = _decode(model, tokens, budget, 1 if tiny else 7)
    except Exception as error:
        rows = {"": {"median": None, "note": reason(error)}}
    for kind, figures in rows.items():
        row: dict[str, Any] = {"tokens": tokens, "what": f"{name}{kind}", "unit": "ms"} | figures
        if row.get("spread"):  # a step like any other
            row |= {"tokens_per_second": round(1e3 / row["median"], 1), "floor": round(floor, 3)}
            row |= {"times_floor": round(row["median"] / floor, 2)}
        emit(row)


def _cache(model: Any, budget: float | None) -> Any:
    """A cache with dense layers as by default; a budget of None means a `DynamicCache`."""
    from transformers import DynamicCache

    config = model.config
    if budget is None:
        return DynamicCache(config=config)
    dense = (0,) if config.num_hidden_layers == 2 else (0, 1)
    return BPCCache(config, random_artifact(config), budget=budget, dense_layers=dense)


def _decode(model: Any, tokens: int, budget: float | None, repeats: int) -> dict[str, dict[str, Any]]:
    """Milliseconds of a step after `tokens` random keys and values."""
    where = model.device
    # A graph holds the new keys and values of a `DynamicCache` beside the old ones.
    crowded = _fits(model, tokens, copies=2) if budget is None else None
    cache = _cache(model, budget)
    bench_decode.fill(cache, model.config, 1, tokens, model.dtype, where)
    ids = torch.zeros(1, 1, dtype=torch.long, device=where)
    step = functools.partial(model, ids, **with_cache(cache))
    began = time.perf_counter()
    step()  # hashes all keys
    timing.synchronize(where)
    first = 1e3 * (time.perf_counter() - began)
    step()
    eager = [1e3 * clock(step) for _ in range(repeats)]
    rows = {", first step (compiles and hashes all)": {"median": round(first, 1)}, ", eager": summary(eager, 3)}
    if crowded:
        return rows | {", CUDA graph": {"median": None, "note": crowded}}
    try:
        rows[", CUDA graph"] = summary(_graph(model, cache, step, ids, 3 * repeats), 3)
    except Exception as error:
        rows[", CUDA graph"] = {"median": None, "note": reason(error)}
    gc.collect()
    return rows


def _graph(model: Any, cache: Any, step: Callable[[], Any], ids: Tensor, repeats: int) -> list[float]:
    """Milliseconds of replayed steps."""
    if not isinstance(cache, BPCCache):
        # Every replay writes to the same place: the time is that of a step at this length.
        run = timing.captured([step], device())
        run()
        return [1e3 * clock(run) for _ in range(repeats)]
    with static_steps(model, cache, repeats + 3) as static:
        for _ in range(3):  # an ordinary step, the capture, a replay
            static(ids)
        return [1e3 * clock(functools.partial(static, ids)) for _ in range(repeats)]


def cases(*, tiny: bool) -> list[tuple[str, Callable[[], Any]]]:
    """The same kernels, to be compiled; a model with few layers, because all layers run the same ones."""
    return [*_layer_cases(tiny), *_decode_cases(tiny)]


def _layer_cases(tiny: bool) -> Iterator[tuple[str, Callable[[], Any]]]:
    for tokens in FEW if tiny else LENGTHS:
        shape = inputs.LayerShape(1, KV_HEADS, GROUP, DIM, tokens, torch.bfloat16)
        yield f"a step at {tokens:,} tokens", functools.partial(_called, layer.compile_seconds, shape, device())


def _called(function: Callable[..., Any], *arguments: Any) -> None:
    function(*arguments)


def _decode_cases(tiny: bool) -> Iterator[tuple[str, Callable[[], Any]]]:
    for tokens in (each for lengths in (DECODED_FEW if tiny else DECODED) for each in lengths):
        for name, budget in FORMS[:2]:
            yield f"{name} at {tokens:,} tokens", functools.partial(_compile, tokens, budget, tiny)


def _compile(tokens: int, budget: float | None, tiny: bool) -> str | None:
    model = _enabled(tiny, layers=3)
    if why := _fits(model, tokens):
        return why
    with torch.inference_mode():
        rows = _decode(model, tokens, budget, 1)
    faults = [row["note"] for row in rows.values() if "note" in row]
    if faults:
        raise RuntimeError(faults[0])
    return None


def calibrate(limits: Limits) -> list[Step]:
    """Finding the projections of a layer, one step per method."""
    tokens, repeats = (300, 1) if limits.tiny else (1 << 16, 3)
    return [
        (f"fit, {name}", functools.partial(_fit, name, method, tokens, repeats))
        for name, method in PROJECTION_METHODS.items()
    ]


def _fit(name: str, method: Any, tokens: int, repeats: int, emit: Emit) -> None:
    about = f"fit, {name}: {KV_HEADS} KV heads, {tokens:,} keys, D={DIM}, 64 bits"
    # Some copies of the keys and of the residuals in float64.
    if why := lacking(KV_HEADS * tokens * DIM * 8 * 8, free()):
        emit({"what": about, "unit": "s", "median": None, "note": why})
        return
    generator, where = torch.Generator(device()).manual_seed(0), device()
    keys = torch.randn(KV_HEADS, tokens, DIM, generator=generator, device=where)
    keys = (keys * torch.logspace(0, -1, DIM, device=where)).bfloat16()
    root = torch.randn(KV_HEADS, 2 * DIM, DIM, generator=generator, device=where)
    run = functools.partial(
        fit, keys, 64, iterations=method.iterations, rounds=method.rounds,
        metric=root.mT @ root / (2 * DIM) if method.metric else None, mean=mean_key(keys) if method.centred else None,
    )  # fmt: skip
    run()
    samples = [clock(run) for _ in range(repeats)]
    emit({"what": about, "unit": "s", **summary(samples, 4)})
    emit({"what": f"fit, {name}: 32 such layers", "unit": "s", "median": round(32 * statistics.median(samples), 2)})
