"""Hashing a prompt, decoding through transformers and calibrating on a GPU, at the shape of Llama 3.1 8B."""

import functools
import gc
import math
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gpu_kernels import DIM, GROUP, KV_HEADS, bandwidth_row
from gpu_timing import captured, clock, device, reason, summary
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import linear, scaled_dot_product_attention, silu

from bpc_calib import BPCCache, decompose, enable, static_steps
from bpc_calib.backends.triton import pipeline
from bpc_calib.bench.random_models import random_artifact, random_model, shape_config
from bpc_calib.bench.shapes import SHAPES
from bpc_calib.calibration.projection_method import PROJECTION_METHODS
from bpc_calib.method import encoding
from bpc_calib.method.encoding import make_encoder
from bpc_calib.method.fitting import fit
from bpc_calib.method.selection import attended

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
import tiny as tiny_models

__all__ = ["calibration", "decoding", "hashing"]

Emit = Callable[[dict[str, Any]], None]

LLAMA_8B = SHAPES["llama-3.1-8b"]


def hashing(emit: Emit, *, tiny: bool) -> None:
    """Time hashing the keys of a prompt in one layer, and its share of the prefill of this layer."""
    rate, row = bandwidth_row(tiny=tiny)
    emit(row)
    tokens, repeats = (100, 1) if tiny else (1 << 17, 5)
    generator = torch.Generator(device()).manual_seed(0)
    keys = torch.randn(1, KV_HEADS, tokens, DIM, generator=generator, device=device(), dtype=torch.bfloat16)
    projection = 0.3 * torch.randn(KV_HEADS, 64, DIM, generator=generator, device=device())
    root = torch.randn(KV_HEADS, 2 * DIM, DIM, generator=generator, device=device())
    metric, mean = root.mT @ root / (2 * DIM), torch.randn(KV_HEADS, DIM, generator=generator, device=device())
    floor = 1e3 * KV_HEADS * tokens * (DIM * 2 + 8 + 4 + 1) / rate
    medians: dict[str, float] = {}
    for form, parts in (("metric and mean", (metric, mean)), ("plain", (None, None))):
        encoder = make_encoder(projection, keys.dtype, metric=parts[0], mean=parts[1])
        for where, function in (("Triton", pipeline.encode_with), ("plain torch", encoding.encode_with)):
            samples = _milliseconds(functools.partial(function, encoder, keys), repeats)
            what = f"hash {tokens:,} keys per KV head, {form}, {where}"
            emit({"what": what, "unit": "ms", **summary(samples, 3), "floor": round(floor, 3)})
            medians[f"{form}, {where}"] = statistics.median(samples)
    del root, keys
    best = math.inf
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
        what = f"prefill of a layer, {tokens:,} tokens, SDPA {backend.name.split('_')[0].lower()}"
        try:
            samples = _milliseconds(
                _prefill(
                    tokens, backend, *((64, 128) if tiny else (LLAMA_8B["hidden_size"], LLAMA_8B["intermediate_size"]))
                ),
                repeats,
            )
        except Exception as error:
            emit({"what": what, "unit": "ms", "median": None, "note": reason(error)})
            continue
        emit({"what": what, "unit": "ms", **summary(samples, 2)})
        best = min(best, statistics.median(samples))
    for form, milliseconds in medians.items():
        share = round(100 * milliseconds / best, 3) if best < math.inf else None
        emit({"what": f"hashing / prefill of the layer: {form}", "unit": "%", "median": share})


def _milliseconds(run: Callable[[], Any], repeats: int) -> list[float]:
    run()
    return [1e3 * clock(run) for _ in range(repeats)]


def _prefill(tokens: int, backend: SDPBackend, hidden: int, intermediate: int) -> Callable[[], Tensor]:
    """The matrix products and the attention of a layer; norms and positions are left out, which makes it faster."""
    generator = torch.Generator(device()).manual_seed(1)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device(), dtype=torch.bfloat16) / shape[-1] ** 0.5

    query_heads = GROUP * KV_HEADS
    state = random(tokens, hidden)
    into, out = random((query_heads + 2 * KV_HEADS) * DIM, hidden), random(hidden, query_heads * DIM)
    gate, up, down = random(intermediate, hidden), random(intermediate, hidden), random(hidden, intermediate)

    def run() -> Tensor:
        heads = linear(state, into).unflatten(-1, (-1, DIM)).transpose(0, 1).unsqueeze(0)
        query, keys, values = heads.split([query_heads, KV_HEADS, KV_HEADS], 1)
        with sdpa_kernel(backend):
            mixed = scaled_dot_product_attention(query, keys, values, is_causal=True, enable_gqa=True)
        result = state + linear(mixed.squeeze(0).transpose(0, 1).flatten(1), out)
        for part in result.split(1 << 14):  # so that it fits the memory of any GPU
            part += linear(silu(linear(part, gate)) * linear(part, up), down)
        return result

    return run


