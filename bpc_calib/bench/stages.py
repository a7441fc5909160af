"""A step of BPC as a cache runs it, and the names of the timed stages."""

from torch import Tensor

from bpc_calib.backends import dispatch
from bpc_calib.method.choosing import Cached, Choice
from bpc_calib.method.encoding import Encoder

__all__ = ["STAGES", "choice", "choose", "step"]

STAGES = ("encode", "project", "score", "select", "attend", "step")


def choice(query: Tensor) -> Choice:
    """Return the default `Choice` of a cache, for queries `[B, H_KV, G, D]`."""
    return Choice(scaling=query.shape[-1] ** -0.5)


def choose(query: Tensor, projection: Tensor, codes: Tensor, gain: Tensor | None, k: int) -> Tensor:
    """Choose the attended tokens as a cache does."""
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
    """Run a whole step as a cache does: encode the new key, choose tokens, compute attention over them."""
    dispatch.encode_with(encoder, new)
    return dispatch.sparse_attention(query, keys, values, choose(query, projection, codes, gain, k))
