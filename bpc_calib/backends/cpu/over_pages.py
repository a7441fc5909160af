"""The calls of the kernels over pages."""

import functools
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from bpc_calib.backends.cpu.encode import Hashing
from bpc_calib.backends.cpu.layout import ELEMENTS, EMPTY, encoder_fields, like
from bpc_calib.backends.cpu.paging import Call, Written, hash_into_kernel, pages_kernel, room_size, write_kernel
from bpc_calib.backends.cpu.pipeline import encode_with
from bpc_calib.backends.cpu.prep import table_size
from bpc_calib.backends.cpu.score import GROUP_CODES
from bpc_calib.backends.cpu.threads import one_at_a_time, run, scratch, set_threads
from bpc_calib.backends.limits import tight
from bpc_calib.method.choosing import Choice
from bpc_calib.method.encoding import Encoder
from bpc_calib.method.paging import CodePages, Fresh, Paged, Rows

__all__ = ["attend_pages", "hash_into"]

FEW = 8  # tokens hashed in one kernel: for more, torch's products are faster
NO_HASHING, NOTHING_WRITTEN = (0,) * len(Hashing._fields), (0,) * len(Written._fields)
# Addresses that stay the same from step to step: to read them anew would take half of the 100 us of a layer.
_pages: WeakKeyDictionary[CodePages, tuple[int, ...]] = WeakKeyDictionary()
_caches: WeakKeyDictionary[Paged, tuple[int, ...]] = WeakKeyDictionary()
_encoders: WeakKeyDictionary[Encoder, tuple[tuple[int, ...], tuple[Tensor | None, ...]]] = WeakKeyDictionary()


def hash_into(fresh: Fresh, pages: CodePages) -> None:
    """`bpc_calib.method.paging.hash_into`."""
    keys, slots = tight(fresh.keys), fresh.slots.to(torch.int64).contiguous()
    if keys.shape[2] > FEW:
        encoded = encode_with(fresh.encoder, keys)
        codes, gain = encoded.codes.contiguous(), encoded.gain.contiguous()
        run(write_kernel, (*_code_pages(pages), len(slots), slots.data_ptr(), codes.data_ptr(), gain.data_ptr()))
        return
    with one_at_a_time:
        (room,) = scratch(_few_size(keys, pages))
        set_threads(keys.shape[1] if keys.shape[2] > 1 else 1)
        hash_into_kernel(like(keys), *_few(fresh.encoder, keys, slots, pages, room))


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
    (batch, kv_heads, heads, dim), (_, _, size, words) = query.shape, paged.codes.codes.shape
    query, bits, per_sequence = tight(query), projection.shape[-2], rows.table.shape[1]
    projection = tight(projection.to(query.dtype))
    slots = min(batch * kv_heads, torch.get_num_threads())
    indices = torch.empty(batch, kv_heads, rows.width, dtype=torch.int64)
    out = torch.empty(batch, kv_heads, heads, dim, dtype=torch.float32)
    sizes = batch, kv_heads, heads, dim, bits, words
    need = _room(query.dtype, sizes, size, per_sequence, rows.width, slots)
    hashing, written = NO_HASHING, NOTHING_WRITTEN
    with one_at_a_time:
        if fresh is None:
            (room,) = scratch(need)
        else:
            keys, new = tight(fresh.keys), fresh.slots.to(torch.int64).contiguous()
            (room,) = scratch(need + _few_size(keys, paged.codes))
            hashing, written = _few(fresh.encoder, keys, new, paged.codes, room + need)
        call = (
            ELEMENTS[query.dtype], query.data_ptr(), *query.stride()[:3],
            projection.data_ptr(), *projection.stride()[:2], *sizes,
            *_cache(paged), rows.table.data_ptr(), per_sequence, rows.lengths.data_ptr(), rows.k.data_ptr(), rows.width,
            gain, GROUP_CODES[choice.group], choice.recent, choice.sink, float(choice.scaling),
            slots, table_size(words), room, indices.data_ptr(), out.data_ptr(),
        )  # fmt: skip
        set_threads(slots)
        pages_kernel(like(query), hashing, written, call)
    return out.to(query.dtype), indices


@functools.lru_cache(256)
def _room(dtype: torch.dtype, sizes: tuple[int, ...], size: int, pages: int, width: int, slots: int) -> int:
    """The bytes of a `Call` of these sizes: `batch` to `words`, as they stand there."""
    names = ("batch", "kv_heads", "heads", "dim", "bits", "words")
    given = dict(zip(names, sizes, strict=True)) | {"size": size, "pages": pages, "width": width, "slots": slots}
    nowhere = Call(*[0] * len(Call._fields))
    call = nowhere._replace(gained=True, scaling=1.0, table_size=table_size(sizes[-1]), **given)
    return int(room_size(EMPTY[dtype], tuple(call)))


def _code_pages(pages: CodePages) -> tuple[int, ...]:
    """The first fields of a `Written`, up to `words`."""
    known = _pages.get(pages)
    if known is None:
        codes, gain = pages.codes, pages.gain
        known = (codes.data_ptr(), *codes.stride()[:2], gain.data_ptr(), *gain.stride()[:2], *codes.shape[1:])
        _pages[pages] = known
    return known


def _cache(paged: Paged) -> tuple[int, ...]:
    """The fields of a `Call` from `codes` to `size`."""
    known = _caches.get(paged)
    if known is None:
        cache, codes, packing = paged.cache, _code_pages(paged.codes), paged.packing
        assert packing is not None
        places = (packing.keys.data_ptr(), packing.values.data_ptr(), len(packing.keys))
        known = _caches[paged] = (*codes[:6], cache.data_ptr(), *cache.stride()[:2], *places)
    return known


def _few_size(keys: Tensor, pages: CodePages) -> int:
    """The bytes of codes, gains and errors of a few keys, each beginning at a multiple of 64."""
    _, kv_heads, tokens, _ = keys.shape
    return kv_heads * tokens * (8 * pages.codes.shape[3] + 4 + 1) + 3 * 64


def _few(
    encoder: Encoder, keys: Tensor, slots: Tensor, pages: CodePages, room: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The `Hashing` and the `Written` of a few keys."""
    encoder.check(keys)
    _, kv_heads, tokens, dim = keys.shape
    where, words = _encoder(encoder, keys.shape[:2])[0], pages.codes.shape[3]
    errors = room + -(-8 * kv_heads * tokens * words // 64) * 64
    gains = errors + -(-4 * kv_heads * tokens // 64) * 64
    lead = (keys.data_ptr(), *keys.stride()[:3], *where, kv_heads, kv_heads, tokens, dim, encoder.bits)
    hashing = (*lead, room, tokens * words, errors, tokens, gains, tokens)
    return hashing, (*_code_pages(pages), tokens, slots.data_ptr(), room, gains)


def _encoder(encoder: Encoder, lead: torch.Size) -> tuple[tuple[int, ...], tuple[Tensor | None, ...]]:
    """`encoder_fields`, kept for the next step."""
    known = _encoders.get(encoder)
    if known is None:
        known = _encoders[encoder] = encoder_fields(encoder, lead)
    return known
