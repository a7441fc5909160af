"""Decoding steps in buffers of fixed size; on a GPU each step replays a CUDA graph."""

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bpc_calib.backends.dispatch import backend
from bpc_calib.compat import with_cache
from bpc_calib.errors import BPCError, InputError, ModelError, first_line
from bpc_calib.models.description import describe
from bpc_calib.runtime.enabling import is_enabled
from bpc_calib.runtime.own_loop import calling, check_loop, check_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from bpc_calib.runtime.cache import BPCCache

__all__ = ["check_static", "static_generate", "static_steps", "warm_up"]

WARM_UP = 3
FEW = 20  # new tokens where nobody says how many: transformers' own default


@contextmanager
def static_steps(
    model: "PreTrainedModel",
    cache: "BPCCache",
    steps: int,
    *,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
) -> Iterator[Callable[[Tensor], Tensor]]:
    """Decode one token at a time after a prefill, in steps that never make the device wait for the host.

    Inside the `with` block, `step(ids)` takes the next tokens, int64 `[B, 1]`, and returns their logits
    `[B, vocab]`. The first static step reserves room for all steps and moves the lengths to the device. So on CUDA a
    step is captured once and replayed; elsewhere it runs as plain code. The first step that chooses tokens is an
    ordinary one, because it hashes the prompt. After the block the cache grows as before. To decode full attention in
    the same way, use `BPCCache(model.config, budget=1.0)`.

    Args:
        model: an enabled model (`bpc_calib.enable`).
        cache: a cache of this model with at least one token.
        steps: the largest number of steps.
        attention_mask: bool or integers `[B, N]` for the `N` cached tokens, 0 for padding; None: no padding.
        position_ids: int64 `[B, 1]` of the first new token; None: the number of real tokens before it.

    Raises:
        ModelError: static steps cannot serve the model or the cache (`check_static`), or CUDA cannot capture a step.
        InputError: an argument does not fit the cache, or `step` is called more often than `steps`.
    """
    check_static(model, cache)
    run = _Steps(model, cache, steps, attention_mask, position_ids)
    try:
        yield run.step
    finally:
        run.end()


def check_static(model: Any, cache: Any) -> None:
    """Raise unless static steps serve this model and cache.

    Raises:
        ModelError: the model has sliding-window layers, RoPE that changes with the length or several devices; or it is
            on a GPU without the Triton kernels, or on several GPUs by tensor parallelism.
        InputError: the cache is not a `BPCCache`, is already in static steps or keeps its keys and values apart from
            the model, or the model is not enabled.
    """
    from bpc_calib.runtime.cache import BPCCache
    from bpc_calib.runtime.layers import GrowingLayer
    from bpc_calib.runtime.static_layer import StaticLayer

    if not isinstance(cache, BPCCache):
        raise InputError(f"static steps need a BPCCache, not {type(cache).__name__}")
    if not is_enabled(model):
        raise InputError("call bpc_calib.enable(model) before static steps")
    description = describe(model.config)
    name = f"{description.id} ({description.model_type})"
    if description.rope_follows_length:
        raise ModelError(f"{name}: its RoPE changes with the length, which static steps do not serve")
    if description.ranks > 1 and model.device.type == "cuda":
        raise ModelError(f"{name}: {description.ranks} processes shard it, which CUDA graphs do not serve")
    for index, layer in enumerate(cache.layers):
        if isinstance(layer, StaticLayer):
            raise InputError("the cache is already in a `static_steps` block")
        if not isinstance(layer, GrowingLayer):
            kept = "a sliding window" if getattr(layer, "is_sliding", False) else "one state of all tokens"
            raise ModelError(f"{name}: layer {index} has {kept}, which static steps do not serve")
        place = layer.common.place
        if place is not None and (place.folder is not None or model.device.type != "cpu"):
            raise InputError("static steps read keys and values where the model is: leave kv_device out")
    if len({parameter.device for parameter in model.parameters()}) > 1:
        raise ModelError(f"{name} is on several devices, which static steps do not serve")
    if model.device.type == "cuda" and backend(model.device) != "triton":
        raise ModelError("static steps on a GPU need the Triton kernels")


