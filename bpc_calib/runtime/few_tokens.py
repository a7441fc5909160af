"""A model's linear layers in passes of a few tokens on a CPU: steps of several sequences, drafts that are verified."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from bpc_calib.backends.linear import linear, slow_in_torch

__all__ = ["serve_few_tokens"]


def serve_few_tokens(model: Any) -> None:
    """Read the weights of decoder layers and head at the speed of memory from now on, where torch alone does not.

    Results differ by rounding. Passes with gradients and of many tokens stay torch's.

    Args:
        model: on a CPU; its weights stay where they are.
    """
    head = model.get_output_embeddings()
    for layer in (*model.get_decoder().layers.modules(), head):
        if type(layer) is nn.Linear:
            slow = slow_in_torch(layer.weight)
            layer.__dict__["forward"] = functools.partial(_forward, layer, layer.forward, slow, layer is head)


def _forward(layer: nn.Linear, plain: Callable[[Tensor], Tensor], slow: range, is_head: bool, hidden: Tensor) -> Tensor:
    """Stand in for the forward of a linear layer."""
    weight, tokens = layer.weight, hidden.shape[:-1].numel()
    if torch.is_grad_enabled() or hidden.dtype != weight.dtype:
        return plain(hidden)
    if tokens in slow:
        found = linear(hidden.reshape(tokens, -1), weight)
    elif is_head and tokens == 1:  # torch's linear layer reads 16-bit weights of one token slowly
        found = torch.mv(weight, hidden.reshape(-1))
    else:
        return plain(hidden)
    return (found if layer.bias is None else found + layer.bias).to(weight.dtype).view(*hidden.shape[:-1], -1)
