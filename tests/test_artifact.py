"""The artifact: round trips, same bytes, and the refusal of damaged files."""

import copy
import dataclasses
import errno
import hashlib
import json
import os
import re
import struct
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from bpc_artifacts import (
    ArtifactError,
    LayerProjection,
    ProjectionArtifact,
    check_model,
    check_writable,
    load,
    save,
)

KV_HEADS, BITS, HEAD_DIM = 2, 32, 8


def metadata(**changes) -> dict:
    """Return valid metadata with changes; the name of a change is a table and a key, such as `model__id`."""
    table = {
        "bpc_version": "0.1.0",
        "metrics": {"residual": 0.5},
        "algorithm": {
            "name": "score-aware",
            "bits": BITS,
            "iterations": 8,
            "metric": False,
            "least_squares": 0,
            "centred": False,
            "position_shift": True,
            "seed": 0,
        },
        "model": {
            "id": "org/name",
            "revision": None,
            "config_sha256": "ab",
            "model_type": "llama",
            "num_layers": 3,
            "kv_heads": KV_HEADS,
            "query_heads": 4,
            "head_dim": HEAD_DIM,
            "rope": {"rope_theta": 10000.0, "rope_type": "default"},
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        },
        "calibration": {
            "sources": [
                {
                    "name": "notes",
                    "path": "notes",
                    "revision": None,
                    "split": None,
                    "field": None,
                    "samples": 2,
                    "tokens": 64,
                    "sha256": "cd",
                }
            ],
            "samples": 2,
            "sequence_length": 32,
            "tokens": 64,
            "keys_per_head": 64,
            "dtype": "float32",
        },
    }
    for path, value in changes.items():
        *tables, key = path.split("__")
        inner = table
        for name in tables:
            inner = inner[name]
        inner[key] = value
    return table


