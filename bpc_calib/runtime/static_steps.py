"""Decoding steps in buffers that keep their size, each a CUDA graph replayed on a GPU: `static_steps`."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bpc_calib.backends.dispatch import backend
from bpc_calib.errors import BPCError, InputError, ModelError, first_line
from bpc_calib.models.description import describe
from bpc_calib.runtime.enabling import is_enabled

if TYPE_CHECKING:
    from bpc_calib.runtime.cache import BPCCache

__all__ = ["check_static", "static_steps", "warm_up"]

WARM_UP = 3


@contextmanager
def static_steps(
    model: Any,
    cache: "BPCCache",
    steps: int,
    *,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
) -> Iterator[Callable[[Tensor], Tensor]]:
    """Decode one token at a time behind a prefilled cache, with nothing in a step that the device must wait for.

    Inside the `with` block, `step(ids)` takes the next tokens, int64 `[B, 1]`, and returns their logits
    `[B, vocab]`. The cache has room for all steps from the first static one on, and lengths are kept on the device, so
    on CUDA a step is captured once and replayed; elsewhere it runs as it is. The first step that has anything to choose
    is an ordinary one: there the prompt is hashed. Behind the block the cache grows as before. Full attention is
    decoded in the same way by a `BPCCache(model.config, budget=1.0)`.

    Args:
        model: enabled (`bpc_calib.enable`).
        cache: of this model, with at least one token cached.
        steps: at most so many.
        attention_mask: bool or integers `[B, N]` for the `N` tokens cached; 0 is padding. None: there is none.
        position_ids: int64 `[B, 1]` of the first new token; None: as many as there are real tokens before it.

    Raises:
        ModelError: a model or a cache that cannot be served (`check_static`), or a step that cannot be captured.
        InputError: arguments that do not fit, or more steps than there is room for.
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
        ModelError: sliding-window layers, RoPE that changes with the length, several devices, or a GPU without the
            kernels.
        InputError: no `BPCCache`, one that takes static steps already, or a model that is not enabled.
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
    for index, layer in enumerate(cache.layers):
        if isinstance(layer, StaticLayer):
            raise InputError("the cache takes static steps already")
        if not isinstance(layer, GrowingLayer):
            raise ModelError(f"{name}: layer {index} has a sliding window, which static steps do not serve")
    if len({each.device for each in model.parameters()}) > 1:
        raise ModelError(f"{name} lies on several devices, which static steps do not serve")
    if model.device.type == "cuda" and backend(model.device) != "triton":
        raise ModelError("static steps on a GPU need the Triton kernels")


