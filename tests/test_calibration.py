"""Calibration as a whole: the kept keys, the contents of the artifact, and its reproducibility."""

import dataclasses
import itertools
import math
import random

import numpy as np
import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bpc_artifacts import load, save
from bpc_calib import BPCError, InputError, ModelError, decompose, describe, make_plan
from bpc_calib.backends.dispatch import find
from bpc_calib.calibration.numbers import held_out_samples
from bpc_calib.calibration.positions import early_keys, first_positions, key_positions, shift_offsets, spread_keys
from bpc_calib.calibration.projecting import fit_layers
from bpc_calib.method.fitting import fit, mean_key, residual_norms
from bpc_calib.method.metric import query_metric
from bpc_calib.method.nibble_fitting import fit_nibbles, nibble_residuals
from bpc_calib.models.observation import observing


@settings(max_examples=100, deadline=None)
@given(
    offsets=st.lists(st.integers(0, 40), min_size=1, max_size=30),
    length=st.integers(1, 50),
    keys=st.integers(1, 2000),
    seed=st.integers(0, 99),
)
def test_keys_are_drawn_without_repetition(offsets, length, keys, seed):
    chosen = spread_keys(offsets, length, keys, random.Random(seed))
    assert len(chosen) == len(offsets)
    assert sum(map(len, chosen)) == min(keys, len(offsets) * length)
    for indices in chosen:
        assert indices == sorted(set(indices))
        assert all(0 <= index < length for index in indices)
    assert chosen == spread_keys(offsets, length, keys, random.Random(seed))


