"""An attention layer of vLLM with BPC, whatever kernels it has: checks, codebook, room for codes, and a step."""

import functools
import logging
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig, get_current_vllm_config, get_current_vllm_config_or_none
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.attention.backend import AttentionType
from vllm.v1.kv_cache_interface import AttentionSpec

from bpc_calib.backends import dispatch
from bpc_calib.errors import InputError, ModelError
from bpc_calib.method import step
from bpc_calib.method.codebook import Codebook
from bpc_calib.method.defaults import budget_text
from bpc_calib.method.rules import Rules
from bpc_calib.method.state import Rows, State
from bpc_calib.models.description import describe, first_head
from bpc_calib.serving.code_cache import CodeCache, Kept, add_code_cache, behind_pages, with_room
from bpc_calib.serving.options import (
    Options,
    check_options,
    dense,
    layer_codebook,
    open_artifact,
    read_options,
    rules,
    shares,
)

__all__ = [
    "Layer", "Split", "announce", "asked", "check", "choosing_layers", "settings", "sized",
]  # fmt: skip

logger = logging.getLogger("vllm.bpc")  # vLLM shows what loggers below its own say

_latest: VllmConfig | None = None  # vLLM asks for the size of pages outside of its current config


def asked() -> Options | None:
    """Return the options of vLLM's current config, checked; None: BPC is not asked for.

    Raises:
        BPCError: the options, the artifact or the model do not fit; the message is one line.
    """
    global _latest
    config = get_current_vllm_config()
    drafts, model = config.speculative_config, config.model_config
    # Where no model drafts, as with n-grams, vLLM names the served one.
    if drafts is not None and model is drafts.draft_model_config and model is not drafts.target_model_config:
        return None
    _latest = config
    options = read_options(config)
    if options is not None:
        check(config, options)
    return options


def check(config: VllmConfig, options: Options) -> None:
    """Raise a `BPCError` unless BPC can serve the model of this config."""
    check_options(options, config.model_config.hf_config)
    if config.model_config.use_mla:
        raise ModelError(f"{config.model_config.model}: BPC does not serve multi-head latent attention")
    if config.parallel_config.decode_context_parallel_size > 1:
        raise ModelError("BPC does not serve contexts split over ranks: leave out --decode-context-parallel-size")
    if config.kv_transfer_config is not None:
        raise ModelError("BPC does not serve KV connectors, which move no codes: leave out --kv-transfer-config")
    if "linear_attention" in describe(config.model_config.hf_config).layer_types:
        raise ModelError(f"{config.model_config.model}: BPC does not serve layers of linear attention in vLLM")


def choosing_layers(config: VllmConfig, names: Iterable[str]) -> int:
    """Return how many of these layers of vLLM's choose tokens; those of a model that drafts never do."""
    layers = config.compilation_config.static_forward_context
    impls = (getattr(layers.get(name), "impl", None) for name in names)
    return sum(getattr(impl, "codebook", None) is not None for impl in impls)


def announce(config: VllmConfig, rules: Rules) -> None:
    """Say in vLLM's log that BPC chooses tokens, in how many layers of the model and from which length on.

    Args:
        config: of vLLM.
        rules: of a step with one request.
    """
    least = rules.budget if isinstance(rules.budget, int) else 0
    logger.info(
        "BPC chooses in %d of %d layers: a step attends to %s of the cached tokens, at least to %s, from %s tokens on",
        choosing_layers(config, config.compilation_config.static_forward_context),
        describe(config.model_config.hf_config).num_layers, budget_text(rules.budget),
        f"{rules.min_tokens:,}", f"{max(rules.min_context, rules.min_tokens + 1, least + 1):,}",
    )  # fmt: skip
    if config.speculative_config is not None:
        logger.warning(
            "BPC chooses in no step that verifies drafts (speculative_config): with most methods no other step is left"
        )


def is_hybrid(config: VllmConfig) -> bool:
    """Return whether some layers do not attend to everything."""
    model = describe(config.model_config.hf_config)
    return len(model.full_layers) < model.num_layers


@functools.cache
def settings(options: Options) -> Rules:
    """Return the rules of every layer, for options that are checked."""
    return rules(options, open_artifact(options.artifact))


