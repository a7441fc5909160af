"""Tokens per second of a whole model: with transformers as it is, with full attention at its best, and with BPC."""

import copy
import functools
import math
import resource
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from bpc_artifacts import ProjectionArtifact
from bpc_calib.backends.linear import MOST
from bpc_calib.bench import dense
from bpc_calib.bench.inputs import least_microseconds, repeated, room
from bpc_calib.bench.machine import available_memory
from bpc_calib.bench.settings import DRAFT, RIGHT, Settings
from bpc_calib.bench.timing import captured, clock, reason, summary, synchronize, timed
from bpc_calib.compat import attention_name, with_cache
from bpc_calib.errors import BPCError, InputError, ModelError
from bpc_calib.models.description import describe
from bpc_calib.runtime.cache import BPCCache
from bpc_calib.runtime.compiled_layers import compile_layers
from bpc_calib.runtime.draft_length import rounds_tokens
from bpc_calib.runtime.enabling import disable, enable
from bpc_calib.runtime.layers import GrowingLayer, SparseLayer

__all__ = [
    "baseline", "check_memory", "decode_rows", "fill", "fitting_layers", "has_experts", "step", "total_bytes",
    "weight_bytes_read",
]  # fmt: skip

NAME = "bench_dense"  # name under which transformers knows the dense attention
SPARE = 512 << 20  # bytes that must stay free
MOST_OF_MEMORY = 0.9  # share of the free memory that a model cut to fit may take


@dataclass(frozen=True)
class Variant:
    """One way to decode. Variants share weights, keys and values."""

    model: Any
    cache: Any
    rewind: Callable[[], None]  # forgets the tokens of a step
    use: Callable[[], None] = lambda: None  # switches the model and the cache to this variant
    rest: str = "rest"  # the variant without the model's layers
    new: int = 1  # tokens of a step
    inside: Callable[[], AbstractContextManager[None]] = nullcontext  # what a step runs in


