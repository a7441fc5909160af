"""vLLM's attention on a CPU and on an NVIDIA GPU with BPC's decoding steps; prefill and dense layers stay vLLM's.

The two differ in which requests a step hands over, and in how a layer lies in vLLM's cache. On a CPU these are the
requests that choose tokens. On a GPU a step waits for nothing on the host, and every launch has the same sizes for as
many requests, so that CUDA graphs capture it: these are all requests of one token, even where that token is the rest of
a prompt.
"""

import dataclasses
import functools
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadata,
    FlashAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.utils import split_decodes_and_prefills
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheSpec

from bpc_calib.backends.switch_over import in_vllm, sparse_from
from bpc_calib.errors import ModelError
from bpc_calib.method.rules import Rules, spread
from bpc_calib.method.state import Rows, State
from bpc_calib.serving.layer import Layer, Split, announce, asked, choosing_layers, settings, shares_on, sized
from bpc_calib.serving.options import Options, read_options
from bpc_calib.serving.packing import packing, unpacked_keys

__all__ = ["CPUAttention", "CPUBackend", "CPUBuilder", "GPUAttention", "GPUBackend", "GPUBuilder"]


HASHED_AT_ONCE = 4096  # tokens


class CPUAttention(Layer, CPUAttentionBackendImpl):  # type: ignore[misc]
    """A layer over pages whose numbers vLLM's kernels pack; a step reads keys from copies in rows."""

    over: tuple[Tensor, State, Tensor] | None = None  # the cache, the state over it, and where its keys' numbers lie

    @staticmethod
    def copied(head_size: int, dtype: torch.dtype) -> int:
        """Return the bytes of a key."""
        return head_size * dtype.itemsize

    def state(self, layer: Any, kv_cache: Tensor) -> State:
        """As `Layer.state`; the same object for as long as the cache is the same tensor."""
        if self.over is None or self.over[0] is not kv_cache:
            size, dim = kv_cache.shape[2], kv_cache.shape[3] // 2
            keys_at, values_at = packing(layer.isa, size, dim, kv_cache.dtype)
            copies, codes, gain = self.kept(kv_cache)
            keys, values = copies.view(kv_cache.dtype), kv_cache.view(*kv_cache.shape[:2], -1)
            state = State(keys, values, codes, gain, values_at=values_at, copied=True)
            if torch.equal(values_at.flatten(), torch.arange(size * dim, 2 * size * dim)):  # they lie in rows
                values = values[..., size * dim :].unflatten(-1, (size, dim))
                state = dataclasses.replace(state, values=values, values_at=None)
            self.over = kv_cache, state, keys_at
        return self.over[1]

    def unhashed(self, split: Split, key: Tensor, kv_cache: Tensor, state: State) -> Tensor:
        """As `Layer.unhashed`: all newest keys."""
        assert self.over is not None
        for slots in () if split.older is None else split.older.split(HASHED_AT_ONCE):
            self.backend.append(state, self.codebook, unpacked_keys(kv_cache, self.over[2], slots), None, slots)
        return key if len(key) == len(split.rows.k) else key[split.tokens]


