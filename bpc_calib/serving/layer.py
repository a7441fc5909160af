"""What an attention layer of vLLM needs for BPC, whatever kernels it has: checks, projections, room for codes."""

import functools
from typing import Any

import torch
from vllm.config import VllmConfig, get_current_vllm_config, get_current_vllm_config_or_none
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.attention.backend import AttentionType
from vllm.v1.kv_cache_interface import AttentionSpec

from bpc_calib.backends import dispatch
from bpc_calib.errors import ModelError
from bpc_calib.method.choosing import Choice
from bpc_calib.method.paging import CodePages
from bpc_calib.models.description import describe, first_head
from bpc_calib.runtime.rules import Rules
from bpc_calib.serving.code_cache import CodeCache, add_code_cache, behind_pages, with_room
from bpc_calib.serving.options import (
    LayerProjections,
    Options,
    checked_artifact,
    layer_projections,
    open_artifact,
    read_options,
    rules,
)

__all__ = ["Layer", "asked", "check", "is_hybrid", "settings", "sized"]

_latest: VllmConfig | None = None  # vLLM asks for the size of pages outside of its current config


def asked() -> Options | None:
    """Return the options of vLLM's current config, checked; None: BPC is not asked for.

    Raises:
        BPCError: the options, the artifact or the model do not fit; the message is one line.
    """
    global _latest
    config = get_current_vllm_config()
    drafts = config.speculative_config
    if drafts is not None and config.model_config is drafts.draft_model_config:
        return None  # a model that drafts for the served one
    _latest = config
    options = read_options(config)
    if options is not None:
        check(config, options)
    return options


def check(config: VllmConfig, options: Options) -> None:
    """Raise a `BPCError` unless BPC can serve the model of this config."""
    artifact = checked_artifact(options.artifact, config.model_config.hf_config)
    rules(options, artifact)
    if config.model_config.use_mla:
        raise ModelError(f"{config.model_config.model}: BPC does not serve multi-head latent attention")
    if config.parallel_config.decode_context_parallel_size > 1:
        raise ModelError("BPC does not serve contexts split over ranks: leave out --decode-context-parallel-size")
    if "linear_attention" in describe(config.model_config.hf_config).layer_types:
        raise ModelError(f"{config.model_config.model}: BPC does not serve layers of linear attention in vLLM")


def is_hybrid(config: VllmConfig) -> bool:
    """Return whether some layers do not attend to everything."""
    model = describe(config.model_config.hf_config)
    return len(model.full_layers) < model.num_layers


@functools.cache
def settings(options: Options) -> Rules:
    """Return the settings of every layer, for options that are checked."""
    return rules(options, open_artifact(options.artifact))


def sized(spec: AttentionSpec) -> AttentionSpec:
    """Return a spec with room for codes behind the pages, where a model has layers of several kinds."""
    config = get_current_vllm_config_or_none() or _latest
    options = None if config is None else read_options(config)
    if config is None or options is None or spec.page_size_padded is not None or not is_hybrid(config):
        return spec
    return with_room(spec, settings(options).words)


class Layer:
    """To inherit from before an implementation of vLLM's: the projections of a layer, and where its codes lie."""

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
        self.projections: LayerProjections | None = None  # None: the layer attends to everything
        self.cache: CodeCache | None = None  # None: codes lie behind the pages

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Take the projections of this layer, and a cache for its codes.

        Raises:
            BPCError: BPC cannot serve the layer, or its projections do not fit.
        """
        super().process_weights_after_loading(act_dtype)  # type: ignore[misc]
        options = read_options(self.config)
        layers = self.config.compilation_config.static_forward_context
        name = next(name for name, layer in layers.items() if getattr(layer, "impl", None) is self)
        index = extract_layer_index(name)
        if options is None or index in options.dense_layers:
            return
        artifact, device = open_artifact(options.artifact), torch.device(self.config.device_config.device)
        projections = layer_projections(artifact, index, self.heads(), act_dtype, device)
        if projections is None:
            return
        if self.projections is not None:  # the weights were loaded again: CUDA graphs read the tensors where they are
            self.projections.refill(projections)
            return
        self.check(name)
        self.settings, self.projections = settings(options), projections
        query = torch.empty(1, self.num_heads, self.head_size, dtype=act_dtype, device=device)
        self.backend = dispatch.for_pages(query, self.num_kv_heads)
        chosen = self.settings
        self.choice = Choice(self.scale, chosen.group, recent=chosen.recent, sink=chosen.sink)
        if not is_hybrid(self.config):
            self.cache = add_code_cache(self.config, name, self.num_kv_heads, chosen.words)

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

    def codes(self, kv_cache: torch.Tensor) -> CodePages:
        """Return where the codes of a layer lie whose cache is `[pages, kv_heads, size, 2 * head_dim]`."""
        return behind_pages(kv_cache, self.settings.words) if self.cache is None else self.cache.pages()