@torch.inference_mode()
def decode_rows(
    model: Any, artifact: ProjectionArtifact, batch: int, tokens: int, settings: Settings, layers: int, rate: float
) -> list[dict[str, Any]]:
    """Return one row per budget: a decoding step after random keys and values.

    All variants are timed in turn, and so is the pass of full attention over several tokens that verifies a draft
    (`exact_decoding`). Every correct form of `bench.dense` is a variant with full attention. On a CPU these
    and BPC run compiled layers, and another variant is transformers as it is: plain layers, its own attention and
    cache. Layers that are dense beside sparse ones use the form that is fastest for a single layer; on a CPU BPC's
    kernel.

    Where the model has fewer layers than `layers`, times and bytes are those of all layers, as if each missing one took
    the mean of the present ones. For this the model without its layers is timed as well.

    Args:
        model: on the device to measure.
        artifact: projections of the model.
        batch: sequences.
        tokens: cached tokens of each.
        settings: budgets, dense layers, repeats, and whether layers are compiled.
        layers: of the whole model.
        rate: memory bandwidth for the floors, in bytes per second.

    Returns:
        Dictionaries under `bpc`, `full` (the fastest dense form, with its name as `form`) and, on a CPU,
        `transformers`. Each has `milliseconds`, `spread`, `tokens_per_second`, the byte `floor` in milliseconds,
        `floor_share` and `peak_bytes`, or a `note` that says why it was not timed. `dense_forms` has the same for every
        dense form, and `times_bpc`. `times_full` is the speedup over `full`, `limit_times_full` the speedup that the
        bytes allow, and `limit_reached` the share of it that BPC reaches. `compiled`: whether layers were compiled.
        `verify` is the pass behind a draft of `DRAFT` tokens; `exact` has the `tokens_per_second` to expect of exact
        decoding if each sequence finds a share `RIGHT` of its drafted tokens right, or None.

    Raises:
        BPCError: no dense form is correct, or none could be timed in the model.
    """
    from transformers import DynamicCache

    device, length = model.device, tokens + 1
    description = describe(model.config)
    heads, dim, dtype = description.kv_heads, description.head_dim, model.dtype
    best, forms, faults = fastest((batch, heads, description.query_heads // heads, tokens, dim), dtype, device)
    cache = BPCCache(model.config, artifact, budget=1.0, dense_layers=settings.dense_layers, min_context=0)
    sparse = [layer for layer in cache.layers if isinstance(layer, SparseLayer)]
    present, on_cpu = description.num_layers, device.type == "cpu"
    measured = _copy(model)  # because its layers are replaced by compiled ones
    with baseline(measured, forms[best]) as switch:
        compiled = settings.compiled and on_cpu and _compile(measured)
        fill(cache, model.config, batch, tokens, dtype, device)

        def variant(budget: float | int, form: str = best) -> Variant:
            def use() -> None:
                switch.attention = forms[form]
                cache.set_budget(budget)

            return Variant(measured, cache, functools.partial(cache.rewind, tokens), use)

        variants = {f"dense/{name}": variant(1.0, name) for name in forms}
        variants |= {str(budget): variant(budget) for budget in settings.budgets}
        several = replace(variant(1.0), new=DRAFT + 1, inside=cache.full_attention)
        variants["verify"] = replace(several, rest="rest of verify")
        if on_cpu:
            own = DynamicCache(config=model.config)
            fill(own, model.config, batch, tokens, dtype, device)
            rewind = functools.partial(_share, own, cache)
            rewind()
            variants["transformers"] = Variant(model, own, rewind, rest="rest of transformers")
        if present < layers:
            for each in list(variants.values()):
                if each.rest not in variants:
                    emptied = _copy(each.model, without_layers=True)
                    variants[each.rest] = Variant(emptied, each.cache, lambda: None, rest=each.rest, new=each.new)
        ids = torch.ones(batch, 1, dtype=torch.long, device=device)
        taken, peaks = _timed_variants(ids, variants, settings.repeats)
    factor, experts = layers / present, has_experts(model.config)
    weights = weight_bytes_read(model)
    if present < layers:
        weights += int((factor - 1) * sum(weight.nbytes for weight in model.get_decoder().layers.parameters()))

    def figures(name: str, cached: int) -> dict[str, Any]:
        """Return the figures of a variant that reads so many `cached` bytes per sequence."""
        samples, peak = taken[name], {"peak_bytes": peaks.get(name)}
        rest = taken.get(variants[name].rest, samples)
        if isinstance(samples, str) or isinstance(rest, str):
            return {"milliseconds": None, "note": samples if isinstance(samples, str) else rest} | peak
        median, spread = summary(_of_all_layers(samples, rest, factor), 3).values()
        floor = None if experts else least_microseconds(weights + int(factor * batch * cached), rate) / 1e3
        return {
            "milliseconds": median,
            "spread": spread,
            "tokens_per_second": round(1e3 * batch * variants[name].new / median, 2),
            "floor": None if floor is None else round(floor, 3),
            "floor_share": None if floor is None else round(floor / median, 4),
        } | peak

    _, whole = cache.kv_bytes(length)
    dense_forms = {name: figures(f"dense/{name}", whole) for name in forms}
    timed_forms = {name: form for name, form in dense_forms.items() if form["milliseconds"]}
    if not timed_forms:
        reasons = "; ".join(f"{name}: {form['note']}" for name, form in dense_forms.items())
        raise BPCError(f"no dense attention could be timed in the model ({reasons})")
    name = min(timed_forms, key=lambda name: timed_forms[name]["milliseconds"])
    full = {"form": name} | timed_forms[name]
    verify, rows = {"tokens": DRAFT + 1} | figures("verify", whole), []
    for budget in settings.budgets:
        cache.set_budget(budget)
        ours = figures(str(budget), cache.kv_bytes(length)[0])
        compared = {name: form | {"times_bpc": _ratio(form, ours)} for name, form in dense_forms.items()}
        times, limit = _ratio(full, ours), _ratio(full, ours, "floor")
        rows.append(
            {
                "batch": batch,
                "tokens": tokens,
                "budget": budget,
                "attended": sparse[0].count(length),
                "compiled": compiled and batch <= MOST,
                "bpc": ours,
                "full": full,
                "dense_forms": compared | {name: {"milliseconds": None, "note": why} for name, why in faults.items()},
                "times_full": times,
                "limit_times_full": limit,
                "limit_reached": None if times is None or limit is None else round(times / limit, 3),
                "verify": verify,
                "exact": {"tokens_per_second": exact_speed(batch, ours["milliseconds"], verify["milliseconds"])},
            }
            | ({"transformers": figures("transformers", whole)} if on_cpu else {})
        )
    return rows


def exact_speed(batch: int, step: float | None, verify: float | None) -> float | None:
    """Return the tokens per second of exact decoding, from milliseconds; a batch keeps what all have right."""
    if step is None or verify is None:
        return None
    return round(1e3 * batch * rounds_tokens(RIGHT**batch, DRAFT) / (DRAFT * step + verify), 2)


def _timed_variants(
    ids: Tensor, variants: Mapping[str, Variant], repeats: int
) -> tuple[dict[str, list[float] | str], dict[str, int]]:
    """Return each variant's milliseconds per step, or why it was not timed, and its peak memory; `ids` are `[B, 1]`."""
    device = ids.device
    runs: dict[str, Callable[[], Any]] = {}
    notes: dict[str, str] = {}
    peaks: dict[str, int] = {}

    def again(variant: Variant) -> None:
        with variant.inside():
            step(variant.model, ids.expand(-1, variant.new), variant.cache)
        variant.rewind()

    for name, variant in variants.items():
        variant.use()
        try:
            again(variant)  # hashes all keys before the timing
            _reset_peak(device)
            # Every replay of a graph writes the same slot, so the time is that of a step at this length.
            run = captured([functools.partial(again, variant)], device)
            run()
            synchronize(device)
            runs[name], peaks[name] = run, _peak(device)
        except Exception as error:
            notes[name] = reason(error)
            variant.rewind()
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name in [name for name in runs if name not in notes]:
            variants[name].use()
            try:
                runs[name]()  # not timed: the first step after another variant takes longer
                taken[name].append(1e3 * clock(runs[name], device))
            except Exception as error:
                notes[name] = reason(error)
                variants[name].rewind()
    return taken | notes, peaks


def _of_all_layers(samples: Sequence[float], rest: Sequence[float], factor: float) -> list[float]:
    """Return the times of a model with `factor` times as many layers, of which `rest` is without any layer."""
    return [least + (time - least) * factor for time, least in zip(samples, rest, strict=True)]


def _ratio(one: dict[str, Any], other: dict[str, Any], what: str = "milliseconds") -> float | None:
    """Return the time, or the floor, of `one` divided by that of `other`; None if either is not known."""
    if not one["milliseconds"] or not other["milliseconds"] or not one[what]:
        return None
    return float(round(one[what] / other[what], 3))


def _copy(model: Any, *, without_layers: bool = False) -> Any:
    """Return the model, or all but its decoder layers, as plain modules that share its weights."""
    shared: dict[int, Any] = {id(each): each for each in (*model.parameters(), *model.buffers())}
    if without_layers:
        shared[id(model.get_decoder().layers)] = torch.nn.ModuleList()
    return copy.deepcopy(model, shared)


def _compile(model: Any) -> bool:
    """Decode through compiled layers from now on; return whether that is possible."""
    try:
        compile_layers(model, several=True)
    except ModelError:
        return False
    return True


def _share(own: Any, cache: BPCCache) -> None:
    """Let the layers of transformers' cache hold what those of BPC's hold, without a copy."""
    for layer, held in zip(own.layers, cache.layers, strict=True):
        if isinstance(held, GrowingLayer):
            layer.keys, layer.values = held.keys, held.values


def step(model: Any, ids: Tensor, cache: Any) -> Tensor:
    """Run a step of `ids [B, new]`, which adds these tokens to the cache; return its logits `[B, new, vocabulary]`."""
    return model(ids, **with_cache(cache), use_cache=True).logits


def fill(cache: Any, config: Any, batch: int, tokens: int, dtype: torch.dtype, device: torch.device) -> None:
    """Give every layer random keys and values; for timing, positions beyond the model's limit do no harm.

    Args:
        cache: an empty `BPCCache`.
        config: of its model.
        batch: sequences.
        tokens: tokens of each.
        dtype: of keys and values.
        device: where they are kept.
    """
    model = describe(config)
    generator = torch.Generator(device).manual_seed(0)
    shape = (batch, model.kv_heads, tokens, model.head_dim)
    keys, values = (repeated(shape, dtype, generator, device) for _ in range(2))
    for layer in cache.layers:
        layer.update(keys, values)
        if isinstance(layer, SparseLayer):
            layer.skip_attention()


@dataclass
class Switch:
    """The attention that a model in `baseline` uses for one token."""

    attention: dense.Dense


@contextmanager
def baseline(model: Any, attention: dense.Dense) -> Iterator[Switch]:
    """Enable BPC on a model whose own attention of one token is replaced by `attention`."""
    from transformers import AttentionInterface, AttentionMaskInterface

    sdpa, sdpa_mask = AttentionInterface()["sdpa"], AttentionMaskInterface()["sdpa"]
    switch = Switch(attention)

    def mask(**arguments: Any) -> Any:
        # transformers 5.17 builds the mask of one token while a CUDA graph is captured; to read it would end that.
        whole = arguments["q_length"] == 1 and arguments.get("local_size") is None
        return None if whole else sdpa_mask(**arguments)

    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **arguments: Any) -> Any:
        if query.shape[2] > 1 or mask is not None:
            return sdpa(module, query, key, value, mask, **arguments)
        grouped = query.squeeze(2).unflatten(1, (key.shape[1], -1))
        scaling, usual = arguments.get("scaling"), query.shape[-1] ** -0.5
        if scaling is not None and not math.isclose(scaling, usual):  # the forms use the usual scaling
            grouped = grouped * (scaling / usual)
        return switch.attention(grouped, key, value).flatten(1, 2).unsqueeze(1), None

    before = attention_name(model.config)
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, mask)
    model.set_attn_implementation(NAME)
    enable(model)
    try:
        yield switch
    finally:
        disable(model)
        model.set_attn_implementation(before)