class GPUAttention(Layer, FlashAttentionImpl):  # type: ignore[misc]
    """A layer over pages that hold the key of a token, and then its value."""

    def state(self, layer: Any, kv_cache: Tensor) -> State:
        """As `Layer.state`, made anew: to keep it would keep the cache that vLLM profiles with.

        Raises:
            ModelError: vLLM splits pages into blocks, or an FP8 cache has a scale per head.
        """
        _, codes, gain = self.kept(kv_cache)
        if codes.shape[2] != kv_cache.shape[2]:
            raise ModelError(f"vLLM splits pages into blocks of {kv_cache.shape[2]}: give it as --block-size")
        scales = None
        if self.kv_cache_dtype.startswith("fp8"):
            kv_cache, scales = kv_cache.view(torch.float8_e4m3fn), (layer._k_scale, layer._v_scale)
            if max(each.numel() for each in scales) > 1:
                raise ModelError("BPC serves FP8 caches with one scale per layer, and this model has one per head")
        keys, values = kv_cache.chunk(2, -1)
        return State(keys, values, codes, gain, scales=scales)

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Write keys and values `[tokens, kv_heads, head_dim]` to `slot_mapping [tokens]` as vLLM does, and codes.

        The codes are those of the keys as they are, before an FP8 cache rounds them.
        """
        super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)
        if self.codebook is not None:
            keys = key[: len(slot_mapping)].transpose(0, 1).unsqueeze(0)
            self.backend.append(self.state(layer, kv_cache), self.codebook, keys, None, slot_mapping.to(torch.int64))


class CPUBuilder(CPUAttentionMetadataBuilder):  # type: ignore[misc]
    """Finds BPC's rows of a step, once for all layers that share block tables, and their tokens without codes."""

    shares: tuple[Options, NDArray[np.int64] | None] | None = None  # of these options (`shares_on`)

    def __init__(
        self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        options = read_options(vllm_config)
        self.chooses = choosing_layers(vllm_config, layer_names) > 0  # not for a model that drafts
        if options is not None and self.chooses:
            announce(vllm_config, self.rules(options, 1))
        self.coded = np.zeros(0, dtype=np.int64)  # [pages]: so many tokens at the beginning of each have codes

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> CPUAttentionMetadata:
        """Return vLLM's metadata, with BPC's rows if the model asks for them."""
        common = common_attn_metadata
        whole = super().build(common_prefix_len, common, fast_build)
        options = read_options(self.vllm_config)
        self.forget(common.slot_mapping.numpy())  # without options, too: they can come back
        if options is None or not self.chooses:
            return whole
        requests, starts, shares = common.num_reqs, common.query_start_loc_cpu, self.shares_of(options)
        lengths, rules = common.seq_lens.numpy()[:requests].astype(np.int64), self.rules(options, requests)
        counts = np.array([rules.count(length) for length in lengths.tolist()])
        if not (choose := choosing(common, counts)).any():
            return whole
        tokens, own, ks = starts.numpy()[:requests][choose].astype(np.int64), lengths[choose], counts[choose]
        most = int(own.max())
        table = common.block_table_tensor.numpy()[:requests, : -(-most // self.block_size)][choose]
        width, given = int(ks.max()), torch.from_numpy(table)
        rows = Rows(torch.from_numpy(own), torch.from_numpy(ks).unsqueeze(1), most, width, block_table=given)
        by_layer = None if shares is None else spread(ks, own, shares)
        width = width if by_layer is None else int(by_layer.max())
        split = Split(
            rows, slice(0, len(tokens)) if int(tokens[-1]) == len(tokens) - 1 else torch.from_numpy(tokens),
            k=None if by_layer is None else torch.from_numpy(by_layer), width=width,
            lists=torch.empty(len(own), self.kv_cache_spec.num_kv_heads, width, dtype=torch.int64),
            older=self.without_codes(table, own),
        )  # fmt: skip
        if not choose.all():
            left, sizes = torch.from_numpy(~choose).nonzero().squeeze(-1), starts.diff()[:requests]
            others, sizes = torch.from_numpy(~choose).repeat_interleave(sizes).nonzero().squeeze(-1), sizes[left]
            begin = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)]).to(starts.dtype)
            rest = some(
                common, left, others, (begin, begin), num_reqs=len(left), num_actual_tokens=len(others),
                max_query_len=int(sizes.max()), max_seq_len=int(lengths[~choose].max()),
            )  # fmt: skip
            built = super().build(common_prefix_len, rest, fast_build)
            split = dataclasses.replace(split, others=built, other_tokens=others)
        whole.bpc = split
        return whole

    def shares_of(self, options: Options) -> NDArray[np.int64] | None:
        """Return `shares_on` the CPU, found anew where the options are others."""
        if self.shares is None or self.shares[0] != options:
            found = shares_on(self.vllm_config, options, torch.device("cpu"))
            self.shares = options, None if found is None else found.numpy()
        return self.shares[1]

    def forget(self, slots: NDArray[np.int64]) -> None:
        """Forget the codes from slots on that get other tokens, `[tokens]`; negative ones are padding."""
        changed = slots[(slots >= 0) & (slots < len(self.coded) * self.block_size)]
        np.minimum.at(self.coded, changed // self.block_size, changed % self.block_size)

    def without_codes(self, table: NDArray[np.int32], lengths: NDArray[np.int64]) -> Tensor | None:
        """Return the slots of sequences whose tokens have no codes yet, without the newest; None: there are none.

        From now on all count as hashed, for this step hashes them in every layer.

        Args:
            table: `[sequences, pages]`.
            lengths: `[sequences]`.
        """
        size = self.block_size
        used = (lengths[:, None] - size * np.arange(table.shape[1])).clip(0, size)  # tokens of each page
        pages = np.where(used, table, 0)
        if (most := int(pages.max())) >= len(self.coded):
            self.coded = np.concatenate([self.coded, np.zeros(2 * (most + 1) - len(self.coded), dtype=np.int64)])
        every, last = np.arange(len(lengths)), (lengths - 1) // size
        older = used.copy()
        older[every, last] -= 1
        begin, missing = self.coded[pages], None
        if (begin < older).any():
            at, places = (begin < older).nonzero()
            runs = zip(pages[at, places] * size, begin[at, places], older[at, places], strict=True)
            slots = np.concatenate([np.arange(page + first, page + end) for page, first, end in runs])
            missing = torch.from_numpy(np.unique(slots))  # sequences may share pages
        np.maximum.at(self.coded, pages, used)
        return missing

    def rules(self, options: Options, requests: int) -> Rules:
        """Return the rules of a step with so many requests."""
        spec = self.kv_cache_spec
        token = 2 * spec.num_kv_heads * spec.head_size * spec.dtype.itemsize
        heads = self.vllm_config.model_config.get_num_attention_heads(self.vllm_config.parallel_config)
        return rules_of(options, requests, token, heads)


@functools.cache
def rules_of(options: Options, requests: int, token: int, heads: int) -> Rules:
    """Return the rules of a step on a CPU.

    Args:
        options: of the model.
        requests: of the step.
        token: bytes of the keys and values that one layer keeps of a token.
        heads: query heads of a layer.
    """
    found = settings(options)
    if options.min_context is not None:
        return found
    start = sparse_from(token, requests, heads, torch.device("cpu"), in_vllm())
    return dataclasses.replace(found, min_context=start)


def choosing(common: CommonAttentionMetadata, counts: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return which requests choose tokens in this step, of which each may attend to `counts`: `[requests]`.

    A single token can also be the rest of a prompt, whose other tokens were cached: it attends to everything, as in a
    prefill.
    """
    one = np.diff(common.query_start_loc_cpu.numpy())[: len(counts)] == 1
    if common.is_prefilling is not None:
        one &= ~common.is_prefilling.numpy()[: len(counts)]
    return one & (counts < common.seq_lens.numpy()[: len(counts)])


class GPUBuilder(FlashAttentionMetadataBuilder):  # type: ignore[misc]
    """Finds BPC's rows of a step, once for all layers that share block tables."""

    counts: Tensor | None = None  # int64 [max_model_len + 1]: how many tokens a sequence of so many attends to

    def __init__(
        self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        options, choosing = read_options(vllm_config), choosing_layers(vllm_config, layer_names)
        # Layers of both kinds share a window where vLLM's manager of hybrid caches is off. And what is built for layers
        # without a window may go to others of their kind, by `update_block_table`.
        slides = getattr(kv_cache_spec, "sliding_window", None) is not None
        if options is None or (slides and not choosing):
            return
        rules, limit = settings(options), vllm_config.model_config.max_model_len
        if choosing:
            announce(vllm_config, rules)
        counts = [rules.count(length) for length in range(limit + 1)]
        self.counts, self.width = torch.tensor(counts, device=device), rules.most(limit)
        # A CUDA graph reads it in place.
        most = max(vllm_config.scheduler_config.max_num_seqs, self.max_cudagraph_size or 0)
        self.k = torch.zeros(most, dtype=torch.int64, device=device)
        self.shares = shares_on(vllm_config, options, device)
        if self.shares is not None:
            layers, _, kv_heads = self.shares.shape
            self.spread = torch.zeros(layers, most, kv_heads, dtype=torch.int64, device=device)
            by_layer = (dataclasses.replace(rules, shares=each) for each in self.shares.tolist())
            self.spread_width = max(each.most(limit) for each in by_layer)
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
        """Return vLLM's metadata, with BPC's rows if the model asks for them."""
        common = common_attn_metadata
        whole = super().build(common_prefix_len, common, fast_build)
        if self.counts is None:
            return whole
        requests, others, tokens, _ = split_decodes_and_prefills(common, decode_threshold=1)
        decoded = min(requests, tokens)  # tokens may be padded, and so may requests
        if not decoded:
            return whole
        # A CUDA graph reads table and lengths in place, so these keep vLLM's dtype.
        table, lengths = common.block_table_tensor[:decoded], common.seq_lens[:decoded]
        k = torch.index_select(self.counts, 0, lengths, out=self.k[:decoded]).unsqueeze(1)
        longest = min(len(self.counts) - 1, table.shape[1] * self.block_size)
        whole.bpc = Split(Rows(lengths, k, longest, min(self.width, longest), block_table=table), slice(0, decoded))
        if self.shares is not None:
            by_layer = self.spread[:, :decoded].copy_(spread(k.squeeze(1), lengths.long(), self.shares))
            width = min(self.spread_width, longest)
            whole.bpc = dataclasses.replace(whole.bpc, k=by_layer, width=width)
        if others:  # a fast build leaves alone what the dense layers read of the other one
            starts = common.query_start_loc[requests:] - tokens, common.query_start_loc_cpu[requests:] - tokens
            rest = some(
                common, slice(requests, None), slice(tokens, None), starts, num_reqs=common.num_reqs - requests,
                num_actual_tokens=common.num_actual_tokens - tokens,
            )  # fmt: skip
            built = super().build(common_prefix_len, rest, True)
            if whole.mm_prefix_query_range_tensor is not None:  # it lies in a buffer of which there is one
                built.mm_prefix_query_range_tensor = whole.mm_prefix_query_range_tensor[tokens:]
            whole.bpc = dataclasses.replace(whole.bpc, others=built, other_tokens=slice(decoded, None))
        return whole

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> FlashAttentionMetadata:
        """Return the metadata of a batch to capture: of sequences of one token, which are soon attended to."""
        made = self.build(0, common_attn_metadata)
        if hasattr(made, "bpc"):
            made.seq_lens.fill_(1)
            self.k.fill_(1)
            if self.shares is not None:
                self.spread.fill_(1)
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
        split: Split | None = getattr(made, "bpc", None)
        if split is not None:
            count, others = len(split.rows.k), split.others
            if others is not None:
                others = super().update_block_table(others, blk_table[count:], slot_mapping[count:])
            rows = dataclasses.replace(split.rows, block_table=blk_table[:count])
            made.bpc = dataclasses.replace(split, rows=rows, others=others)
        return made


def some(
    common: CommonAttentionMetadata,
    requests: slice | Tensor,
    tokens: slice | Tensor,
    starts: tuple[Tensor, Tensor],
    **sizes: int,
) -> CommonAttentionMetadata:
    """Return vLLM's metadata of some requests alone.

    Args:
        common: vLLM's metadata of the step.
        requests: a slice, or int64 `[requests]`.
        tokens: their rows of the queries: a slice, or int64 `[tokens]`.
        starts: where each begins among these rows, on the device and on the host.
        sizes: other fields.
    """
    names = ("seq_lens", "block_table_tensor", "seq_lens_cpu_upper_bound", "is_prefilling")
    kept = {name: None if (each := getattr(common, name)) is None else each[requests] for name in names}
    return dataclasses.replace(
        common, query_start_loc=starts[0], query_start_loc_cpu=starts[1], slot_mapping=common.slot_mapping[tokens],
        mm_req_doc_ranges=None, **kept, **sizes,
    )  # fmt: skip


class _Backend:
    """To inherit from before a backend of vLLM's: it stays vLLM's own, except for a model that asks for BPC."""

    attention: type[Any]
    builder: type[Any]

    @classmethod
    def get_impl_cls(cls) -> type[Any]:
        """Return the implementation for the current config.

        Raises:
            BPCError: the options, the artifact or the model do not fit; the message is one line.
        """
        return super().get_impl_cls() if asked() is None else cls.attention  # type: ignore[misc]

    @classmethod
    def get_builder_cls(cls) -> type[Any]:
        """Return the class that finds BPC's rows of a step."""
        return cls.builder

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        """Give pages room for codes, where a model has layers of several kinds."""
        return sized(spec, cls.attention.copied(spec.head_size, spec.dtype))


class CPUBackend(_Backend, CPUAttentionBackend):  # type: ignore[misc]
    """The one that vLLM takes on a CPU."""

    attention, builder = CPUAttention, CPUBuilder

    @classmethod
    def get_impl_cls(cls) -> type[Any]:
        """As above; `ModelError` for an FP8 cache."""
        own = super().get_impl_cls()
        if own is cls.attention and get_current_vllm_config().cache_config.cache_dtype.startswith("fp8"):
            raise ModelError("BPC on a CPU does not serve FP8 caches: leave out --kv-cache-dtype")
        return own


class GPUBackend(_Backend, FlashAttentionBackend):  # type: ignore[misc]
    """FlashAttention's."""

    attention, builder = GPUAttention, GPUBuilder
