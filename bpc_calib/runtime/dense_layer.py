"""A cache layer that attends to every token, on a CPU by BPC's own kernel."""

from typing import Any

import torch
from torch import Tensor

from bpc_calib.backends.dispatch import backend, dense_attention
from bpc_calib.runtime.attention_call import AttentionCall, with_layer
from bpc_calib.runtime.layers import GrowingLayer
from bpc_calib.runtime.masks import visible_tokens
from bpc_calib.runtime.rules import Rules

__all__ = ["DenseLayer"]


class DenseLayer(GrowingLayer):
    """A layer whose steps attend to everything.

    The model's own attention computes them, with one exception. Where one-token steps run on a CPU, and other layers
    choose, BPC's kernel does: torch's SDPA can take several times as long there, and then these few layers take a large
    part of a step.
    """

    def __init__(self, rules: Rules) -> None:
        super().__init__()
        self.rules = rules

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append `[batch, kv_heads, new, head_dim]`; keys that BPC's kernel may read carry this layer."""
        keys, values = super().update(key_states, value_states)
        if key_states.shape[2] == 1 and backend(keys.device) == "numba":
            keys = with_layer(keys, self)
        return keys, values

    def attention(self, call: AttentionCall) -> Tensor | None:
        """Return the attention output `[batch, 1, query_heads, head_dim]`; None: use the model's own attention.

        Raises:
            ModelError: BPC cannot read the mask.
        """
        visible = visible_tokens(call.mask, self.keys, call.window)
        batch, kv_heads, length, _ = self.keys.shape
        lengths = [length] if visible is None else visible.sum(-1).tolist()
        if all(self.rules.count(each) == each for each in lengths):
            return None  # no layer chooses: the step has the bits of the model's own
        grouped = call.query.squeeze(2).unflatten(1, (kv_heads, -1))
        everything = torch.full((batch,), length)
        out = dense_attention(grouped, self.keys, self.values, everything, call.scale, valid=visible)
        return out.flatten(1, 2).unsqueeze(1)
