"""Codes of nibbles: nibble `j` names one of 16 vectors of all dimensions, and a key is the sum of the named vectors.

Such codes are additive (Babenko and Lempitsky, "Additive quantization for extreme vector compression", 2014). Signs are
the special case in which the vectors of a nibble are `±a ±b ±c ±d`.
"""

import torch
from torch import Tensor

from bpc_calib.method.codes import pack, unpack
from bpc_calib.method.encoded import Encoded, gain_byte

__all__ = ["BEAM", "NIBBLE", "encode_nibbles", "named", "pack_nibbles", "unpack_nibbles"]

NIBBLE = 16  # values of a nibble
BEAM = 4  # the search keeps so many partial codes per key
PLACE = 63  # the bits of a sort key that hold the place of a candidate, of which there are BEAM * NIBBLE


def encode_nibbles(scores: Tensor, gram: Tensor, squared_norm: Tensor) -> Encoded:
    """Find codes by a beam search through the nibbles, from inner products alone.

    With the inner products `S` of keys and vectors and `T` of vectors, to add the vector `v` to a partial code `c`
    changes the squared error by `T[v, v] - 2 S[v] + sum 2 T[c_i, v]`, the sum over the nibbles so far, in their order.
    Candidates are sorted by these costs in float32 without their lowest 6 bits, then by beam and vector. So another
    implementation that adds in the same order and dtype returns the same codes from the same `S` and `T`, bit for bit.

    Args:
        scores: `S`, `[..., N, R]`, `R = 16` times the nibbles.
        gram: `T`, `[..., R, R]`.
        squared_norm: `[..., N]`, of the keys.
    """
    lead = torch.broadcast_shapes(scores.shape[:-2], gram.shape[:-2])
    tokens, size = scores.shape[-2:]
    scores, gram = scores.expand(*lead, tokens, size), gram.expand(*lead, size, size)
    adding = (gram.diagonal(dim1=-2, dim2=-1).unsqueeze(-2) - 2 * scores).unsqueeze(-2)  # [..., N, beam, R - first]
    cost = adding.new_zeros(*lead, tokens, 1)
    codes = torch.zeros(*lead, tokens, 1, 0, dtype=torch.int64, device=scores.device)
    for first in range(0, size, NIBBLE):
        candidates = (cost.unsqueeze(-1) + adding[..., :NIBBLE]).flatten(-2)
        beam = min(BEAM, candidates.shape[-1])
        place = _sort_keys(candidates).topk(beam, largest=False).values.to(torch.int64) & PLACE
        cost, old, new = candidates.gather(-1, place), place // NIBBLE, place % NIBBLE
        codes = torch.cat([_of_beams(codes, old), new.unsqueeze(-1)], -1)
        rows = gram[..., first : first + NIBBLE, first + NIBBLE :]
        rows = rows.gather(-2, new.flatten(-2).unsqueeze(-1).expand(*lead, -1, rows.shape[-1]))
        adding = _of_beams(adding[..., NIBBLE:], old).add_(rows.unflatten(-2, (tokens, beam)), alpha=2)
    best = codes[..., 0, :]
    product = torch.zeros_like(cost[..., 0])
    for part in scores.gather(-1, named(best)).unbind(-1):
        product += part
    squared_norm = squared_norm.expand(product.shape)
    squared_error = squared_norm + cost[..., 0]
    return Encoded(
        codes=pack_nibbles(best),
        error=squared_error.clamp(min=0).double().sqrt().float(),  # torch misrounds float32 roots on CPU
        gain=gain_byte(squared_norm, product),
    )


def _of_beams(x: Tensor, old: Tensor) -> Tensor:
    """Return `x [..., N, beam, size]` of the beams `old [..., N, new beam]`."""
    return x.gather(-2, old.unsqueeze(-1).expand(*old.shape, x.shape[-1]))


def _sort_keys(costs: Tensor) -> Tensor:
    """Return int32 of the same order as the costs `[..., candidates]`, with the place of each in the lowest bits."""
    bits = costs.float().contiguous().view(torch.int32)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return ordered & ~PLACE | torch.arange(costs.shape[-1], dtype=torch.int32, device=costs.device)


def named(nibbles: Tensor) -> Tensor:
    """Return which of all vectors nibbles `[..., m]` name, int64 in `[0, 16 m)`."""
    return nibbles + NIBBLE * torch.arange(nibbles.shape[-1], device=nibbles.device)


def pack_nibbles(nibbles: Tensor) -> Tensor:
    """Pack int64 `[..., N, m]` in [0, 16) into codes, int64 `[..., N, W]`: nibble 0 is the lowest of word 0."""
    return pack(nibbles, 4)


def unpack_nibbles(codes: Tensor, bits: int) -> Tensor:
    """Unpack codes, int64 `[..., N, W]`, into nibbles, int64 `[..., N, bits / 4]`.

    Raises:
        InputError: the codes are not int64 of that many bits.
    """
    return unpack(codes, bits, 4)
