"""Dense attention of one new token over all keys, in every fast form: the baseline of sparse decoding."""

import functools
import math
from collections.abc import Callable
from importlib import import_module

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from bpc_calib.backends import dispatch
from bpc_calib.bench.timing import reason
from bpc_calib.method.state import Rows, State, alike

__all__ = ["OURS", "Dense", "correct_forms", "exact", "fault", "folded", "forms", "matmul", "ours"]

# Relative error against float64 that rounding to 16 bits explains; a larger error means a wrong result.
TOLERANCE = 0.02
OURS = "(ours)"  # in the names of this package's own forms

Dense = Callable[[Tensor, Tensor, Tensor], Tensor]


def forms(device: torch.device) -> tuple[dict[str, Dense], dict[str, str]]:
    """Return the dense forms by name, and why others are missing.

    A form accepts queries `[B, H_KV, G, D]` and keys and values `[B, H_KV, N, D]`. On a CPU the group is folded into
    the query's length, because SDPA with `enable_gqa` is 3 to 9 times slower there.
    """
    if device.type == "cuda":
        return _gpu_forms(device)
    found: dict[str, Dense] = {"SDPA, group folded": folded, "matmul, softmax, matmul": matmul}
    if (name := dispatch.backend(device)) != "torch":
        found[f"every token in {name} {OURS}"] = ours(device)
    return found, {}


def correct_forms(
    query: Tensor, keys: Tensor, values: Tensor, expected: Tensor
) -> tuple[dict[str, Dense], dict[str, str]]:
    """Return those of `forms` that compute attention, and why the others are left out.

    Args:
        query: `[B, H_KV, G, D]`.
        keys, values: `[B, H_KV, N, D]`.
        expected: `exact` attention of the first sequences, which are compared.
    """
    found, missing = forms(query.device)
    faults = {name: fault(functools.partial(form, query, keys, values), expected) for name, form in found.items()}
    correct = {name: form for name, form in found.items() if not faults[name]}
    return correct, {name: why for name, why in faults.items() if why} | missing


def fault(form: Callable[[], Tensor], expected: Tensor) -> str:
    """Return why a form is not measured: it fails, or its first sequences are not as expected; empty if it is right."""
    try:
        off = float((form()[: len(expected)].float() - expected).norm() / expected.norm())
    except Exception as error:
        return reason(error)
    return "" if off < TOLERANCE else f"not measured: its result is off by {off:.1e}"


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


def _gpu_forms(device: torch.device) -> tuple[dict[str, Dense], dict[str, str]]:

    def through(backend: SDPBackend, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(query, keys, values)

    def grouped(backend: SDPBackend, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(
                query.flatten(1, 2).unsqueeze(2), keys, values, enable_gqa=True
            ).unflatten(1, query.shape[1:3]).squeeze(3)  # fmt: skip

    found: dict[str, Dense] = {}
    missing: dict[str, str] = {}
    makers = (
        (f"split-KV in Triton {OURS}", functools.partial(ours, device)), ("FlashInfer", _flashinfer),
        ("FlashAttention 3", functools.partial(_flash, "flash_attn_interface")),
        ("FlashAttention 2", functools.partial(_flash, "flash_attn")),
    )  # fmt: skip
    for name, make in makers:
        try:
            found[name] = make()
        except ImportError:
            missing[name] = "not installed"
    for name, backend in (("flash", SDPBackend.FLASH_ATTENTION), ("cuDNN", SDPBackend.CUDNN_ATTENTION)):
        found[f"SDPA {name}, group folded"] = functools.partial(through, backend)
        found[f"SDPA {name}, enable_gqa"] = functools.partial(grouped, backend)
    return found, missing


def ours(device: torch.device) -> Dense:
    """Return this package's own attention to every token, compiled for the device.

    Raises:
        ImportError: its compiler is not available.
    """
    if dispatch.backend(device) == "torch":
        raise ImportError(dispatch.compiled(device))
    rows: dict[torch.Size, Rows] = {}  # created once, as a cache does

    def attend(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        if keys.shape not in rows:
            rows[keys.shape] = alike(keys, keys.shape[2])
        state = State(keys, values)
        return dispatch.find(query, state).dense_decode(query, state, rows[keys.shape])

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


def _flash(module: str) -> Dense:
    """Return FlashAttention's decoding from the package of one of its versions."""
    with_cache = import_module(module).flash_attn_with_kvcache

    def decode(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        out = with_cache(query.flatten(1, 2).unsqueeze(1), keys.transpose(1, 2), values.transpose(1, 2))
        return (out[0] if isinstance(out, tuple) else out).view_as(query)

    return decode
