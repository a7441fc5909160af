"""`additional_config["bpc"]` of a vLLM config: how many tokens, and the projections of each layer."""

import functools
import logging
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch

from bpc_artifacts import ProjectionArtifact, check_model, load
from bpc_calib.errors import InputError
from bpc_calib.method.codebook import Codebook, codebook_of
from bpc_calib.method.defaults import BUDGET, MIN_TOKENS
from bpc_calib.method.numbers import check_flag
from bpc_calib.method.rules import Rules, default_dense_layers, ranking_defaults, shares_of
from bpc_calib.method.shares import Shares
from bpc_calib.models.description import describe, sparse_layers

__all__ = [
    "Options", "check_options", "dense", "given_options", "layer_codebook", "open_artifact", "read_options", "rules",
    "shares",
]  # fmt: skip

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Options:
    """The options; names, meanings and defaults are those of `BPCCache`, but `artifact` is a file."""

    artifact: str
    budget: float | int = BUDGET
    min_tokens: int = MIN_TOKENS
    min_context: int | None = None
    dense_layers: tuple[int, ...] | None = None
    equal_shares: bool = False
    recent: int | None = None
    sink: int | None = None
    group: str | None = None


NAMES = tuple(field.name for field in fields(Options))


def given_options(vllm_config: Any) -> Mapping[str, Any] | None:
    """Return what the user gave; None: nothing, so vLLM stays as it is."""
    given = vllm_config.additional_config
    return given.get("bpc") if isinstance(given, Mapping) else None


def read_options(vllm_config: Any) -> Options | None:
    """Return the options of a vLLM config; None: BPC is not asked for.

    Raises:
        InputError: an option is unknown, missing or no fitting value.
    """
    given = given_options(vllm_config)
    if given is None:
        return None
    if not isinstance(given, Mapping) or "artifact" not in given:
        raise InputError("additional_config.bpc needs an artifact: the file that bpc calibrate wrote")
    if unknown := sorted(given.keys() - NAMES):
        raise InputError(f"additional_config.bpc has no {unknown[0]!r}; it has {', '.join(NAMES)}")
    if not isinstance(given["artifact"], str) or given["artifact"] == "online":
        raise InputError(
            "additional_config.bpc.artifact must be a file that bpc calibrate wrote: requests share cached prompts, so "
            "projections cannot come from one prompt"
        )
    values: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in given.items()}
    return Options(**values)


def rules(options: Options, artifact: ProjectionArtifact) -> Rules:
    """Return the checked rules of every layer. There is no safeguard: it needs 4 bytes more per key.

    Raises:
        InputError: a value is out of range.
    """
    asked = {name: getattr(options, name) for name in ("recent", "sink", "group")}
    chosen = ranking_defaults(artifact) | {name: value for name, value in asked.items() if value is not None}
    return Rules(
        budget=options.budget, min_tokens=options.min_tokens,
        min_context=0 if options.min_context is None else options.min_context, **(chosen | {"safeguard": 0.0}),
    )  # fmt: skip


@functools.cache
def shares(options: Options) -> dict[int, Shares]:
    """Return the shares of the KV heads of the layers that choose; none where all heads have the same."""
    artifact = open_artifact(options.artifact)
    return {} if options.equal_shares else shares_of(artifact, [i for i in artifact.layers if i not in dense(options)])


def dense(options: Options) -> tuple[int, ...]:
    """Return the layers that attend to everything."""
    if options.dense_layers is not None:
        return options.dense_layers
    artifact = open_artifact(options.artifact)
    return default_dense_layers(artifact, artifact.metadata["model"]["num_layers"])


@functools.cache
def open_artifact(path: str) -> ProjectionArtifact:
    """Load an artifact, once per process.

    Raises:
        ArtifactError: the file is no artifact.
    """
    return load(path)


def check_options(options: Options, config: Any) -> None:
    """Check that the options and their artifact fit the model of a transformers config.

    Raises:
        ArtifactError: the file is no artifact, or belongs to another model.
        InputError: a value is out of range, or leaves no layer that chooses.
        ModelError: BPC cannot serve the model.
    """
    check_flag("equal_shares", options.equal_shares)
    artifact, model = open_artifact(options.artifact), describe(config)
    for warning in check_model(artifact, model.metadata()):
        _warn_once(warning)
    rules(options, artifact)
    sparse_layers(model, dense(options))


@functools.cache
def _warn_once(message: str) -> None:
    logger.warning("%s", message)  # vLLM asks for every layer


def layer_codebook(
    artifact: ProjectionArtifact, index: int, heads: slice, dtype: torch.dtype, device: torch.device
) -> Codebook | None:
    """Return the codebook of some KV heads of a layer, for keys of a dtype; None: the artifact has none.

    Args:
        artifact: the projections of the model.
        index: the layer, from 0.
        heads: the KV heads of this rank.
        dtype: of the keys.
        device: where to put the codebook.

    Raises:
        InputError: the layer has fewer KV heads than asked for.
    """
    if index not in artifact.layers:
        return None
    layer = artifact.layers[index]
    if heads.stop > len(layer.projection):
        raise InputError(f"layer {index} of the artifact has {len(layer.projection)} KV heads, not {heads.stop}")
    return codebook_of(layer, heads, dtype, device)
