"""Tokens a second of a whole model: with BPC, with full attention, and with a sparse attention that is free."""

import functools
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from bpc_artifacts import ProjectionArtifact
from bpc_calib.bench import dense
from bpc_calib.bench.floors import decode_bytes, least_microseconds
from bpc_calib.bench.inputs import repeated, room
from bpc_calib.bench.machine import available_memory
from bpc_calib.bench.memory import peak, reset_peak
from bpc_calib.bench.timing import captured, clock, summary, synchronize, timed
from bpc_calib.cache import BPCCache
from bpc_calib.errors import InputError
from bpc_calib.layers import GrowingLayer, SparseLayer
from bpc_calib.models import describe
from bpc_calib.runtime import disable, enable

__all__ = ["baseline", "check_memory", "decode_rows", "fill", "weight_bytes"]

NAME = "bench_dense"  # of the dense attention, as transformers calls it
SPARE = 512 << 20


@torch.inference_mode()
def decode_rows(
    model: Any,
    artifact: ProjectionArtifact,
    batch: int,
    tokens: int,
    budgets: Sequence[float | int],
    dense_layers: Sequence[int],
    rate: float,
    repeats: int,
) -> list[dict[str, Any]]:
    """A row for each budget: a step behind `tokens` random keys and values, of each of `batch` sequences.

    All sides share the model, the cache and the token ids, and differ in what their sparse layers attend to; they
    are timed in turn. The dense attention is the fastest form of `bench.dense` for this layer, on every side.

    Returns:
        Tables of `milliseconds`, `spread` and `tokens_per_second` under `bpc`, `full` and `free` (the sparse layers'
        attention replaced by zeros: the limit of Amdahl), their byte `floor` in milliseconds and `floor_share`,
        `peak_bytes`; `times_full` and `limit_reached`, the share of the limit's tokens a second that BPC reaches.
    """
    device = model.device
    description = describe(model.config)
    heads, group = description.kv_heads, description.query_heads // description.kv_heads
    form, attention = fastest((batch, heads, group, tokens, description.head_dim), model.dtype, device)
    cache = BPCCache(model.config, artifact, budget=1.0, dense_layers=dense_layers)
    sparse = [layer for layer in cache.layers if isinstance(layer, SparseLayer)]
    plain = sparse[0].rules
    rows = []
    with baseline(model, attention) as switch:
        fill(cache, model.config, batch, tokens, model.dtype, device)
        ids = torch.ones(batch, 1, dtype=torch.long, device=device)

        def use(budget: float | int, free: bool = False) -> None:
            switch["free"] = free
            for layer in sparse:
                layer.rules = replace(plain, budget=budget)

        sides = {"full": (1.0, False), "free": (1.0, True)} | {str(each): (each, False) for each in budgets}
        runs: dict[str, Callable[[], float]] = {}
        peaks: dict[str, int] = {}
        for name, (budget, free) in sides.items():
            use(budget, free)
            step(model, ids, cache)  # hashes all keys
            crop(cache)
            reset_peak(device)
            runs[name] = prepared(model, ids, cache)
            peaks[name] = peak(device)
        taken: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(repeats):
            for name, (budget, free) in sides.items():
                use(budget, free)
                taken[name].append(1e3 * runs[name]())
        weights = weight_bytes(model)
        for budget in budgets:
            use(budget)
            read, full = cache.kv_bytes(tokens + 1)
            token = 2 * heads * description.head_dim * model.dtype.itemsize
            rest = full - len(sparse) * token * (tokens + 1)
            row: dict[str, Any] = {"batch": batch, "tokens": tokens, "budget": budget, "form": form}
            row |= {"attended": sparse[0].count(tokens + 1)}
            for name, side, size in (("bpc", str(budget), read), ("full", "full", full), ("free", "free", rest)):
                row[name] = _figures(taken[side], batch, decode_bytes(weights, batch, size), rate)
                row[name]["peak_bytes"] = peaks[side]
            row["times_full"] = round(row["full"]["milliseconds"] / row["bpc"]["milliseconds"], 3)
            row["limit_times_full"] = round(row["full"]["milliseconds"] / row["free"]["milliseconds"], 3)
            row["limit_reached"] = round(row["free"]["milliseconds"] / row["bpc"]["milliseconds"], 3)
            rows.append(row)
    return rows


def _figures(samples: list[float], batch: int, size: int, rate: float) -> dict[str, Any]:
    about = summary(samples, 3)
    floor = least_microseconds(size, rate) / 1e3
    return {
        "milliseconds": about["median"],
        "spread": about["spread"],
        "tokens_per_second": round(1e3 * batch / about["median"], 2),
        "floor": round(floor, 3),
        "floor_share": round(floor / about["median"], 4),
    }


def step(model: Any, ids: Tensor, cache: Any) -> Tensor:
    """Logits of the next token of each sequence; the cache grows by one."""
    return model(ids, past_key_values=cache, use_cache=True).logits


