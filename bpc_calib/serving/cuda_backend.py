"""vLLM's FlashAttention on an NVIDIA GPU with BPC's decoding steps. Prefill and dense layers stay FlashAttention's.

A decoding step waits for nothing on the host, and every launch has the same sizes for as many requests: so CUDA graphs
capture it. A request of one token is a decoding step; that may also be the rest of a prompt, of one token.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadata,
    FlashAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.utils import split_decodes_and_prefills
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheSpec

from bpc_calib.backends import dispatch
from bpc_calib.errors import ModelError
from bpc_calib.method.paging import Fresh, Paged, Rows
from bpc_calib.serving.layer import Layer, asked, settings, sized
from bpc_calib.serving.options import read_options

__all__ = ["Attention", "Backend", "Builder", "Metadata", "after"]


class Backend(FlashAttentionBackend):  # type: ignore[misc]
    """vLLM's own backend, except for a model that asks for BPC."""

    @staticmethod
    def get_impl_cls() -> type[FlashAttentionImpl]:
        """Return the implementation for the current config.

        Raises:
            BPCError: the options, the artifact or the model do not fit; the message is one line.
        """
        return FlashAttentionImpl if asked() is None else Attention

    @staticmethod
    def get_builder_cls() -> type[FlashAttentionMetadataBuilder]:
        """Return the class that finds the sparse rows of a step."""
        return Builder

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        """Give pages room for codes, where a model has layers of several kinds."""
        return sized(spec)


@dataclass
class Metadata(FlashAttentionMetadata):  # type: ignore[misc]
    """vLLM's metadata of a step, and which rows are BPC's: the first, one token each."""

    sparse: Rows | None = None
    rest: FlashAttentionMetadata | None = None  # of the other requests


