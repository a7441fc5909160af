"""Time decoding through transformers on a GPU, with random weights of Llama 3.1 8B's shape, beside its floor."""

import functools
import gc
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gpu_memory import decode_bytes, free, lacking, longest
from gpu_part import Emit, Limits, Step
from gpu_timing import bandwidth_row, captured, clock, device, reason, summary
from torch import Tensor

from bpc_calib import BPCCache, enable, static_steps
from bpc_calib.bench.random_models import random_artifact, random_model, shape_config
from bpc_calib.compat import with_cache
from bpc_calib.method.budget import attended

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
import tiny as tiny_models

__all__ = ["cases", "steps"]

LENGTHS = ((1 << 17,), (1 << 19, 3 << 17, 1 << 18))  # of each list, the first that fits
FEW = ((150,),)
WEIGHTS = 17_000_000_000  # bytes, with what the model needs while it is drawn
FORMS: tuple[tuple[str, float | None], ...] = (
    ("BPC, 2 %", 0.02),
    ("full attention, BPCCache", 1.0),
    ("full attention, DynamicCache, SDPA", None),
)


def steps(limits: Limits) -> list[Step]:
    """One step per length and form of attention."""
    tiny = limits.tiny
    made: list[Step] = [("bandwidth", lambda emit: emit(bandwidth_row(tiny=tiny)[1]))]
    for lengths in FEW if tiny else LENGTHS:
        about = f"at most {lengths[0]:,} tokens"
        made.append((f"bounds at {about}", functools.partial(_bounds, lengths, tiny)))
        made += [(f"{name}, {about}", functools.partial(_form, lengths, name, budget, tiny)) for name, budget in FORMS]
    return made


def cases(*, tiny: bool) -> list[tuple[str, Callable[[], Any]]]:
    """The same kernels, to be compiled: with few layers, because all layers run the same ones."""
    return [
        (f"{name} at {tokens:,} tokens", functools.partial(_compile, tokens, budget, tiny))
        for lengths in (FEW if tiny else LENGTHS)
        for tokens in lengths
        for name, budget in FORMS[:2]
    ]


def _compile(tokens: int, budget: float | None, tiny: bool) -> str | None:
    model = Model(tiny, layers=3)
    if why := lacking(model.needs(tokens), free(device())):
        return why
    with torch.inference_mode():
        rows = _decode(model, tokens, budget, 1)
    faults = [row["note"] for row in rows.values() if "note" in row]
    if faults:
        raise RuntimeError(faults[0])
    return None


class Model:
    """Random bf16 weights, with dense layers as by default, and the bytes that a step reads."""

    def __init__(self, tiny: bool, layers: int | None = None) -> None:
        if tiny:
            self.model = tiny_models.model(num_hidden_layers=2, max_position_embeddings=1024).to(device())
        else:
            config = shape_config("llama-3.1-8b", layers, None if layers is None else 256)
            self.model = random_model(config, torch.bfloat16, device())
        enable(self.model)
        self.config = self.model.config
        self.artifact = random_artifact(self.config)
        self.layers, self.dense_layers = self.config.num_hidden_layers, (0,) if tiny else (0, 1)
        embedding = self.model.get_input_embeddings().weight.nbytes
        self.weights = sum(each.nbytes for each in self.model.parameters()) - embedding
        self.kv_heads = self.config.num_key_value_heads
        self.token = 2 * self.kv_heads * self.config.head_dim * self.model.dtype.itemsize  # bytes a layer

    def needs(self, tokens: int, copies: int = 1) -> int:
        """Bytes beside the weights."""
        return decode_bytes(tokens, self.layers, self.token, self.kv_heads, copies=copies)

    def full(self, tokens: int) -> int:
        """Bytes that a step with full attention reads."""
        return self.weights + self.layers * tokens * self.token

    def free_attention(self, tokens: int) -> int:
        """Bytes of a step whose sparse layers read no token."""
        return self.weights + len(self.dense_layers) * tokens * self.token

    def bpc(self, tokens: int) -> int:
        """Bytes of a step with BPC."""
        sparse = self.layers - len(self.dense_layers)
        return self.free_attention(tokens) + sparse * (self.kv_heads * 9 * tokens + self.token * attended(tokens, 0.02))


