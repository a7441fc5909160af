"""The calls of the kernels over pages."""

import functools

import torch
from torch import Tensor

from bpc_calib.backends.cpu.encode import Hashing
from bpc_calib.backends.cpu.layout import EMPTY, address, like, rows_of, strides, tight
from bpc_calib.backends.cpu.paging import Call, Written, hash_into_kernel, pages_kernel, room_size, write_kernel
from bpc_calib.backends.cpu.pipeline import encode_with
from bpc_calib.backends.cpu.prep import table_size
from bpc_calib.backends.cpu.score import GROUP_CODES
from bpc_calib.backends.cpu.threads import SHARE, one_at_a_time, run, scratch, set_threads
from bpc_calib.method.choosing import Choice
from bpc_calib.method.paging import CodePages, Fresh, Paged, Rows

__all__ = ["attend_pages", "hash_into"]

FEW = 8  # tokens hashed in one kernel: for more, torch's products are faster


NO_HASHING, NOTHING_WRITTEN = Hashing(*[0] * len(Hashing._fields)), Written(*[0] * len(Written._fields))


def hash_into(fresh: Fresh, pages: CodePages) -> None:
    """`bpc_calib.method.paging.hash_into`."""
    keys = fresh.keys
    if keys.shape[2] > FEW:
        slots = fresh.slots.to(torch.int64).contiguous()
        encoded = encode_with(fresh.encoder, keys)
        codes, gain = encoded.codes.contiguous(), encoded.gain.contiguous()
        run(write_kernel, tuple(_written(pages, slots, codes.data_ptr(), gain.data_ptr())))
        return
    with one_at_a_time:
        hashing, written, _ = _few(fresh, pages, *scratch(*_few_sizes(fresh, pages)))
        set_threads(keys.shape[1] if keys.shape[2] > 1 else 1)
        hash_into_kernel(like(keys), tuple(hashing), tuple(written))


def attend_pages(
    query: Tensor,
    projection: Tensor,
    paged: Paged,
    rows: Rows,
    choice: Choice,
    *,
    gain: bool = True,
    fresh: Fresh | None = None,
) -> tuple[Tensor, Tensor]:
    """`bpc_calib.method.paging.attend_pages`, for checked arguments."""
    if fresh is not None and fresh.keys.shape[2] > FEW:
        hash_into(fresh, paged.codes)
        fresh = None
    pages, gains, cache, table, lengths, k = (
        paged.codes.codes,
        paged.codes.gain,
        paged.cache,
        rows.table,
        rows.lengths,
        rows.k,
    )
    (batch, kv_heads, heads, dim), (_, _, size, words), per_sequence = query.shape, pages.shape, table.shape[1]
    query, projection = tight(query), tight(projection)
    slots = max(1, min(batch * kv_heads, torch.get_num_threads(), batch * kv_heads * per_sequence * size // SHARE))
    indices = torch.empty(batch, kv_heads, rows.width, dtype=torch.int64)
    out = torch.empty(batch, kv_heads, heads, dim, dtype=torch.float32)
    query_b, query_h, query_g, _ = query.stride()
    projection_h, projection_n, _ = projection.stride()
    codes_page, codes_h, _, _ = pages.stride()
    gain_page, gain_h, _ = gains.stride()
    cache_page, cache_h, _ = cache.stride()
    sizes = () if fresh is None else _few_sizes(fresh, paged.codes)
    room = _room(
        query.dtype, (batch, kv_heads, heads, dim, projection.shape[1], words), size, per_sequence, rows.width, slots
    )
    with one_at_a_time:
        begin, *more = scratch(room, *sizes)
        call = Call(
            query.data_ptr(), query_b, query_h, query_g, projection.data_ptr(), projection_h, projection_n,
            batch, kv_heads, heads, dim, projection.shape[1], words,
            pages.data_ptr(), codes_page, codes_h, gains.data_ptr(), gain_page, gain_h, cache.data_ptr(), cache_page,
            cache_h, paged.keys_at.data_ptr(), paged.values_at.data_ptr(), size,
            table.data_ptr(), per_sequence, lengths.data_ptr(), k.data_ptr(), rows.width,
            gain, GROUP_CODES[choice.group], choice.recent, choice.sink, float(choice.scaling),
            slots, table_size(words), begin, indices.data_ptr(), out.data_ptr(),
        )  # fmt: skip
        hashing, written, _ = (NO_HASHING, NOTHING_WRITTEN, ()) if fresh is None else _few(fresh, paged.codes, *more)
        set_threads(slots)
        pages_kernel(like(query), tuple(hashing), tuple(written), tuple(call))
    return out.to(query.dtype), indices


@functools.lru_cache(256)
def _room(dtype: torch.dtype, sizes: tuple[int, ...], size: int, pages: int, width: int, slots: int) -> int:
    """The bytes of a `Call` of these sizes: `batch` to `words`, as they stand there."""
    names = ("batch", "kv_heads", "heads", "dim", "bits", "words")
    given = dict(zip(names, sizes, strict=True)) | {"size": size, "pages": pages, "width": width, "slots": slots}
    call = Call(*[0] * len(Call._fields))._replace(gained=True, scaling=1.0, table_size=table_size(sizes[-1]), **given)
    return int(room_size(EMPTY[dtype], tuple(call)))


def _few_sizes(fresh: Fresh, pages: CodePages) -> tuple[int, int, int]:
    """The bytes of the codes, gains and errors of a few keys."""
    _, kv_heads, tokens, _ = fresh.keys.shape
    return 8 * kv_heads * tokens * pages.codes.shape[3], kv_heads * tokens, 4 * kv_heads * tokens


def _few(
    fresh: Fresh, pages: CodePages, codes_at: int, gain_at: int, errors_at: int
) -> tuple[Hashing, Written, tuple[Tensor, ...]]:
    """What hashes a few keys and writes their codes, and the tensors that must live until then."""
    encoder, keys, slots = fresh.encoder, tight(fresh.keys), fresh.slots.to(torch.int64).contiguous()
    encoder.check(keys)
    (_, kv_heads, tokens, dim), lead, words = keys.shape, keys.shape[:2], pages.codes.shape[3]
    matrix, gram = rows_of(encoder.matrix.mT, lead, 2), rows_of(encoder.gram, lead, 2)
    metric = None if encoder.metric is None else rows_of(encoder.metric, lead, 2)
    mean = None if encoder.mean is None else rows_of(encoder.mean, lead, 1)
    keys_b, keys_h, keys_n, _ = keys.stride()
    hashing = Hashing(
        keys.data_ptr(), keys_b, keys_h, keys_n, matrix.data_ptr(), matrix.stride(0), gram.data_ptr(),
        gram.stride(0), address(metric), strides(metric, 1)[0], address(mean), strides(mean, 1)[0],
        kv_heads, kv_heads, tokens, dim, matrix.shape[1],
        codes_at, tokens * words, errors_at, tokens, gain_at, tokens,
    )  # fmt: skip
    return hashing, _written(pages, slots, codes_at, gain_at), (keys, slots, matrix, gram, metric, mean)


def _written(pages: CodePages, slots: Tensor, own_codes: int, own_gain: int) -> Written:
    codes, gain = pages.codes, pages.gain
    (codes_page, codes_h, _, _), (gain_page, gain_h, _) = codes.stride(), gain.stride()
    return Written(
        codes.data_ptr(), codes_page, codes_h, gain.data_ptr(), gain_page, gain_h, *codes.shape[1:],
        len(slots), slots.data_ptr(), own_codes, own_gain,
    )  # fmt: skip
