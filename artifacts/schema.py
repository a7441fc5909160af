"""The contents of a projection artifact, and the check of every value before its use (format versions 1 and 3)."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bpc_artifacts.bits import BITS
from bpc_artifacts.errors import ArtifactError

__all__ = [
    "LAST_VERSION",
    "SHARES",
    "LayerProjection",
    "ProjectionArtifact",
    "check",
    "check_version",
    "format_version",
    "unknown_keys",
]

# Version 2 had product codes. Version 3 is version 1 with the needs of the KV heads, or with codes of nibbles.
PLAIN_VERSION, PRODUCT_VERSION, LAST_VERSION = 1, 2, 3
NIBBLE = 16  # vectors of a nibble
SHARES = 16  # at which a need is measured

Array = NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class LayerProjection:
    """One calibrated layer. All arrays are float32."""

    projection: Array  # [kv_heads, rows, head_dim]; of signs `bits` rows, of nibbles 16 vectors for each
    residual: Array  # [kv_heads, steps + 1]: |R|_F / |K|_F after 0..steps signs or nibbles, on the fitted keys
    metric: Array | None = None  # [kv_heads, head_dim, head_dim], symmetric positive definite; None: identity
    mean: Array | None = None  # [kv_heads, head_dim], subtracted before encoding; None: 0
    need: Array | None = None  # [kv_heads, SHARES], what a head loses at each share of the tokens; None: not measured
    need_short: Array | None = None  # the same on 2,048 tokens, where `need` was measured on more; None: not measured
    nibbles: bool = False  # codes are nibbles instead of signs

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return self.projection.shape[1] // (4 if self.nibbles else 1)

    @property
    def mean_residual(self) -> float:
        """The residual after all steps, the mean over KV heads."""
        return float(self.residual[:, -1].mean(dtype=np.float64))

    @property
    def steps(self) -> int:
        """Signs or nibbles of a code."""
        return self.bits // (4 if self.nibbles else 1)

    def arrays(self) -> dict[str, Array]:
        """Return the arrays by their names in files; the projection of nibbles is their `vectors`."""
        named = {
            field.name: array for field in fields(self) if isinstance(array := getattr(self, field.name), np.ndarray)
        }
        if self.nibbles:
            rows = named.pop("projection")
            named["vectors"] = rows.reshape(len(rows), -1, NIBBLE, rows.shape[-1])
        return named

    @classmethod
    def of(cls, arrays: Mapping[str, Array]) -> "LayerProjection":
        """Return the layer of which `arrays` returned these. Raises `ArtifactError` if it cannot have."""
        found = dict(arrays)
        vectors = found.pop("vectors", None)
        if vectors is not None and "projection" not in found and vectors.ndim == 4 and vectors.shape[2] == NIBBLE:
            found["projection"] = vectors.reshape(vectors.shape[0], vectors.shape[1] * NIBBLE, vectors.shape[3])
        elif vectors is not None:
            raise ArtifactError(
                f"vectors: expected [kv_heads, nibbles, 16, head_dim] alone, found {list(vectors.shape)}"
            )
        for name in ("projection", "residual"):
            if name not in found:
                raise ArtifactError(f"{name}: missing")
        return cls(**found, nibbles=vectors is not None)


@dataclass(frozen=True, eq=False)
class ProjectionArtifact:
    """Projections by the model's layer index, and the metadata of docs/artifact-format.md."""

    layers: Mapping[int, LayerProjection]
    metadata: Mapping[str, Any]

    @property
    def nibbles(self) -> bool:
        """Whether codes are nibbles instead of signs."""
        return any(layer.nibbles for layer in self.layers.values())

    @property
    def has_needs(self) -> bool:
        """Whether the needs of the KV heads are known."""
        return all(layer.need is not None for layer in self.layers.values())

    def by_layer(self, name: str) -> dict[int, Array]:
        """Return the arrays of one name, such as "need", of the layers that have one."""
        return {i: array for i, layer in self.layers.items() if (array := getattr(layer, name)) is not None}

    def tensors(self) -> dict[str, Array]:
        """Return all arrays by their names in the file."""
        return {
            f"layers.{index}.{name}": array
            for index, layer in self.layers.items()
            for name, array in layer.arrays().items()
        }


