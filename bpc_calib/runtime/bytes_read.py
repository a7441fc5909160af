"""The bytes of keys, values and codes that a decoding step reads, by what they are."""

from dataclasses import dataclass
from typing import Any

from bpc_calib.method.budget import attended
from bpc_calib.runtime.layers import SparseLayer

__all__ = ["KVBytes", "count_bytes"]


@dataclass(frozen=True)
class KVBytes:
    """The bytes that a step reads per sequence. The parts add up to `read`."""

    sliding: int = 0  # keys and values of sliding-window layers
    dense: int = 0  # keys and values of the other layers that attend to every token
    ranking: int = 0  # what ranks the tokens: codes, gains and the safeguard's list
    chosen: int = 0  # keys and values of the tokens of the budget
    minimum: int = 0  # keys and values of further tokens, because of `min_tokens` or `min_context`
    full: int = 0  # what full attention reads

    @property
    def read(self) -> int:
        """The sum of the parts."""
        return self.sliding + self.dense + self.ranking + self.chosen + self.minimum

    def __add__(self, other: "KVBytes") -> "KVBytes":
        return KVBytes(*(getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__))


def count_bytes(layers: list[Any], length: int) -> KVBytes:
    """Count what a step reads per sequence at `length` cached tokens in these cache layers; 0 before the first step."""
    from transformers.cache_utils import DynamicLayer

    sums = dict.fromkeys(KVBytes.__dataclass_fields__, 0)
    for outer in layers:
        layer = getattr(outer, "layer", outer)  # a StaticLayer wraps the layer that counts
        if isinstance(layer, DynamicLayer) and layer.is_initialized:
            for part, count in _of_layer(layer, length).items():
                sums[part] += count
    return KVBytes(**sums)


def _of_layer(layer: Any, length: int) -> dict[str, int]:
    _, heads, held, dim = layer.keys.shape
    token = 2 * heads * dim * layer.keys.element_size()
    if layer.is_sliding:
        full = min(length, held) * token
        return {"sliding": full, "full": full}
    full = length * token
    if not isinstance(layer, SparseLayer):
        return {"dense": full, "full": full}
    read = layer.step_bytes(length, token)
    ranking = layer.ranking_bytes(length) if min(layer.counts(length)) < length else 0
    k = layer.rules.by_head(attended(length, layer.rules.budget, min_tokens=1), length)
    chosen = min(read - ranking, sum(k) * token // len(k))
    return {"ranking": ranking, "chosen": chosen, "minimum": read - ranking - chosen, "full": full}
