"""The attention of vLLM on a CPU with BPC's decoding steps. Prefill, short sequences and dense layers stay vLLM's."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)
from vllm.v1.kv_cache_interface import AttentionSpec

from bpc_calib.errors import ModelError
from bpc_calib.method.paging import Fresh, Paged, Rows
from bpc_calib.runtime.rules import Rules
from bpc_calib.serving.layer import Layer, asked, settings, sized
from bpc_calib.serving.options import read_options
from bpc_calib.serving.packing import packing

__all__ = ["Attention", "Backend", "Metadata", "SparseRows", "sparse_rows"]


class Backend(CPUAttentionBackend):  # type: ignore[misc]
    """vLLM's own backend, except for a model that asks for BPC."""

    @staticmethod
    def get_impl_cls() -> type[CPUAttentionBackendImpl]:
        """Return the implementation for the current config.

        Raises:
            BPCError: the options, the artifact or the model do not fit; the message is one line.
        """
        if asked() is None:
            return CPUAttentionBackendImpl
        if get_current_vllm_config().cache_config.cache_dtype.startswith("fp8"):
            raise ModelError("BPC on a CPU does not serve FP8 caches: leave out --kv-cache-dtype")
        return Attention

    @staticmethod
    def get_builder_cls() -> type[CPUAttentionMetadataBuilder]:
        """Return the class that finds the sparse rows of a step."""
        return Builder

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        """Give pages room for codes, where a model has layers of several kinds."""
        return sized(spec)


@dataclass(frozen=True)
class SparseRows:
    """The requests of a step that choose tokens."""

    tokens: slice | Tensor  # their rows in the queries; int64 [R] where other requests lie between them
    rows: Rows


@dataclass
class Metadata(CPUAttentionMetadata):  # type: ignore[misc]
    """vLLM's metadata of a step, and which rows are BPC's."""

    sparse: SparseRows | None = None
    dense: CPUAttentionMetadata | None = None  # of the other requests
    dense_tokens: Tensor | None = None  # int64, their rows in the queries


class Builder(CPUAttentionMetadataBuilder):  # type: ignore[misc]
    """Finds the sparse rows of a step, once for all layers that share block tables."""

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> CPUAttentionMetadata:
        """Return vLLM's metadata, with the sparse rows if the model asks for BPC."""
        whole = super().build(common_prefix_len, common_attn_metadata, fast_build)
        options = read_options(self.vllm_config)
        if options is None or self.window_size != -1:
            return whole
        k = wanted(settings(options), common_attn_metadata)
        chosen = sparse_requests(common_attn_metadata, k)
        if not chosen.any():
            return whole
        made = Metadata(
            **vars(whole), sparse=sparse_rows(common_attn_metadata, chosen, k, self.kv_cache_spec.block_size)
        )
        if not chosen.all():
            made.dense_tokens, rest = without(common_attn_metadata, chosen)
            made.dense = super().build(common_prefix_len, rest, fast_build)
        return made


def wanted(settings: Rules, common: CommonAttentionMetadata) -> Tensor:
    """Return how many tokens each request attends to: int64 `[requests]`."""
    lengths = common.seq_lens[: common.num_reqs].tolist()
    return torch.tensor([settings.count(length) for length in lengths], dtype=torch.int64)


def sparse_requests(common: CommonAttentionMetadata, k: Tensor) -> Tensor:
    """Return which requests choose tokens in this step, of which each may attend to `k`: bool `[requests]`.

    A single token can also be the rest of a prompt, whose other tokens were cached: it attends to everything, as in a
    prefill.
    """
    one = common.query_start_loc_cpu.diff()[: common.num_reqs] == 1
    if common.is_prefilling is not None:
        one &= ~common.is_prefilling[: common.num_reqs]
    return one & (k < common.seq_lens[: common.num_reqs])