# Each value is a type, a tuple of types, a constant, a nested table, or a list of one of these. Additional keys are
# allowed, because a later writer of the same format version may add some.
_TEXT_OR_NONE = (str, type(None))
_METADATA: dict[str, Any] = {
    "format_version": int,
    "bpc_version": str,
    "key_space": "post_rope",
    "payload_sha256": str,
    "metadata_sha256": str,
    "layers": [int],
    "metrics": dict,
    "algorithm": {
        "name": str,
        "bits": int,
        "iterations": int,
        "metric": bool,
        "least_squares": int,
        "centred": bool,
        "position_shift": bool,
        "seed": int,
    },
    "model": {
        "id": str,
        "revision": _TEXT_OR_NONE,
        "config_sha256": str,
        "model_type": str,
        "num_layers": int,
        "kv_heads": int,
        "query_heads": int,
        "head_dim": int,
        "rope": (dict, type(None)),
        "layer_types": [str],
    },
    "calibration": {
        "sources": [
            {
                "name": str,
                "path": str,
                "revision": _TEXT_OR_NONE,
                "split": _TEXT_OR_NONE,
                "field": _TEXT_OR_NONE,
                "samples": int,
                "tokens": int,
                "sha256": str,
            }
        ],
        "samples": int,
        "sequence_length": int,
        "tokens": int,
        "keys_per_head": int,
        "dtype": str,
    },
}
_HELD_OUT: dict[str, Any] = {  # optional
    "samples": int,
    "keys_per_head": int,
    "residual": (float, int),
    "residual_by_layer": dict,
    "residual_by_head": dict,
}

_OPTIONAL: dict[str, Any] = {
    "metadata.algorithm": {"codes": str},
    "metadata.metrics": {"residual": float, "residual_by_layer": dict, "held_out": _HELD_OUT},
    "metadata.metrics.held_out": {"length_by_head": dict},
}


def format_version(artifact: ProjectionArtifact) -> int:
    """Return the lowest format version that holds an artifact."""
    return LAST_VERSION if artifact.has_needs or artifact.nibbles else PLAIN_VERSION


def check_version(metadata: Mapping[str, Any]) -> None:
    """Raise `ArtifactError` if the metadata names a format version that this code does not read."""
    version = metadata.get("format_version", PLAIN_VERSION)
    if version == PRODUCT_VERSION:
        raise ArtifactError("format_version is 2, of product codes, which bpc reads no longer: calibrate again")
    if type(version) is int and version > LAST_VERSION:
        raise ArtifactError(
            f"format_version is {version}, but this bpc reads only up to {LAST_VERSION}: upgrade bpc-calib"
        )
    known = (PLAIN_VERSION, LAST_VERSION)
    _expect("metadata.format_version", version, "1 or 3", type(version) is int and version in known)


def check(artifact: ProjectionArtifact) -> None:
    """Raise `ArtifactError` at the first value that its format version does not allow."""
    metadata = artifact.metadata
    _expect("metadata", metadata, "a table", isinstance(metadata, dict))
    check_version(metadata)
    _check_value("metadata", metadata, _METADATA)
    if list(artifact.layers) != metadata["layers"]:
        raise ArtifactError(
            f"metadata.layers: expected the layers of the tensors {list(artifact.layers)}, found {metadata['layers']}"
        )
    _check_numbers(metadata)
    _check_metrics(metadata)
    model = metadata["model"]
    algorithm = metadata["algorithm"]
    kv_heads, head_dim, bits = model["kv_heads"], model["head_dim"], algorithm["bits"]
    codes = algorithm.get("codes", "signs")
    _expect("metadata.algorithm.codes", codes, "'signs' or 'nibbles'", codes in ("signs", "nibbles"))
    nibbles = codes == "nibbles"
    needs = artifact.layers[metadata["layers"][0]].need is not None
    version = LAST_VERSION if needs or nibbles else PLAIN_VERSION
    _expect(
        "metadata.format_version", metadata["format_version"], f"{version}, by the first layer",
        metadata["format_version"] == version,
    )  # fmt: skip
    for index, layer in artifact.layers.items():
        name = f"layers.{index}"
        if layer.nibbles != nibbles:
            raise ArtifactError(f"{name}.vectors: is {_found(layer.nibbles)}, but metadata.algorithm says the opposite")
        _check_array(
            f"{name}.{'vectors' if nibbles else 'projection'}",
            layer.projection,
            (kv_heads, 4 * bits if nibbles else bits, head_dim),
        )
        _check_array(f"{name}.residual", layer.residual, (kv_heads, layer.steps + 1))
        if (layer.residual < 0).any():
            raise ArtifactError(f"{name}.residual: expected values of 0 or more, found a negative one")
        for kind, array, flag in (
            ("metric", layer.metric, algorithm["metric"]),
            ("mean", layer.mean, algorithm["centred"]),
        ):
            if (array is not None) != flag:
                raise ArtifactError(
                    f"{name}.{kind}: is {_found(array is not None)}, but metadata.algorithm says the opposite"
                )
        if layer.metric is not None:
            _check_array(f"{name}.metric", layer.metric, (kv_heads, head_dim, head_dim))
            _check_metric(f"{name}.metric", layer.metric)
        if layer.mean is not None:
            _check_array(f"{name}.mean", layer.mean, (kv_heads, head_dim))
        if (layer.need is not None) != needs:
            raise ArtifactError(f"{name}.need: expected in all layers or in none")
        for kind, need in (("need", layer.need), ("need_short", layer.need_short)):
            if need is not None:
                _check_array(f"{name}.{kind}", need, (kv_heads, SHARES))
                if (need < 0).any():
                    raise ArtifactError(f"{name}.{kind}: expected values of 0 or more, found a negative one")
        short, first = layer.need_short is not None, artifact.layers[metadata["layers"][0]].need_short is not None
        if (short and layer.need is None) or short != first:
            raise ArtifactError(f"{name}.need_short: expected in all layers that have a need, or in none")


