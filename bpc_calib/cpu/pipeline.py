"""The compiled kernels behind the signatures of their torch oracles: what is allocated, and what is run in which order."""

import threading
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from bpc_calib.cpu.attend import attend_kernel, reduce_kernel
from bpc_calib.cpu.encode import greedy_kernel
from bpc_calib.cpu.prep import prep_kernel, table_size
from bpc_calib.cpu.score import GROUP_CODES, PAD, score_kernel
from bpc_calib.cpu.take import take_kernel
from bpc_calib.encoding import Encoded, Encoder
from bpc_calib.scoring import GROUPS, QuantizedQuery
from bpc_calib.selection import as_fraction

__all__ = ["Ranking", "choose", "encode_gram", "encode_with", "prepare", "quantized", "rank", "sparse_attention", "take"]

SHARE = 4096  # keys that are worth a thread
LIKE = {torch.bfloat16: np.uint16, torch.float16: np.int16, torch.float32: np.float32}
NONE = 0  # the address of what there is not

_one_at_a_time = threading.Lock()  # not every threading layer of numba can be entered twice


@dataclass(frozen=True)
class Ranking:
    """What the kernels of one step leave for each other; a row is a KV head of a sequence."""

    values: Tensor  # int8 [rows, G, H]
    totals: Tensor  # int32 [rows, G up to 4s], sums of the values
    scale: Tensor  # float32 [rows]
    tables: Tensor  # int32 [rows, G / 4, ...], see `fill_bytes`
    ranked: Tensor  # int32 [rows, N and some more]
    rules: dict[str, Any]  # what `rank` and `take` need of the arguments of `prepare`


def _run(kernel: Any, *arguments: Any) -> None:
    with _one_at_a_time:
        numba.set_num_threads(min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS))
        kernel(*arguments)


def _like(tensor: Tensor) -> Any:
    return np.empty(0, LIKE[tensor.dtype])