def fastest(
    size: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> tuple[str, dict[str, dense.Dense], dict[str, str]]:
    """Time the dense forms on a layer `(B, H_KV, G, N, D)` in a cache's buffers.

    Returns:
        The name of the fastest form, all correct forms, and why the others are left out.

    Raises:
        BPCError: no form is correct.
    """
    batch, heads, group, tokens, dim = size
    generator = torch.Generator(device).manual_seed(0)
    query = repeated((batch, heads, group, dim), dtype, generator, device)
    whole = (batch, heads, room(tokens), dim)
    keys, values = (repeated(whole, dtype, generator, device)[:, :, :tokens] for _ in range(2))
    forms, faults = dense.correct_forms(query, keys, values, dense.exact(query[:1], keys[:1], values[:1]))
    taken = timed({name: [functools.partial(form, query, keys, values)] for name, form in forms.items()}, 3, device)
    faults |= {name: samples for name, samples in taken.items() if isinstance(samples, str)}
    medians = {name: statistics.median(samples) for name, samples in taken.items() if not isinstance(samples, str)}
    if not medians:
        reasons = "; ".join(f"{name}: {note}" for name, note in faults.items())
        raise BPCError(f"no dense attention is correct on this machine ({reasons})")
    return min(medians, key=lambda name: medians[name]), {name: forms[name] for name in medians}, faults


def weight_bytes_read(model: Any) -> int:
    """Return the bytes of the weights that a step reads, counting all experts.

    An embedding that is not tied to the output is left out, because a step reads only one row of it.
    """
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings()
    tied = head is not None and head.weight is embedding
    return sum(weight.nbytes for weight in model.parameters()) - (0 if tied else embedding.nbytes)


def has_experts(config: Any) -> bool:
    """Return whether a step reads only part of the weights, so that its byte floor is unknown."""
    text = config.get_text_config(decoder=True)
    return any(getattr(text, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts"))


def total_bytes(config: Any, dtype: torch.dtype) -> int:
    """Return the bytes of a model's weights without creating it; 0 if transformers cannot build it."""
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    except Exception:
        return 0
    return sum(weight.nbytes for weight in model.parameters())


def check_memory(config: Any, weights: int, batch: int, tokens: int, dtype: torch.dtype, device: torch.device) -> None:
    """Raise `InputError` if the model and a cache of `tokens` do not fit in memory.

    Args:
        config: of the model.
        weights: bytes of its weights; 0 if they are loaded already.
        batch: sequences.
        tokens: cached tokens of each.
        dtype: of the cache.
        device: where the model runs.
    """
    model = describe(config)
    needed = weights + _cached_bytes(config, batch, tokens, dtype, device) + SPARE
    if needed > available_memory(device):
        raise InputError(
            f"decoding {batch} x {tokens:,} tokens with {model.id} needs about {needed / 1e9:.1f} GB, but only "
            f"{available_memory(device) / 1e9:.1f} GB are free on {device.type}: use shorter --lengths or a smaller "
            "--shape"
        )


def fitting_layers(make_config: Callable[[int], Any], layers: int, batch: int, tokens: int, dtype: torch.dtype) -> int:
    """Return how many layers of a model fit in memory on a CPU with their cache; at least 1.

    Args:
        make_config: returns the config with so many layers.
        layers: of the whole model.
        batch: sequences.
        tokens: cached tokens of each.
        dtype: of weights and cache.
    """
    cpu = torch.device("cpu")

    def needed(count: int) -> int:
        config = make_config(count)
        return total_bytes(config, dtype) + _cached_bytes(config, batch, tokens, dtype, cpu)

    one, two = needed(1), needed(2)
    room = int(MOST_OF_MEMORY * available_memory(cpu)) - SPARE - one
    return max(1, min(layers, 1 + room // (two - one)))


def _cached_bytes(config: Any, batch: int, tokens: int, dtype: torch.dtype, device: torch.device) -> int:
    """Return the bytes of keys, values and codes; on a CPU twice, because transformers' cache copies them at a step."""
    model = describe(config)
    layer = batch * model.kv_heads * tokens * (2 * model.head_dim * dtype.itemsize + 9)
    return (model.num_layers * (2 if device.type == "cpu" else 1) + 2) * layer


def _reset_peak(device: torch.device) -> None:
    """Start the peak again at the current use, if the system supports that."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with suppress(OSError), open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def _peak(device: torch.device) -> int:
    """Return the peak in bytes since `_reset_peak`, or since the start of the process if the system cannot reset it."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    with suppress(OSError), open("/proc/self/status") as file:
        for line in file:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) << 10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << (0 if sys.platform == "darwin" else 10)