@torch.inference_mode()
def decoding(emit: Emit, *, tiny: bool) -> None:
    """Time a step through transformers, eager (dense layers use SDPA) and as a CUDA graph, beside its floor."""
    rate, row = bandwidth_row(tiny=tiny)
    emit(row)
    model = _model(tiny)
    enable(model)
    config = model.config
    artifact = random_artifact(config)
    weights = sum(each.nbytes for each in model.parameters()) - model.get_input_embeddings().weight.nbytes
    token = 2 * config.num_key_value_heads * config.head_dim * model.dtype.itemsize  # bytes a layer
    layers, dense_layers = config.num_hidden_layers, (0,) if tiny else (0, 1)
    emit({"what": "read all weights once, except the embedding", "unit": "ms", "floor": _floor(weights, rate)})
    for tokens in (150,) if tiny else (1 << 17, 1 << 19):
        k = attended(tokens, 0.02)
        code = config.num_key_value_heads * 9 * tokens
        sparse = layers - len(dense_layers)
        full = weights + layers * tokens * token
        least = weights + len(dense_layers) * tokens * token + sparse * (code + k * token)
        floors = {"BPC": least, "full": full}
        emit(
            {
                "tokens": tokens,
                "what": "largest speedup of BPC, by bytes",
                "unit": "times",
                "median": round(full / least, 2),
            }
        )
        emit({
            "tokens": tokens, "what": "largest speedup of any sparse attention, by bytes", "unit": "times",
            "median": round(full / (weights + len(dense_layers) * tokens * token), 2),
        })  # fmt: skip
        for name, budget in (
            ("BPC, 2 %", 0.02),
            ("full attention, BPCCache", 1.0),
            ("full attention, DynamicCache, SDPA", None),
        ):
            about: dict[str, Any] = {"tokens": tokens, "what": name, "unit": "ms"}
            floor = _floor(floors["BPC" if budget == 0.02 else "full"], rate)
            try:
                rows = _decode(model, artifact, tokens, budget, dense_layers, 1 if tiny else 7)
            except Exception as error:
                rows = {"": {"median": None, "note": reason(error)}}
            for kind, figures in rows.items():
                row = about | {"what": f"{name}{kind}"} | figures
                if row.get("spread"):  # a step like any other
                    row |= {"tokens_per_second": round(1e3 / row["median"], 1), "floor": floor}
                    row |= {"times_floor": round(row["median"] / floor, 2)}
                emit(row)
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()


def _floor(size: float, rate: float) -> float:
    return round(1e3 * size / rate, 3)


def _model(tiny: bool) -> Any:
    """Random bf16 weights."""
    if tiny:
        return tiny_models.model(num_hidden_layers=2, max_position_embeddings=1024).to(device())
    return random_model(shape_config("llama-3.1-8b"), torch.bfloat16, device())


def _decode(
    model: Any, artifact: Any, tokens: int, budget: float | None, dense_layers: tuple[int, ...], repeats: int
) -> dict[str, dict[str, Any]]:
    """Milliseconds of a step after `tokens` random keys and values; a budget of None means a `DynamicCache`."""
    from transformers import DynamicCache

    config = model.config
    if budget is None:
        cache: Any = DynamicCache(config=config)
    else:
        cache = BPCCache(config, artifact, budget=budget, dense_layers=dense_layers)
    shape = (1, config.num_key_value_heads, tokens, config.head_dim)
    for layer in cache.layers:
        keys, values = (torch.randn(shape, dtype=model.dtype, device=model.device) for _ in range(2))
        layer.update(keys, values)
        layer.served = True  # this update has no attention
    ids = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    step = functools.partial(model, ids, past_key_values=cache)
    began = time.perf_counter()
    step()  # hashes all keys
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    first = 1e3 * (time.perf_counter() - began)
    step()
    eager = [1e3 * clock(step) for _ in range(repeats)]
    rows = {", first step (compiles and hashes all)": {"median": round(first, 1)}, ", eager": summary(eager, 3)}
    try:
        rows[", CUDA graph"] = summary(_graph(model, cache, step, ids, 3 * repeats), 3)
    except Exception as error:
        rows[", CUDA graph"] = {"median": None, "note": reason(error)}
    return rows


def _graph(model: Any, cache: Any, step: Callable[[], Any], ids: Tensor, repeats: int) -> list[float]:
    """Milliseconds of replayed steps."""
    if not isinstance(cache, BPCCache):
        # Every replay writes to the same place: the time is that of a step at this length.
        run = captured([step])
        run()
        return [1e3 * clock(run) for _ in range(repeats)]
    with static_steps(model, cache, repeats + 3) as static:
        for _ in range(3):  # an ordinary step, the capture, a replay
            static(ids)
        return [1e3 * clock(functools.partial(static, ids)) for _ in range(repeats)]


def calibration(emit: Emit, *, tiny: bool) -> None:
    """Time finding the projections of a layer from 65,536 keys per KV head."""
    tokens, repeats = (300, 1) if tiny else (1 << 16, 3)
    generator = torch.Generator(device()).manual_seed(0)
    keys = torch.randn(KV_HEADS, tokens, DIM, generator=generator, device=device())
    keys = (keys * torch.logspace(0, -1, DIM, device=device())).bfloat16()
    root = torch.randn(KV_HEADS, 2 * DIM, DIM, generator=generator, device=device())
    metric = root.mT @ root / (2 * DIM)
    method = next(each for each in PROJECTION_METHODS.values() if each.power is not None)
    default = functools.partial(
        fit, keys, 64, iterations=method.iterations, rounds=method.rounds, metric=metric, centred=method.centred
    )
    for what, run in (
        ("decompose, 8 steps per bit", functools.partial(decompose, keys, 64)),
        ("decompose, 1 step per bit (the paper's)", functools.partial(decompose, keys, 64, iterations=1)),
        (f"fit as calibration does by default ({method.name})", default),
    ):
        run()
        samples = [clock(run) for _ in range(repeats)]
        about = f"{what}: {KV_HEADS} KV heads, {tokens:,} keys, D={DIM}, 64 bits"
        emit({"what": about, "unit": "s", **summary(samples, 4)})
        emit({"what": f"{what}: 32 such layers", "unit": "s", "median": round(32 * statistics.median(samples), 2)})
