"""Random inputs of an attention layer, in working sets larger than the processor's caches, and byte floors.

A byte floor is the bytes that a step must move, or their time at the memory's bandwidth.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from bpc_calib.backends.pages import in_huge_pages
from bpc_calib.bench.machine import available_memory, cache_bytes
from bpc_calib.errors import InputError
from bpc_calib.method.codebook import Codebook, make_codebook
from bpc_calib.method.rules import Rules
from bpc_calib.method.state import Rows, State, alike
from bpc_calib.runtime.growing import LEAST_ROOM

__all__ = [
    "ONE",
    "LayerInputs",
    "LayerShape",
    "Sets",
    "code_bytes",
    "dense_bytes",
    "least_microseconds",
    "make",
    "repeated",
    "room",
    "stage_bytes",
    "working_sets",
]

BITS = 64
MOST_BYTES = {"cpu": 4 << 30, "cuda": 16 << 30}  # limit for all working sets together
MOST_SETS = 8192  # of short contexts, where the caches of a processor hold hundreds of MB
BLOCK = 1 << 24  # count of random numbers that are drawn; longer tensors repeat them


@dataclass(frozen=True)
class LayerShape:
    """The shape of an attention layer and its cache."""

    batch: int
    kv_heads: int
    group: int  # query heads per KV head
    dim: int
    tokens: int
    dtype: torch.dtype

    @property
    def rows(self) -> int:
        """The number of KV heads of all sequences."""
        return self.batch * self.kv_heads

    @property
    def cached_bytes(self) -> int:
        """The bytes of keys, values, codes and gains, including the spare room of their buffers."""
        return dense_bytes(self, room(self.tokens)) + code_bytes(self, room(self.tokens))


@dataclass(frozen=True)
class Sets:
    """The numbers of working sets that timed calls use in turn."""

    codes: int  # sets of codes and gains
    keys: int  # sets of keys and values, which need more memory
    dense: int  # sets of keys and values that dense forms use
    steps: int  # whole steps, which read both, before the first sets are used again
    cold: bool = True  # whether everything that a call reads has left the caches before it is read again


ONE = Sets(1, 1, 1, 1)


@dataclass(frozen=True)
class LayerInputs:
    """The inputs of a layer, with a working set per call until the first is used again."""

    query: Tensor  # [B, H_KV, G, D]
    codebook: Codebook  # with a metric and a mean, as from calibration
    rules: Rules  # the default of a cache
    states: list[State]  # of N tokens: call number `i` uses `states[i]`

    def rows(self, k: int) -> Rows:
        """Return the sequences of a step that attends to `k` tokens of each."""
        return alike(self.states[0].keys, k)


def working_sets(shape: LayerShape, k: int, device: torch.device) -> Sets:
    """Return enough working sets that caches are cold when `k` tokens are attended, within `MOST_BYTES`.

    Raises:
        InputError: not even one working set fits in memory.
    """
    free = available_memory(device)
    if shape.cached_bytes + (64 << 20) > free:
        raise InputError(
            f"{shape.tokens:,} tokens of {shape.rows} KV heads need {shape.cached_bytes / 1e9:.1f} GB per layer, but "
            f"only {free / 1e9:.1f} GB are free on {device.type}: use shorter --lengths or smaller --batch-sizes"
        )
    wanted = 4 * cache_bytes(device)
    most = min(free // 3, MOST_BYTES["cuda" if device.type == "cuda" else "cpu"])
    held = code_bytes(shape, room(shape.tokens))
    codes, dense, kept = code_bytes(shape, shape.tokens), dense_bytes(shape, shape.tokens), dense_bytes(shape, k)
    code_sets = max(1, min(-(-wanted // codes), most // 2 // held, MOST_SETS))
    fitting = max(1, min((most - code_sets * held) // (shape.cached_bytes - held), MOST_SETS))
    key_sets = min(max(2, -(-wanted // kept)), fitting)
    dense_sets = min(key_sets, max(2, -(-wanted // dense)))
    # Before a step reads the same keys and values again, it reads codes too.
    read = (code_sets * codes, key_sets * (kept + codes), dense_sets * dense)
    steps = key_sets if read[1] >= wanted else max(code_sets, key_sets)
    return Sets(code_sets, key_sets, dense_sets, steps, min(read) >= wanted)


def make(shape: LayerShape, sets: Sets, device: torch.device) -> LayerInputs:
    """Make the inputs of a layer, the same for the same shape, in buffers with spare room like those of a cache."""
    generator = torch.Generator(device).manual_seed(0)
    dim, dtype, heads = shape.dim, shape.dtype, (shape.batch, shape.kv_heads)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, device=device)

    projection, root = 0.3 * normal(shape.kv_heads, BITS, dim), normal(shape.kv_heads, 2 * dim, dim)
    mean = 0.1 * normal(shape.kv_heads, dim)
    cached, tokens = (sets.codes, *heads, room(shape.tokens)), shape.tokens
    dense = (sets.keys, *cached[1:], dim)
    codes, gains = (
        in_huge_pages(torch.empty(cached, dtype=kind, device=device)) for kind in (torch.int64, torch.uint8)
    )
    torch.randint(-(1 << 31), 1 << 31, cached, generator=generator, device=device, out=codes)
    codes.bitwise_left_shift_(32).bitwise_xor_(
        torch.randint(-(1 << 31), 1 << 31, cached, generator=generator, device=device)
    )
    torch.randint(32, 97, cached, generator=generator, device=device, dtype=torch.uint8, out=gains)
    query = normal(*heads, shape.group, dim).to(dtype)
    keys, values = (repeated(dense, dtype, generator, device)[:, :, :, :tokens] for _ in range(2))
    codes, gains = codes.unsqueeze(-1)[:, :, :, :tokens], gains[..., :tokens]
    pairs = [(i % sets.keys, i % sets.codes) for i in range(max(sets.keys, sets.codes))]
    return LayerInputs(
        query=query,
        codebook=make_codebook(projection, dtype, metric=root.mT @ root / (2 * dim), mean=mean),
        rules=Rules(),
        states=[State(keys[i], values[i], codes[j], gains[j]) for i, j in pairs],
    )


def room(tokens: int) -> int:
    """Return the room of a cache's buffers at `tokens` cached tokens; its cost differs between dense forms."""
    return -(-(tokens + max(LEAST_ROOM, tokens // 16)) // 16) * 16


def repeated(size: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator, device: torch.device) -> Tensor:
    """Return random normal numbers; copies of one `BLOCK` fill the tensor, because drawing is slower than copying.

    Args:
        size: shape of the tensor.
        dtype: the numbers are drawn in float32 and rounded to it.
        generator: on the device.
        device: where the tensor is made.
    """
    whole = in_huge_pages(torch.empty(size, dtype=dtype, device=device))
    flat = whole.view(-1)
    drawn = torch.randn(min(BLOCK, len(flat)), generator=generator, device=device, dtype=torch.float32).to(dtype)
    for part in flat.split(len(drawn)):
        part.copy_(drawn[: len(part)])
    return whole


def dense_bytes(shape: LayerShape, tokens: int) -> int:
    """Return the bytes of the keys and values of so many tokens of each sequence."""
    return shape.rows * tokens * shape.dim * 2 * shape.dtype.itemsize


def code_bytes(shape: LayerShape, tokens: int) -> int:
    """Return the bytes of the codes of so many tokens of each sequence, and of their gains."""
    return shape.rows * tokens * (BITS // 8 + 1)


def stage_bytes(shape: LayerShape, k: int) -> dict[str, int]:
    """Return the byte floors of scoring, of attention to `k` tokens, and of both, since scores need not be written."""
    codes, kept = code_bytes(shape, shape.tokens), dense_bytes(shape, k)
    return {"score": codes, "attend": kept, "step": codes + kept}


def least_microseconds(size: int, bytes_per_second: float) -> float:
    """Return the microseconds that moving `size` bytes takes at this bandwidth."""
    return 1e6 * size / bytes_per_second