class _Steps:
    """The steps of one `static_steps` block: static, then one ordinary step that first chooses, then static again."""

    def __init__(
        self, model: Any, cache: Any, steps: int, attention_mask: Tensor | None, position_ids: Tensor | None
    ) -> None:
        from bpc_calib.runtime.layers import SparseLayer

        self.model, self.cache = model, cache
        self.length = self.start = cache.get_seq_length()  # tokens cached
        if not self.length:
            raise InputError("the cache is empty: run the prefill before static steps")
        if steps < 0:
            raise InputError(f"steps must be 0 or more, not {steps}")
        keys = cache.layers[0].keys
        self.batch, self.device = keys.shape[0], keys.device
        self.mask = _padding(attention_mask, self.batch, self.length, self.device)
        real = [self.length] * self.batch if self.mask is None else self.mask.sum(-1).tolist()
        if position_ids is None:
            position_ids = torch.tensor(real, device=self.device).unsqueeze(-1)
        if position_ids.shape not in ((self.batch, 1), (1, 1)):
            raise InputError(f"position_ids must be [B, 1] for {self.batch} sequences, not {list(position_ids.shape)}")
        with torch.inference_mode(False):  # so that steps outside of inference mode may write to the positions
            self.positions = position_ids.to(self.device, copy=True)
        self.room = self.length + steps
        count = next(layer.count for layer in cache.layers if isinstance(layer, SparseLayer))
        self.counts, self.first = _plan(real, steps, count)
        self.layers: list[Any] = []  # the static layers while they are in the cache
        self.run: Callable[[], Tensor] | None = None
        self.failed = False

    @torch.no_grad()
    def step(self, ids: Tensor) -> Tensor:
        """Feed the next tokens, int64 `[B, 1]`; return their logits `[B, vocab]`."""
        if ids.shape != (self.batch, 1) or ids.dtype.is_floating_point:
            raise InputError(f"ids must be integers [{self.batch}, 1], not {ids.dtype} {list(ids.shape)}")
        if self.length == self.room:
            raise InputError(f"static_steps was called for {self.room - self.start} steps, and this is one more")
        if self.failed or self.cache.get_seq_length() != self.length:
            raise InputError("an earlier step failed or the cache was changed: start a new `static_steps` block")
        self.failed = True  # until the step succeeds
        if self.length - self.start == self.first:
            self.end()
            logits = self._ordinary(ids)
        else:
            if self.run is None:
                self.run = self._begin(ids)
            self.ids.copy_(ids)
            logits = self.run()
            self.clock.length += 1
        self.length += 1
        self.failed = False
        return logits

    def end(self) -> None:
        """Put the growing layers back into the cache."""
        if self.layers and self.cache.layers is self.layers:
            self.cache.layers = [layer.thaw() for layer in self.layers]
        self.layers, self.run = [], None

    def _ordinary(self, ids: Tensor) -> Tensor:
        logits = self._forward(ids, None if self.mask is None else _widened(self.mask, self.length + 1).long())
        self.positions += 1
        return logits

    def _forward(self, ids: Tensor, mask: Tensor | None) -> Tensor:
        positions = self.positions.expand(self.batch, 1)
        output = self.model(
            input_ids=ids, attention_mask=mask, position_ids=positions, **with_cache(self.cache), use_cache=True
        )
        return output.logits[:, -1]

    def _begin(self, ids: Tensor) -> Callable[[], Tensor]:
        """Make the layers static; return a function that runs a step for the tokens in `self.ids`."""
        from bpc_calib.runtime.static_layer import Clock, StaticLayer

        chooses = self.first is not None and self.length - self.start > self.first
        with torch.inference_mode(False), torch.no_grad():  # so that steps outside of inference mode may write
            self.ids = ids.to(self.device, copy=True)
            self.clock = Clock(
                place=torch.full((1,), self.length, device=self.device),
                # The slots before the first step get columns too, so that a slot is the index of its count.
                counts=torch.nn.functional.pad(torch.tensor(self.counts, device=self.device), (self.start, 0)),
                valid=None if self.mask is None else _widened(self.mask, self.room),
                padding=None if self.mask is None else (~self.mask).sum(-1),
                width=max(map(max, self.counts)),
                length=self.length,
            )
            self.layers = [StaticLayer(layer, self.clock, chooses=chooses) for layer in self.cache.layers]
            self.clock.share_out(self.layers)
        self.cache.layers = self.layers
        # transformers passes a 4-dimensional mask on unchanged, so it builds none; no static layer reads this one.
        unread = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=self.device)

        def run() -> Tensor:
            self.clock.tick()
            self.clock.stepping = True
            try:
                logits = self._forward(self.ids, unread)
            finally:
                self.clock.stepping = False
            if not all(layer.served for layer in self.layers):
                raise ModelError("a layer of the model bypasses BPC's attention, so static steps cannot serve it")
            self.clock.place += 1
            self.positions += 1
            return logits

        return _captured(run, [self.clock.place, self.positions]) if self.device.type == "cuda" else run


def _padding(mask: Tensor | None, batch: int, length: int, device: torch.device) -> Tensor | None:
    """Return the mask as bool `[B, N]`; None if there is no padding."""
    if mask is None:
        return None
    if mask.shape != (batch, length):
        raise InputError(f"attention_mask must be [{batch}, {length}] like the cache, not {list(mask.shape)}")
    mask = mask.to(device).bool()
    return None if mask.all() else mask


def _widened(mask: Tensor, length: int) -> Tensor:
    """Extend the mask to `length` tokens, none of the new ones padding."""
    return torch.nn.functional.pad(mask, (0, length - mask.shape[1]), value=True)