class _Steps:
    """The steps of one `static_steps`: static, ordinary where a choice is first to be made, static again."""

    def __init__(
        self, model: Any, cache: Any, steps: int, attention_mask: Tensor | None, position_ids: Tensor | None
    ) -> None:
        from bpc_calib.runtime.layers import SparseLayer

        self.model, self.cache = model, cache
        self.length = self.start = cache.get_seq_length()  # tokens cached
        if not self.length:
            raise InputError("the cache is empty: static steps begin behind a prefill")
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
        with torch.inference_mode(False):  # a step outside of it may write to them
            self.positions = position_ids.to(self.device, copy=True)
        self.room = self.length + steps
        count = next(layer.count for layer in cache.layers if isinstance(layer, SparseLayer))
        self.counts, self.first = _plan(real, steps, count)
        self.layers: list[Any] = []  # the static ones, while there are
        self.run: Callable[[], Tensor] | None = None
        self.failed = False

    @torch.no_grad()
    def step(self, ids: Tensor) -> Tensor:
        """Logits `[B, vocab]` behind the next tokens, int64 `[B, 1]`."""
        if ids.shape != (self.batch, 1) or ids.dtype.is_floating_point:
            raise InputError(f"ids must be integers [{self.batch}, 1], not {ids.dtype} {list(ids.shape)}")
        if self.length == self.room:
            raise InputError(f"more steps than the {self.room - self.start} that static_steps was told")
        if self.failed or self.cache.get_seq_length() != self.length:
            raise InputError("a step of this static_steps failed, or its cache was changed: begin anew")
        self.failed = True  # until it has not
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
        """Let the cache grow again."""
        if self.layers and self.cache.layers is self.layers:
            self.cache.layers = [layer.thaw() for layer in self.layers]
        self.layers, self.run = [], None

    def _ordinary(self, ids: Tensor) -> Tensor:
        logits = self._forward(ids, None if self.mask is None else _widened(self.mask, self.length + 1).long())
        self.positions += 1
        return logits

    def _forward(self, ids: Tensor, mask: Tensor | None) -> Tensor:
        positions = self.positions.expand(self.batch, 1)
        made = self.model(
            input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=self.cache, use_cache=True
        )
        return made.logits[:, -1]

    def _begin(self, ids: Tensor) -> Callable[[], Tensor]:
        """Give the layers their room; what runs a step, for tokens in `self.ids`."""
        from bpc_calib.runtime.static_layer import Clock, StaticLayer

        chooses = self.first is not None and self.length - self.start > self.first
        with torch.inference_mode(False), torch.no_grad():  # a step outside of it may write to them
            self.ids = ids.to(self.device, copy=True)
            self.clock = Clock(
                place=torch.full((1,), self.length, device=self.device),
                # With columns for the slots in use before, so that a count stands where its token does.
                counts=torch.nn.functional.pad(torch.tensor(self.counts, device=self.device), (self.start, 0)),
                valid=None if self.mask is None else _widened(self.mask, self.room),
                width=max(map(max, self.counts)),
                length=self.length,
            )
            self.layers = [StaticLayer(layer, self.clock, chooses=chooses) for layer in self.cache.layers]
        self.cache.layers = self.layers
        # Masks of four dimensions are handed on as they are: nothing is built for a step, and none of ours reads it.
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
    """bool `[B, N]`; None where nothing is padding."""
    if mask is None:
        return None
    if mask.shape != (batch, length):
        raise InputError(f"attention_mask must be [{batch}, {length}], as the cache, not {list(mask.shape)}")
    mask = mask.to(device).bool()
    return None if mask.all() else mask


def _widened(mask: Tensor, length: int) -> Tensor:
    """The mask of so many tokens: what came behind a prompt is no padding."""
    return torch.nn.functional.pad(mask, (0, length - mask.shape[1]), value=True)


def _plan(real: list[int], steps: int, count: Callable[[int], int]) -> tuple[list[list[int]], int | None]:
    """How many tokens each sequence attends to in each step, and the first step with anything to choose.

    Args:
        real: tokens of each sequence before the first step.
        count: how many of so many tokens are attended.
    """
    lengths = [range(each + 1, each + 1 + steps) for each in real]
    counts = [list(map(count, row)) for row in lengths]
    first = (i for i in range(steps) if any(wanted[i] < row[i] for wanted, row in zip(counts, lengths, strict=True)))
    return counts, next(first, None)


def warm_up(run: Callable[[], Tensor], state: list[Tensor]) -> None:
    """Run a step a few times and undo what it wrote to `state`.

    What it caches goes to the same slot each time, and is the same: that needs no undoing.
    """
    held = [each.clone() for each in state]
    for _ in range(WARM_UP):
        run()
        for each, before in zip(state, held, strict=True):
            each.copy_(before)


def _captured(run: Callable[[], Tensor], state: list[Tensor]) -> Callable[[], Tensor]:
    """What replays `run` as a CUDA graph."""
    caching = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)  # or a graph would read casts that are freed behind it
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
        raise ModelError(f"a step cannot be captured as a CUDA graph: {first_line(fault)}") from fault
    finally:
        torch.set_autocast_cache_enabled(caching)

    def replay() -> Tensor:
        graph.replay()
        return logits.clone()

    return replay
