"""Where vLLM's CPU kernels keep the numbers of a token within a page: they pack them for their vector instructions."""

import functools

import torch
from torch import Tensor
from vllm import _custom_ops as ops

__all__ = ["packing", "unpacked_keys"]

PAIRS = {2: torch.int32, 4: torch.int64}  # of numbers of so many bytes


@functools.cache
def packing(isa: str, size: int, dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return where the numbers of each key and value of a page lie: int64 `[size, dim]` each.

    The packing depends on the processor and is private to the kernel that writes it, so this function looks: it writes
    a page of known numbers. A small integer is exact in every dtype, so numbers are written in parts of 4 bits.

    Args:
        isa: vLLM's name of the vector instructions that its kernel uses.
        size: tokens of a page.
        dim: head_dim.
        dtype: of the cache.
    """
    places, shifts = torch.arange(size), range(0, max(size, dim).bit_length(), 4)
    numbers = torch.arange(dim).expand(size, dim), places.unsqueeze(-1).expand(size, dim)
    dims, tokens = (
        torch.stack([_written(number >> shift & 15, isa, dtype) << shift for shift in shifts]).sum(0)
        for number in numbers
    )
    dims, tokens = dims.view(2, size * dim), tokens.view(2, size * dim)
    where = torch.full((2, size, dim), -1)
    for kind in range(2):  # keys fill the first half of a page, values the second
        where[kind, tokens[kind], dims[kind]] = torch.arange(size * dim) + kind * size * dim
    assert (where >= 0).all(), f"unknown packing of {isa}"
    return where[0], where[1]


def unpacked_keys(kv_cache: Tensor, keys_at: Tensor, slots: Tensor) -> Tensor:
    """Copy keys.

    Args:
        kv_cache: what the kernels of vLLM wrote, `[pages, kv_heads, size, 2 * dim]`.
        keys_at: as `packing` returns it.
        slots: int64 `[T]`, of the tokens.

    Returns:
        `[1, kv_heads, T, dim]`.
    """
    size, dim = keys_at.shape
    used, of = (slots // size).unique(return_inverse=True)
    pages, at = kv_cache.view(*kv_cache.shape[:2], -1)[used], keys_at
    if bool((at.unflatten(1, (-1, 2)).diff() == 1).all()) and not bool((at[:, ::2] % 2).any()):
        pages, at = (
            pages.view(PAIRS[kv_cache.element_size()]),
            at[:, ::2] // 2,
        )  # pairs lie together: half as many to read
    keys = pages.gather(2, at.flatten().expand(*pages.shape[:2], -1)).view(kv_cache.dtype)
    return keys.view(len(used), -1, size, dim)[of, :, slots % size].transpose(0, 1).unsqueeze(0)


def _written(numbers: Tensor, isa: str, dtype: torch.dtype) -> Tensor:
    """Return the page, int64, after the kernel wrote these keys `[size, dim]`, and the same values."""
    size, dim = numbers.shape
    page = torch.zeros(1, 1, 2 * size, dim, dtype=dtype)
    keys, values = page.chunk(2, dim=2)
    both = numbers.to(dtype).unsqueeze(1).contiguous()
    ops.cpu_attn_reshape_and_cache(both, both, keys, values, torch.arange(size), isa)
    return page.flatten().long()
