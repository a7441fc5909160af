"""A step of BPC as a cache makes it, and the stages whose time is measured."""

from torch import Tensor

from bpc_calib.backends import dispatch
from bpc_calib.method.choosing import Cached, Choice
from bpc_calib.method.encoding import Encoder

__all__ = ["STAGES", "choice", "choose", "step"]

STAGES = ("encode", "project", "score", "select", "attend", "step")


def choice(query: Tensor) -> Choice:
    """The default choice of a cache, for queries `[B, H_KV, G, D]`."""
    return Choice(scaling=query.shape[-1] ** -0.5)


def choose(query: Tensor, projection: Tensor, codes: Tensor, gain: Tensor | None, k: int) -> Tensor:
    """The tokens attended, as a cache chooses them."""
    return dispatch.choose(query, projection, Cached(codes, gain), k, choice(query))


def step(
    encoder: Encoder,
    new: Tensor,
    query: Tensor,
    projection: Tensor,
    k: int,
    codes: Tensor,
    gain: Tensor,
    keys: Tensor,
    values: Tensor,
) -> Tensor:
    """A whole step as a cache calls it: the new key gets its code, then tokens are chosen and attended."""
    dispatch.encode_with(encoder, new)
    return dispatch.sparse_attention(query, keys, values, choose(query, projection, codes, gain, k))
