"""One decoding step of a layer on tensors that nobody fills: its launches and the operations of torch, in order."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig

from bpc_calib import describe
from bpc_calib.backends import dispatch
from bpc_calib.backends.triton import pipeline
from bpc_calib.method.budget import attended
from bpc_calib.method.encoding import make_encoder
from bpc_calib.runtime.call import AttentionCall
from bpc_calib.runtime.hashed_layer import BPCLayer
from bpc_calib.runtime.rules import Rules
from bpc_calib.runtime.static_layer import Clock, StaticLayer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from ptx import driver  # the tests' stand-in for the CUDA driver

__all__ = ["Recorder", "Shape", "record"]


@dataclass(frozen=True)
class Shape:
    """A layer and its cache."""

    tokens: int
    budget: float
    kv_heads: int = 8
    group: int = 4
    dim: int = 128
    bits: int = 64


class Recorder(TorchDispatchMode):
    """Collects launches, and operations of torch that would launch a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Any] = []  # names of operations, and launches
        self.made: set[int] = set()  # addresses of what the step has made or been given
        self.kept: list[Any] = []  # so that no address is used twice

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        returned = function._schema.returns
        view = any(each.alias_info is not None and not each.alias_info.is_write for each in returned)
        name = str(function).removeprefix("aten.")
        if view or name.startswith(("_unsafe_view", "_reshape_alias", "detach", "lift")):
            return result
        for each in result if isinstance(result, tuple | list) else [result]:
            if isinstance(each, Tensor) and not any(r.alias_info for r in returned):
                self.give(each)
        if not name.startswith(("empty", "new_empty", "promote_types")):
            self.events.append(name)
        return result

    def give(self, tensor: Tensor) -> None:
        """Count a tensor as one of this step."""
        self.made.add(tensor.untyped_storage().data_ptr())
        self.kept.append(tensor)

    def is_made(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self.made


@dataclass
class _Told:
    """Where the driver sends launches: it is installed once, and the step changes."""

    to: Callable[[Any], None] = field(default=lambda launch: None)


_told = _Told()


def _installed() -> None:
    """Compile for 9.0, and let every call of the backends' dispatch reach the kernels' pipeline."""
    driver.install(90, lambda launch: _told.to(launch))
    served = SimpleNamespace(**{**vars(pipeline), "serves": lambda request: None})
    dispatch.backend = lambda device: "triton"
    dispatch._load = lambda name: served  # type: ignore[assignment]


def record(shape: Shape) -> Recorder:
    """A step at the last place of a cache that has just enough room."""
    _installed()
    heads, tokens, dtype = shape.kv_heads, shape.tokens, torch.bfloat16
    layer = _layer(shape, dtype)
    k = attended(tokens, shape.budget)
    clock = Clock(torch.tensor([tokens - 1]), torch.full((1, tokens), k), None, k, tokens, stepping=True)
    static = StaticLayer(layer, clock, chooses=True)
    clock.tick()
    new = [torch.zeros(1, heads, 1, shape.dim, dtype=dtype) for _ in range(2)]
    query = torch.zeros(1, heads * shape.group, 1, shape.dim, dtype=dtype)
    recorder = Recorder()
    for given in (*new, query, clock.place, clock.lengths, clock.k):
        recorder.give(given)
    _told.to = recorder.events.append
    with recorder:
        static.update(*new)
        static.attention(AttentionCall(None, query, None, shape.dim**-0.5, None, None))
    return recorder


def _layer(shape: Shape, dtype: torch.dtype) -> BPCLayer:
    """With the metric and the mean of a calibration, and buffers whose memory is never touched."""
    heads, dim, room = shape.kv_heads, shape.dim, (1, shape.kv_heads, shape.tokens)
    config = LlamaConfig(num_attention_heads=heads * shape.group, num_key_value_heads=heads, head_dim=dim)
    rules = Rules(shape.budget, 128, 0.0, 0, 0, "relative", True, shape.bits, 0)
    layer = BPCLayer(0, rules, describe(config), None)
    projection = torch.randn(heads, shape.bits, dim)
    metric, mean = torch.eye(dim).repeat(heads, 1, 1), torch.zeros(heads, dim)
    layer.projection, layer.encoder = projection.to(dtype), make_encoder(projection, dtype, metric=metric, mean=mean)
    layer.serve = lambda module: None  # type: ignore[method-assign]
    layer.buffers = {
        "keys": torch.empty(*room, dim, dtype=dtype),
        "values": torch.empty(*room, dim, dtype=dtype),
        "codes": torch.empty(*room, -(-shape.bits // 64), dtype=torch.int64),
        "gain": torch.empty(*room, dtype=torch.uint8),
    }
    layer.is_initialized = True
    return layer
