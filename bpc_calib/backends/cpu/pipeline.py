"""The compiled kernels behind the signatures of their torch oracles: what is allocated, and what runs when."""

import functools
import itertools
import logging
import threading
import time
from typing import Any

import numba
import numpy as np
import torch
from filelock import FileLock
from torch import Tensor

from bpc_calib.backends.cpu.attend import attend_kernel, work_size
from bpc_calib.backends.cpu.choose import PROJECT, SELECT, choose_kernel
from bpc_calib.backends.cpu.encode import greedy_kernel, hash_kernel
from bpc_calib.backends.cpu.folder import kept
from bpc_calib.backends.cpu.prep import table_size
from bpc_calib.backends.cpu.score import GROUP_CODES, PAD, sample_size
from bpc_calib.backends.pages import in_huge_pages
from bpc_calib.errors import InputError
from bpc_calib.method.encoding import Encoded, Encoder, make_encoder
from bpc_calib.method.scoring import GROUPS, QuantizedQuery
from bpc_calib.method.selection import as_fraction
from bpc_calib.method.sparse_attention import sparse_attention as plain_attention

__all__ = [
    "SHARE",
    "choose",
    "choose_asked",
    "encode_gram",
    "encode_with",
    "make_ready",
    "parts",
    "quantize_query",
    "run",
    "sparse_attention",
]

logger = logging.getLogger(__name__)

SHARE = 4096  # keys that are worth a thread
FEW = 4  # tokens hashed in one kernel: for more, torch's products are faster
LIKE = {torch.bfloat16: np.uint16, torch.float16: np.int16, torch.float32: np.float32}
NONE = 0  # the address of what there is not

_one_at_a_time = threading.Lock()  # not every threading layer of numba can be entered twice
_set = threading.local()
_memory = torch.empty(0, dtype=torch.uint8)  # of whoever holds the lock


@functools.cache
def make_ready(dtype: torch.dtype) -> None:
    """Compile the kernels for keys of a dtype, or load them, and say how long it took where it takes long."""
    folder, name = kept(), str(dtype).removeprefix("torch.")
    if folder is None:
        logger.warning(
            "compiling the kernels for %s on the CPU, at every start: no folder could be made for them", name
        )
        return _compile(dtype)
    with FileLock(folder / "lock"):  # two processes would mix up what they keep
        marker = folder / name
        if marker.exists():
            return _compile(dtype)
        logger.warning("compiling the kernels for %s on the CPU, some 20 to 60 s, once on this machine", name)
        began = time.perf_counter()
        _compile(dtype)
        marker.touch()
        logger.warning("compiled in %.1f s", time.perf_counter() - began)


def _compile(dtype: torch.dtype) -> None:
    """Call every kernel once, on next to nothing."""
    query, keys = torch.zeros(1, 1, 1, 16, dtype=dtype), torch.zeros(1, 1, 2, 16, dtype=dtype)
    codes = torch.zeros(1, 1, 2, 1, dtype=torch.int64)
    chosen = choose(query, torch.zeros(1, 32, 16, dtype=dtype), codes, None, 1, scaling=1.0)
    sparse_attention(query, keys, keys, chosen)
    encoder = make_encoder(torch.zeros(1, 32, 16), dtype)
    for tokens in (1, FEW + 1):
        encode_with(encoder, torch.zeros(1, 1, tokens, 16, dtype=dtype))


@functools.cache
def _start_threads() -> None:
    """Have numba start its threads, which makes torch, too, use all of the machine: put that back."""
    before = torch.get_num_threads()
    numba.set_num_threads(1)
    torch.set_num_threads(before)


def _threads() -> None:
    """As many as torch has."""
    _start_threads()
    wanted = min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS)
    if getattr(_set, "threads", None) != wanted:  # of this thread of Python's
        numba.set_num_threads(wanted)
        _set.threads = wanted


def run(kernel: Any, *arguments: Any) -> Any:
    """What a kernel returns, with as many threads as torch has."""
    with _one_at_a_time:
        _threads()
        return kernel(*arguments)