def _parts(rows: int, length: int, share: int) -> int:
    """In how many parts a row is cut so that every thread has its own, of at least `share` each."""
    threads = torch.get_num_threads()
    return 1 if rows >= 2 * threads else max(1, min(-(-2 * threads // rows), length // share))


def prepare(
    query: Tensor,
    projection: Tensor,
    k: int | Tensor,
    tokens: int,
    *,
    group: str,
    gain: bool,
    scaling: float,
    valid: Tensor | None = None,
    lengths: Tensor | None = None,
    recent: int = 0,
    sink: int = 0,
    safeguard: float = 0.0,
) -> Ranking:
    """Step 1 for queries `[B, H_KV, G, D]`, projections `[(B,) H_KV, H, D]` and up to `tokens` keys."""
    batch, kv_heads, heads, dim = query.shape
    bits, rows = projection.shape[-2], batch * kv_heads
    words, fours = -(-bits // 64), -(-heads // 4)
    projection = _tight(projection.to(query.dtype)).expand(batch, *projection.shape[-3:])
    query = _tight(query)
    size = table_size(words)
    ranking = Ranking(
        values=torch.empty(rows, heads, bits, dtype=torch.int8),
        totals=torch.empty(rows, 4 * fours, dtype=torch.int32),
        scale=torch.empty(rows),
        tables=torch.empty(rows, fours, size, dtype=torch.int32),
        ranked=torch.empty(rows, -(-tokens // PAD) * PAD + PAD, dtype=torch.int32),
        rules={
            "tokens": tokens, "k": k, "scaling": scaling, "recent": recent, "sink": sink, "safeguard": safeguard,
            "valid": None if valid is None else _tight(valid),
            "lengths": None if lengths is None else lengths.to(torch.int64).contiguous(),
        },
    )  # fmt: skip
    _run(
        prep_kernel, _like(query), query.data_ptr(), *query.stride()[:3], projection.data_ptr(), *projection.stride()[:3],
        rows, kv_heads, heads, bits, dim, words, ranking.values.data_ptr(), ranking.totals.data_ptr(),
        ranking.scale.data_ptr(), ranking.tables.data_ptr(), size,
    )  # fmt: skip
    return ranking


def _tight(tensor: Tensor) -> Tensor:
    """With a contiguous last dimension, which all kernels count on."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _address(tensor: Tensor | None) -> int:
    return NONE if tensor is None else tensor.data_ptr()


def quantized(ranking: Ranking, batch: int) -> QuantizedQuery:
    """The queries as step 1 rounded them, in the form of `quantize_query`."""
    return QuantizedQuery(ranking.values.unflatten(0, (batch, -1)), ranking.scale.unflatten(0, (batch, -1)))


def rank(ranking: Ranking, codes: Tensor, gain: Tensor | None, *, group: str) -> None:
    """Step 2: fills `ranked`, for codes `[B, H_KV, N, W]` and gains `[B, H_KV, N]`."""
    rows, heads, _ = ranking.values.shape
    kv_heads, tokens, words = codes.shape[1:]
    if codes.stride(3) != 1 or codes.stride(2) != words:
        codes = codes.contiguous()
    gain = None if gain is None else _tight(gain)
    valid, lengths = ranking.rules["valid"], ranking.rules["lengths"]
    stride = ranking.ranked.shape[1]
    fours, parts = ranking.tables.shape[1], _parts(rows, tokens, SHARE)
    kept = torch.empty(rows, 4 * fours, stride, dtype=torch.int16)
    best = torch.empty(rows, parts, 4 * fours, dtype=torch.int32)
    _run(
        score_kernel, rows, kv_heads, heads, tokens, words, parts, GROUP_CODES[group],
        codes.data_ptr(), codes.stride(0), codes.stride(1),
        _address(gain), *((0, 0) if gain is None else gain.stride()[:2]),
        _address(valid), 0 if valid is None else valid.stride(0), _address(lengths),
        ranking.scale.data_ptr(), ranking.rules["scaling"], ranking.tables.data_ptr(), ranking.tables.shape[2],
        ranking.totals.data_ptr(), kept.data_ptr(), best.data_ptr(), ranking.ranked.data_ptr(), stride,
    )  # fmt: skip


def take(ranking: Ranking, batch: int, width: int, worst: Tensor | None = None) -> Tensor:
    """Step 3: int64 `[rows, width]`, -1 behind the last token of a row."""
    rows, stride = ranking.ranked.shape
    rules = ranking.rules
    k, ks = rules["k"], None
    if isinstance(k, Tensor):
        ks, k = k.to(torch.int64).expand(batch, rows // batch), 0
    if worst is not None:
        worst = worst.to(torch.int32).contiguous()
    share = as_fraction(rules["safeguard"] if worst is not None else 0.0)
    valid, lengths = rules["valid"], rules["lengths"]
    indices = torch.empty(rows, width, dtype=torch.int64)
    _run(
        take_kernel, ranking.ranked.data_ptr(), stride, rows, rows // batch, rules["tokens"], _address(lengths),
        _address(valid), 0 if valid is None else valid.stride(0), k, _address(ks), *((0, 0) if ks is None else ks.stride()),
        rules["recent"], rules["sink"], _address(worst), 0 if worst is None else worst.shape[-1], share.numerator, share.denominator, indices.data_ptr(), width,
    )  # fmt: skip
    return indices


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
    """`bpc_calib.choosing.choose`."""
    batch, kv_heads, tokens = codes.shape[:3]
    if width is None:
        width = int(k.max()) if isinstance(k, Tensor) else k
    ranking = prepare(
        query, projection, k, tokens, group=group, gain=gain is not None, scaling=scaling, valid=valid, lengths=lengths,
        recent=recent, sink=sink, safeguard=safeguard,
    )  # fmt: skip
    rank(ranking, codes, gain, group=group)
    return take(ranking, batch, width, worst).unflatten(0, (batch, kv_heads))


def sparse_attention(
    query: Tensor, keys: Tensor, values: Tensor, indices: Tensor, scale: float | None = None
) -> Tensor:
    """`bpc_calib.sparse_attention` for `[B, H_KV, ...]`."""
    batch, kv_heads, heads, dim = query.shape
    rows, count = batch * kv_heads, indices.shape[-1]
    parts = _parts(rows, count, 64)
    wide, indices = _tight(query).float(), indices.contiguous()
    partial = torch.empty(rows, parts, heads, dim)
    weights = torch.empty(rows, parts, 2, heads)
    out = torch.empty(batch, kv_heads, heads, dim)
    _run(
        attend_kernel, _like(keys), wide.data_ptr(), *wide.stride()[:3], keys.data_ptr(), *keys.stride()[:3],
        values.data_ptr(), *values.stride()[:3], indices.data_ptr(), count,
        float(dim**-0.5 if scale is None else scale), rows, kv_heads, heads, dim, parts,
        partial.data_ptr(), weights.data_ptr(),
    )  # fmt: skip
    _run(reduce_kernel, partial.data_ptr(), weights.data_ptr(), out.data_ptr(), rows, parts, heads, dim)
    return out.to(query.dtype)


def encode_with(encoder: Encoder, keys: Tensor) -> Encoded:
    """`bpc_calib.encoding.encode_with`, with torch's products."""
    with torch.autocast("cpu", enabled=False):
        wide, along = encoder.centre(keys)
        return encode_gram(wide @ encoder.matrix, encoder.gram, (wide * along).sum(-1))


def encode_gram(scores: Tensor, gram: Tensor, squared_norm: Tensor) -> Encoded:
    """`bpc_calib.encoding.encode_gram` for float32 products `[B, H_KV, N, H]` or `[rows, N, H]`."""
    lead, (tokens, bits) = scores.shape[:-2], scores.shape[-2:]
    rows = lead.numel()
    scores, norms = scores.contiguous(), squared_norm.expand(scores.shape[:-1]).contiguous()
    gram = gram.expand(*lead, bits, bits).reshape(rows, bits, bits)
    encoded = Encoded(
        codes=torch.empty(*lead, tokens, -(-bits // 64), dtype=torch.int64),
        error=torch.empty(*lead, tokens),
        gain=torch.empty(*lead, tokens, dtype=torch.uint8),
    )
    _run(
        greedy_kernel, scores.data_ptr(), norms.data_ptr(), gram.data_ptr(), bits * bits, rows, tokens, bits,
        encoded.codes.data_ptr(), encoded.error.data_ptr(), encoded.gain.data_ptr(),
    )  # fmt: skip
    return encoded