@settings(max_examples=100, deadline=None)
@given(samples=st.integers(1, 200), length=st.integers(1, 100), more=st.integers(0, 10_000), seed=st.integers(0, 9))
def test_two_of_three_samples_begin_at_0_and_the_others_anywhere(samples, length, more, seed):
    offsets = shift_offsets(samples, length, length + more, random.Random(seed))
    assert len(offsets) == samples
    assert all(0 <= offset <= more for offset in offsets)
    assert not any(offsets[0::3] + offsets[2::3])
    if samples >= 100 and more >= 1000:
        ordered = sorted(offsets[1::3])
        assert ordered[len(ordered) // 2] == pytest.approx(more / 2, rel=0.1)
        assert ordered[-1] > 0.9 * more
    assert shift_offsets(samples, length, length, random.Random(seed)) == [0] * samples


@pytest.mark.parametrize("limit", [8192, 32768])
def test_positions_of_every_order_of_magnitude_have_as_many_keys(limit):
    offsets = shift_offsets(96, 8192, limit, random.Random(0))
    indices = spread_keys(offsets, 8192, 8192, random.Random(0))
    positions = [offset + index for offset, own in zip(offsets, indices, strict=True) for index in own]
    for begin, end in ((128, 896), (896, 4096), (4096, 8192), (8192, limit)):
        share = sum(begin <= each < end for each in positions) / len(positions)
        # The integrals of 1 / (position + 128).
        assert share == pytest.approx(math.log((end + 128) / (begin + 128)) / math.log((limit + 128) / 128), rel=0.1)


def test_memory_is_limited_by_the_number_of_kept_keys():
    model = tiny.model()
    samples = torch.randint(0, 256, (6, 100), generator=torch.Generator().manual_seed(0))
    everything, nothing = tiny.collect_keys(model, samples, [list(range(100))] * 6, [0] * 6)
    assert nothing == {}
    positions = spread_keys([0] * 6, 100, 50, random.Random(0))
    kept, _ = tiny.collect_keys(model, samples, positions, [0] * 6)
    flat = [100 * i + position for i, row in enumerate(positions) for position in row]
    for layer, keys in kept.items():
        assert keys.shape == (2, 50, 8)
        assert keys.untyped_storage().nbytes() == 2 * 50 * 8 * 4
        assert torch.equal(keys, everything[layer][:, flat])


def test_moments_match_the_queries_at_the_kept_positions():
    model = tiny.model()
    samples = torch.randint(0, 256, (3, 40), generator=torch.Generator().manual_seed(0))
    offsets = [0, 7, 30]
    positions = spread_keys(offsets, 40, 12, random.Random(0))
    _, moments = tiny.collect_keys(model, samples, positions, offsets, moments=True)
    expected = {layer: torch.zeros(2, 8, 8, dtype=torch.float64) for layer in moments}
    places: list[int] = []

    def add(module, query, key, value, arguments):
        for head in range(4):  # two query heads per KV head
            for place in places:
                q = query[0, head, place].double()
                expected[module.layer_idx][head // 2] += torch.outer(q, q)

    with observing(model, add), torch.inference_mode():
        for sample, offset, places in zip(samples, offsets, positions, strict=True):  # noqa: B007
            model.base_model(input_ids=sample[None], position_ids=torch.arange(offset, offset + 40)[None])
    assert list(moments) == [0, 1, 2]
    for layer, moment in moments.items():
        torch.testing.assert_close(moment, expected[layer], rtol=1e-10, atol=1e-10)


@pytest.fixture(scope="module")
def made(text_folder):
    return tiny.calibrated(
        tiny.model(), tiny.tokenizer(), corpora=[f"notes={text_folder}"], samples=5, bits=32, keys_per_head=200
    )


def test_the_artifact_records_its_settings(made, tmp_path):
    metadata = made.metadata
    assert metadata["algorithm"] == {
        "name": "score-aware",
        "bits": 32,
        "iterations": 8,
        "metric": True,
        "least_squares": 6,
        "centred": True,
        "position_shift": True,
        "seed": 0,
    }
    calibration = metadata["calibration"]
    assert {k: calibration[k] for k in ("samples", "sequence_length", "tokens", "keys_per_head", "dtype")} == {
        "samples": 5,
        "sequence_length": 128,
        "tokens": 640,
        "keys_per_head": 200,
        "dtype": "float32",
    }
    (source,) = calibration["sources"]
    assert (source["name"], source["path"], source["tokens"]) == ("notes", "notes", 640)
    last = [layer.residual[:, -1].mean() for layer in made.layers.values()]
    assert metadata["metrics"]["residual"] == pytest.approx(float(np.mean(last)), rel=1e-6)
    save(made, tmp_path / "a.safetensors")
    assert load(tmp_path / "a.safetensors").metadata["model"]["model_type"] == "llama"


@pytest.mark.parametrize("method", ["paper", "score-aware", "nibbles"])
def test_projections_match_the_collected_keys(method, text_folder, tmp_path):
    from bpc_calib.text.corpora import open_corpus
    from bpc_calib.text.samples import draw_samples

    model = tiny.model()
    tokens, _ = draw_samples(
        [open_corpus(f"notes={text_folder}")],
        tiny.tokenizer(),
        samples=5,
        sequence_length=128,
        seed=0,
        vocab_size=tiny.VOCAB,
    )
    paper = method == "paper"
    plan = make_plan(describe(model.config), samples=5, bits=32, keys_per_head=200, method=method)
    assert (plan.fitted, plan.held_out) == ([0, 1, 3, 4], [2])
    positions, offsets = key_positions(plan), first_positions(plan)
    assert offsets == [0] * 5 if paper else shift_offsets(5, 128, 128, random.Random("0/position-shift"))
    places = ([part[i] for i in plan.fitted] for part in (tokens, positions, offsets))
    keys, moments = tiny.collect_keys(model, *places, moments=not paper)
    aside, _ = tiny.collect_keys(model, tokens[2:3], positions[2:3], offsets[2:3])
    settings = {"corpora": [f"notes={text_folder}"], "samples": 5, "bits": 32, "keys_per_head": 200}
    save(tiny.calibrated(model, tiny.tokenizer(), method=method, **settings), tmp_path / "a.safetensors")
    held_out = load(tmp_path / "a.safetensors").metadata["metrics"]["held_out"]
    assert (held_out["samples"], held_out["keys_per_head"]) == (1, 50)
    for layer, held in load(tmp_path / "a.safetensors").layers.items():
        generator = torch.Generator().manual_seed(0)
        if paper:
            found = decompose(keys[layer], 32, iterations=1, generator=generator)
            assert held.metric is None
            assert held.mean is None
        else:
            metric = query_metric(moments[layer], 0.25)
            about = {"metric": metric, "mean": mean_key(keys[layer])}
            if held.nibbles:
                found = fit_nibbles(
                    keys[layer], 32, rounds=8, encode=find(keys[layer].unsqueeze(0)).encode_with, **about
                )
            else:
                found = fit(keys[layer], 32, rounds=6, generator=generator, **about)
            assert np.array_equal(held.metric, metric.numpy())
            assert np.array_equal(held.mean, found.mean.numpy())
        assert np.array_equal(held.projection, found.projection.numpy())
        relative = found.residual_norms / found.residual_norms[:, :1]
        np.testing.assert_allclose(held.residual, relative.numpy(), rtol=1e-6)
        assert held.nibbles == (method == "nibbles")
        mean = None if paper else found.mean
        measure = nibble_residuals if held.nibbles else residual_norms
        measured = measure(aside[layer], found.projection, metric=None if paper else metric, mean=mean)
        assert held_out["residual_by_head"][str(layer)] == (measured[:, -1] / measured[:, 0]).tolist()


def test_the_mean_is_that_of_early_positions(text_folder, monkeypatch):
    monkeypatch.setattr("bpc_calib.calibration.positions.CENTRED", 40)
    model = tiny.model(max_position_embeddings=512)
    settings = {"corpora": [str(text_folder)], "samples": 6, "bits": 32, "sequence_length": 128, "keys_per_head": 300}
    plan = make_plan(describe(model.config), **{name: settings[name] for name in list(settings)[1:]})
    early = early_keys(plan)
    places = [
        offset + index
        for sample, (offset, indices) in enumerate(zip(first_positions(plan), key_positions(plan), strict=True))
        for index in indices
        if sample in plan.fitted
    ]
    assert max(places) > 128
    assert early.tolist() == [place < 40 for place in places]
    assert 0 < early.sum() < len(early)
    kept = []
    monkeypatch.setattr(
        "bpc_calib.calibration.projecting.fit_layers",
        lambda keys, *rest, **options: kept.extend(keys) or fit_layers(keys, *rest, **options),
    )
    artifact = tiny.calibrated(model, tiny.tokenizer(), **settings)
    for layer, keys in enumerate(kept):
        mean = keys[:, early].double().mean(1)
        np.testing.assert_allclose(artifact.layers[layer].mean, mean.numpy(), rtol=1e-5, atol=1e-6)
        assert abs(keys.double().mean(1) - mean).max() > 1e-3


@pytest.mark.parametrize(
    ("dtype", "method"), [(torch.float32, "score-aware"), (torch.bfloat16, "score-aware"), (torch.float32, "nibbles")]
)
def test_the_same_seed_returns_the_same_bytes_with_one_or_two_threads(text_folder, tmp_path, dtype, method):
    about = {"corpora": [str(text_folder)], "samples": 4, "bits": 64, "method": method}
    threads = torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            model = tiny.model("qwen3", hidden_size=64).to(dtype)
            artifact = tiny.calibrated(model, tiny.tokenizer(), **about)
            save(artifact, tmp_path / f"{count}.safetensors")
    finally:
        torch.set_num_threads(threads)
    assert (tmp_path / "1.safetensors").read_bytes() == (tmp_path / "2.safetensors").read_bytes()
    other = tiny.calibrated(model, tiny.tokenizer(), **about, seed=1)
    assert not np.array_equal(other.layers[0].projection, artifact.layers[0].projection)


def test_the_papers_method_has_one_iteration_and_no_shift(text_folder):
    artifact = tiny.calibrated(tiny.model(), tiny.tokenizer(), corpora=[str(text_folder)], samples=2, method="paper")
    algorithm = artifact.metadata["algorithm"]
    assert (algorithm["name"], algorithm["iterations"], algorithm["position_shift"]) == ("paper", 1, False)
    assert (algorithm["metric"], algorithm["least_squares"], algorithm["centred"]) == (False, 0, False)


def test_heads_are_fitted_in_groups_if_memory_is_short(made, text_folder, monkeypatch):
    monkeypatch.setattr("bpc_calib.calibration.projecting.FITTED_AT_ONCE", 1)
    again = tiny.calibrated(
        tiny.model(), tiny.tokenizer(), corpora=[f"notes={text_folder}"], samples=5, bits=32, keys_per_head=200
    )
    for layer, held in made.layers.items():
        np.testing.assert_allclose(held.projection, again.layers[layer].projection, rtol=1e-6, atol=1e-9)


@settings(max_examples=100, deadline=None)
@given(samples=st.integers(1, 500), corpora=st.integers(1, 4))
def test_held_out_samples_are_a_sixteenth_and_spread_over_the_corpora(samples, corpora):
    aside = held_out_samples(samples)
    assert len(aside) == (max(1, samples // 16) if samples > 1 else 0)
    assert all(0 <= each < samples for each in aside)
    assert all(b - a >= 2 for a, b in itertools.pairwise(aside))
    shares = [samples // corpora + (i < samples % corpora) for i in range(corpora)]
    edges = [0, *itertools.accumulate(shares)]
    counts = [sum(start <= each < end for each in aside) for start, end in itertools.pairwise(edges)]
    assert max(counts) - min(counts) <= 1


def test_one_sample_is_fitted_and_not_measured(text_folder):
    artifact = tiny.calibrated(tiny.model(), tiny.tokenizer(), corpora=[str(text_folder)], samples=1)
    assert "held_out" not in artifact.metadata["metrics"]
    assert artifact.metadata["calibration"]["keys_per_head"] == 128


def test_progress_counts_every_step_of_each_stage(text_folder):
    seen = []
    tiny.calibrated(
        tiny.model(),
        tiny.tokenizer(),
        corpora=[str(text_folder)],
        samples=3,
        bits=32,
        progress=lambda *step: seen.append(step),
    )
    for stage in ("text", "keys", "decompose"):
        steps = [step for step in seen if step[0] == stage]
        assert [done for _, done, _ in steps] == [0, 1, 2, 3]
        assert {total for _, _, total in steps} == {3}


@pytest.mark.parametrize(("layer", "weight", "what"), [(1, "k_proj", "keys"), (2, "q_proj", "queries")])
def test_keys_and_queries_that_overflow_are_refused(text_folder, layer, weight, what):
    """By the first sample, before sums of them are kept."""
    model = tiny.model()
    with torch.no_grad():
        getattr(model.model.layers[layer].self_attn, weight).weight.fill_(torch.inf)
    with pytest.raises(ModelError, match=f"layer {layer}: {what} hold NaN or infinity; try another dtype"):
        tiny.calibrated(model, tiny.tokenizer(), corpora=[str(text_folder)], samples=2)
    assert model.config._attn_implementation == "sdpa"


def test_a_head_with_zero_keys_has_a_zero_projection(text_folder, tmp_path):
    model = tiny.model()
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight[:8] = 0
    artifact = tiny.calibrated(model, tiny.tokenizer(), corpora=[str(text_folder)], samples=2, bits=32)
    assert (artifact.layers[1].projection[0] == 0).all()
    save(artifact, tmp_path / "a.safetensors")
    load(tmp_path / "a.safetensors")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"samples": 0}, "samples must be 1 to 1,048,576, not 0"),
        ({"samples": -3}, "samples must be 1 to 1,048,576, not -3"),
        ({"bits": 48}, "bits must be 32, 64 or 128, not 48"),
        ({"sequence_length": 129}, "a sequence length of 129 is over the limit of llama, 128 tokens"),
        ({"sequence_length": 0}, "sequence length must be 1 to"),
        ({"keys_per_head": 0}, "keys per head must be an integer of at least 1"),
        (
            {"keys_per_head": 127},
            "127 fitted keys per head are too few for 64 bits, .* at least 128: raise the keys per",
        ),
        (
            {"samples": 2, "bits": 128},
            "128 fitted keys per head are too few for 128 bits, .* 256: raise the samples or",
        ),
        ({"samples": 2.5}, "samples must be 1 to 1,048,576, not 2.5"),
        ({"seed": -1}, "seed must be an integer of at least 0"),
        ({"seed": 1 << 63}, "seed must be below 2"),
        ({"method": "magic"}, "unknown method 'magic': known are score-aware, nibbles, paper"),
    ],
)
def test_arguments_out_of_range(arguments, message):
    with pytest.raises(InputError, match=message):
        make_plan(describe(tiny.config()), **arguments)


def test_defaults_fit_the_model():
    description = describe(tiny.config())
    assert make_plan(description).sequence_length == 128
    assert make_plan(description).keys_per_head == 169 * 128  # 11 samples are kept aside
    large = dataclasses.replace(description, context_limit=131_072)
    assert make_plan(large).sequence_length == 8192
    assert make_plan(large).keys_per_head == 65_536
    unshifted = describe(tiny.config("gpt2"))
    assert make_plan(unshifted).position_shift is False
    with pytest.raises(InputError, match="does not allow a position shift"):
        make_plan(unshifted, position_shift=True)


def test_no_corpus_is_an_error():
    for corpora in ([], "notes"):
        with pytest.raises(BPCError, match="at least one corpus"):
            tiny.calibrated(tiny.model(), tiny.tokenizer(), corpora=corpora)


def test_training_mode_and_autocast_change_nothing(text_folder):
    model = tiny.model(attention_dropout=0.5)
    settings = {"corpora": [text_folder], "samples": 3, "bits": 32}
    plain = tiny.calibrated(model, tiny.tokenizer(), **settings)
    model.train()
    model.model.layers[0].eval()
    modes = [module.training for module in model.modules()]
    with torch.autocast("cpu", torch.bfloat16):
        again = tiny.calibrated(model, tiny.tokenizer(), **settings)
    assert np.array_equal(plain.layers[2].projection, again.layers[2].projection)
    assert [module.training for module in model.modules()] == modes
