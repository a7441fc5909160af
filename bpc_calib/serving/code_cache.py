"""Where the codes of a layer live in vLLM's memory: in a cache of their own, or behind the keys of each page.

A cache of its own is an ordinary cache layer to vLLM, as the index of DeepSeek's sparse attention is, in the block
tables of the layer that it belongs to. That needs one kind of attention in all layers. Models with sliding-window
layers keep the codes behind the keys and values of their pages, which are larger for it. vLLM frees the pages of a
sliding layer behind its window, for any layer to use; but only a layer that attends to everything has codes, and its
pages stay as long as the request. Either way vLLM counts the memory, and a code is written, shared, copied and dropped
with the key that it belongs to.
"""

import dataclasses
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

__all__ = ["CodeCache", "add_code_cache", "behind_pages", "with_room"]

ALIGNED = 64  # bytes: the codes behind a page are read in whole cache lines


class CodeCache(torch.nn.Module, AttentionLayerBase):  # type: ignore[misc]
    """A cache layer for codes and gains, which takes no part in the forward pass."""

    def __init__(self, kv_heads: int, words: int) -> None:
        super().__init__()
        self.kv_heads, self.words = kv_heads, words
        self.kv_cache = torch.tensor([])  # uint8 [pages, kv_heads, size, 8 * words + 1]; vLLM sets it

    def get_attn_backend(self) -> type[AttentionBackend]:
        """Return the backend that vLLM asks for the layout of the cache."""
        return _CodeBackend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        """Return the size of a page: one code and one gain per token and KV head."""
        return FullAttentionSpec(
            block_size=vllm_config.cache_config.block_size, num_kv_heads=self.kv_heads,
            head_size=8 * self.words + 1, head_size_v=0, dtype=torch.uint8,
        )  # fmt: skip

    def pages(self) -> tuple[Tensor, Tensor]:
        """Return the codes and gains as in `State`; a page holds the codes of a KV head, then its gains."""
        pages, heads, size, content = self.kv_cache.shape
        flat = self.kv_cache.reshape(pages, heads, size * content)
        codes = flat[..., : size * 8 * self.words].view(torch.int64).unflatten(-1, (size, self.words))
        return codes, flat[..., size * 8 * self.words :]


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


def add_code_cache(vllm_config: VllmConfig, layer: str, kv_heads: int, words: int) -> CodeCache:
    """Add a cache for the codes of a layer, before vLLM asks which caches there are.

    Args:
        vllm_config: the config of the engine, which is changed.
        layer: vLLM's name of the layer.
        kv_heads: KV heads on this rank.
        words: words of 64 bits of a code.
    """
    cache = CodeCache(kv_heads, words)
    vllm_config.compilation_config.static_forward_context[f"{layer}.bpc_codes"] = cache
    return cache


def with_room(spec: AttentionSpec, words: int) -> AttentionSpec:
    """Return a spec whose pages have room for codes and gains behind keys and values."""
    room = spec.num_kv_heads * spec.block_size * (8 * words + 1)
    return dataclasses.replace(spec, page_size_padded=spec.unpadded_page_size_bytes + -(-room // ALIGNED) * ALIGNED)


def behind_pages(kv_cache: Tensor, words: int) -> tuple[Tensor, Tensor]:
    """Return the codes and gains, as in `State`, behind the pages `[pages, kv_heads, size, 2 * head_dim]`."""
    pages, heads, size, _ = kv_cache.shape
    wide = kv_cache.element_size()
    page, first = kv_cache.stride(0) * wide, kv_cache.storage_offset() * wide + kv_cache[0].numel() * wide
    raw = torch.empty(0, dtype=torch.uint8, device=kv_cache.device).set_(kv_cache.untyped_storage())
    codes = raw.view(torch.int64).as_strided(
        (pages, heads, size, words), (page // 8, size * words, words, 1), first // 8
    )
    gain = raw.as_strided((pages, heads, size), (page, size, 1), first + heads * size * 8 * words)
    return codes, gain
