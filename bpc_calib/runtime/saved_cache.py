"""A cache in a file: what its layers hold, its tokens and its settings, for the same model in another process."""

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import DynamicSlidingWindowLayer

import bpc_calib.runtime.sealed_tensors as files
from bpc_artifacts import ProjectionArtifact
from bpc_calib.errors import CacheFileError, InputError, ModelError
from bpc_calib.models.description import ModelDescription, describe
from bpc_calib.models.loading import weights_identity
from bpc_calib.runtime.hashed_layer import BPCLayer
from bpc_calib.runtime.layers import GrowingLayer
from bpc_calib.runtime.served_layers import with_tokens

__all__ = ["Saved", "opened", "write"]

KEY = "bpc_cache"  # of the metadata in the file
VERSION = 1
KIND = files.kind_of(KEY, "a saved cache")
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
NONE = type(None)
SETTINGS = {
    "budget": (int, float), "min_tokens": (int,), "dense_layers": (list, NONE), "equal_shares": (bool,),
    "min_context": (int, NONE), "bits": (int, NONE), "seed": (int,), "adapt": (bool,),
    "safeguard": (int, float), "recent": (int,), "sink": (int,), "group": (str,), "gain": (bool,),
}  # fmt: skip
HASHED = ("codes", "gain", "error")

Part = tuple[Sequence[torch.dtype], tuple[int | None, ...]]  # dtypes and shape; None: any size


def write(
    path: str | os.PathLike[str], cache: Any, model: Any, tokens: Tensor, about: Mapping[str, Any], overwrite: bool
) -> int:
    """Write a `BPCCache`; return the size of the file in bytes. See `BPCCache.save`."""
    description, length = describe(model.config), cache.get_seq_length()
    if description.ranks > 1:
        raise ModelError("each of several processes holds a part of this cache, and such a cache cannot be saved")
    if not length or any(cache.layers[index].get_seq_length() != length for index in with_tokens(cache.layers)):
        raise InputError("the cache is empty, or a pass failed in it: feed the whole text first")
    batch = len(cache.layers[description.full_layers[0]].keys)
    if tokens.dim() != 2 or len(tokens) != batch or tokens.shape[1] < length:
        raise InputError(f"tokens must be [{batch}, {length}], or more behind them, not {list(tokens.shape)}")
    tensors = {"tokens": tokens.to(torch.int64)}
    for index, layer in enumerate(cache.layers):
        tensors |= {f"layers.{index}.{name}": part for name, part in _contents(layer, index).items()}
    metadata = {
        "format_version": VERSION,
        "model": description.id,
        "config_sha256": description.config_sha256,
        "weights_sha256": weights_identity(model)["sha256"],
        "dtype": str(model.dtype),
        "projections_sha256": _projections_sha256(cache.artifact),
        "length": length,
        "settings": {name: _plain(value) for name, value in cache.settings.items()},
        "about": dict(about),
    }
    return files.write(Path(path), KIND, KEY, metadata, tensors, overwrite)


def _plain(value: Any) -> Any:
    """Return a number of NumPy as one of Python, which JSON can hold."""
    return value.item() if isinstance(value, np.generic) else value


def _contents(layer: Any, index: int) -> dict[str, Tensor]:
    if isinstance(layer, GrowingLayer):
        return layer.contents()
    if type(layer) is DynamicSlidingWindowLayer:
        window = slice(1 - layer.sliding_window, None)  # a layer may hold more for drafts
        return {"keys": layer.keys[:, :, window], "values": layer.values[:, :, window]}
    raise ModelError(f"layer {index} of the cache is a {type(layer).__name__}, which cannot be saved")


def _projections_sha256(artifact: ProjectionArtifact | None) -> str | None:
    """Return a hash of an artifact's arrays; None: online projections."""
    if artifact is None:
        return None
    found = hashlib.sha256()
    for name, array in sorted(artifact.tensors().items()):
        found.update(f"{name} {array.shape}".encode())
        found.update(array.tobytes())
    return found.hexdigest()


