"""`additional_config["bpc"]` of a vLLM config: which projections, and how many tokens."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from bpc_artifacts import ProjectionArtifact
from bpc_calib.errors import InputError
from bpc_calib.runtime.rules import Rules, ranking_defaults

__all__ = ["Options", "given_options", "read_options", "rules"]


@dataclasses.dataclass(frozen=True)
class Options:
    """The options; names, meanings and defaults are those of `BPCCache`, but `artifact` is a file."""

    artifact: str
    budget: float | int = 0.02
    min_tokens: int = 128
    min_context: int = 0
    dense_layers: tuple[int, ...] = (0, 1)
    recent: int | None = None
    sink: int | None = None
    group: str | None = None


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
    known = [field.name for field in dataclasses.fields(Options)]
    if not isinstance(given, Mapping) or "artifact" not in given:
        raise InputError("additional_config.bpc needs an artifact: the file that bpc calibrate wrote")
    if unknown := sorted(set(given) - set(known)):
        raise InputError(f"additional_config.bpc has no {unknown[0]!r}; it has {', '.join(known)}")
    if not isinstance(given["artifact"], str) or given["artifact"] == "online":
        raise InputError(
            "additional_config.bpc.artifact must be a file that bpc calibrate wrote: requests share cached prompts, so "
            "projections cannot come from one prompt"
        )
    values: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in given.items()}
    return Options(**values)


def rules(options: Options, artifact: ProjectionArtifact) -> Rules:
    """Return the checked settings of every layer. There is no safeguard: it needs 4 bytes more per key.

    Raises:
        InputError: a value is out of range.
    """
    asked = {name: getattr(options, name) for name in ("recent", "sink", "group")}
    chosen = ranking_defaults(artifact) | {name: value for name, value in asked.items() if value is not None}
    return Rules(
        budget=options.budget, min_tokens=options.min_tokens, min_context=options.min_context,
        bits=artifact.metadata["algorithm"]["bits"], seed=0, **(chosen | {"safeguard": 0.0}),
    )  # fmt: skip
