"""Score cached keys from their codes and gains only: Algorithm 3 of the paper, with the gain."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from bpc_calib.errors import InputError
from bpc_calib.method.codebook import check_rows
from bpc_calib.method.codes import check_codes
from bpc_calib.method.encoded import GAIN_OFFSET
from bpc_calib.method.nibbles import NIBBLE

__all__ = [
    "GROUPS",
    "LARGEST_LIMIT",
    "LARGEST_OCTAVE",
    "LARGEST_QUERY",
    "LARGEST_SCORE",
    "LEAST",
    "OCTAVES",
    "RELATIVE_LIMIT",
    "STRIPES",
    "QuantizedQuery",
    "check_group",
    "group_scores",
    "hash_scores",
    "quantize_query",
]

# Rules to combine the scores of the query heads of one KV head: see `group_scores`.
GROUPS = ("relative", "max")
RELATIVE_LIMIT = 16.0  # logits: a key that far below the denominator has e^-16 of a head's attention
LARGEST_LIMIT = 1 << 24  # largest limit in the unit of scores, whose absolute values are below 2^23
STRIPES = 64  # key `i` is in stripe `i % STRIPES`; the best key of each stripe counts in an integer denominator
OCTAVES = 6  # as many factors of two can a denominator be above the best weight: the logarithm of `STRIPES`
LARGEST_OCTAVE = 1 << 17  # units of scores in a factor of two, at most: with more, all keys weigh much alike
LEAST = -(1 << 23)  # below every score: of a key that does not count
LARGEST_QUERY = 127  # largest absolute int8 value of a query quantized for signs
LARGEST_SCORE = 29216  # no score without its gain is above: times 287, the largest gain, it is below 2^23


@dataclass(frozen=True)
class QuantizedQuery:
    """The result of `quantize_query`: the score of a code is the sum of one entry per nibble."""

    tables: Tensor  # int16 [..., G, H / 4, 16]
    scale: Tensor  # float32 [...], what an entry of 1 stands for


def quantize_query(query: Tensor, projection: Tensor, *, nibbles: bool = False) -> QuantizedQuery:
    """Project the `G` queries of a KV head, `[..., G, D]`, with `[..., R, D]`, round, and list what each nibble adds.

    Products with the rows of signs are rounded to int8, and a nibble adds four of them, plus or minus. Products with
    the vectors of nibbles are rounded to so many bits that no score leaves the range of those of signs.

    Rounding is symmetric and half to even. The whole group has one scale, so that its scores are comparable.
    As in `encode`, the projection is first rounded to the query's dtype. A zero query returns zeros and
    scale 0.

    Raises:
        InputError: the shapes or dtypes do not fit.
    """
    if query.dim() < 2 or projection.dim() < 2 or query.shape[-1] != projection.shape[-1]:
        raise InputError(
            f"query [..., G, D] and projection [..., R, D] do not fit: {list(query.shape)} and {list(projection.shape)}"
        )
    if not query.dtype.is_floating_point:
        raise InputError(f"query must be floating, not {query.dtype}")
    _check_lead("query [..., G, D] and projection [..., R, D]", query, projection)
    check_rows(projection, nibbles)
    with torch.autocast(query.device.type, enabled=False):
        exact = torch.promote_types(query.dtype, torch.float32)
        projected = query.to(exact) @ projection.to(query.dtype).to(exact).mT
    most = LARGEST_SCORE // (projection.shape[-2] // NIBBLE) if nibbles else LARGEST_QUERY
    largest = projected.abs().amax((-2, -1))
    inverse = torch.where(largest > 0, most / largest, 0)
    # 0 stays 0, also times an inverse that overflows.
    values = torch.where(projected == 0, 0, projected * inverse[..., None, None]).round().clamp(-most, most)
    tables = values.unflatten(-1, (-1, NIBBLE)) if nibbles else _sums_of_signs(values)
    return QuantizedQuery(tables.to(torch.int16), (largest / most).float())


def _sums_of_signs(values: Tensor) -> Tensor:
    """Return what each value of each nibble adds to `c = p . u`: `[..., G, H / 4, 16]` of integers `[..., G, H]`."""
    nibble = torch.arange(NIBBLE, device=values.device).unsqueeze(-1) >> torch.arange(4, device=values.device)
    signs = ((nibble & 1) * 2 - 1).to(values.dtype)
    return (values.unflatten(-1, (-1, 1, 4)) * signs).sum(-1)


def hash_scores(query: QuantizedQuery, codes: Tensor, gain: Tensor | None = None) -> Tensor:
    """Score every key for every query: int32 `[..., G, N]`, `c = p . u`, or `c * (gain + 32)`.

    The integers are exact: `|c| <= LARGEST_SCORE`, and with the gain `|score| < 2^23`. The
    paper's printed formula counts XOR as agreement and so flips the sign of every score (docs/algorithm.md).

    Args:
        query: tables `[..., G, H / 4, 16]`.
        codes: int64 `[..., N, W]`.
        gain: uint8 `[..., N]`; None scores without the gain, as in the paper.

    Raises:
        InputError: the shapes or dtypes do not fit.
    """
    check_codes(codes, 4 * query.tables.shape[-2])
    if gain is not None and (gain.dtype != torch.uint8 or gain.shape != codes.shape[:-1]):
        raise InputError(f"gain must be uint8 {list(codes.shape[:-1])}, not {gain.dtype} {list(gain.shape)}")
    _check_lead("tables [..., G, H / 4, 16] and codes [..., N, W]", query.tables[..., 0], codes)
    scores = _look_up(_by_bytes(query.tables), codes)
    if gain is None:
        return scores
    return scores * (gain.to(torch.int32) + GAIN_OFFSET).unsqueeze(-2)


def group_scores(
    scores: Tensor, group: str, *, valid: Tensor | None = None, logit: Tensor | float | None = None
) -> Tensor:
    """Combine the scores of the `G` query heads of a KV head: `[..., G, N]` -> `[..., N]`, same dtype.

    - "relative": `4 G max + sum` over the heads of `s - logsumexp s`, the distance of a key below the denominator of
      a head's softmax: the logarithm of its attention weight. That is `G` times the sum of their mean and four times
      the smallest distance. The keys with the largest weight in any head rank first. Among keys that are equally good
      for one head, the keys that suit the other heads rank first;
    - "max": the largest score, as in the paper's release.

    Args:
        scores: int32 with absolute values below 2^23 (`hash_scores`), or floats.
        group: one of `GROUPS`.
        valid: bool `[..., N]`; an invalid key is in no denominator.
        logit: for "relative", `[...]`: one logit of attention in the unit of the scores. In the sum, a distance above
            `RELATIVE_LIMIT` logits counts as this limit, because such a key has no weight. None: the unit is unknown;
            distances are below the best score of a head, without a limit.

    Of floats the denominator is exact. Of integers it is the sum of the weights of the best key of each of 64 stripes
    (key `i` is in stripe `i % 64`), within 0.1 logit: powers and logarithms are linear between powers of two, so every
    machine finds the same integer.

    Raises:
        InputError: the group is unknown.
    """
    check_group(group)
    if group == "max":
        return scores.amax(-2)
    heads, exact = scores.shape[-2], not scores.dtype.is_floating_point
    counted = scores
    if valid is not None:
        counted = scores.masked_fill(~valid.unsqueeze(-2), LEAST if exact else -math.inf)
    if logit is None:
        denominator = counted.amax(-1, keepdim=True)
    else:
        unit = torch.float32 if exact else scores.dtype
        logit = torch.as_tensor(logit, dtype=unit, device=scores.device)[..., None, None]
        denominator = _denominator(counted, logit) if exact else (counted / logit).logsumexp(-1, keepdim=True) * logit
    # Keeps the result within int32; up to 40 heads never reach this bound.
    least = -(((1 << 31) - 1) // (5 * heads)) if exact else -math.inf
    below = (scores - denominator).clamp_(least, 0)
    best = below.amax(-2)
    if logit is not None:
        limit = RELATIVE_LIMIT * logit
        below = below.clamp_(min=-(limit.clamp(max=LARGEST_LIMIT).to(scores.dtype) if exact else limit))
    return 4 * heads * best + below.sum(-2, dtype=scores.dtype)


def _denominator(scores: Tensor, logit: Tensor) -> Tensor:
    """Return the logarithms of the denominators, in the unit of the scores: int32 `[..., G, 1]` of `[..., G, N]`.

    An octave is the distance that halves a weight. Distances are in 1/128 octaves, and weights are integers, so that
    their sum does not depend on its order.
    """
    octave = (math.log(2) * logit).clamp(1, LARGEST_OCTAVE).to(torch.int32).float()
    stripes = torch.nn.functional.pad(scores, (0, -scores.shape[-1] % STRIPES), value=LEAST)
    stripes = stripes.unflatten(-1, (-1, STRIPES)).amax(-2)
    best = stripes.amax(-1, keepdim=True)
    below = ((best - stripes) * (128 / octave)).to(torch.int32)
    weights = (256 - (below & 127) << 15) >> (below >> 7).clamp(max=31)  # 2^23 of the best
    total = weights.sum(-1, keepdim=True, dtype=torch.int32)
    # The logarithm: the exponent of a float and the upper 7 bits of its fraction, less those of 2^23.
    above = (total.float().view(torch.int32) >> 16) - (150 << 7)
    return best + (above * (octave / 128)).to(torch.int32)


def check_group(group: str) -> None:
    """Raise `InputError` unless `group` is one of `GROUPS`."""
    if group not in GROUPS:
        raise InputError(f"group must be one of {', '.join(GROUPS)}, not {group!r}")


def _check_lead(what: str, one: Tensor, other: Tensor) -> None:
    try:
        torch.broadcast_shapes(one.shape[:-2], other.shape[:-2])
    except RuntimeError:
        raise InputError(f"{what} do not fit: {list(one.shape)} and {list(other.shape)}") from None


def _by_bytes(tables: Tensor) -> Tensor:
    """Return what each value of each byte of a code adds to a score: float32 `[..., G, H / 8, 256]`."""
    low, high = tables.float().unflatten(-2, (-1, 2)).unbind(-2)
    return (high.unsqueeze(-1) + low.unsqueeze(-2)).flatten(-2)  # exact, in float32 and in any order


def _look_up(table: Tensor, codes: Tensor) -> Tensor:
    """Sum integers, float32 `[..., G, parts, 256]`, over the bytes of codes `[..., N, W]`: int32 `[..., G, N]`."""
    group, parts = table.shape[-3:-1]
    lead = torch.broadcast_shapes(table.shape[:-3], codes.shape[:-2])
    table, codes = table.expand(*lead, *table.shape[-3:]), codes.expand(*lead, *codes.shape[-2:])
    table = table.movedim(-3, -1).reshape(-1, group)  # one row per KV head, part and byte value
    # Byte i of a word holds its bits 8i to 8i + 7 on little-endian machines.
    index = codes.contiguous().view(torch.uint8)[..., :parts].to(torch.int32)
    first = torch.arange(lead.numel() * parts, device=table.device, dtype=torch.int32) * 256
    index = (index + first.view(*lead, 1, parts)).reshape(-1, parts)
    scores = torch.nn.functional.embedding_bag(index, table, mode="sum")
    return scores.view(*lead, -1, group).mT.to(torch.int32)