@dataclass(frozen=True)
class Saved:
    """A file that is open, for a model whose cache it holds."""

    model: ModelDescription | None  # None: of any model, and `fill` cannot be called
    metadata: Mapping[str, Any]
    tokens: Tensor  # int64 [batch, length or more]
    fetch: Callable[[Sequence[str]], list[Tensor]]

    def settings(self) -> dict[str, Any]:
        """Return the arguments of `BPCCache` that the cache had."""
        found = dict(self.metadata["settings"])
        for name, value in found.items():
            layers = value if isinstance(value, list) else []
            if type(value) not in SETTINGS.get(name, ()) or not all(type(each) is int for each in layers):
                raise files.damaged(f"{str(value)[:40]} is no value of the setting {name[:40]}")
        return found

    def check_config(self, model: ModelDescription) -> None:
        """Refuse the cache of a model with another config, before the weights are there. Raises `CacheFileError`."""
        _check_own(self.metadata, "config", model.config_sha256, model.id)

    def fill(self, cache: Any, device: torch.device) -> None:
        """Give an empty `BPCCache` what the file holds. With other projections, its next step hashes the keys again.

        Raises:
            CacheFileError: the file is damaged.
        """
        assert self.model is not None
        size, names = (len(self.tokens), self.metadata["length"]), set(self.metadata[files.HASHES])
        same = self.metadata["projections_sha256"] == _projections_sha256(cache.artifact)
        same &= self.metadata["settings"].get("bits") == cache.settings["bits"]
        for index, layer in enumerate(cache.layers):
            wanted = {
                f"layers.{index}.{name}": (name, part)
                for name, part in _parts(layer, self.model, *size).items()
                if name in ("keys", "values") or (same and f"layers.{index}.{name}" in names)
            }
            parts = {}
            for (where, (name, part)), tensor in zip(wanted.items(), self.fetch(list(wanted)), strict=True):
                _check(where, tensor, part)
                parts[name] = tensor.to(device)
            _check_counts(f"layers.{index}", parts, size[1])
            _take(layer, parts, size[1])


