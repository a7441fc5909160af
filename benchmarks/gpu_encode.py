"""Time hashing the keys of a prompt in one layer on a GPU, and its share of the prefill of this layer."""

import functools
import math
import statistics
from collections.abc import Callable
from typing import Any

import torch
from gpu_memory import free, lacking
from gpu_part import Emit, Limits, Step
from gpu_timing import bandwidth_row, clock, device, reason, summary
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import linear, scaled_dot_product_attention, silu

from bpc_calib.backends.triton import pipeline
from bpc_calib.bench.settings import SHAPES
from bpc_calib.method import encoding
from bpc_calib.method.encoding import Encoder, make_encoder

__all__ = ["cases", "steps"]

KV_HEADS, GROUP, DIM = 8, 4, 128
TOKENS, FEW = 1 << 17, 40
FORMS = ("metric and mean", "plain")
LLAMA_8B = SHAPES["llama-3.1-8b"]


def steps(limits: Limits) -> list[Step]:
    """Hashing by the kernels first; the last step compares it with the prefill."""
    tokens, repeats = (FEW, 1) if limits.tiny else (TOKENS, 5)
    made: list[Step] = [("bandwidth", lambda emit: emit(bandwidth_row(tiny=limits.tiny)[1]))]
    for where, function in (("Triton", pipeline.encode_with), ("plain torch", encoding.encode_with)):
        for form in FORMS:
            what = f"hash {tokens:,} keys per KV head, {form}, {where}"
            made.append((what, functools.partial(_hash, what, form, function, limits.tiny, repeats)))
    made.append((f"prefill of a layer, {tokens:,} tokens", functools.partial(_compare, limits.tiny, tokens, repeats)))
    return made


def cases(*, tiny: bool) -> list[tuple[str, Callable[[], Any]]]:
    """The same kernels, to be compiled."""
    tokens = FEW if tiny else TOKENS
    return [(f"hash {tokens:,} keys, {form}", functools.partial(_compile, form, tokens)) for form in FORMS]


def _compile(form: str, tokens: int) -> None:
    pipeline.encode_with(*_inputs(form, tokens))


def _inputs(form: str, tokens: int) -> tuple[Encoder, Tensor]:
    generator = torch.Generator(device()).manual_seed(0)
    keys = torch.randn(1, KV_HEADS, tokens, DIM, generator=generator, device=device(), dtype=torch.bfloat16)
    projection = 0.3 * torch.randn(KV_HEADS, 64, DIM, generator=generator, device=device())
    metric = mean = None
    if form != "plain":
        root = torch.randn(KV_HEADS, 2 * DIM, DIM, generator=generator, device=device())
        metric, mean = root.mT @ root / (2 * DIM), torch.randn(KV_HEADS, DIM, generator=generator, device=device())
    return make_encoder(projection, keys.dtype, metric=metric, mean=mean), keys


def _hash(
    what: str, form: str, function: Callable[[Encoder, Tensor], Any], tiny: bool, repeats: int, emit: Emit
) -> None:
    tokens = FEW if tiny else TOKENS
    rate, _ = bandwidth_row(tiny=tiny)
    if why := lacking(KV_HEADS * tokens * (64 * 4 * 6 + DIM * 12), free(device())):
        emit({"what": what, "unit": "ms", "median": None, "note": why})
        return
    samples = _milliseconds(functools.partial(function, *_inputs(form, tokens)), repeats)
    floor = 1e3 * KV_HEADS * tokens * (DIM * 2 + 8 + 4 + 1) / rate
    emit({"what": what, "unit": "ms", **summary(samples, 3), "floor": round(floor, 3)})


def _compare(tiny: bool, tokens: int, repeats: int, emit: Emit) -> None:
    hidden, intermediate = (64, 128) if tiny else (LLAMA_8B["hidden_size"], LLAMA_8B["intermediate_size"])
    # The weights, two states, the heads with copies in other orders, and a part of the MLP.
    numbers = 3 * hidden * intermediate + tokens * (3 * hidden + 4 * DIM * (GROUP + 2) * KV_HEADS)
    best = math.inf
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
        what = f"prefill of a layer, {tokens:,} tokens, SDPA {backend.name.split('_')[0].lower()}"
        try:
            if why := lacking(2 * (numbers + 3 * (1 << 14) * intermediate), free(device())):
                emit({"what": what, "unit": "ms", "median": None, "note": why})
                continue
            samples = _milliseconds(_prefill(tokens, backend, hidden, intermediate), repeats)
        except Exception as error:
            emit({"what": what, "unit": "ms", "median": None, "note": reason(error)})
            continue
        emit({"what": what, "unit": "ms", **summary(samples, 2)})
        best = min(best, statistics.median(samples))
    for form in FORMS if best < math.inf else ():  # timed again: another process may have timed the rows above
        run = functools.partial(pipeline.encode_with, *_inputs(form, tokens))
        share = 100 * statistics.median(_milliseconds(run, repeats)) / best
        emit({"what": f"hashing / prefill of the layer: {form}, Triton", "unit": "%", "median": round(share, 3)})


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