class Builder(FlashAttentionMetadataBuilder):  # type: ignore[misc]
    """Finds the sparse rows of a step, once for all layers that share block tables."""

    counts: Tensor | None = None  # int64 [max_model_len + 1]: how many tokens a sequence of so many attends to

    def __init__(
        self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        options, layers = read_options(vllm_config), vllm_config.compilation_config.static_forward_context
        own = [getattr(layers[name], "impl", None) for name in layer_names if name in layers]
        # Layers of both kinds share a window where vLLM's manager of hybrid caches is off. And what is built for layers
        # without a window may go to others of their kind, by `update_block_table`.
        slides = getattr(kv_cache_spec, "sliding_window", None) is not None
        if options is None or (slides and not any(isinstance(impl, Attention) and impl.projections for impl in own)):
            return
        rules, limit = settings(options), vllm_config.model_config.max_model_len
        counts = [rules.count(length) for length in range(limit + 1)]
        self.counts, self.width = torch.tensor(counts, device=device), rules.most(limit)
        # A CUDA graph reads it in place.
        most = max(vllm_config.scheduler_config.max_num_seqs, self.max_cudagraph_size or 0)
        self.k = torch.zeros(most, dtype=torch.int64, device=device)
        self._init_reorder_batch_threshold(1)  # requests of one token come first

    @classmethod
    def get_cudagraph_support(cls, vllm_config: VllmConfig, kv_cache_spec: KVCacheSpec) -> AttentionCGSupport:
        """Return which batches a CUDA graph can hold."""
        own: AttentionCGSupport = super().get_cudagraph_support(vllm_config, kv_cache_spec)
        if read_options(vllm_config) is None:
            return own
        return min(own, AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE, key=lambda each: each.value)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> FlashAttentionMetadata:
        """Return vLLM's metadata, with the sparse rows if the model asks for BPC."""
        common = common_attn_metadata
        whole = super().build(common_prefix_len, common, fast_build)
        if self.counts is None:
            return whole
        requests, others, tokens, _ = split_decodes_and_prefills(common, decode_threshold=1)
        decoded = min(requests, tokens)  # tokens may be padded, and so may requests
        if not decoded:
            return whole
        k = torch.index_select(self.counts, 0, common.seq_lens[:decoded], out=self.k[:decoded])
        rows = Rows(common.block_table_tensor[:decoded], common.seq_lens[:decoded], k, self.width)
        made = Metadata(**vars(whole), sparse=rows)
        if others:  # a fast build leaves alone what the dense layers read of the other one
            made.rest = super().build(common_prefix_len, after(common, requests, tokens), True)
            if whole.mm_prefix_query_range_tensor is not None:  # it lies in a buffer of which there is one
                made.rest.mm_prefix_query_range_tensor = whole.mm_prefix_query_range_tensor[tokens:]
        return made

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> FlashAttentionMetadata:
        """Return the metadata of a batch to capture: of sequences of one token, which are soon attended to."""
        made = self.build(0, common_attn_metadata)
        if isinstance(made, Metadata):
            made.seq_lens.fill_(1)
            self.k.fill_(1)
        return made

    def update_block_table(
        self, metadata: FlashAttentionMetadata, blk_table: Tensor, slot_mapping: Tensor
    ) -> FlashAttentionMetadata:
        """Return the metadata for layers with other block tables.

        Args:
            metadata: of the step.
            blk_table: integers `[requests, pages]`.
            slot_mapping: integers `[tokens]`.
        """
        made = super().update_block_table(metadata, blk_table, slot_mapping)
        if isinstance(made, Metadata) and made.sparse is not None:
            rows = len(made.sparse.k)
            made.sparse = dataclasses.replace(made.sparse, table=blk_table[:rows])
            if made.rest is not None:
                made.rest = super().update_block_table(made.rest, blk_table[rows:], slot_mapping[rows:])
        return made


def after(common: CommonAttentionMetadata, requests: int, tokens: int) -> CommonAttentionMetadata:
    """Return vLLM's metadata of the requests behind the first ones, which have so many tokens."""
    bound, prefilling = common.seq_lens_cpu_upper_bound, common.is_prefilling
    return dataclasses.replace(
        common,
        query_start_loc=common.query_start_loc[requests:] - tokens,
        query_start_loc_cpu=common.query_start_loc_cpu[requests:] - tokens,
        seq_lens=common.seq_lens[requests:],
        num_reqs=common.num_reqs - requests,
        num_actual_tokens=common.num_actual_tokens - tokens,
        block_table_tensor=common.block_table_tensor[requests:],
        slot_mapping=common.slot_mapping[tokens:],
        seq_lens_cpu_upper_bound=None if bound is None else bound[requests:],
        is_prefilling=None if prefilling is None else prefilling[requests:],
        mm_req_doc_ranges=None,
    )


class Attention(Layer, FlashAttentionImpl):  # type: ignore[misc]
    """Hashes keys where they are cached, and attends to the best of them in decoding steps."""

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Take the projections of this layer, and a cache for its codes.

        Raises:
            BPCError: BPC cannot serve the layer, or its projections do not fit.
        """
        super().process_weights_after_loading(act_dtype)
        self.dtype = act_dtype

    def paged(self, layer: Any, kv_cache: Tensor) -> Paged:
        """Return how this layer lies in its cache. To keep it would keep the cache that vLLM profiles with.

        Args:
            layer: vLLM's layer, which has the scales of an FP8 cache.
            kv_cache: `[pages, kv_heads, size, 2 * head_dim]`.

        Raises:
            ModelError: vLLM splits pages into blocks, or an FP8 cache has a scale per head.
        """
        codes, cache, scales = self.codes(kv_cache), kv_cache, None
        if codes.codes.shape[2] != kv_cache.shape[2]:
            raise ModelError(f"vLLM splits pages into blocks of {kv_cache.shape[2]}: give it as --block-size")
        if self.kv_cache_dtype.startswith("fp8"):
            cache, scales = kv_cache.view(torch.float8_e4m3fn), (layer._k_scale, layer._v_scale)
            if max(each.numel() for each in scales) > 1:
                raise ModelError("BPC serves FP8 caches with one scale per layer, and this model has one per head")
        return Paged(codes, cache, scales=scales)

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Write keys and values `[tokens, kv_heads, head_dim]` to `slot_mapping [tokens]` as vLLM does, and codes.

        The codes are those of the keys as they are, before an FP8 cache rounds them.
        """
        super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)
        if self.projections is not None:
            keys = key[: len(slot_mapping)].transpose(0, 1).unsqueeze(0)
            fresh = Fresh(self.projections.encoder, keys, slot_mapping)
            self.backend.hash_into(fresh, self.paged(layer, kv_cache).codes)

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: FlashAttentionMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Write the attention of every token to `output`, as vLLM's own does.

        Queries are `[tokens, heads, head_dim]`, keys and values `[tokens, kv_heads, head_dim]`, the cache
        `[pages, kv_heads, size, 2 * head_dim]`.
        """
        stock = super().forward
        sparse = attn_metadata.sparse if isinstance(attn_metadata, Metadata) else None
        if self.projections is None or sparse is None:
            if attn_metadata is None and self.projections is not None:
                self.reserve(query.device)
            return stock(layer, query, key, value, kv_cache, attn_metadata, output, output_scale, output_block_scale)
        assert isinstance(attn_metadata, Metadata)
        rows = len(sparse.k)
        if attn_metadata.rest is not None:
            stock(layer, query[rows:], key, value, kv_cache, attn_metadata.rest, output[rows:])
        own = query[:rows].unflatten(1, (self.num_kv_heads, -1))
        if own.dtype != self.dtype:  # of an FP8 cache vLLM quantises the queries, too
            own = (own.float() * layer._q_scale).to(self.dtype)
        found, _ = self.attend(own, self.paged(layer, kv_cache), sparse)
        output[:rows] = found.view(output[:rows].shape)
        return output

    def attend(self, query: Tensor, paged: Paged, rows: Rows) -> tuple[Tensor, Tensor]:
        """Attend to the best tokens of each row, `[R, H_KV, G, D]`. Also return these tokens."""
        assert self.projections is not None
        projection = self.projections.projection
        return self.backend.attend_pages(query, projection, paged, rows, self.choice, gain=self.settings.gain)

    def reserve(self, device: torch.device) -> None:
        """Take as much memory as a step does, and give it back: vLLM counts the most that a pass took."""
        limit, requests = self.config.model_config.max_model_len, self.config.scheduler_config.max_num_seqs
        sizes = self.num_kv_heads, self.num_heads // self.num_kv_heads, limit
        listed = 8 * requests * self.num_kv_heads * self.settings.most(limit)
        scored = dispatch.workspace(device, sizes, self.choice, self.settings.bits, requests)
        torch.empty(listed + scored, dtype=torch.uint8, device=device)