def sized(spec: AttentionSpec, copied: int) -> AttentionSpec:
    """Return a spec with room for codes behind the pages, where a model has layers of several kinds.

    Args:
        spec: of a layer.
        copied: bytes of each key that a page also has room for.
    """
    config = get_current_vllm_config_or_none() or _latest
    options = None if config is None else read_options(config)
    if config is None or options is None or spec.page_size_padded is not None or not is_hybrid(config):
        return spec
    return with_room(spec, Kept(-(-open_artifact(options.artifact).metadata["algorithm"]["bits"] // 64), copied))


@dataclass(frozen=True)
class Split:
    """The requests of a step: BPC's, of one token each, and the others. It is the `bpc` of vLLM's metadata."""

    rows: Rows
    tokens: slice | Tensor  # rows of the queries; int64 where other requests lie between them
    k: Tensor | None = None  # int64 [layers, requests, H_KV], in place of that of the rows in layers with shares
    width: int = 0  # no such `k` is above it
    lists: Tensor | None = None  # int64 [requests, H_KV, width], where each layer in turn lists the tokens it chose
    others: Any = None  # vLLM's metadata of the other requests; None: there are none
    other_tokens: slice | Tensor | None = None  # their rows of the queries
    older: Tensor | None = None  # int64, slots of cached tokens without codes, but for the newest; None: there are none

    @functools.cached_property
    def by_layer(self) -> list[Rows]:
        """The rows of each layer with shares, else those of all; the first layer makes them, with its code cached."""
        rows, ks = self.rows, () if self.k is None else self.k.unbind()
        return [Rows(rows.lengths, k, rows.longest, self.width, block_table=rows.block_table) for k in ks] or [rows]


def shares_on(config: VllmConfig, options: Options, device: torch.device) -> Tensor | None:
    """Return the shares of this rank's KV heads in the layers that have some: int64 `[layers, 2 LEVELS, H_KV]`."""
    layers = config.compilation_config.static_forward_context.values()
    own = next((each.impl for each in layers if getattr(getattr(each, "impl", None), "codebook", None)), None)
    found = shares(options)
    if own is None or not found:
        return None
    heads = own.heads()
    return torch.tensor([[level[heads] for level in found[index]] for index in sorted(found)], device=device)


class Layer:
    """To inherit from before an implementation of vLLM's: hashes keys where they are cached, attends to the best."""

    # That implementation sets them.
    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float
    sliding_window: Any  # -1 or (-1, -1): none
    attn_type: str
    alibi_slopes: Any
    logits_soft_cap: float | None
    sinks: Any
    kv_sharing_target_layer_name: str | None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.config = get_current_vllm_config()
        self.codebook: Codebook | None = None  # None: the layer attends to everything
        self.cache: CodeCache | None = None  # None: codes lie behind the pages
        self.nth = 0  # among the layers with shares

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Take the codebook of this layer, and a cache for its codes.

        Raises:
            BPCError: BPC cannot serve the layer, or its projections do not fit.
        """
        super().process_weights_after_loading(act_dtype)  # type: ignore[misc]
        options = read_options(self.config)
        layers = self.config.compilation_config.static_forward_context
        name = next(name for name, layer in layers.items() if getattr(layer, "impl", None) is self)
        index = extract_layer_index(name)
        if options is None or index in dense(options):
            return
        artifact, device = open_artifact(options.artifact), torch.device(self.config.device_config.device)
        codebook = layer_codebook(artifact, index, self.heads(), act_dtype, device)
        if codebook is None:
            return
        if self.codebook is not None:  # the weights were loaded again
            self.codebook.refill(codebook)
            return
        self.check(name)
        group = self.num_heads // self.num_kv_heads
        query = codebook.projection.new_empty(1, self.num_kv_heads, group, self.head_size)
        self.backend = dispatch.find(query, State(query, query))
        if query.is_cuda and self.backend.sparse_decode is step.sparse_decode:  # which no CUDA graph can hold
            raise InputError("BPC's kernels do not serve this model on this GPU: the warning above says why")
        self.codebook, self.rules = codebook, replace(settings(options), scaling=self.scale)
        if index in (found := shares(options)):
            self.nth = sorted(found).index(index)
            self.rules = replace(self.rules, shares=tuple(each[self.heads()] for each in found[index]))
        if not is_hybrid(self.config):
            kept = Kept(codebook.words, self.copied(self.head_size, act_dtype))
            self.cache = add_code_cache(self.config, name, self.num_kv_heads, kept)

    def check(self, name: str) -> None:
        """Raise `ModelError` if the layer does more than attention over its own cached keys."""
        for fault, reason in (
            (self.attn_type != AttentionType.DECODER, f"attention of type {self.attn_type}"),
            (self.alibi_slopes is not None, "ALiBi"),
            (bool(self.logits_soft_cap), "a soft cap on the logits"),
            (self.sinks is not None, "attention sinks"),
            (self.kv_sharing_target_layer_name is not None, "keys shared with another layer"),
        ):
            if fault:
                raise ModelError(f"{name} has {reason}, which BPC does not serve")
        if self.sliding_window not in (-1, (-1, -1)):  # as long as the model, or it would have no projections
            raise ModelError(f"vLLM gives {name} a sliding window as long as the model: add --disable-sliding-window")

    def heads(self) -> slice:
        """Return the KV heads of this rank."""
        from vllm.distributed import get_tensor_model_parallel_rank

        ranks = self.config.parallel_config.tensor_parallel_size
        total = self.config.model_config.get_total_num_kv_heads()
        first = first_head(total, get_tensor_model_parallel_rank() if ranks > 1 else 0, ranks)
        return slice(first, first + self.num_kv_heads)

    @staticmethod
    def copied(head_size: int, dtype: torch.dtype) -> int:
        """Return the bytes of a key that BPC keeps in a row: none, for vLLM's own lie in rows."""
        return 0

    def kept(self, kv_cache: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return copies, codes and gains (`Kept.parts`) for the cache `[pages, kv_heads, size, 2 * head_dim]`."""
        if self.cache is not None:
            return self.cache.pages()
        assert self.codebook is not None
        return behind_pages(kv_cache, Kept(self.codebook.words, self.copied(self.head_size, kv_cache.dtype)))

    def state(self, layer: Any, kv_cache: Tensor) -> State:
        """Return what is cached.

        Args:
            layer: vLLM's layer.
            kv_cache: `[pages, kv_heads, size, 2 * head_dim]`.
        """
        raise NotImplementedError

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Write the attention of every token to `output`, as vLLM's own does.

        Queries are `[tokens, heads, head_dim]`, keys and values `[tokens, kv_heads, head_dim]`, the cache
        `[pages, kv_heads, size, 2 * head_dim]`.
        """
        stock, codebook = super().forward, self.codebook  # type: ignore[misc]
        split: Split | None = getattr(attn_metadata, "bpc", None)
        if codebook is None or split is None:
            if attn_metadata is None and codebook is not None:
                self.reserve(query.device)
            return stock(layer, query, key, value, kv_cache, attn_metadata, output, output_scale, output_block_scale)
        if split.others is not None:
            own = output[split.other_tokens]
            stock(layer, query[split.other_tokens], key, value, kv_cache, split.others, own)
            if isinstance(split.other_tokens, Tensor):  # else `own` is a view
                output[split.other_tokens] = own
        rows, state = split.by_layer[self.nth], self.state(layer, kv_cache)
        alone = len(rows.k) == len(query)  # each call of torch between two layers' weights takes 5 to 20 us
        grouped = (query if alone else query[split.tokens]).view(len(rows.k), self.num_kv_heads, -1, self.head_size)
        if grouped.dtype != codebook.projection.dtype:  # of an FP8 cache vLLM quantises the queries, too
            grouped = (grouped.float() * layer._q_scale).to(codebook.projection.dtype)
        newest = self.unhashed(split, key, kv_cache, state)
        out = None if split.lists is None or not alone else (output, split.lists)
        found, _ = self.attend(grouped, state, rows, newest, out)
        if out is None:
            output[split.tokens] = found.view(-1, *output.shape[1:])
        return output

    def unhashed(self, split: Split, key: Tensor, kv_cache: Tensor, state: State) -> Tensor | None:
        """Return the newest keys, `[R, H_KV, D]`, if the step is to hash them; the older ones are hashed here.

        Arguments as of `forward`.
        """
        return None

    def attend(
        self, query: Tensor, state: State, rows: Rows, newest: Tensor | None, out: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor]:
        """Attend to the best tokens of each row, `[R, H_KV, G, D]`. Also return these tokens."""
        assert self.codebook is not None
        return self.backend.sparse_decode(query, self.codebook, state, rows, self.rules, key=newest, out=out)

    def reserve(self, device: torch.device) -> None:
        """Take as much memory as a step does, and give it back: vLLM counts the most that a pass took on a GPU."""
        limit, requests = self.config.model_config.max_model_len, self.config.scheduler_config.max_num_seqs
        sizes = self.num_kv_heads, self.num_heads // self.num_kv_heads, limit
        listed = 8 * requests * self.num_kv_heads * self.rules.most(limit)
        scored = dispatch.workspace(device, sizes, self.rules, requests)
        torch.empty(listed + scored, dtype=torch.uint8, device=device)