def artifact(*, metric=False, mean=False, nibbles=False, layers=(0, 2), **changes) -> ProjectionArtifact:
    rng = np.random.default_rng(0)

    def array(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    held = {}
    for index in layers:
        root = array(KV_HEADS, HEAD_DIM, HEAD_DIM)
        held[index] = LayerProjection(
            projection=array(KV_HEADS, 4 * BITS if nibbles else BITS, HEAD_DIM),
            residual=np.abs(array(KV_HEADS, (BITS // 4 if nibbles else BITS) + 1)),
            nibbles=nibbles,
            metric=root @ root.swapaxes(1, 2) + 0.1 * np.eye(HEAD_DIM, dtype=np.float32) if metric else None,
            mean=array(KV_HEADS, HEAD_DIM) if mean else None,
        )
    changes = {"algorithm__metric": metric, "algorithm__centred": mean} | changes
    if nibbles:
        changes = {"algorithm__codes": "nibbles", "format_version": 3} | changes
    return ProjectionArtifact(held, metadata(**changes))


def held_out(residual: float = 0.5, **changes) -> dict:
    """Return residuals of held-out samples, the same for every layer and head."""
    by_head = {"0": [residual] * KV_HEADS, "2": [residual] * KV_HEADS}
    table = {"samples": 1, "keys_per_head": 32, "residual": residual, "residual_by_head": by_head}
    return table | {"residual_by_layer": {"0": residual, "2": residual}} | changes


def test_vectors_of_nibbles_are_kept(tmp_path):
    made, path = artifact(metric=True, mean=True, nibbles=True), tmp_path / "n.safetensors"
    save(made, path)
    found = load(path)
    assert found.nibbles
    assert safetensors.numpy.load_file(path)["layers.0.vectors"].shape == (KV_HEADS, BITS // 4, 16, HEAD_DIM)
    for index, layer in found.layers.items():
        assert layer.nibbles
        assert layer.bits == BITS
        assert np.array_equal(layer.projection, made.layers[index].projection)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda header, table, payload: table["algorithm"].pop("codes"),
            "format_version: expected 1, by the first layer, found 3",
        ),
        (
            lambda header, table, payload: table["algorithm"].update(codes="bytes"),
            "codes: expected 'signs' or 'nibbles'",
        ),
        (
            lambda header, table, payload: table.update(format_version=1),
            "format_version: expected 3, by the first layer",
        ),
        (
            lambda header, table, payload: header["layers.2.vectors"].update(shape=[KV_HEADS, BITS // 8, 32, HEAD_DIM]),
            r"layers.2.vectors: expected \[kv_heads, nibbles, 16, head_dim\] alone, found \[2, 4, 32, 8\]",
        ),
        (
            lambda header, table, payload: header.update({"layers.0.projection": header.pop("layers.0.vectors")}),
            r"layers.0.vectors: is absent, but",
        ),
    ],
)
def test_vectors_that_are_not_as_they_should_be(tmp_path, change, message):
    path = tmp_path / "n.safetensors"
    save(artifact(nibbles=True), path)
    rewrite(path, lambda *parts: change(*parts) and None)
    with pytest.raises(ArtifactError, match=message):
        load(path)


@pytest.mark.parametrize("shape", [(0, 16, 16, 64), (2, 16, 16, 0)])
def test_vectors_without_numbers_are_refused(tmp_path, shape):
    made = artifact(nibbles=True)
    broken = LayerProjection.of(made.layers[0].arrays() | {"vectors": np.zeros(shape, np.float32)})
    with pytest.raises(ArtifactError, match=r"layers\.0"):
        save(dataclasses.replace(made, layers={**made.layers, 0: broken}), tmp_path / "n.safetensors")


@pytest.fixture
def path(tmp_path) -> Path:
    save(artifact(), tmp_path / "a.safetensors")
    return tmp_path / "a.safetensors"


def rewrite(path: Path, change) -> None:
    """Change a file with `change(header, metadata, payload)`; it stays a valid safetensors file."""
    blob = path.read_bytes()
    length = struct.unpack("<Q", blob[:8])[0]
    header, payload = json.loads(blob[8 : 8 + length]), bytearray(blob[8 + length :])
    table = json.loads(header["__metadata__"]["bpc"])
    result = change(header, table, payload)
    payload = payload if result is None else result
    if header.get("__metadata__", {}).get("bpc") is not None:
        header["__metadata__"]["bpc"] = json.dumps(table)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + payload)


@pytest.mark.parametrize("metric", [False, True])
@pytest.mark.parametrize("mean", [False, True])
def test_round_trip_and_same_bytes(tmp_path, metric, mean):
    made = artifact(metric=metric, mean=mean)
    save(made, tmp_path / "one.safetensors")
    found = load(tmp_path / "one.safetensors")
    assert list(found.layers) == [0, 2]
    for index, layer in made.layers.items():
        for kind in ("projection", "residual", "metric", "mean"):
            ours, theirs = getattr(layer, kind), getattr(found.layers[index], kind)
            assert (ours is None) == (theirs is None)
            assert ours is None or np.array_equal(ours, theirs)
    assert {k: found.metadata[k] for k in made.metadata} == made.metadata
    save(found, tmp_path / "two.safetensors")
    assert (tmp_path / "one.safetensors").read_bytes() == (tmp_path / "two.safetensors").read_bytes()


def test_the_file_is_plain_safetensors(path):
    tensors = safetensors.numpy.load_file(path)
    assert sorted(tensors) == ["layers.0.projection", "layers.0.residual", "layers.2.projection", "layers.2.residual"]
    blob = path.read_bytes()
    length = struct.unpack("<Q", blob[:8])[0]
    header = json.loads(blob[8 : 8 + length])
    assert list(header["__metadata__"]) == ["bpc"]
    table = json.loads(header["__metadata__"]["bpc"])
    assert header["__metadata__"]["bpc"] == json.dumps(table, sort_keys=True, separators=(",", ":"))
    assert table["payload_sha256"] == hashlib.sha256(blob[8 + length :]).hexdigest()
    assert (table["format_version"], table["key_space"], table["layers"]) == (1, "post_rope", [0, 2])


def test_additional_keys_of_a_later_writer_are_kept(tmp_path):
    save(artifact(algorithm__temper=0.5), tmp_path / "a.safetensors")
    assert load(tmp_path / "a.safetensors").metadata["algorithm"]["temper"] == 0.5


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_flipped_byte_is_refused(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("flip") / "a.safetensors"
    save(artifact(), path)
    blob = bytearray(path.read_bytes())
    blob[data.draw(st.integers(0, len(blob) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(blob)
    with pytest.raises(ArtifactError) as fault:
        load(path)
    assert str(fault.value).startswith(str(path))
    assert "\n" not in str(fault.value)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_truncation_is_refused(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("cut") / "a.safetensors"
    save(artifact(), path)
    blob = path.read_bytes()
    path.write_bytes(blob[: data.draw(st.integers(0, len(blob) - 1))])
    with pytest.raises(ArtifactError):
        load(path)


def test_bytes_after_the_end_are_refused(path):
    path.write_bytes(path.read_bytes() + b"\0" * 8)
    with pytest.raises(ArtifactError, match="damaged or truncated"):
        load(path)


def set_path(table, dotted, value):
    *tables, key = dotted.split(".")
    for name in tables:
        table = table[name]
    if value is KeyError:
        del table[key]
    else:
        table[key] = value


@pytest.mark.parametrize(
    ("where", "value", "message"),
    [
        ("format_version", 4, "format_version is 4, but this bpc reads only up to 3: upgrade"),
        ("format_version", 3, "metadata.format_version: expected 1, by the first layer, found 3"),
        ("format_version", 0, "metadata.format_version: expected 1 or 3, found 0"),
        ("format_version", True, "metadata.format_version: expected 1 or 3, found True"),
        ("format_version", KeyError, "metadata.format_version: missing"),
        ("bpc_version", 1, "metadata.bpc_version: expected str, found 1"),
        ("key_space", "pre_rope", "metadata.key_space: expected 'post_rope', found 'pre_rope'"),
        ("model.id", "org/other", "damaged: the sha256 of its metadata is"),
        ("payload_sha256", "0" * 64, "damaged: the sha256 of its tensors is"),
        ("layers", [0], r"metadata.layers: expected the layers of the tensors \[0, 2\], found \[0\]"),
        ("layers", [0, "2"], r"metadata.layers\[1\]: expected int"),
        ("layers", 3, "metadata.layers: expected a list"),
        ("algorithm", [], r"metadata.algorithm: expected a table, found \[\]"),
        ("algorithm.bits", 48, "metadata.algorithm.bits: expected 32, 64 or 128, found 48"),
        ("algorithm.bits", 64, r"layers.0.projection: expected shape \[2, 64, 8\], found \[2, 32, 8\]"),
        ("algorithm.iterations", 0, "metadata.algorithm.iterations: expected at least 1"),
        ("algorithm.metric", True, "layers.0.metric: is absent, but metadata.algorithm says the opposite"),
        ("algorithm.centred", True, "layers.0.mean: is absent"),
        ("algorithm.centred", 0, "metadata.algorithm.centred: expected bool, found 0"),
        ("model.kv_heads", 4, r"layers.0.projection: expected shape \[4, 32, 8\]"),
        ("model.kv_heads", 3, "metadata.model.query_heads: expected a multiple of kv_heads 3"),
        ("model.kv_heads", 0, "metadata.model.kv_heads: expected at least 1"),
        ("model.kv_heads", 2.0, "metadata.model.kv_heads: expected int, found 2.0"),
        ("model.head_dim", 16, r"expected shape \[2, 32, 16\]"),
        ("model.num_layers", 4, "metadata.model.layer_types: expected 4 entries, found 3"),
        (
            "model.layer_types",
            ["full_attention"] * 3,
            r"metadata.layers: expected the full-attention layers \[0, 1, 2\]",
        ),
        ("model.rope", [], "metadata.model.rope: expected dict or null"),
        ("calibration.sources", {}, "metadata.calibration.sources: expected a list"),
        ("calibration.sources", [{}], r"metadata.calibration.sources\[0\].name: missing"),
        ("calibration.samples", -1, "metadata.calibration.samples: expected at least 1"),
    ],
)
def test_metadata_is_checked(path, where, value, message):
    rewrite(path, lambda header, table, payload: set_path(table, where, value))
    with pytest.raises(ArtifactError, match=message):
        load(path)


def test_a_file_of_product_codes_is_refused_with_what_to_do(path):
    """Format version 2 had other tensors: the version is told before their names are."""

    def with_centroids(header, table, payload):
        table["format_version"] = 2
        header["layers.0.centroids"] = header.pop("layers.0.projection")

    rewrite(path, with_centroids)
    with pytest.raises(ArtifactError, match=r"format_version is 2, of product codes, .* calibrate again"):
        load(path)


def swap_float(payload: bytearray, value: float) -> bytes:
    return struct.pack("<f", value) + bytes(payload[4:])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda h, t, p: swap_float(p, float("nan")), "layers.0.projection: expected finite values, found NaN"),
        (lambda h, t, p: swap_float(p, float("inf")), "layers.0.projection: expected finite values, found NaN or inf"),
        (lambda h, t, p: swap_float(p, 1.5), "damaged: the sha256 of its tensors"),
        (lambda h, t, p: h["layers.0.projection"].update(shape=[2, 8, 32]), r"expected shape \[2, 32, 8\], found"),
        (lambda h, t, p: h["layers.0.projection"].update(shape=[512]), r"expected shape \[2, 32, 8\], found \[512\]"),
        (lambda h, t, p: h["layers.0.projection"].update(dtype="I32"), "layers.0.projection: expected F32, found I32"),
        (lambda h, t, p: h["layers.0.projection"].update(dtype="NOPE"), "expected F32, found NOPE"),
        (lambda h, t, p: h["layers.0.projection"].update(shape=[2, 32, 9]), "damaged or truncated"),
        (lambda h, t, p: h["layers.0.projection"].update(data_offsets=[0, 1 << 60]), "damaged or truncated"),
        (lambda h, t, p: h.update({"layers.0.projection": 7}), "layers.0.projection: expected F32, found 7"),
        (lambda h, t, p: h.update({"weights": h.pop("layers.0.projection")}), "weights: not a tensor of this format"),
        (lambda h, t, p: h.update({"layers.00.mean": h.pop("layers.0.residual")}), "layers.00.mean: not a tensor"),
        (lambda h, t, p: h.update({"layers.0.mean": h.pop("layers.0.residual")}), "layers.0.residual: missing"),
        (lambda h, t, p: h.update({"layers.1.residual": h.pop("layers.2.residual")}), "layers.1.projection: missing"),
        (lambda h, t, p: h.pop("__metadata__"), "not a BPC artifact: the metadata key 'bpc' is missing"),
        (lambda h, t, p: h["__metadata__"].pop("bpc"), "the metadata key 'bpc' is missing"),
    ],
)
def test_tensors_are_checked(path, change, message):
    def apply(header, table, payload):
        result = change(header, table, payload)
        return result if isinstance(result, bytes) else None

    rewrite(path, apply)
    with pytest.raises(ArtifactError, match=message):
        load(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "metadata: not valid JSON"),
        ("[]", "metadata: expected a JSON object, found list"),
        ('{"a": NaN}', "metadata: not valid JSON: NaN is not a JSON number"),
        ('{"a": 1e999}', "metadata: not valid JSON: 1e999 is not a JSON number"),
        ('{"a": 1, "a": 2}', "metadata: not valid JSON: a key occurs twice"),
        ("[" * 100_000, "metadata: not valid JSON"),
    ],
)
def test_metadata_is_strict_json(tmp_path, text, message):
    tensors = {"layers.0.projection": np.zeros((1, 32, 4), np.float32)}
    path = tmp_path / "a.safetensors"
    path.write_bytes(safetensors.numpy.save(tensors, {"bpc": text}))
    with pytest.raises(ArtifactError, match=message):
        load(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a safetensors file: 0 bytes"),
        (b"PK\x03\x04 a zip file of some kind", "the header claims"),
        (struct.pack("<Q", 1 << 21) + b"{}", "the header claims 2,097,152 bytes, expected 2 to 1,048,576"),
        (struct.pack("<Q", 100) + b"{}", "truncated: 10 bytes, expected more than 108"),
        (struct.pack("<Q", 2) + b"\xff\xff", "the safetensors header: not valid JSON"),
        (struct.pack("<Q", 2) + b"{}", "not a BPC artifact: the metadata key 'bpc' is missing"),
    ],
)
def test_other_files_are_refused(tmp_path, content, message):
    path = tmp_path / "a.safetensors"
    path.write_bytes(content)
    with pytest.raises(ArtifactError, match=message):
        load(path)


def test_missing_files_and_folders_are_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ArtifactError, match="is not a regular file"):
        load(tmp_path / "pipe")
    with pytest.raises(ArtifactError, match="No such file"):
        load(tmp_path / "no.safetensors")
    with pytest.raises(ArtifactError, match="is a folder"):
        load(tmp_path)


def test_metric_must_be_symmetric_and_positive_definite(tmp_path):
    for change, message in (
        (lambda m: m[0, 0].__setitem__(1, 99.0), "layers.0.metric: expected symmetric matrices"),
        (
            lambda m: m.__setitem__(0, -np.eye(HEAD_DIM)),
            "expected positive definite matrices, found an eigenvalue of -1",
        ),
        (lambda m: m.__setitem__(0, 0.0), "found an eigenvalue of 0"),
    ):
        made = artifact(metric=True)
        change(made.layers[0].metric)
        with pytest.raises(ArtifactError, match=message):
            save(made, tmp_path / "a.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_saving_an_invalid_artifact_writes_nothing(tmp_path):
    made = artifact()
    made.layers[0].projection[0, 0, 0] = np.nan
    with pytest.raises(ArtifactError, match="expected finite values"):
        save(made, tmp_path / "a.safetensors")
    with pytest.raises(ArtifactError, match="expected float32, found float64"):
        save(
            ProjectionArtifact(
                dict.fromkeys((0, 2), LayerProjection(np.zeros((2, 32, 8)), np.zeros((2, 33)))), metadata()
            ),
            tmp_path / "a.safetensors",
        )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("value", [float("nan"), np.int64(3), {1, 2}])
def test_metadata_that_is_not_json_is_refused(tmp_path, value):
    with pytest.raises(ArtifactError, match="metadata: not JSON"):
        save(artifact(metrics={"x": value}), tmp_path / "a.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_file_names_of_the_largest_length(tmp_path):
    name = "長" * 80 + ".safetensors"
    save(artifact(), tmp_path / name)
    load(tmp_path / name)
    with pytest.raises(ArtifactError, match="cannot be written: File name too long"):
        save(artifact(), tmp_path / ("x" * 300))


def test_only_a_regular_file_is_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ArtifactError, match="is not a regular file"):
        save(artifact(), tmp_path / "pipe", overwrite=True)


def test_residuals_of_held_out_samples_are_kept_and_checked(path):
    for table in (held_out(), held_out(0), None):
        save(artifact(metrics__held_out=table), path, overwrite=True)
        assert load(path).metadata["metrics"]["held_out"] == table
    where = "metadata.metrics.held_out"
    for table, message in (
        (0.5, f"{where}: expected a table, found 0.5"),
        (held_out(samples=0), f"{where}.samples: expected at least 1, found 0"),
        (held_out(keys_per_head=True), f"{where}.keys_per_head: expected int, found True"),
        (held_out(residual="low"), f"{where}.residual: expected float or int, found 'low'"),
        (held_out(-0.1), f"{where}.residual: expected a finite number of 0 or more, found -0.1"),
        (held_out(10**400), f"{where}.residual: expected a finite number of 0 or more, found 1000"),
        (held_out(residual_by_layer={"0": 0.5}), f"{where}.residual_by_layer: expected the layers ['0', '2'], found"),
        (held_out(residual_by_layer={"0": 0.5, "2": None}), f"{where}.residual_by_layer.2: expected a finite number"),
        (held_out(residual_by_head={"0": [0.5], "2": [0.5] * 2}), f"{where}.residual_by_head.0: expected a list of 2"),
        (held_out(length_by_head=[3]), f"{where}.length_by_head: expected a table"),
        (held_out(length_by_head={"0": [3.0]}), f"{where}.length_by_head: expected the layers"),
        (held_out(length_by_head={"0": [3.0], "2": [3.0] * 2}), f"{where}.length_by_head.0: expected a list of 2"),
        (held_out(residual_by_head={"0": [0.5] * 2, "2": [0.5, "x"]}), f"{where}.residual_by_head.2[1]: expected a"),
    ):
        with pytest.raises(ArtifactError, match=re.escape(message)):
            save(artifact(metrics__held_out=table), path, overwrite=True)


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        ({"residual": "by Anna"}, "residual: expected a finite number of 0 or more, found 'by Anna'"),
        ({"residual": True}, "residual: expected a finite number of 0 or more, found True"),
        ({"residual": None}, "residual: expected a finite number of 0 or more, found None"),
        ({"residual_by_layer": "by Anna"}, "residual_by_layer: expected a table, found 'by Anna'"),
        ({"residual_by_layer": {"0": 0.5}}, "residual_by_layer: expected the layers ['0', '2'], found ['0']"),
        ({"residual_by_layer": {"0": 1, "2": -1}}, "residual_by_layer.2: expected a finite number of 0 or more"),
        ({"residual_by_layer": {"0": {"by": "Anna"}, "2": 1}}, "residual_by_layer.0: expected a finite number"),
    ],
)
def test_residuals_of_fitted_samples_are_checked_where_they_are_present(path, metrics, message):
    for good in ({}, {"residual": 0.5, "residual_by_layer": {"0": 0.25, "2": 1}}):
        save(artifact(metrics=good), path, overwrite=True)
        assert load(path).metadata["metrics"] == good
    with pytest.raises(ArtifactError, match=re.escape(f"metadata.metrics.{message}")):
        save(artifact(metrics=metrics), path, overwrite=True)


