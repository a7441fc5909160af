"""Dense attention of one new token over all keys, in every fast form: the baseline of sparse decoding."""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from bpc_calib.backends import dispatch

__all__ = ["TOLERANCE", "Dense", "error", "exact", "folded", "forms", "gpu_forms", "matmul", "ours", "to_beat"]

# Relative error against float64 that rounding to 16 bits explains; a larger error means a wrong result.
TOLERANCE = 0.02

Dense = Callable[[Tensor, Tensor, Tensor], Tensor]


def forms(device: torch.device) -> dict[str, Dense | str]:
    """Return the dense forms by name, or a string that says why one is missing.

    A form accepts queries `[B, H_KV, G, D]` and keys and values `[B, H_KV, N, D]`. On a CPU the group is folded into
    the query's length, because SDPA with `enable_gqa` is 3 to 9 times slower there.
    """
    found = to_beat(device)
    if device.type != "cuda" and (name := dispatch.backend(device)) != "torch":
        found[f"every token in {name} (ours)"] = ours(device)
    return found


def to_beat(device: torch.device) -> dict[str, Dense | str]:
    """Return those of `forms` that sparse attention must beat to be switched on: all on a GPU, torch's on a CPU.

    Below `min_context` a model on a CPU runs torch's, not this package's.
    """
    if device.type == "cuda":
        return gpu_forms(device)
    return {"SDPA, group folded": folded, "matmul, softmax, matmul": matmul}


def folded(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Compute attention as a form (`forms`), `[B, H_KV, G, D]`, with the SDPA backend that torch chooses."""
    return scaled_dot_product_attention(query, keys, values)


def matmul(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Compute attention as a form (`forms`), `[B, H_KV, G, D]`, by two products per head.

    A batched product would copy keys from a buffer with spare room.
    """
    query = query * query.shape[-1] ** -0.5
    out = torch.empty_like(query)
    for b in range(len(query)):
        for h in range(query.shape[1]):
            weights = (query[b, h] @ keys[b, h].mT).softmax(-1, dtype=torch.float32)
            torch.mm(weights.to(query.dtype), values[b, h], out=out[b, h])
    return out


def exact(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Compute full attention in float64, one KV head at a time; return float32 `[B, H_KV, G, D]`."""
    heads = []
    for h in range(keys.shape[1]):
        logits = query[:, h].double() @ keys[:, h].double().mT / math.sqrt(query.shape[-1])
        heads.append(logits.softmax(-1) @ values[:, h].double())
    return torch.stack(heads, 1).float()


def error(found: Tensor, right: Tensor) -> float:
    """Return the relative error |found - right| / |right|."""
    return float((found.float() - right).norm() / right.norm())


def gpu_forms(device: torch.device) -> dict[str, Dense | str]:
    """Return every dense form for an NVIDIA GPU, as `forms` does."""

    def through(backend: SDPBackend, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(query, keys, values)

    def grouped(backend: SDPBackend, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(
                query.flatten(1, 2).unsqueeze(2), keys, values, enable_gqa=True
            ).unflatten(1, query.shape[1:3]).squeeze(3)  # fmt: skip

    found: dict[str, Dense | str] = {}
    makers = (
        ("split-KV in Triton (ours)", functools.partial(ours, device)), ("FlashInfer", _flashinfer),
        ("FlashAttention 3", _flash3), ("FlashAttention 2", _flash2),
    )  # fmt: skip
    for name, make in makers:
        try:
            found[name] = make()
        except ImportError:
            found[name] = "not installed"
    for name, backend in (("flash", SDPBackend.FLASH_ATTENTION), ("cuDNN", SDPBackend.CUDNN_ATTENTION)):
        found[f"SDPA {name}, group folded"] = functools.partial(through, backend)
        found[f"SDPA {name}, enable_gqa"] = functools.partial(grouped, backend)
    return found


def ours(device: torch.device) -> Dense:
    """Return this package's own attention to every token, compiled for the device.

    Raises:
        ImportError: its compiler is not available.
    """
    if dispatch.backend(device) == "torch":
        raise ImportError(dispatch.compiled(device))
    lengths: dict[tuple[int, int], Tensor] = {}  # created once, as a cache does

    def attend(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        shape = (len(keys), keys.shape[2])
        if shape not in lengths:
            lengths[shape] = torch.full(shape[:1], shape[1], device=keys.device)
        return dispatch.dense_attention(query, keys, values, lengths[shape])

    return attend


def _flashinfer() -> Dense:
    from flashinfer import single_decode_with_kv_cache

    def decode(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        if len(keys) > 1:
            raise ValueError("this form decodes only a single sequence")
        out = single_decode_with_kv_cache(
            query.flatten(0, 2), keys[0], values[0], kv_layout="HND", use_tensor_cores=True
        )
        return out.view_as(query)

    return decode


def _flash2() -> Dense:
    from flash_attn import flash_attn_with_kvcache

    return functools.partial(_flash, flash_attn_with_kvcache)


def _flash3() -> Dense:
    from flash_attn_interface import flash_attn_with_kvcache

    return functools.partial(_flash, flash_attn_with_kvcache)


def _flash(function: Callable[..., Any], query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    out = function(query.flatten(1, 2).unsqueeze(1), keys.transpose(1, 2), values.transpose(1, 2))
    return (out[0] if isinstance(out, tuple) else out).view_as(query)