def prepared(model: Any, ids: Tensor, cache: Any) -> Callable[[], float]:
    """What decodes a token and gives its seconds: on a GPU a CUDA graph, else a call; the cache stays as it was."""
    device = model.device
    if device.type == "cuda":
        length = cache.get_seq_length()
        # Replayed, a step writes the same place again: the time is that of a step at this length.
        run = captured([lambda: step(model, ids, cache)], device)
        crop(cache, cache.get_seq_length() - length)
        run()
        synchronize(device)
        return lambda: clock(run, device)

    def timed_step() -> float:
        seconds = clock(lambda: step(model, ids, cache), device)
        crop(cache)
        return seconds

    timed_step()
    return timed_step


def crop(cache: Any, tokens: int = 1) -> None:
    """Forget the newest tokens; sliding windows keep theirs, which are as many and cost the same."""
    for layer in cache.layers:
        if isinstance(layer, GrowingLayer):
            layer.crop(-tokens)


def fill(cache: Any, config: Any, batch: int, tokens: int, dtype: torch.dtype, device: torch.device) -> None:
    """Give every layer random keys and values; positions beyond the model's limit are as good as others for this."""
    model = describe(config)
    generator = torch.Generator(device).manual_seed(0)
    shape = (batch, model.kv_heads, tokens, model.head_dim)
    keys, values = (repeated(shape, dtype, generator, device) for _ in range(2))
    for layer in cache.layers:
        layer.update(keys, values)
        if isinstance(layer, SparseLayer):
            layer.served = True  # no attention of this step is to come


@contextmanager
def baseline(model: Any, attention: dense.Dense) -> Any:
    """Let the model's dense attention of one token be `attention`, and BPC stand above it.

    Yields a switch: while its `free` is true, sparse layers attend to nothing and give zeros.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    sdpa = AttentionInterface()["sdpa"]
    switch = {"free": False}

    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **arguments: Any) -> Any:
        if query.shape[2] > 1 or mask is not None:
            return sdpa(module, query, key, value, mask, **arguments)
        if switch["free"] and hasattr(key, "bpc_layer"):
            return query.new_zeros(query.shape).transpose(1, 2), None
        grouped = query.squeeze(2).unflatten(1, (key.shape[1], -1))
        scale = arguments.get("scaling")
        if scale is not None:  # the forms take the usual scale
            grouped = grouped * (scale * query.shape[-1] ** 0.5)
        return attention(grouped, key, value).flatten(1, 2).unsqueeze(1), None

    before = model.config._attn_implementation
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, AttentionMaskInterface()["sdpa"])
    model.set_attn_implementation(NAME)
    enable(model)
    try:
        yield switch
    finally:
        disable(model)
        model.set_attn_implementation(before)


def fastest(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> tuple[str, dense.Dense]:
    """The dense form that takes least for a layer `(B, H_KV, G, N, D)` in a cache's buffers, and its name."""
    batch, heads, group, tokens, dim = size
    generator = torch.Generator(device).manual_seed(0)
    query = repeated((batch, heads, group, dim), dtype, generator, device)
    whole = (batch, heads, room(tokens), dim)
    keys, values = (repeated(whole, dtype, generator, device)[:, :, :tokens] for _ in range(2))
    right = dense.exact(query[:1], keys[:1], values[:1])
    near = {}
    for name, form in dense.forms(device).items():
        try:
            if not isinstance(form, str) and dense.error(form(query, keys, values)[:1], right) < 0.02:
                near[name] = form
        except Exception:  # not for this shape or machine: the layer part says which and why
            continue
    calls = {name: [functools.partial(form, query, keys, values)] for name, form in near.items()}
    taken = timed(calls, 3, device)
    best = min((name for name in near if not isinstance(taken[name], str)), key=lambda name: sorted(taken[name])[1])
    return best, near[best]


def weight_bytes(model: Any) -> int:
    """Bytes of the weights that a step reads: of an embedding that is not the output too it reads but a row."""
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings()
    tied = head is not None and head.weight is embedding
    return sum(each.nbytes for each in model.parameters()) - (0 if tied else embedding.nbytes)


def check_memory(config: Any, weights: int, batch: int, tokens: int, dtype: torch.dtype, device: torch.device) -> None:
    """Raise `InputError` where a cache of so many tokens does not fit beside the model."""
    model = describe(config)
    layer = batch * model.kv_heads * tokens * (2 * model.head_dim * dtype.itemsize + 9)
    needed = weights + (model.num_layers + 2) * layer + SPARE
    if needed > available_memory(device):
        raise InputError(
            f"decoding {batch} x {tokens:,} tokens with {model.id} takes some {needed / 1e9:.1f} GB, and "
            f"{available_memory(device) / 1e9:.1f} GB are free on {device.type}: shorter --lengths, or a smaller "
            "--shape, --layers and --mlp"
        )
