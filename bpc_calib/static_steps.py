"""Decoding steps in buffers that keep their size, each a CUDA graph replayed on a GPU: `static_steps`."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bpc_calib.dispatch import backend
from bpc_calib.errors import BPCError, InputError, ModelError
from bpc_calib.hub import first_line
from bpc_calib.models import describe
from bpc_calib.runtime import is_enabled
from bpc_calib.selection import attended

if TYPE_CHECKING:
    from bpc_calib.cache import BPCCache
    from bpc_calib.layers import Rules

__all__ = ["check_static", "static_steps"]

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
    `[B, vocab]`. The cache has room for all steps before the first static one, and lengths are kept on the device, so
    on CUDA a step is captured once and replayed; elsewhere it runs as it is. Steps up to the first that has anything
    to choose are ordinary ones: there the prompt is hashed. Behind the block the cache grows as before. Full attention
    is decoded in the same way by a `BPCCache(model.config, budget=1.0)`.

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
    from bpc_calib.cache import BPCCache
    from bpc_calib.layers import GrowingLayer
    from bpc_calib.static_layer import StaticLayer

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
    """The steps of one `static_steps`: ordinary ones, then static ones."""

    def __init__(
        self, model: Any, cache: Any, steps: int, attention_mask: Tensor | None, position_ids: Tensor | None
    ) -> None:
        from bpc_calib.layers import SparseLayer

        self.model, self.cache = model, cache
        self.length = cache.get_seq_length()
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
        self.positions = position_ids.to(self.device).clone()
        self.room = self.length + steps
        rules = next(layer.rules for layer in cache.layers if isinstance(layer, SparseLayer))
        self.counts, first = _plan(real, steps, rules)
        self.chooses = first is not None
        self.ordinary = 0 if first is None else first + 1
        self.layers: list[Any] = []  # the static ones, once there are
        self.run: Callable[[], Tensor] | None = None
        self.failed = False

    @torch.no_grad()
    def step(self, ids: Tensor) -> Tensor:
        """Logits `[B, vocab]` behind the next tokens, int64 `[B, 1]`."""
        if ids.shape != (self.batch, 1) or ids.dtype.is_floating_point:
            raise InputError(f"ids must be integers [{self.batch}, 1], not {ids.dtype} {list(ids.shape)}")
        if self.length == self.room:
            raise InputError("more steps than static_steps was told")
        if self.failed or (self.layers and self.cache.layers is not self.layers):
            raise InputError("a step of this static_steps failed, or its cache was reset: begin anew")
        self.failed = True  # until it has not
        if self.ordinary:
            logits = self._ordinary(ids)
            self.ordinary -= 1
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

    def _ordinary(self, ids: Tensor) -> Tensor:
        if self.mask is not None:
            self.mask = torch.nn.functional.pad(self.mask, (0, 1), value=True)
        logits = self._forward(ids, None if self.mask is None else self.mask.long())
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
        from bpc_calib.static_layer import Clock, StaticLayer

        counts = torch.tensor(self.counts, device=self.device)
        valid = None
        if self.mask is not None:
            valid = torch.nn.functional.pad(self.mask, (0, self.room - self.length), value=True)
        self.ids = ids.to(self.device, copy=True)
        # Columns for the slots in use, so that a count stands where its token does.
        counts = torch.nn.functional.pad(counts, (self.room - counts.shape[1], 0))
        place = torch.full((1,), self.length, device=self.device)
        self.clock = Clock(place, counts, valid, width=int(counts.max()), length=self.length)
        self.layers = [StaticLayer(layer, self.clock, chooses=self.chooses) for layer in self.cache.layers]
        self.cache.layers = self.layers
        # Masks of four dimensions are handed on as they are: nothing is built for a step, and none of ours reads it.
        unread = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=self.device)

        def run() -> Tensor:
            self.clock.tick()
            logits = self._forward(self.ids, unread)
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


def _plan(real: list[int], steps: int, rules: "Rules") -> tuple[list[list[int]], int | None]:
    """How many tokens each sequence attends to in each step, and the first step with anything to choose.

    Args:
        real: tokens of each sequence before the first step.
    """
    lengths = [range(count + 1, count + 1 + steps) for count in real]
    counts = [[attended(each, rules.budget, rules.min_tokens) for each in row] for row in lengths]
    choosing = [
        next((i for i in range(steps) if wanted[i] < row[i]), None) for wanted, row in zip(counts, lengths, strict=True)
    ]
    return counts, min((each for each in choosing if each is not None), default=None)


def _captured(run: Callable[[], Tensor], state: list[Tensor]) -> Callable[[], Tensor]:
    """What replays `run` as a CUDA graph, whose writes to `state` are undone while it warms up.

    What a step caches goes to the same slot each time, so it needs no undoing.
    """
    held = [each.clone() for each in state]
    caching = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)  # or a graph would read casts that are freed behind it
    try:
        with torch.cuda.device(state[0].device):
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(WARM_UP):
                    run()
                    for each, before in zip(state, held, strict=True):
                        each.copy_(before)
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                logits = run()
    except BPCError:
        raise
    except RuntimeError as fault:
        raise ModelError(f"a step cannot be captured as a CUDA graph: {first_line(fault)}") from fault
    finally:
        torch.set_autocast_cache_enabled(caching)

    def replay() -> Tensor:
        graph.replay()
        return logits.clone()

    return replay
