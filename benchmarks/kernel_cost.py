"""What a decoding step of one layer would take on an H100, by the machine code of its kernels: a model.

    python benchmarks/kernel_cost.py --output kernel_cost.json

Nothing here is measured. A step runs with Triton's compiler and a stand-in for the CUDA driver, so no GPU is needed:
its launches are recorded with their compiled code, and `kernel_time` says what each would take. An operation of torch
that launches a kernel takes the fixed cost alone, for it moves a few bytes. Dense attention is its bytes alone: keys
and values once, at the rate of memory.

The column `us` takes every load from memory or L2; `least` takes loads as free, as if all were in L1: the truth lies
between. The order of sizes and what dominates them is worth something; a difference of 10 % is not.
"""

import os

os.environ["TRITON_INTERPRET"] = "0"  # read when the kernels are imported: this script compiles them

import json
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import report
import torch
from kernel_time import CONSTANTS, FIXED, HBM, L2_KEEPS, cost
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

sys.path.insert(0, str(report.ROOT / "tests"))

from ptx import driver  # the tests' stand-in for the CUDA driver

COLUMNS = "launch grid warps registers shared instructions per_key barriers shuffles in_loops least us".split()


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


def main() -> None:
    parser = report.make_parser(__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[32768, 131072, 524288])
    parser.add_argument("--budget", type=float, default=0.02)
    parser.add_argument("--json", action="store_true", help="print the result as JSON in place of tables")
    arguments = report.parse(parser, lengths=[2048])
    steps = [step(Shape(length, arguments.budget)) for length in arguments.lengths]
    if arguments.json:
        print(json.dumps(steps))
    else:
        for each in steps:
            show(each)
    for note in sorted({note for each in steps for row in each["launches"] for note in row["notes"]}):
        print(f"warning: {note}", file=sys.stderr)
    shape = {"kv_heads": 8, "group": 4, "head_dim": 128, "bits": 64, "batch": 1, "dtype": "bfloat16"}
    report.write(
        arguments.output,
        {"model": "H100, not measured", "constants": CONSTANTS, "shape": shape, "steps": steps},
    )


def step(shape: Shape) -> dict[str, Any]:
    """All launches of a step, and sums of them."""
    recorder = record(shape)
    launches = [each for each in recorder.events if not isinstance(each, str)]
    operations = [each for each in recorder.events if isinstance(each, str)]
    costs = [cost(each, shape.tokens, shape.kv_heads, *reached(each, recorder)) for each in launches]
    kernels = sum(each["microseconds"] for each in costs)
    torchs = 1e6 * FIXED * len(operations)
    dense = 2 * shape.tokens * shape.kv_heads * shape.dim * 2
    return {
        "tokens": shape.tokens,
        "budget": shape.budget,
        "launches": costs,
        "torch_operations": dict(Counter(operations)),
        "launched": len(launches) + len(operations),
        "kernel_microseconds": round(kernels, 2),
        "torch_microseconds": round(torchs, 2),
        "microseconds": round(kernels + torchs, 2),
        "least_microseconds": round(sum(each["least_microseconds"] for each in costs) + torchs, 2),
        "dense_microseconds_by_bytes": round(1e6 * dense / HBM, 2),
    }


def reached(launch: Any, recorder: Recorder) -> tuple[int, int]:
    """Bytes of a launch's tensors in memory, and in L2: those of this step that fit half of it."""
    cold = warm = 0
    for tensor in {id(each): each for each in launch.arguments if isinstance(each, Tensor)}.values():
        size = tensor.numel() * tensor.element_size()
        if recorder.is_made(tensor) and size <= L2_KEEPS:
            warm += size
        else:
            cold += size
    return cold, warm


def show(step: dict[str, Any]) -> None:
    """Print the table of a step."""
    table = [COLUMNS, *(_cells(row) for row in step["launches"])]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    print(f"{step['tokens']:,} tokens, budget {step['budget']}: a model of an H100, nothing is measured")
    for first, *others in table:
        cells = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        print("  ".join([first.ljust(widths[0]), *cells]))
    print("torch:", ", ".join(f"{count} {name}" for name, count in step["torch_operations"].items()))
    print(
        f"{step['launched']} launches, {len(step['launches'])} of Triton: {step['microseconds']:.1f} us, of them torch "
        f"{step['torch_microseconds']:.1f}; with free loads {step['least_microseconds']:.1f}; "
        f"dense by bytes {step['dense_microseconds_by_bytes']:.1f}\n"
    )


def _cells(row: dict[str, Any]) -> list[str]:
    inside = "; ".join(
        f"{loop['trips']:g} x ({loop['all']} instr, {loop['barrier']} bar, {loop['shuffle']} shfl)"
        for loop in row["loops"]
    )
    numbers = (f"{row[name]:g}" for name in ("warps", "registers", "shared", "instructions", "per_key"))
    counts = (f"{row[name]:g}" for name in ("barriers", "shuffles"))
    times = (f"{row[name]:.2f}" for name in ("least_microseconds", "microseconds"))
    return [row["kernel"], "x".join(map(str, row["grid"][:2])), *numbers, *counts, inside or "-", *times]


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


if __name__ == "__main__":
    main()