@functools.cache
def _model(tiny: bool) -> Model:
    """Drawn once in a process.

    Raises:
        MemoryError: the weights do not fit.
    """
    if not tiny and (why := lacking(WEIGHTS, free(device()))):
        raise MemoryError(f"the weights: {why}")
    return Model(tiny)


def _bounds(lengths: tuple[int, ...], tiny: bool, emit: Emit) -> None:
    """Emit the length that is measured, why the longer ones are not, and what is possible there."""
    model, (rate, _) = _model(tiny), bandwidth_row(tiny=tiny)
    tokens, skipped = longest(lengths, model.needs, free(device()))
    for note in skipped:
        emit({"what": note.split(" not measured")[0], "unit": "ms", "median": None, "note": note})
    if tokens is None:
        return
    floor = round(1e3 * model.weights / rate, 3)
    emit({"tokens": tokens, "what": "read all weights once, except the embedding", "unit": "ms", "floor": floor})
    for name, least in (("BPC", model.bpc(tokens)), ("any sparse attention", model.free_attention(tokens))):
        ratio = round(model.full(tokens) / least, 2)
        emit({"tokens": tokens, "what": f"largest speedup of {name}, by bytes", "unit": "times", "median": ratio})


def _form(lengths: tuple[int, ...], name: str, budget: float | None, tiny: bool, emit: Emit) -> None:
    """A step, eager (dense layers use SDPA) and as a CUDA graph, beside its floor."""
    model, (rate, _) = _model(tiny), bandwidth_row(tiny=tiny)
    tokens, _ = longest(lengths, model.needs, free(device()))
    if tokens is None:  # `_bounds` says why
        return
    about: dict[str, Any] = {"tokens": tokens, "what": name, "unit": "ms"}
    floor = round(1e3 * (model.bpc(tokens) if budget == 0.02 else model.full(tokens)) / rate, 3)
    try:
        with torch.inference_mode():
            rows = _decode(model, tokens, budget, 1 if tiny else 7)
    except Exception as error:
        rows = {"": {"median": None, "note": reason(error)}}
    for kind, figures in rows.items():
        row = about | {"what": f"{name}{kind}"} | figures
        if row.get("spread"):  # a step like any other
            row |= {"tokens_per_second": round(1e3 / row["median"], 1), "floor": floor}
            row |= {"times_floor": round(row["median"] / floor, 2)}
        emit(row)


def _decode(model: Model, tokens: int, budget: float | None, repeats: int) -> dict[str, dict[str, Any]]:
    """Milliseconds of a step after `tokens` random keys and values; a budget of None means a `DynamicCache`."""
    from transformers import DynamicCache

    config, dtype, where = model.config, model.model.dtype, model.model.device
    # A graph holds the new keys and values of a `DynamicCache` beside the old ones.
    crowded = lacking(model.needs(tokens, copies=2), free(where)) if budget is None else None
    if budget is None:
        cache: Any = DynamicCache(config=config)
    else:
        cache = BPCCache(config, model.artifact, budget=budget, dense_layers=model.dense_layers)
    shape = (1, config.num_key_value_heads, tokens, config.head_dim)
    for layer in cache.layers:
        keys, values = (torch.randn(shape, dtype=dtype, device=where) for _ in range(2))
        layer.update(keys, values)
        layer.served = True  # this update has no attention
    del keys, values
    ids = torch.zeros(1, 1, dtype=torch.long, device=where)
    step = functools.partial(model.model, ids, **with_cache(cache))
    began = time.perf_counter()
    step()  # hashes all keys
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    first = 1e3 * (time.perf_counter() - began)
    step()
    eager = [1e3 * clock(step) for _ in range(repeats)]
    rows = {", first step (compiles and hashes all)": {"median": round(first, 1)}, ", eager": summary(eager, 3)}
    if crowded:
        return rows | {", CUDA graph": {"median": None, "note": crowded}}
    try:
        rows[", CUDA graph"] = summary(_graph(model.model, cache, step, ids, 3 * repeats), 3)
    except Exception as error:
        rows[", CUDA graph"] = {"median": None, "note": reason(error)}
    gc.collect()
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
