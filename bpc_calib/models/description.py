"""Describe a model (`describe`), say which KV heads a rank holds, and refuse models that BPC does not support."""

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bpc_calib.compat import can_set_attention
from bpc_calib.errors import InputError, ModelError, first_line

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

__all__ = [
    "ModelDescription", "describe", "first_head", "heads_per_rank", "held_heads", "rank_among", "rope_tables",
    "sparse_layers", "tensor_ranks",
]  # fmt: skip

# Their frequencies depend on the length of the context, so a shift of the positions changes the model's function.
LENGTH_DEPENDENT_ROPE = {"dynamic", "longrope"}
CAUSAL_ENDINGS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
VOLATILE_CONFIG = {
    "transformers_version",
    "_name_or_path",
    "_model_name_or_path",
    "dtype",
    "torch_dtype",
    "architectures",
    "quantization_config",
    "use_cache",
}
PER_POSITION = ("attn_temperature_tuning", "llama_4_scaling_beta")  # scale queries by their absolute position


@dataclass(frozen=True)
class ModelDescription:
    """The facts about a model that a projection depends on; the artifact stores `metadata()`."""

    id: str
    revision: str | None
    config_sha256: str
    model_type: str
    num_layers: int
    kv_heads: int
    query_heads: int
    head_dim: int
    rope: dict[str, Any] | None  # rope_parameters; None without RoPE
    layer_types: list[str]  # one per layer; a sliding window that covers the whole context is full attention
    context_limit: int | None  # max_position_embeddings
    vocab_size: int
    scales_by_position: bool  # the attention depends on absolute positions in addition to RoPE
    ranks: int = 1  # processes with a shard of the heads each (tensor parallelism); the counts above are those of all

    @property
    def full_layers(self) -> list[int]:
        """The layers to calibrate: the layers that attend to the whole context."""
        return [i for i, kind in enumerate(self.layer_types) if kind == "full_attention"]

    @property
    def rope_follows_length(self) -> bool:
        """True if the frequencies of RoPE change with the length of the context."""
        return any(table.get("rope_type") in LENGTH_DEPENDENT_ROPE for table in rope_tables(self.rope or {}))

    @property
    def can_shift(self) -> bool:
        """True if a shift of all positions does not change the model's function."""
        return self.rope is not None and not self.scales_by_position and not self.rope_follows_length

    def fits(self, text_config: Any) -> bool:
        """Return True if a text model's config has the same model type, layers, heads and RoPE."""
        other = _describe(text_config, self.id, self.revision, self.config_sha256)
        return self == replace(other, vocab_size=self.vocab_size, context_limit=self.context_limit, ranks=self.ranks)

    def metadata(self) -> dict[str, Any]:
        """Return the `model` table of the artifact."""
        table = asdict(self)
        del table["context_limit"], table["vocab_size"], table["scales_by_position"], table["ranks"]
        return table


def describe(config: "PreTrainedConfig", *, revision: str | None = None) -> ModelDescription:
    """Describe a causal language model from its transformers config.

    Args:
        config: the config of the whole model, `model.config`.
        revision: the Hub commit of the model.

    Raises:
        InputError: the argument is not a config.
        ModelError: the model is not causal, or BPC does not support it; the message says why.
    """
    if not hasattr(config, "get_text_config"):
        raise InputError(f"expected a model's config (model.config), not {type(config).__name__}")
    name = _display_name(config)
    try:
        text = config.get_text_config(decoder=True)
        _refuse_unserved(config, text, name)
        return replace(_describe(text, name, revision, _digest(text)), ranks=tensor_ranks(config))
    except ModelError:
        raise
    except Exception as fault:  # a config may hold anything: a list instead of a number, a string instead of a number
        raise ModelError(f"{name} ({config.model_type}) is not supported: {first_line(fault)}") from fault


