"""Centring: calibrated projections hash the keys of a sequence around their own mean."""

from dataclasses import replace

import torch
from torch import Tensor

from bpc_calib.method.encoding import AnyEncoder
from bpc_calib.method.fitting import mean_key
from bpc_calib.runtime.online_fit import fitted_places

__all__ = ["CALIBRATED_WEIGHT", "centred_on", "own_mean"]

CALIBRATED_WEIGHT = 128  # tokens that the calibrated mean counts for, because the mean of a few keys is mostly noise


def own_mean(keys: Tensor, visible: Tensor | None, calibrated: Tensor) -> Tensor:
    """Return the mean of the keys of each sequence and of `CALIBRATED_WEIGHT` keys at the calibrated mean.

    Of a long sequence as many keys as online projections are fitted to, evenly spaced: more move the mean by nothing.

    Args:
        keys: `[batch, kv_heads, N, head_dim]`.
        visible: bool `[batch, N]`, False for padding; None: no padding.
        calibrated: `[kv_heads, head_dim]`.

    Returns:
        float32 `[batch, kv_heads, head_dim]`.
    """
    means = []
    for row, own in enumerate(keys):
        count = own.shape[1] if visible is None else int(visible[row].sum())
        places = fitted_places(count).to(keys.device)
        if visible is not None:
            places = visible[row].nonzero().squeeze(1)[places]
        mean, share = mean_key(own[:, places], None) if count else calibrated, count / (count + CALIBRATED_WEIGHT)
        means.append(share * mean.double() + (1 - share) * calibrated.double())
    return torch.stack(means).float()


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
