"""The call of `step_kernel`: a whole step of a layer whose codes are few enough for one thread."""

import torch
from torch import Tensor

from bpc_calib.backends.cpu.attend import Attention, work_size
from bpc_calib.backends.cpu.encode import Hashing
from bpc_calib.backends.cpu.kernels import SELECT, step_kernel
from bpc_calib.backends.cpu.layout import ELEMENTS, address, encoder_fields, like
from bpc_calib.backends.cpu.prep import table_size
from bpc_calib.backends.cpu.score import GROUP_CODES, PAD, sample_size
from bpc_calib.backends.cpu.step import Step
from bpc_calib.backends.cpu.threads import one_at_a_time, scratch
from bpc_calib.backends.limits import tight
from bpc_calib.method.choosing import Choice
from bpc_calib.method.selection import as_fraction
from bpc_calib.method.stepping import Hashed

__all__ = ["FEW_CODES", "is_small", "step"]

FEW_CODES = 1 << 15  # keys of all KV heads and sequences: one thread ranks as many in some 100 us


def is_small(hashed: Hashed) -> bool:
    """Whether `step` serves: few codes, that lie one after the other in each row, and the rows at equal distances."""
    slots, codes = hashed.slots, hashed.slots.codes
    if codes is None or codes.shape[0] * codes.shape[1] * hashed.length > FEW_CODES:
        return False
    lying = (codes, slots.gain, slots.error)
    return (
        all(each is None or each.is_contiguous() for each in lying) and slots.keys.shape[-1] == slots.values.shape[-1]
    )


def step(query: Tensor, hashed: Hashed, k: int, choice: Choice) -> Tensor:
    """`bpc_calib.method.stepping.step` for checked arguments."""
    slots, length, encoder = hashed.slots, hashed.length, hashed.encoder
    keys, cached_values, codes, gain, error = slots.keys, slots.values, slots.codes, slots.gain, slots.error
    assert codes is not None
    (batch, kv_heads, heads, dim), (bits, words) = query.shape, (encoder.bits, codes.shape[3])
    rows, fours, room = batch * kv_heads, -(-heads // 4), codes.shape[2]
    query, lead = tight(query), codes.shape[:2]
    projection = tight(hashed.projection.to(query.dtype)).expand(batch, kv_heads, -1, dim)
    where, _tensors = encoder_fields(encoder, lead)  # the kernel reads them
    worst = None if hashed.worst is None or not choice.safeguard else hashed.worst.to(torch.int32).contiguous()
    numerator, denominator = (0, 1) if worst is None else as_fraction(choice.safeguard).as_integer_ratio()
    out = torch.empty(batch, kv_heads, heads, dim, dtype=torch.float32)
    stride, size = -(-length // PAD) * PAD + PAD, table_size(words)
    query_b, query_h, query_g, _ = query.stride()
    keys_b, keys_h, keys_n, _ = keys.stride()
    values_b, values_h, values_n, _ = cached_values.stride()
    projection_b, projection_h, projection_n, _ = projection.stride()
    place, keys_at = length - 1, keys.data_ptr()
    with one_at_a_time:
        (
            totals, tables, best, products, sample, marks, least, candidates, counts, values, scale, indices,
            partial, weights, work, faults, unkept,
        ) = scratch(
            16 * rows * fours, 4 * rows * fours * size, 16 * rows * fours, 8 * fours * stride,
            sample_size(fours), stride // 8, 4 * rows, 8 * stride, 8 * rows,
            rows * heads * bits, 4 * rows, 8 * rows * k, 16 * rows * fours * dim,
            8 * rows * heads, rows * work_size(heads, dim, k), 8 * rows, 16,
        )  # fmt: skip
        hashing = Hashing(
            keys_at + keys.element_size() * keys_n * place, keys_b, keys_h, keys_n, *where,
            rows, kv_heads, 1, dim, bits,
            codes.data_ptr() + 8 * words * place, words * room,
            unkept if error is None else error.data_ptr() + 4 * place,
            0 if error is None else error.shape[2],
            unkept if gain is None else gain.data_ptr() + place,
            0 if gain is None else gain.shape[2],
        )  # fmt: skip
        choosing = Step(
            stages=SELECT, element=ELEMENTS[query.dtype],
            rows=rows, kv_heads=kv_heads, heads=heads, dim=dim, bits=bits, words=words, tokens=length,
            slots=1, parts=1, part_size=stride,
            query=query.data_ptr(), query_b=query_b, query_h=query_h, query_g=query_g,
            projection=projection.data_ptr(), projection_b=projection_b, projection_h=projection_h,
            projection_n=projection_n,
            codes=codes.data_ptr(), codes_b=kv_heads * words * room, codes_h=words * room, codes_slot=0,
            gain=address(gain), gain_b=0 if gain is None else kv_heads * gain.shape[2],
            gain_h=0 if gain is None else gain.shape[2], gain_slot=0, valid=0, valid_b=0,
            lengths=0, worst=address(worst), worst_count=0 if worst is None else worst.shape[-1],
            ks=0, ks_b=0, ks_h=0, k=k,
            group=GROUP_CODES[choice.group], recent=choice.recent, sink=choice.sink, numerator=numerator,
            denominator=denominator, scaling=float(choice.scaling),
            totals=totals, table_size=size, tables=tables, stride=stride, products=products, best=best, sample=sample,
            marks=marks, least=least, candidates=candidates, counts=counts,
            values=values, scale=scale, indices=indices, width=k,
        )  # fmt: skip
        attending = Attention(
            query=choosing.query, query_b=query_b, query_h=query_h, query_g=query_g,
            keys=keys_at, keys_b=keys_b, keys_h=keys_h, keys_n=keys_n,
            values=cached_values.data_ptr(), values_b=values_b, values_h=values_h, values_n=values_n,
            indices=indices, count=k, scaling=float(choice.scaling),
            rows=rows, kv_heads=kv_heads, heads=heads, dim=dim, tokens=length, parts=1,
            partial=partial, weights=weights, work=work, faults=faults, out=out.data_ptr(),
        )  # fmt: skip
        step_kernel(like(query), tuple(hashing), tuple(choosing), tuple(attending))
    return out.to(query.dtype)