def _scratch(*sizes: int) -> list[int]:
    """Addresses of so many bytes each, at multiples of 64: fresh memory would cost more than what is done in it."""
    global _memory
    ends = list(itertools.accumulate(-(-size // 64) * 64 + 64 for size in sizes))
    if len(_memory) < ends[-1] + 64:
        _memory = in_huge_pages(torch.empty(ends[-1] + ends[-1] // 16 + 64, dtype=torch.uint8))
    first = -(-_memory.data_ptr() // 64) * 64
    return [first + begin for begin in (0, *ends[:-1])]


def _like(tensor: Tensor) -> Any:
    return np.empty(0, LIKE[tensor.dtype])


def parts(rows: int, length: int, share: int) -> int:
    """In how many parts a row is cut so that every thread has its own, of at least `share` each."""
    threads = torch.get_num_threads()
    return 1 if rows >= 2 * threads else max(1, min(-(-2 * threads // rows), length // share))


def _tight(tensor: Tensor) -> Tensor:
    """With a contiguous last dimension, which all kernels count on."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _address(tensor: Tensor | None) -> int:
    return NONE if tensor is None else tensor.data_ptr()


def choose(
    query: Tensor,
    projection: Tensor,
    codes: Tensor,
    gain: Tensor | None,
    k: int | Tensor,
    *,
    scaling: float,
    group: str = GROUPS[0],
    valid: Tensor | None = None,
    lengths: Tensor | None = None,
    recent: int = 0,
    sink: int = 0,
    worst: Tensor | None = None,
    safeguard: float = 0.0,
    width: int | None = None,
) -> Tensor:
    """`bpc_calib.method.choosing.choose`."""
    return choose_asked(
        query, projection, codes, gain, k, scaling=scaling, group=group, valid=valid, lengths=lengths, recent=recent,
        sink=sink, worst=worst, safeguard=safeguard, width=width,
    )[0]  # fmt: skip


def choose_asked(
    query: Tensor,
    projection: Tensor,
    codes: Tensor,
    gain: Tensor | None,
    k: int | Tensor,
    *,
    scaling: float,
    group: str,
    valid: Tensor | None = None,
    lengths: Tensor | None = None,
    recent: int = 0,
    sink: int = 0,
    worst: Tensor | None = None,
    safeguard: float = 0.0,
    width: int | None = None,
    stages: int = SELECT,
) -> tuple[Tensor, QuantizedQuery]:
    """`choose`, and the queries as they were rounded; or only the first `stages` of it, for a clock."""
    (batch, kv_heads, heads, dim), (tokens, words) = query.shape, codes.shape[2:]
    bits, rows, fours = projection.shape[-2], batch * kv_heads, -(-heads // 4)
    if width is None:
        width = int(k.max()) if isinstance(k, Tensor) else k
    if not rows or not width:
        empty = torch.empty(batch, kv_heads, heads, bits, dtype=torch.int8)
        return codes.new_empty(batch, kv_heads, width), QuantizedQuery(empty, torch.empty(batch, kv_heads))
    query, projection = _tight(query), _tight(projection.to(query.dtype)).expand(batch, *projection.shape[-3:])
    if codes.stride(3) != 1 or codes.stride(2) != words:
        codes = codes.contiguous()
    gain, valid = (None if each is None else _tight(each) for each in (gain, valid))
    lengths = None if lengths is None else lengths.to(torch.int64).contiguous()
    ks = None
    if isinstance(k, Tensor):
        ks, k = k.to(torch.int64).expand(batch, kv_heads), 0
    worst = None if worst is None or not safeguard else worst.to(torch.int32).contiguous()
    share = as_fraction(safeguard if worst is not None else 0.0)
    split = parts(rows, tokens, SHARE)
    slots = min(rows, torch.get_num_threads()) if split == 1 else rows
    stride, size = -(-tokens // PAD) * PAD + PAD, table_size(words)
    values, scale = torch.empty(batch, kv_heads, heads, bits, dtype=torch.int8), torch.empty(batch, kv_heads)
    indices = torch.empty(batch, kv_heads, width, dtype=torch.int64)
    with _one_at_a_time:
        totals, tables, best, kept, sampled, marks, least, spare, counts = _scratch(
            16 * rows * fours, 4 * rows * fours * size, 16 * rows * split * fours, 8 * slots * fours * stride,
            slots * sample_size(fours), slots * stride // 8, 4 * rows, 8 * slots * stride, 8 * rows * split,
        )  # fmt: skip
        _threads()
        choose_kernel(
            slots, split, stages, rows, _like(query), query.data_ptr(), *query.stride()[:3], projection.data_ptr(),
            *projection.stride()[:3], kv_heads, heads, bits, dim, words, values.data_ptr(), totals, scale.data_ptr(),
            tables, size, tokens, GROUP_CODES[group], codes.data_ptr(), *codes.stride()[:2],
            _address(gain), *((0, 0) if gain is None else gain.stride()[:2]),
            _address(valid), 0 if valid is None else valid.stride(0), _address(lengths), float(scaling), kept, best,
            stride, sampled, k, _address(ks), *((0, 0) if ks is None else ks.stride()), recent, sink, _address(worst),
            0 if worst is None else worst.shape[-1], share.numerator, share.denominator, marks, least, spare, counts,
            indices.data_ptr(), width,
        )  # fmt: skip
    return indices, QuantizedQuery(values, scale)


def quantize_query(query: Tensor, projection: Tensor) -> QuantizedQuery:
    """`bpc_calib.quantize_query` for `[B, H_KV, G, D]`, as the first stage rounds."""
    none = torch.empty(*query.shape[:2], 1, -(-projection.shape[-2] // 64), dtype=torch.int64)
    return choose_asked(query, projection, none, None, 1, scaling=1.0, group="max", stages=PROJECT)[1]


def sparse_attention(
    query: Tensor, keys: Tensor, values: Tensor, indices: Tensor, scale: float | None = None
) -> Tensor:
    """`bpc_calib.method.sparse_attention` for `[B, H_KV, ...]`."""
    batch, kv_heads, heads, dim = query.shape
    rows, count = batch * kv_heads, indices.shape[-1]
    if not rows or not count:
        return plain_attention(query, keys, values, indices, scale)
    split = parts(rows, count, 64)
    query, indices = _tight(query), indices.contiguous()
    out = torch.empty(batch, kv_heads, heads, dim)
    with _one_at_a_time:
        room = _scratch(
            16 * rows * split * -(-heads // 4) * dim, 8 * rows * split * heads,
            rows * split * work_size(heads, dim, -(-count // split)), 8 * rows * split,
        )  # fmt: skip
        _threads()
        known = attend_kernel(
            _like(keys), query.data_ptr(), *query.stride()[:3], keys.data_ptr(), keys.shape[2], *keys.stride()[:3],
            values.data_ptr(), *values.stride()[:3], indices.data_ptr(), count,
            float(dim**-0.5 if scale is None else scale), rows, kv_heads, heads, dim, split, *room, out.data_ptr(),
        )  # fmt: skip
    if not known:
        raise InputError(f"indices must be below the {keys.shape[2]} tokens there are, and one is {int(indices.max())}")
    return out.to(query.dtype)


def encode_with(encoder: Encoder, keys: Tensor) -> Encoded:
    """`bpc_calib.method.encoding.encode_with`: few tokens in one kernel, many with torch's products."""
    encoder.check(keys)
    lead, (tokens, dim) = keys.shape[:-2], keys.shape[-2:]
    if tokens > FEW or not lead.numel():
        with torch.autocast("cpu", enabled=False):
            wide, along = encoder.centre(keys)
            return encode_gram(wide @ encoder.matrix, encoder.gram, (wide * along).sum(-1))
    matrix, gram = _rows(encoder.matrix.mT, lead, 2), _rows(encoder.gram, lead, 2)
    metric = None if encoder.metric is None else _rows(encoder.metric, lead, 2)
    mean = None if encoder.mean is None else _rows(encoder.mean, lead, 1)
    encoded, keys = _empty(lead, tokens, matrix.shape[1]), _tight(keys)
    run(
        hash_kernel, _like(keys), keys.data_ptr(), *keys.stride()[:3], matrix.data_ptr(), matrix.stride(0),
        gram.data_ptr(), gram.stride(0), _address(metric), 0 if metric is None else metric.stride(0), _address(mean),
        0 if mean is None else mean.stride(0), len(matrix), keys.shape[1], tokens, dim, matrix.shape[1],
        encoded.codes.data_ptr(), encoded.error.data_ptr(), encoded.gain.data_ptr(),
    )  # fmt: skip
    return encoded


def _rows(tensor: Tensor, lead: torch.Size, rank: int) -> Tensor:
    """`[rows, ...]` of a tensor that may be one for several rows, each row contiguous."""
    if tensor.dim() == rank + 1 and tensor.shape[0] == lead.numel() and tensor.is_contiguous():
        return tensor  # of one sequence, as most often
    shape = tensor.shape[-rank:]
    rows = tensor.expand(*lead, *shape).reshape(-1, *shape)  # one for all has stride 0 here
    return rows if rows[:1].is_contiguous() else rows.contiguous()


def _empty(lead: torch.Size, tokens: int, bits: int) -> Encoded:
    return Encoded(
        codes=torch.empty(*lead, tokens, -(-bits // 64), dtype=torch.int64),
        error=torch.empty(*lead, tokens),
        gain=torch.empty(*lead, tokens, dtype=torch.uint8),
    )


def encode_gram(scores: Tensor, gram: Tensor, squared_norm: Tensor) -> Encoded:
    """`bpc_calib.method.encoding.encode_gram` for float32 products `[B, H_KV, N, H]` or `[rows, N, H]`."""
    lead, (tokens, bits) = scores.shape[:-2], scores.shape[-2:]
    scores, norms = scores.contiguous(), squared_norm.expand(scores.shape[:-1]).contiguous()
    gram, encoded = _rows(gram, lead, 2), _empty(lead, tokens, bits)
    run(
        greedy_kernel, scores.data_ptr(), norms.data_ptr(), gram.data_ptr(), gram.stride(0), lead.numel(), tokens, bits,
        encoded.codes.data_ptr(), encoded.error.data_ptr(), encoded.gain.data_ptr(),
    )  # fmt: skip
    return encoded
