"""Centring: calibrated projections hash the keys of a sequence around their own mean."""

from dataclasses import replace

import torch
from torch import Tensor

from bpc_calib.method.encoding import AnyEncoder
from bpc_calib.method.fitting import mean_key

__all__ = ["CALIBRATED_WEIGHT", "centred_on", "own_mean"]

CALIBRATED_WEIGHT = 128  # tokens that the calibrated mean counts for, because the mean of a few keys is mostly noise


def own_mean(keys: Tensor, visible: Tensor | None, calibrated: Tensor) -> Tensor:
    """Return the mean of the keys of each sequence and of `CALIBRATED_WEIGHT` keys at the calibrated mean.

    Args:
        keys: `[batch, kv_heads, N, head_dim]`.
        visible: bool `[batch, N]`, False for padding; None: no padding.
        calibrated: `[kv_heads, head_dim]`.

    Returns:
        float32 `[batch, kv_heads, head_dim]`.
    """
    batch, kv_heads, tokens, _ = keys.shape
    weights = None if visible is None else visible.unsqueeze(1).expand(batch, kv_heads, tokens)
    count = torch.full((batch,), tokens, device=keys.device) if visible is None else visible.sum(-1)
    share = (count.double() / (count + CALIBRATED_WEIGHT))[:, None, None]
    return (share * mean_key(keys, weights).double() + (1 - share) * calibrated.double()).float()


def centred_on(keys: Tensor, visible: Tensor | None, encoder: AnyEncoder) -> AnyEncoder:
    """Return the encoder `[kv_heads, ...]` with the own mean of each sequence; without a mean it stays as it is.

    A mean adds the same to the score of every key, so any mean ranks correctly; the own one leaves the smallest keys,
    and so the smallest errors.

    Args:
        keys: `[batch, kv_heads, N, head_dim]`.
        visible: bool `[batch, N]`, False for padding; None: no padding.
        encoder: of calibrated projections.

    Returns:
        An encoder `[kv_heads, ...]` for one sequence, `[batch, kv_heads, ...]` for several.
    """
    if encoder.mean is None:
        return encoder
    mean = own_mean(keys, visible, encoder.mean).to(encoder.mean.dtype)
    if len(mean) == 1:
        return replace(encoder, mean=mean[0])
    each = encoder.change(lambda tensor: tensor.expand(len(mean), *tensor.shape).contiguous())
    return replace(each, mean=mean)