def _found(present: bool) -> str:
    return "present" if present else "absent"


def unknown_keys(metadata: Mapping[str, Any]) -> list[str]:
    """Return the keys of checked metadata that the format does not name, such as `metadata.note`."""
    return _unknown("metadata", metadata, _METADATA)


def _unknown(where: str, found: Any, expected: Any) -> list[str]:
    if isinstance(expected, list):
        return [key for i, item in enumerate(found) for key in _unknown(f"{where}[{i}]", item, expected[0])]
    if where in _OPTIONAL:
        expected = (expected if isinstance(expected, dict) else {}) | _OPTIONAL[where]
    if not isinstance(expected, dict) or found is None:
        return []
    return [
        unknown
        for key, inner in found.items()
        for unknown in (_unknown(f"{where}.{key}", inner, expected[key]) if key in expected else [f"{where}.{key}"])
    ]


def _check_value(where: str, found: Any, expected: Any) -> None:
    if isinstance(expected, dict):
        _expect(where, found, "a table", isinstance(found, dict))
        for key, inner in expected.items():
            if key not in found:
                raise ArtifactError(f"{where}.{key}: missing")
            _check_value(f"{where}.{key}", found[key], inner)
    elif isinstance(expected, list):
        _expect(where, found, "a list", isinstance(found, list))
        for i, item in enumerate(found):
            _check_value(f"{where}[{i}]", item, expected[0])
    elif isinstance(expected, type | tuple):
        kinds = expected if isinstance(expected, tuple) else (expected,)
        names = " or ".join("null" if kind is type(None) else kind.__name__ for kind in kinds)
        # bool is an int in Python, but not in this format
        _expect(where, found, names, isinstance(found, kinds) and (isinstance(found, bool) == (expected is bool)))
    else:
        _expect(where, found, repr(expected), found == expected and type(found) is type(expected))


def _expect(where: str, found: Any, expected: str, good: bool) -> None:
    if not good:
        shown = repr(found)
        raise ArtifactError(f"{where}: expected {expected}, found {shown[:60]}{'...' * (len(shown) > 60)}")


def _check_numbers(metadata: Mapping[str, Any]) -> None:
    model, algorithm, calibration = metadata["model"], metadata["algorithm"], metadata["calibration"]
    _expect("metadata.algorithm.bits", algorithm["bits"], "32, 64 or 128", algorithm["bits"] in BITS)
    positive = {f"metadata.model.{key}": model[key] for key in ("num_layers", "kv_heads", "query_heads", "head_dim")}
    positive["metadata.algorithm.iterations"] = algorithm["iterations"]
    positive |= {
        f"metadata.calibration.{key}": calibration[key]
        for key in ("samples", "sequence_length", "tokens", "keys_per_head")
    }
    for where, value in positive.items():
        _expect(where, value, "at least 1", value >= 1)
    _expect(
        "metadata.model.query_heads",
        model["query_heads"],
        f"a multiple of kv_heads {model['kv_heads']}",
        model["query_heads"] % model["kv_heads"] == 0,
    )
    types = model["layer_types"]
    _expect(
        "metadata.model.layer_types",
        len(types),
        f"{model['num_layers']} entries",
        len(types) == model["num_layers"],
    )
    layers = metadata["layers"]
    full = [i for i, kind in enumerate(types) if kind == "full_attention"]
    _expect("metadata.layers", layers, f"the full-attention layers {full}", layers == full and layers != [])


