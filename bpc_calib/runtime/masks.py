"""Attention masks of every form, read as the cached tokens that the newest token may attend to."""

from typing import Any

import torch
from torch import Tensor

from bpc_calib.compat import continued_cache_restarts
from bpc_calib.errors import InputError, ModelError

__all__ = ["check_continued", "visible_tokens"]


def visible_tokens(mask: Any, key: Tensor, window: int | None) -> Tensor | None:
    """bool `[batch, N]`: the cached tokens that the newest may attend to; None for all of them.

    Args:
        mask: in the form of any implementation: None, bool or additive `[batch, 1, 1, N]`, `[batch, N]`, or
            flex attention's.
    """
    batch, length = key.shape[0], key.shape[2]
    if mask is None and (window is None or window >= length):
        return None
    place = torch.arange(length, device=key.device)
    if mask is None:
        visible = torch.ones(batch, length, dtype=torch.bool, device=key.device)
    elif hasattr(mask, "mask_mod"):
        rows = torch.arange(batch, device=key.device).unsqueeze(-1)
        zero = torch.zeros((), dtype=torch.long, device=key.device)
        visible = mask.mask_mod(rows, zero, zero, place).expand(batch, length)
    else:
        if mask.dim() == 4:
            if mask.shape[1] != 1:
                raise ModelError("an attention mask of its own for each head, which BPC does not serve")
            mask = mask[:, 0, -1]
        if mask.shape[-1] < length:
            raise InputError(f"the attention mask covers {mask.shape[-1]} of {length} cached tokens")
        visible = _as_bool(mask[:, :length]).expand(batch, length)
    if window is not None:
        visible = visible & (place >= length - window)
    return None if visible.all() else visible


def _as_bool(mask: Tensor) -> Tensor:
    if not mask.dtype.is_floating_point:
        return mask.bool()
    visible = mask == 0
    if (visible | (mask <= torch.finfo(mask.dtype).min / 2)).all():
        return visible
    raise ModelError("an attention mask that weighs tokens, which BPC does not serve: it selects or leaves out")


def check_continued(query: Tensor, key: Tensor, mask: Any, positions: Tensor | None) -> None:
    """Refuse what `generate` makes of a continued cache and `prefill_chunk_size` before transformers 5.21.

    It feeds the whole text again, from position 0, behind the tokens it has cached.
    """
    past = key.shape[2] - query.shape[2]
    if not past or positions is None or not continued_cache_restarts():
        return
    visible = visible_tokens(mask, key, None)
    began = torch.ones(1, dtype=torch.bool) if visible is None else visible[:, :past].any(-1).cpu()
    if began.any() and (positions[:, 0].cpu() == 0)[began.expand(len(positions))].all():
        raise InputError(
            f"new tokens are given as the first ones, behind {past} cached tokens: generate(prefill_chunk_size=...) "
            "cannot continue a cache before transformers 5.21; leave it out"
        )
