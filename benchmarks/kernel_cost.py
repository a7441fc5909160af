"""What a decoding step of one layer would take on an H100, by the machine code of its kernels: a model.

    python benchmarks/kernel_cost.py --output kernel_cost.json

Nothing here is measured. A step runs with Triton's compiler and a stand-in for the CUDA driver, so no GPU is needed:
its launches are recorded with their compiled code, and `kernel_time` says what each would take. An operation of torch
that launches a kernel takes the fixed cost alone, for it moves a few bytes. Dense attention is its bytes alone: keys
and values once, at the rate of memory.

The times take every load from memory or L2; those with free loads, as if all were in L1: the truth lies between. The
order of sizes and what dominates them is worth something; a difference of 10 % is not.
"""

import os

os.environ["TRITON_INTERPRET"] = "0"  # read when the kernels are imported: this script compiles them

import sys
from collections import Counter
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
from bpc_calib.backends.triton.attend import AttendShape
from bpc_calib.method.codebook import make_codebook
from bpc_calib.method.rules import Rules
from bpc_calib.method.shares import LEVELS, UNIT
from bpc_calib.runtime.call import AttentionCall
from bpc_calib.runtime.hashed_layer import BPCLayer
from bpc_calib.runtime.layers import Common
from bpc_calib.runtime.static_layer import Clock, StaticLayer

sys.path.insert(0, str(report.ROOT / "tests"))

from ptx import driver  # the tests' stand-in for the CUDA driver

KV_HEADS, GROUP, DIM, BITS, BUDGET = 8, 4, 128, 64, 0.02
DTYPE = torch.bfloat16
LENGTHS = (32768, 131072, 524288)
UNEVEN = (0.15, 0.3, 0.4, 0.5, 0.75, 1.2, 1.7, 3.0)  # of the mean, for each KV head


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


def main() -> None:
    parser = report.make_parser(__doc__)
    parser.add_argument("--nibbles", action="store_true", help="codes of nibbles instead of signs")
    arguments = parser.parse_args()
    nibbles = arguments.nibbles
    steps = [
        step(length, by_head, nibbles)
        for length in ([2048] if arguments.tiny else LENGTHS)
        for by_head in (False, True)
    ]
    for each in steps:
        for row in each["launches"]:
            print(f"{row['microseconds']:8.2f} us  {row['least_microseconds']:8.2f} with free loads  {row['kernel']}")
        print(
            f"{each['microseconds']:8.2f} us  {each['least_microseconds']:8.2f} a step at {each['tokens']:,} tokens"
            f"{', shares by head' * each['by_head']}\n"
        )
    for note in sorted({note for each in steps for row in each["launches"] for note in row["notes"]}):
        print(f"warning: {note}", file=sys.stderr)
    shape = {"kv_heads": KV_HEADS, "group": GROUP, "head_dim": DIM, "bits": BITS, "batch": 1, "dtype": "bfloat16"}
    shape |= {"nibbles": True} if nibbles else {}
    result = {"model": "H100, not measured", "constants": CONSTANTS, "shape": shape, "steps": steps}
    report.keep(arguments.output, report.about() | result)


def step(tokens: int, by_head: bool, nibbles: bool) -> dict[str, Any]:
    """All launches of a step, and sums of them."""
    rules = Rules(BUDGET, shares=2 * LEVELS * (tuple(round(UNIT * each) for each in UNEVEN),) if by_head else None)
    recorder = record(tokens, rules, nibbles)
    launches = [each for each in recorder.events if not isinstance(each, str)]
    operations = [each for each in recorder.events if isinstance(each, str)]
    costs = [cost(each, tokens, KV_HEADS, *reached(each, recorder), working(each, tokens, rules)) for each in launches]
    kernels = sum(each["microseconds"] for each in costs)
    torchs = 1e6 * FIXED * len(operations)
    return {
        "tokens": tokens,
        "budget": BUDGET,
        "by_head": by_head,
        "launches": costs,
        "torch_operations": dict(Counter(operations)),
        "launched": len(launches) + len(operations),
        "kernel_microseconds": round(kernels, 2),
        "torch_microseconds": round(torchs, 2),
        "microseconds": round(kernels + torchs, 2),
        "least_microseconds": round(sum(each["least_microseconds"] for each in costs) + torchs, 2),
        "dense_microseconds_by_bytes": round(1e6 * 4 * tokens * KV_HEADS * DIM / HBM, 2),
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


def working(launch: Any, tokens: int, rules: Rules) -> float:
    """The share of the blocks of a launch that have tokens: in attention, some have none with shares by head."""
    shapes = (each for each in dict(launch.kernel.src.constants).values() if isinstance(each, AttendShape))
    if (shape := next(shapes, None)) is None or rules.shares is None:
        return 1.0
    blocks = sum(-(-count // shape.CHUNK) for count in rules.by_head(rules.count(tokens), tokens))
    return blocks / (launch.grid[0] * launch.grid[1])


def record(tokens: int, rules: Rules, nibbles: bool) -> Recorder:
    """A step at the last place of a cache that has just enough room."""
    recorder = Recorder()
    # Compile for 9.0, and let every call of the backends' dispatch reach the kernels' pipeline.
    driver.install(90, recorder.events.append)
    served = SimpleNamespace(**{**vars(pipeline), "serves": lambda *given: None})
    dispatch.backend = lambda device: "triton"
    dispatch._load = lambda name: served  # type: ignore[assignment]
    k = rules.count(tokens)
    clock = Clock(torch.tensor([tokens - 1]), torch.full((1, tokens), k), None, k, tokens, stepping=True)
    static = StaticLayer(_layer(tokens, rules, nibbles), clock, chooses=True)
    clock.share_out([static])
    clock.tick()
    new = [torch.zeros(1, KV_HEADS, 1, DIM, dtype=DTYPE) for _ in range(2)]
    query = torch.zeros(1, KV_HEADS * GROUP, 1, DIM, dtype=DTYPE)
    for given in (*new, query, clock.place, clock.rows.lengths, clock.rows.k):
        recorder.give(given)
    with recorder:
        static.update(*new)
        static.attention(AttentionCall(None, query, None, DIM**-0.5, None, None))
    return recorder


def _layer(tokens: int, rules: Rules, nibbles: bool) -> BPCLayer:
    """With the metric and the mean of a calibration, and buffers whose memory is never touched."""
    room = (1, KV_HEADS, tokens)
    config = LlamaConfig(num_attention_heads=KV_HEADS * GROUP, num_key_value_heads=KV_HEADS, head_dim=DIM)
    layer = BPCLayer(0, rules, Common(describe(config)), None)
    projection, metric = torch.randn(KV_HEADS, BITS * (4 if nibbles else 1), DIM), torch.eye(DIM).repeat(KV_HEADS, 1, 1)
    layer.codebook = make_codebook(projection, DTYPE, metric=metric, mean=torch.zeros(KV_HEADS, DIM), nibbles=nibbles)
    layer.serve = lambda module: None  # type: ignore[method-assign]
    layer.buffers = {
        "keys": torch.empty(*room, DIM, dtype=DTYPE),
        "values": torch.empty(*room, DIM, dtype=DTYPE),
        "codes": torch.empty(*room, 1, dtype=torch.int64),
        "gain": torch.empty(*room, dtype=torch.uint8),
    }
    layer.is_initialized = True
    return layer


if __name__ == "__main__":
    main()