def test_only_an_artifact_or_an_empty_file_is_replaced(path, tmp_path):
    whole = path.read_bytes()
    other = safetensors.numpy.save({"x": np.zeros(3, np.float32)}, {"format": "pt"})
    for content in (b"text", b"12345678{}", other, json.dumps({"__metadata__": {"bpc": ""}}).encode()):
        path.write_bytes(content)
        for attempt in (lambda: save(artifact(), path, overwrite=True), lambda: check_writable(path, 0)):
            with pytest.raises(ArtifactError, match="exists and is not a BPC artifact, so it is never replaced: give"):
                attempt()
        assert path.read_bytes() == content
    flipped = bytearray(whole)
    flipped[-3] ^= 1
    foreign = safetensors.numpy.save({"x": np.zeros(3, np.float32)}, {"a": "1", "bpc": "{}"})
    for content in (whole, whole[:200], bytes(flipped), foreign, b""):  # damaged ones too
        path.write_bytes(content)
        with pytest.raises(ArtifactError, match="exists; pass --force"):
            save(artifact(), path)
        save(artifact(), path, overwrite=True)
        load(path)


def test_existing_files_are_kept_without_overwrite(path):
    before = path.read_bytes()
    other = artifact(algorithm__seed=1)
    for attempt in (lambda: save(other, path), lambda: check_writable(path, 0)):
        with pytest.raises(ArtifactError, match=r"exists; pass --force \(overwrite=True in Python\) to replace it"):
            attempt()
    assert path.read_bytes() == before
    check_writable(path, 0, overwrite=True)
    assert path.read_bytes() == before
    save(other, path, overwrite=True)
    assert load(path).metadata["algorithm"]["seed"] == 1
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_bad_targets_are_refused(tmp_path):
    for attempt in (lambda p: save(artifact(), p), lambda p: check_writable(p, 0)):
        with pytest.raises(ArtifactError, match="there is no folder"):
            attempt(tmp_path / "no" / "a.safetensors")
        with pytest.raises(ArtifactError, match="is a folder: give the path of a file"):
            attempt(tmp_path)
    with pytest.raises(ArtifactError, match=r"cannot be written: 1,000,000,000,000,000,000 bytes are needed and"):
        check_writable(tmp_path / "a.safetensors", 10**18)
    assert list(tmp_path.iterdir()) == []


