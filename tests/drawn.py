"""Random queries, keys, codes and projections for the tests of all backends."""

import torch

from bpc_calib import encode

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

# Triton's compiler fails on float64 products for compute capability 10 and higher.
FLOAT64 = [] if torch.cuda.is_available() and torch.cuda.get_device_capability() >= (10, 0) else [torch.float64]
# The rounding error of one product in a dtype, or a softmax over it: a few units in the last of 24, 53, 8 or 11 bits.
EXACT = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def draw(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(DEVICE, dtype)


def cache(batch, kv_heads, tokens, dim, bits, *, zero_keys=False, dtype=torch.float32):
    """Return random projections, and the codes, gains and errors of random keys with them."""
    projection = draw(kv_heads, bits, dim, seed=1) / (2 * dim**0.5)
    keys = draw(batch, kv_heads, tokens, dim, seed=2, dtype=dtype)
    if zero_keys:
        keys[:, :, ::3] = 0
    return projection, encode(keys, projection)


def integers(*shape, most, seed, dtype=torch.float32):
    """Small ones, whose products and sums are exact in every dtype and order; many are equal."""
    drawn = torch.randint(-most, most + 1, shape, generator=torch.Generator().manual_seed(seed))
    return drawn.to(DEVICE, dtype)