def _plan(real: list[int], steps: int, count: Callable[[int], int]) -> tuple[list[list[int]], int | None]:
    """Return the number of tokens that each sequence attends to in each step, and the first step that chooses.

    Args:
        real: number of real tokens of each sequence before the first step.
        count: returns the number of attended tokens for a length.
    """
    lengths = [range(tokens + 1, tokens + 1 + steps) for tokens in real]
    counts = [list(map(count, row)) for row in lengths]
    first = (i for i in range(steps) if any(wanted[i] < row[i] for wanted, row in zip(counts, lengths, strict=True)))
    return counts, next(first, None)


def warm_up(run: Callable[[], Tensor], state: list[Tensor]) -> None:
    """Run a step a few times, and restore `state`, tensors of any shape, after each run.

    The cache needs no restoring: every run writes the same numbers to the same slot.
    """
    saved = [tensor.clone() for tensor in state]
    for _ in range(WARM_UP):
        run()
        for tensor, before in zip(state, saved, strict=True):
            tensor.copy_(before)


def _captured(run: Callable[[], Tensor], state: list[Tensor]) -> Callable[[], Tensor]:
    """Capture `run` as a CUDA graph; return a function that replays it."""
    caching = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)  # otherwise the graph would read cached casts after they are freed
    try:
        with torch.cuda.device(state[0].device):
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                warm_up(run, state)
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                logits = run()
    except (BPCError, torch.OutOfMemoryError):
        raise
    except RuntimeError as fault:
        raise ModelError(f"CUDA cannot capture a step as a graph: {first_line(fault)}") from fault
    finally:
        torch.set_autocast_cache_enabled(caching)

    def replay() -> Tensor:
        graph.replay()
        return logits.clone()

    return replay


def static_generate(
    model: "PreTrainedModel", inputs: Tensor | None = None, *, cache: "BPCCache", **arguments: Any
) -> Any:
    """Run `model.generate(inputs, cache=cache, **arguments)` with static steps after the prefill (`static_steps`).

    The loop is that of transformers. So sampling, logits processors, stopping criteria, streamers and the returned
    value are the same as without static steps, and so are the tokens, except for the rounding of attention.

    Args:
        model: an enabled model (`bpc_calib.enable`).
        inputs: the prompt, int64 `[B, N]`, as `generate` takes it; or pass `input_ids` or `inputs_embeds`.
        cache: a `BPCCache` of this model.
        arguments: others of `generate`. The cache reserves room for `max_new_tokens` (or `max_length`).

    Raises:
        ModelError: static steps cannot serve the model (`static_steps`).
        InputError: the cache is not a `BPCCache`; or the call uses beams, drafts, `use_cache=False` or `synced_gpus`,
            requests attentions or hidden states, or passes the model arguments other than the tokens.
    """
    settings = _settings(model, arguments)
    check_loop(settings, arguments.get("assistant_model"), "static_generate serves", "static_generate returns")
    if settings.use_cache is False:
        raise InputError("static_generate needs use_cache=True")
    for name in ("synced_gpus", "custom_generate"):
        if arguments.get(name):
            raise InputError(f"static_generate does not serve {name}")
    check_static(model, cache)
    with ExitStack() as stack:
        call = _calls(model, cache, settings, stack)
        return calling(model, call).generate(inputs, **with_cache(cache), **arguments)


def _settings(model: Any, arguments: dict[str, Any]) -> Any:
    """Return the generation config that `generate` will work with: arguments, then a given config, then the model's."""
    settings, given = copy.deepcopy(model.generation_config), arguments.get("generation_config")
    for name, value in (({} if given is None else given.to_diff_dict()) | arguments).items():
        if hasattr(settings, name):
            setattr(settings, name, value)
    return settings


def _calls(model: Any, cache: Any, settings: Any, stack: ExitStack) -> Callable[..., Any]:
    """Return a function that runs the model, and static steps once a pass adds one token to a filled cache."""
    from transformers.modeling_outputs import CausalLMOutputWithPast

    step: Any = None
    left = 0  # steps of the current block

    def call(**inputs: Any) -> Any:
        nonlocal step, left
        ids, length = inputs.get("input_ids"), cache.get_seq_length()
        if step is None and (ids is None or ids.shape[1] != 1 or not length):
            return model(**inputs)
        check_tokens(inputs, "static_generate")
        if not left:
            stack.close()
            left = settings.max_new_tokens or max(FEW, (settings.max_length or 0) - length)
            mask = inputs.get("attention_mask")
            block = static_steps(
                model,
                cache,
                left,
                attention_mask=None if mask is None else mask[:, :length],
                position_ids=inputs.get("position_ids"),
            )
            step = stack.enter_context(block)
        left -= 1
        return CausalLMOutputWithPast(logits=step(ids).unsqueeze(1), **with_cache(cache))

    return call