def sparse_rows(common: CommonAttentionMetadata, chosen: Tensor, k: Tensor, size: int) -> SparseRows:
    """Return the rows of the chosen requests, with as many pages as the longest has.

    Args:
        common: vLLM's metadata of the step.
        chosen: bool `[requests]`.
        k: int64 `[requests]`, tokens that each may attend to.
        size: tokens of a page.
    """
    tokens = common.query_start_loc[: common.num_reqs][chosen].to(torch.int64)
    lengths, k = common.seq_lens[: common.num_reqs][chosen].to(torch.int64), k[chosen]
    pages = -(-int(lengths.max()) // size)
    return SparseRows(
        tokens=slice(0, len(tokens)) if int(tokens[-1]) == len(tokens) - 1 else tokens,
        rows=Rows(common.block_table_tensor[: common.num_reqs, :pages][chosen].contiguous(), lengths, k, int(k.max())),
    )


def without(common: CommonAttentionMetadata, chosen: Tensor) -> tuple[Tensor, CommonAttentionMetadata]:
    """Return the query rows of the other requests, and vLLM's metadata of these requests alone.

    Args:
        common: vLLM's metadata of the step.
        chosen: bool `[requests]`, those to leave out.

    Returns:
        int64 `[tokens]`, and the metadata.
    """
    rest, sizes = ~chosen, common.query_start_loc_cpu.diff()[: common.num_reqs]
    tokens = rest.repeat_interleave(sizes).nonzero().squeeze(-1)
    starts = torch.cat([sizes.new_zeros(1), sizes[rest].cumsum(0)]).to(common.query_start_loc.dtype)
    lengths = common.seq_lens[: common.num_reqs][rest]
    return tokens, dataclasses.replace(
        common,
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=lengths,
        num_reqs=len(lengths),
        num_actual_tokens=len(tokens),
        max_query_len=int(sizes[rest].max()),
        max_seq_len=int(lengths.max()),
        block_table_tensor=common.block_table_tensor[: common.num_reqs][rest],
        slot_mapping=common.slot_mapping[tokens],
        is_prefilling=None if common.is_prefilling is None else common.is_prefilling[: common.num_reqs][rest],
    )


class Attention(Layer, CPUAttentionBackendImpl):  # type: ignore[misc]
    """Hashes keys where they are cached, and attends to the best of them in decoding steps."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fresh: Fresh | None = None
        self.lying: tuple[Tensor, Paged] | None = None

    def paged(self, kv_cache: Tensor, isa: str) -> Paged:
        """Return how this layer lies in its cache, which stays the same tensor for as long as vLLM serves.

        Args:
            kv_cache: `[pages, kv_heads, size, 2 * head_dim]`.
            isa: as in `packing`.
        """
        if self.lying is None or self.lying[0] is not kv_cache:
            pages, kv_heads, size, content = kv_cache.shape
            flat = kv_cache.view(pages, kv_heads, size * content)
            self.lying = kv_cache, Paged(self.codes(kv_cache), flat, packing(isa, size, content // 2, kv_cache.dtype))
        return self.lying[1]

    def hash_fresh(self, paged: Paged) -> None:
        """Hash the keys that were cached last, if that is still to be done."""
        fresh, self.fresh = self.fresh, None
        if fresh is not None:
            self.backend.hash_into(fresh, paged.codes)

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Write keys and values `[tokens, kv_heads, head_dim]` to `slot_mapping [tokens]` as vLLM does, and codes."""
        super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)
        if self.projections is None:
            return
        self.hash_fresh(self.paged(kv_cache, layer.isa))
        keys = key[: len(slot_mapping)].transpose(0, 1).unsqueeze(0)
        self.fresh = Fresh(self.projections.encoder, keys, slot_mapping)  # hashed in `forward`, which follows

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: CPUAttentionMetadata | None,
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
            if self.fresh is not None:
                self.hash_fresh(self.paged(kv_cache, layer.isa))
            return stock(layer, query, key, value, kv_cache, attn_metadata, output, output_scale, output_block_scale)
        assert isinstance(attn_metadata, Metadata)
        rest = attn_metadata.dense_tokens
        if rest is not None:
            own = torch.empty_like(output[: len(rest)])
            output[rest] = stock(layer, query[rest], key, value, kv_cache, attn_metadata.dense, own)
        grouped = query[sparse.tokens].unflatten(1, (self.num_kv_heads, -1))
        found, _ = self.attend(grouped, self.paged(kv_cache, layer.isa), sparse.rows)
        output[sparse.tokens] = found.view(-1, *output.shape[1:])
        return output

    def attend(self, query: Tensor, paged: Paged, rows: Rows) -> tuple[Tensor, Tensor]:
        """Hash new keys, and attend to the best tokens of each row, `[R, H_KV, G, D]`. Also return these tokens."""
        assert self.projections is not None
        fresh, self.fresh = self.fresh, None
        return self.backend.attend_pages(
            query, self.projections.projection, paged, rows, self.choice, gain=self.settings.gain, fresh=fresh
        )