def _parts(layer: Any, model: ModelDescription, batch: int, length: int) -> dict[str, Part]:
    """Return what a layer may hold."""
    heads, dim = model.kv_heads, model.head_dim
    sliding = not isinstance(layer, GrowingLayer)
    kept: Part = FLOATS, (batch, heads, None if sliding else length, dim)
    parts = {"keys": kept, "values": kept}
    if isinstance(layer, BPCLayer):
        every, bits = (batch, heads, None), layer.bits
        rows = 4 * bits if layer.nibbles else bits
        parts |= {
            "guarded": ([torch.int64], (1,)),
            "codes": ([torch.int64], (*every, -(-bits // 64))),
            "gain": ([torch.uint8], every),
            "error": ([torch.float32], every),
        }
        parts |= {
            "asked.queries": (FLOATS, (batch, model.query_heads, None, dim)),
            "asked.places": ([torch.int64], (None,)),
            "moments": ([torch.float32], (batch, heads, dim, dim)),
            "made_at": ([torch.int64], (1,)),
            "projection": (FLOATS, (batch, heads, rows, dim)),
            "matrix": (FLOATS, (batch, heads, rows, dim)),
            "gram": (FLOATS, (batch, heads, rows, rows)),
            "metric": (FLOATS, (batch, heads, dim, dim)),
            "mean": (FLOATS, (batch, heads, dim)),
        }
    return parts


def _check(name: str, tensor: Tensor, part: Part) -> None:
    dtypes, shape = part
    fits = len(shape) == tensor.dim() and all(
        want in (None, size) for want, size in zip(shape, tensor.shape, strict=True)
    )
    if not fits or tensor.dtype not in dtypes:
        raise files.damaged(f"{name} is {tensor.dtype} {list(tensor.shape)}")


def _check_counts(where: str, parts: Mapping[str, Tensor], length: int) -> None:
    """Refuse parts of a layer that do not fit each other."""
    hashed = {parts[name].shape[2] for name in HASHED if name in parts}
    places = parts.get("asked.places", torch.empty(0, dtype=torch.int64))
    asked = parts["asked.queries"].shape[2] if "asked.queries" in parts else 0
    if (
        len({parts[name].dtype for name in ("keys", "values", "asked.queries") if name in parts}) > 1
        or parts["keys"].shape != parts["values"].shape
        or parts["keys"].shape[2] > length
        or len(hashed) > 1
        or max(hashed, default=0) > length
        or not all(0 <= int(parts.get(name, torch.zeros(1))) <= length for name in ("guarded", "made_at"))
        or len(places) != asked
        or not all(0 <= place < length for place in places.tolist())
        or len({"projection", "matrix", "gram"} & parts.keys()) not in (0, 3)
    ):
        raise files.damaged(f"the parts of {where} do not fit each other")


def _take(layer: Any, parts: Mapping[str, Tensor], length: int) -> None:
    """Give a layer its parts."""
    if isinstance(layer, GrowingLayer):
        layer.take(parts)
    else:
        layer.lazy_initialization(parts["keys"], parts["values"])
        layer.keys, layer.values, layer.cumulative_length = parts["keys"].clone(), parts["values"].clone(), length


@contextmanager
def opened(path: str | os.PathLike[str], model: Any = None) -> Iterator[Saved]:
    """Open a saved cache of this model; None: of any, to look at its metadata.

    Raises:
        CacheFileError: the file cannot be read, is damaged, or belongs to another model.
    """
    try:
        with files.opened(Path(path), KEY) as (metadata, fetch):
            _check_metadata(metadata)
            description = None if model is None else _same_model(metadata, model)
            (tokens,) = fetch(["tokens"])
            _check("tokens", tokens, ([torch.int64], (None, None)))
            if not len(tokens) or tokens.shape[1] < metadata["length"]:
                raise files.damaged(f"tokens are {list(tokens.shape)}")
            yield Saved(description, metadata, tokens.clone(), fetch)
    except CacheFileError as fault:
        raise CacheFileError(f"{path}: {fault}") from None


def _same_model(metadata: Mapping[str, Any], model: Any) -> ModelDescription:
    """Return the description of a model whose cache these are the metadata of."""
    description = describe(model.config)
    if metadata["dtype"] != str(model.dtype):
        raise CacheFileError(f"was made in {metadata['dtype']}, and this model computes in {model.dtype}")
    _check_own(metadata, "config", description.config_sha256, description.id)
    _check_own(metadata, "weights", weights_identity(model)["sha256"], description.id)
    return description


def _check_own(metadata: Mapping[str, Any], what: str, own: str, model: str) -> None:
    """Refuse a cache whose config or weights have another hash."""
    if metadata[f"{what}_sha256"] != own:
        raise CacheFileError(
            f"belongs to another model, {metadata['model']} (its {what} is not that of {model}): open it with the "
            "model that it was saved with"
        )


def _check_metadata(metadata: Mapping[str, Any]) -> None:
    version = metadata.get("format_version")
    if version != VERSION:
        raise CacheFileError(f"its format_version is {version}, and this bpc reads {VERSION}: make the cache again")
    kinds = {
        "model": str, "config_sha256": str, "weights_sha256": str, "dtype": str, "length": int, "settings": dict,
        "about": dict, "projections_sha256": str | None,
    }  # fmt: skip
    for name, kind in kinds.items():
        if name not in metadata or not isinstance(metadata[name], kind):
            raise files.damaged(f"its metadata have no {name}")
    if metadata["length"] < 1:
        raise files.damaged("it has no tokens")
