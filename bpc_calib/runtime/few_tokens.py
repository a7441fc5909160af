"""A model's linear layers in passes of a few tokens on a CPU: steps of several sequences, drafts that are verified."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from bpc_calib.backends.linear import MOST, linear, slow_in_torch
from bpc_calib.models.description import describe

__all__ = ["IN_COMPILED_CODE", "product", "serve_few_tokens", "unread"]

_library = torch.library.Library("bpc", "FRAGMENT")
_library.define("few_tokens(Tensor tokens, Tensor weight) -> Tensor")
_library.impl("few_tokens", linear, "CPU")
torch.library.register_fake(
    "bpc::few_tokens",
    lambda tokens, weight: tokens.new_empty(tokens.shape[0], weight.shape[0], dtype=torch.float32),
    lib=_library,
)
# By operators, the functions that compiled code calls, under the names that torch gives them, because a call through
# Python takes 12 us. They need the kernel's library to be loaded.
IN_COMPILED_CODE = {
    torch.ops.bpc.few_tokens.default: """
void bpc_linear(int64_t, int64_t, const void *, int64_t, const void *, int64_t, int64_t, float *);
extern int omp_get_max_threads();
extern AOTITorchError aoti_torch_cpu_few_tokens(
    AtenTensorHandle tokens, AtenTensorHandle weight, AtenTensorHandle *made
) {
    int64_t count, outputs, columns;
    int32_t dtype;
    void *from, *matrix, *to;
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_size(tokens, 0, &count));
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_size(weight, 0, &outputs));
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_size(weight, 1, &columns));
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(weight, &dtype));
    const int64_t sizes[] = {count, outputs}, strides[] = {outputs, 1};
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(
        2, sizes, strides, aoti_torch_dtype_float32(), aoti_torch_device_type_cpu(), 0, made));
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_data_ptr(tokens, &from));
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_data_ptr(weight, &matrix));
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_data_ptr(*made, &to));
    int64_t element = dtype == aoti_torch_dtype_bfloat16() ? 0 : dtype == aoti_torch_dtype_float16() ? 1 : 2;
    bpc_linear(omp_get_max_threads(), element, from, count, matrix, outputs, columns, static_cast<float *>(to));
    return AOTI_TORCH_SUCCESS;
}
"""
}


def product(tokens: Tensor, weight: Tensor) -> Tensor:
    """Return float32 `[T, outputs]`, the products of a weight and tokens `[T, columns]`, in code that torch traces."""
    found: Tensor = torch.ops.bpc.few_tokens(tokens, weight)
    return found


def unread(model: Any) -> str | None:
    """Say why this process cannot read the weights of a model where they are, on a CPU; None: it can."""
    name = describe(model.config).id
    if any(each.device.type != "cpu" for each in model.parameters()):
        return f"{name} is not on a CPU"
    if any(hasattr(module, "_hf_hook") for module in model.modules()):
        return f"{name} has weights that are loaded when they are used"
    return f"{name}: several processes shard it" if describe(model.config).ranks > 1 else None


def serve_few_tokens(model: Any) -> None:
    """Read the weights of decoder layers and head at the speed of memory from now on, where torch alone does not.

    Results differ by rounding. Passes with gradients and of many tokens stay torch's, and so do those of a model
    that is `unread`. A second call does nothing.
    """
    if unread(model) is not None:
        return
    head = model.get_output_embeddings()
    for layer in (*model.get_decoder().modules(), head):
        if type(layer) is nn.Linear and "forward" not in vars(layer):
            slow = slow_in_torch(layer.weight)
            layer.__dict__["forward"] = functools.partial(_forward, layer, layer.forward, slow, layer is head)


def _forward(layer: nn.Linear, plain: Callable[[Tensor], Tensor], slow: bool, is_head: bool, hidden: Tensor) -> Tensor:
    """Stand in for the forward of a linear layer."""
    weight = layer.weight
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or hidden.dtype != weight.dtype:
        return plain(hidden)
    tokens = hidden.shape[:-1].numel()
    if slow and 0 < tokens <= MOST:
        found = linear(hidden.reshape(tokens, -1), weight)
    elif is_head and tokens == 1:  # torch's linear layer reads 16-bit weights of one token slowly
        found = torch.mv(weight, hidden.reshape(-1))
    else:
        return plain(hidden)
    return (found if layer.bias is None else found + layer.bias).to(weight.dtype).view(*hidden.shape[:-1], -1)
