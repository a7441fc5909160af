"""Where the codes of a layer live in vLLM's memory: in a cache of their own, or behind the keys of each page.

On a CPU, so does a copy of each key, in a row: vLLM's kernels put the numbers of many keys side by side there, so one
key lies in as many cache lines as it has numbers.

A cache of its own is an ordinary cache layer to vLLM, as the index of DeepSeek's sparse attention is, in the block
tables of the layer that it belongs to. That needs one kind of attention in all layers. Models with sliding-window
layers keep the codes behind the keys and values of their pages, which are larger for it. vLLM frees the pages of a
sliding layer behind its window, for any layer to use; but only a layer that attends to everything has codes, and its
pages stay as long as the request. Either way vLLM counts the memory, and a code is written, shared, copied and dropped
with the key that it belongs to.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
    MultipleOf,
)
from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec, KVCacheLayout, KVCacheSpec

__all__ = ["CodeCache", "Kept", "add_code_cache", "behind_pages", "with_room"]

ALIGNED = 64  # bytes: the codes behind a page are read in whole cache lines


@dataclass(frozen=True)
class Kept:
    """What a page holds of each key of a KV head: the copies of all its keys, then their codes, then their gains."""

    words: int  # of a code, of 64 bits
    copied: int = 0  # bytes of a copied key; 0: keys are not copied

    @property
    def bytes(self) -> int:
        """Per key."""
        return self.copied + 8 * self.words + 1

    def parts(self, raw: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return copies, as bytes, codes and gains as in `State`, of pages uint8 `[pages, kv_heads, size * bytes]`."""
        copies, codes, gain = raw.split([size * self.copied, size * 8 * self.words, size], -1)
        words = codes.view(torch.int64).unflatten(-1, (size, self.words))
        return copies.unflatten(-1, (size, self.copied)), words, gain


class CodeCache(torch.nn.Module, AttentionLayerBase):  # type: ignore[misc]
    """A cache layer for what is kept of keys, which takes no part in the forward pass."""

    def __init__(self, kv_heads: int, kept: Kept) -> None:
        super().__init__()
        self.kv_heads, self.kept = kv_heads, kept
        self.kv_cache = torch.tensor([])  # uint8 [pages, kv_heads, size, kept.bytes]; vLLM sets it

    def get_attn_backend(self) -> type[AttentionBackend]:
        """Return the backend that vLLM asks for the layout of the cache."""
        return _CodeBackend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        """Return the size of a page."""
        return FullAttentionSpec(
            block_size=vllm_config.cache_config.block_size, num_kv_heads=self.kv_heads,
            head_size=self.kept.bytes, head_size_v=0, dtype=torch.uint8,
        )  # fmt: skip

    def pages(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return what `Kept.parts` does."""
        pages, heads, size, _ = self.kv_cache.shape
        return self.kept.parts(self.kv_cache.view(pages, heads, -1), size)


class _CodeBackend(AttentionBackend):  # type: ignore[misc]
    @staticmethod
    def get_name() -> str:
        return "BPC_CODES"

    @staticmethod
    def get_impl_cls() -> Any:
        raise NotImplementedError

    @staticmethod
    def get_builder_cls() -> Any:
        return _NoMetadata

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(16)]

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        return (KVCacheLayout.LBHNC,)


class _NoMetadata(AttentionMetadataBuilder):  # type: ignore[misc]
    _cudagraph_support = AttentionCGSupport.ALWAYS  # the least of all builders decides

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> AttentionMetadata:
        return AttentionMetadata()


def add_code_cache(vllm_config: VllmConfig, layer: str, kv_heads: int, kept: Kept) -> CodeCache:
    """Add a cache for what is kept of the keys of a layer, before vLLM asks which caches there are.

    Args:
        vllm_config: the config of the engine, which is changed.
        layer: vLLM's name of the layer.
        kv_heads: KV heads on this rank.
        kept: of each key.
    """
    cache = CodeCache(kv_heads, kept)
    vllm_config.compilation_config.static_forward_context[f"{layer}.bpc_codes"] = cache
    return cache


def with_room(spec: AttentionSpec, kept: Kept) -> AttentionSpec:
    """Return a spec whose pages have room, behind keys and values, for what is kept of each key."""
    room = spec.num_kv_heads * spec.block_size * kept.bytes
    return dataclasses.replace(spec, page_size_padded=spec.unpadded_page_size_bytes + -(-room // ALIGNED) * ALIGNED)


def behind_pages(kv_cache: Tensor, kept: Kept) -> tuple[Tensor, Tensor, Tensor]:
    """Return what `Kept.parts` does, of what is behind the pages `[pages, kv_heads, size, 2 * head_dim]`."""
    pages, heads, size, _ = kv_cache.shape
    wide = kv_cache.element_size()
    page, first = kv_cache.stride(0) * wide, kv_cache.storage_offset() * wide + kv_cache[0].numel() * wide
    raw = torch.empty(0, dtype=torch.uint8, device=kv_cache.device).set_(kv_cache.untyped_storage())
    each = size * kept.bytes
    return kept.parts(raw.as_strided((pages, heads, each), (page, each, 1), first), size)