def test_save_replaces_the_target_of_a_link_and_not_the_link(path):
    link = path.with_name("link.safetensors")
    link.symlink_to(path)
    save(artifact(algorithm__seed=7), link, overwrite=True)
    assert link.is_symlink()
    assert load(path).metadata["algorithm"]["seed"] == 7


def test_save_respects_the_umask(tmp_path):
    before = os.umask(0o027)
    try:
        save(artifact(), tmp_path / "a.safetensors")
    finally:
        os.umask(before)
    assert (tmp_path / "a.safetensors").stat().st_mode & 0o777 == 0o640


def test_one_of_several_concurrent_saves_wins_and_the_file_is_complete(tmp_path):
    outcomes = []

    def run(seed):
        with suppress(ArtifactError):
            save(artifact(algorithm__seed=seed), tmp_path / "a.safetensors")
            outcomes.append(seed)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(outcomes) == 1
    assert load(tmp_path / "a.safetensors").metadata["algorithm"]["seed"] == outcomes[0]
    assert len(list(tmp_path.iterdir())) == 1


def test_a_failed_write_keeps_the_old_file_and_leaves_no_other(path):
    """A limit of the file size makes the write fail halfway, as on a full disk."""
    before = path.read_bytes()
    script = (
        "import resource, sys; sys.path.insert(0, sys.argv[2])\n"
        "from test_artifact import artifact, save\n"
        "from bpc_artifacts import ArtifactError\n"
        "made = artifact()\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "try:\n    save(made, sys.argv[1], overwrite=True)\n"
        "except ArtifactError as fault:\n    print(fault)\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", script, path, Path(__file__).parent], capture_output=True, text=True, check=True
    )
    assert f"{path}: cannot be written: {os.strerror(errno.EFBIG)}" in ran.stdout
    assert path.read_bytes() == before
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_an_artifact_fits_only_its_model():
    made = artifact()
    model = made.metadata["model"]
    assert check_model(made, copy.deepcopy(model)) == []
    for key, value, name in (
        ("num_layers", 5, "layers: the artifact has 3, the model 5"),
        ("kv_heads", 4, "KV heads: the artifact has 2, the model 4"),
        ("head_dim", 16, "head_dim: the artifact has 8, the model 16"),
        ("rope", {"rope_theta": 5e5, "rope_type": "default"}, "RoPE: the artifact has"),
        ("rope", None, "RoPE: the artifact has"),
        ("layer_types", ["full_attention"] * 3, "layer types"),
    ):
        with pytest.raises(ArtifactError, match=name):
            check_model(made, model | {key: value, "id": "other"})
    with pytest.raises(ArtifactError, match=r"has 3, the model 4 \(bpc calibrate makes an artifact for other\)$"):
        check_model(made, model | {"id": "other", "num_layers": 4, "layer_types": ["full_attention"] * 4})


def test_another_version_of_the_model_causes_a_warning():
    made = artifact(model__revision="a" * 40)
    model = made.metadata["model"]
    assert check_model(made, model | {"revision": None}) == []  # a local copy has no revision
    (warning,) = check_model(made, model | {"revision": "b" * 40})
    assert warning.startswith("revision differs")
    (warning,) = check_model(made, model | {"config_sha256": "ef"})
    assert warning.startswith("config differs")