def _digest(text: Any) -> str:
    """The SHA-256 of what a config says of its model; it takes a millisecond, so no layer of a cache asks for it."""
    canonical = json.dumps(_stable(text.to_diff_dict()), sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(canonical.encode()).hexdigest()


def _describe(text: Any, name: str, revision: str | None, config_sha256: str) -> ModelDescription:
    layers, query_heads = text.num_hidden_layers, text.num_attention_heads
    kv_heads = getattr(text, "num_key_value_heads", None) or query_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // query_heads
    limit = getattr(text, "max_position_embeddings", None)
    window = getattr(text, "sliding_window", None)
    types = list(getattr(text, "layer_types", None) or [])
    if not types:  # mistral, phi3 and starcoder2 have one window for all layers
        types = ["sliding_attention" if window else "full_attention"] * layers
    if window and limit and window >= limit:
        types = ["full_attention" if kind == "sliding_attention" else kind for kind in types]
    rope = getattr(text, "rope_parameters", None) or None
    for value, what in (
        (layers, "layers"),
        (query_heads, "query heads"),
        (kv_heads, "KV heads"),
        (head_dim, "head_dim"),
    ):
        if isinstance(value, list | tuple):
            raise ModelError(f"{name}: {what} differ per layer ({str(value)[:60]}), which BPC does not support")
        if not isinstance(value, int) or value < 1:
            raise ModelError(f"{name}: its config has an invalid value for {what}: {str(value)[:60]}")
    if len(types) != layers or (limit is not None and limit < 1):
        raise ModelError(f"{name}: its config has {layers} layers, {len(types)} layer types and {limit} positions")
    if "full_attention" not in types:
        raise ModelError(f"{name}: no layer attends to the whole context ({types[0]}), so BPC has nothing to do")
    return ModelDescription(
        id=name,
        revision=revision,
        config_sha256=config_sha256,
        model_type=text.model_type,
        num_layers=layers,
        kv_heads=kv_heads,
        query_heads=query_heads,
        head_dim=head_dim,
        rope=_plain(rope),
        layer_types=types,
        context_limit=limit,
        vocab_size=text.vocab_size,
        scales_by_position=any(
            table.get(key) for table in (vars(text), *rope_tables(rope or {})) for key in PER_POSITION
        ),
    )


def sparse_layers(model: ModelDescription, dense_layers: Sequence[int]) -> list[int]:
    """Return the layers that choose tokens, where `dense_layers` attend to everything.

    Raises:
        InputError: one of these is no layer of the model, or no layer is left.
    """
    if not isinstance(dense_layers, Sequence) or isinstance(dense_layers, str):
        raise InputError(f"dense_layers must be a list of layers, such as (0, 1), not {dense_layers!r}")
    for index in dense_layers:
        if not isinstance(index, Integral) or isinstance(index, bool) or not 0 <= index < model.num_layers:
            raise InputError(
                f"dense_layers: {index!r} is not a layer of {model.id}, which has layers 0 to {model.num_layers - 1}"
            )
    sparse = [index for index in model.full_layers if index not in dense_layers]
    if not sparse:
        raise InputError(
            f"dense_layers {list(dense_layers)} leave BPC no layer: the full-attention layers of {model.id} are "
            f"{model.full_layers}"
        )
    return sparse


def _display_name(config: Any) -> str:
    """Return the Hub id, or only the base name of a local folder: a full path would leak a user's name."""
    name = getattr(config, "_name_or_path", "") or config.model_type
    path = Path(os.path.expanduser(name))
    return path.resolve().name if path.is_dir() or path.is_absolute() or name.startswith(".") else name


def _refuse_unserved(config: Any, text: Any, name: str) -> None:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    kind = f"{name} ({text.model_type})"
    architectures = getattr(config, "architectures", None) or []
    remote = "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    known = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    if (
        getattr(config, "is_encoder_decoder", False)
        or not (known or remote)
        or (architectures and not any(a.endswith(CAUSAL_ENDINGS) for a in architectures))
    ):
        raise ModelError(f"{kind} is not a causal language model: BPC supports only decoders")
    if getattr(text, "kv_lora_rank", None):
        raise ModelError(f"{kind} uses multi-head latent attention (MLA), which BPC does not support")
    if getattr(text, "attn_logit_softcapping", None):
        raise ModelError(f"{kind} caps its attention logits (soft-capping), which BPC does not support")
    if known:
        model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        model_class = model_class[0] if isinstance(model_class, tuple) else model_class
        if not can_set_attention(model_class):
            raise ModelError(f"{kind} does not use transformers' attention interface, so BPC does not support it")


def rope_tables(rope: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the one table of RoPE parameters, or one table per layer type (gemma3)."""
    return [v for v in rope.values() if isinstance(v, dict)] or [rope]


def _stable(value: Any) -> Any:
    """Drop the config entries that depend on the version of transformers or on how the model was loaded."""
    if isinstance(value, dict):
        return {k: _stable(v) for k, v in value.items() if k not in VOLATILE_CONFIG}
    return value


def _plain(value: Any) -> Any:
    """Convert to JSON types and drop entries that are None, which differ between versions of transformers."""
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items() if v is not None}
    return [_plain(v) for v in value] if isinstance(value, list | tuple) else value


def first_head(total: int, rank: int, ranks: int) -> int:
    """Return the first KV head of a rank: in order, or each head on several ranks where these are more."""
    return rank * (total // ranks) if total >= ranks else rank * total // ranks


def heads_per_rank(total: int, ranks: int) -> int | None:
    """Return how many KV heads a rank holds, 1 where each head is on several ranks; None: the shards are not equal."""
    if total >= ranks:
        return None if total % ranks else total // ranks
    return None if ranks % total else 1


def held_heads(total: int, held: int, rank: int, ranks: int) -> slice | None:
    """Return which KV heads of a layer a rank holds; None: so many heads are no rank's shard.

    Some models keep all heads on every rank, because they normalise over heads or split a fused projection.

    Args:
        total: KV heads of the whole layer.
        held: KV heads on this rank.
        rank: this process, from 0.
        ranks: processes that shard the model.
    """
    if held == total:
        return slice(0, total)
    if held != heads_per_rank(total, ranks):
        return None
    first = first_head(total, rank, ranks)
    return slice(first, first + held)


def tensor_ranks(config: Any) -> int:
    """Return over how many processes transformers shards the heads of a model with this config; 1: not at all."""
    distributed = getattr(config, "distributed_config", None)
    ranks = distributed.get("tp_size") if isinstance(distributed, dict) else getattr(distributed, "tp_size", None)
    return ranks or 1


def rank_among(ranks: int) -> int:
    """Return the number of this process among the `ranks` of one model; transformers gives them in a row."""
    import torch

    started = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_rank() % ranks if started else 0
