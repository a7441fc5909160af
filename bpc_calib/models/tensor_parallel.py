"""Tensor parallelism of transformers: how the heads of a model are sharded over the processes of torchrun."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bpc_calib.compat import WHOLE, copied_heads
from bpc_calib.errors import ModelError
from bpc_calib.models.description import ModelDescription, describe, heads_per_rank

if TYPE_CHECKING:
    from transformers import PreTrainedConfig
    from transformers.distributed import DistributedConfig

__all__ = ["check_shards", "from_ranks", "tensor_parallel"]

SHARDED = "colwise"
KEYS = ("k_proj", "qkv_proj", "query_key_value")  # projections that compute keys, as transformers names them


def tensor_parallel(config: "PreTrainedConfig", ranks: int) -> "DistributedConfig":
    """Return the `distributed_config` that shards a model over `ranks` processes, for `from_pretrained`.

    It is `DistributedConfig(tp_plan="auto")`, which gives each process an equal part of the heads, unless the model has
    fewer KV heads than that. Then each KV head is on several processes, with equal parts of its query heads.

    Args:
        config: the config of the whole model.
        ranks: the number of processes that torchrun has started, each with one part.

    Raises:
        ModelError: BPC cannot serve the model, or its heads have no equal parts; the message names numbers that fit.
    """
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    description = describe(config)
    if ranks == 1 or not description.kv_heads % ranks:
        return DistributedConfig(tp_size=ranks, tp_plan="auto")
    with torch.device("meta"):  # transformers' plan, by the names of modules, depends on the class of the model
        plan: dict[str, Any] = dict(AutoModelForCausalLM.from_config(config).tp_plan or {})
    if not _shards_keys(plan):
        return DistributedConfig(tp_size=ranks, tp_plan="auto")
    attentions = [name.removesuffix(".k_proj") for name in plan if name.endswith(".k_proj")]
    if not attentions or not _has_parts(description, ranks):
        raise ModelError(_no_parts(description, ranks))
    for name in attentions:
        plan |= {name: copied_heads(description.kv_heads), f"{name}.k_proj": WHOLE, f"{name}.v_proj": WHOLE}
    return DistributedConfig(tp_size=ranks, tp_plan=plan)


def check_shards(model: Any, description: ModelDescription) -> None:
    """Raise `ModelError` if a loaded model's KV heads were cut in pieces: transformers would fail with a shape."""
    ranks, kv_heads = description.ranks, description.kv_heads
    if not kv_heads % ranks or not _shards_keys(getattr(model, "tp_plan", None) or {}):
        return
    if not _has_parts(description, ranks):
        raise ModelError(_no_parts(description, ranks))
    raise ModelError(
        f"{description.id}: {ranks} processes share {kv_heads} KV heads, which tp_plan='auto' cuts in pieces: load it "
        f"with distributed_config=bpc_calib.tensor_parallel(config, {ranks})"
    )


def from_ranks(mine: dict[int, Tensor], description: ModelDescription, device: torch.device) -> dict[int, Tensor]:
    """Return what every process with a shard of a model has for its KV heads; all of them call this together.

    Args:
        mine: CPU tensors `[held, ...]` by layer, all of one shape and dtype.
        device: of this process; its collectives take tensors on no other.

    Returns:
        CPU tensors `[copies, kv_heads, ...]` by layer; `copies` processes hold each KV head.
    """
    if not mine:
        return {}
    layers = torch.stack(list(mine.values()))
    sent = layers.to(device).view(torch.uint8)  # as bytes, which every backend gathers
    received = [torch.empty_like(sent) for _ in range(description.ranks)]
    torch.distributed.all_gather(received, sent)
    parts = torch.stack([each.cpu() for each in received]).view(layers.dtype)  # [ranks, layers, held, ...]
    copies = description.ranks * layers.shape[1] // description.kv_heads
    heads = parts.unflatten(0, (-1, copies)).movedim((2, 1), (0, 1)).flatten(2, 3)
    return dict(zip(mine, heads, strict=True))


def _shards_keys(plan: dict[str, str]) -> bool:
    return any(style == SHARDED and name.rpartition(".")[2] in KEYS for name, style in plan.items())


def _has_parts(description: ModelDescription, ranks: int) -> bool:
    return heads_per_rank(description.kv_heads, ranks) is not None and not description.query_heads % ranks


def _no_parts(description: ModelDescription, ranks: int) -> str:
    heads = description.query_heads
    fitting = [str(count) for count in range(2, heads + 1) if _has_parts(description, count)]
    return (
        f"{description.id}: its {heads} query heads and {description.kv_heads} KV heads have no equal parts for "
        f"{ranks} processes: start {' or '.join(fitting) or '1'}"
    )