def _check_metrics(metadata: Mapping[str, Any]) -> None:
    """Check the residuals in `metrics`, each of which may be absent."""
    where, metrics = "metadata.metrics", metadata["metrics"]
    if "residual" in metrics:
        _check_residual(f"{where}.residual", metrics["residual"])
    if "residual_by_layer" in metrics:
        by_layer = metrics["residual_by_layer"]
        _expect(f"{where}.residual_by_layer", by_layer, "a table", isinstance(by_layer, dict))
        _check_by_layer(f"{where}.residual_by_layer", by_layer, metadata["layers"])
        for name, value in by_layer.items():
            _check_residual(f"{where}.residual_by_layer.{name}", value)
    _check_held_out(metadata)


def _check_by_layer(where: str, table: Mapping[str, Any], layers: list[int]) -> None:
    names, found = [str(layer) for layer in layers], list(table)
    _expect(where, found, f"the layers {names}", sorted(found) == sorted(names))


def _check_held_out(metadata: Mapping[str, Any]) -> None:
    """Check `metrics.held_out`, which is absent or null where no sample was kept aside."""
    where, held_out = "metadata.metrics.held_out", metadata["metrics"].get("held_out")
    if held_out is None:
        return
    _check_value(where, held_out, _HELD_OUT)
    for key in ("samples", "keys_per_head"):
        _expect(f"{where}.{key}", held_out[key], "at least 1", held_out[key] >= 1)
    _check_residual(f"{where}.residual", held_out["residual"])
    _check_by_layer(f"{where}.residual_by_layer", held_out["residual_by_layer"], metadata["layers"])
    for name, found in held_out["residual_by_layer"].items():
        _check_residual(f"{where}.residual_by_layer.{name}", found)
    _check_by_head(f"{where}.residual_by_head", held_out["residual_by_head"], metadata)
    if "length_by_head" in held_out:
        _expect(f"{where}.length_by_head", lengths := held_out["length_by_head"], "a table", isinstance(lengths, dict))
        _check_by_head(f"{where}.length_by_head", lengths, metadata)


def _check_by_head(where: str, table: Mapping[str, Any], metadata: Mapping[str, Any]) -> None:
    kv_heads = metadata["model"]["kv_heads"]
    _check_by_layer(where, table, metadata["layers"])
    for name, heads in table.items():
        place = f"{where}.{name}"
        _expect(place, heads, f"a list of {kv_heads} numbers", isinstance(heads, list) and len(heads) == kv_heads)
        for head, value in enumerate(heads):
            _check_residual(f"{place}[{head}]", value)


def _check_residual(where: str, value: Any) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    _expect(where, value, "a finite number of 0 or more", number and 0 <= value <= sys.float_info.max)


def _check_array(name: str, array: Any, shape: tuple[int, ...]) -> None:
    if not isinstance(array, np.ndarray) or array.dtype != np.float32:
        found = getattr(array, "dtype", type(array).__name__)
        raise ArtifactError(f"{name}: expected float32, found {found}")
    if array.shape != shape:
        raise ArtifactError(f"{name}: expected shape {list(shape)}, found {list(array.shape)}")
    if not np.isfinite(array).all():
        raise ArtifactError(f"{name}: expected finite values, found NaN or infinity")


def _check_metric(name: str, metric: Array) -> None:
    wide = metric.astype(np.float64)
    scale = np.abs(wide).max(axis=(-2, -1), keepdims=True)
    if (np.abs(wide - wide.swapaxes(-2, -1)) > 1e-5 * scale).any():
        raise ArtifactError(f"{name}: expected symmetric matrices, found one that is not")
    lowest = float(np.linalg.eigvalsh(wide).min())
    if lowest <= 0:
        raise ArtifactError(f"{name}: expected positive definite matrices, found an eigenvalue of {lowest:.3g}")
