"""How well codes describe new keys, beside what calibration saw, and the warning where they hardly do."""

import copy
import json
from dataclasses import replace

import literal
import pytest
import tiny
import torch
from numpy.testing import assert_allclose

from bpc_artifacts import ProjectionArtifact, save
from bpc_calib import BPCCache, enable, make_codebook, static_generate
from bpc_calib.compat import with_cache
from bpc_calib.models.loading import load_model, load_tokenizer
from bpc_calib.runtime.drift import NEWEST, hardly_fit, residual
from bpc_calib.text.corpora import open_corpora
from bpc_calib.text.samples import draw_samples
from bpc_cli.chat import Conversation
from bpc_cli.decoding import make_decoder

EVERY = {"min_context": 0, "budget": 16, "min_tokens": 1, "dense_layers": ()}  # every layer of every step chooses
GREEDY = {"do_sample": False, "eos_token_id": None}


@pytest.fixture(scope="module")
def model():
    made = load_model("demo")
    enable(made)
    return made


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("demo")


@pytest.fixture(scope="module")
def artifact(model, tokenizer):
    return tiny.calibrated(model, tokenizer, corpora=["demo"], samples=4, sequence_length=512)


@pytest.fixture(scope="module")
def text(model, tokenizer):
    """Text of the kind that was calibrated on, int64 `[2, 400]`."""
    vocabulary = model.config.vocab_size
    drawn, _ = draw_samples(
        open_corpora(["demo"]), tokenizer, samples=2, sequence_length=400, seed=5, vocab_size=vocabulary
    )
    return drawn.long()


def generated(model, cache, ids, new=4):
    model.generate(ids, **with_cache(cache), max_new_tokens=new, **GREEDY)
    return cache


def warnings(caplog):
    return [each.getMessage() for each in caplog.records if "hardly fit" in each.getMessage()]


@pytest.mark.parametrize("centred", [False, True])
def test_the_residual_is_that_of_the_algorithm(centred):
    generator = torch.Generator().manual_seed(0)
    keys, projection = (torch.randn(1, 2, n, 8, generator=generator).double() for n in (50, 32))
    projection = projection[0] * torch.linspace(1, 0.1, 32).unsqueeze(-1)
    root = torch.randn(2, 8, 8, generator=generator).double()
    metric, mean = root @ root.mT + torch.eye(8), torch.randn(2, 8, generator=generator).double() * centred
    found = residual(make_codebook(projection, torch.float64, metric=metric, mean=mean), keys)
    for head in range(2):
        one, m = keys[0, head] - mean[head], metric[head]
        _, _, left = literal.encode(one, projection[head], projection[head] @ m)
        expected = (torch.trace(left @ m @ left.T) / torch.trace(one @ m @ one.T)).sqrt()
        assert_allclose(found[0, head], expected, rtol=1e-6)


def test_short_keys_are_compared_with_the_length_that_calibration_saw():
    """At early positions keys are shorter, and their codes lose as much: that is no drift."""
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(1, 2, 50, 8, generator=generator).double()
    codebook = make_codebook(torch.randn(2, 32, 8, generator=generator).double() / 9, torch.float64)
    own = keys.square().sum(-1).mean(-1).sqrt()[0]
    alone = residual(codebook, keys)
    assert_allclose(residual(codebook, keys, 3 * own), alone / 3, rtol=1e-6)
    assert_allclose(residual(codebook, keys, own / 3), alone, rtol=1e-6)


def test_a_cache_measures_its_newest_keys_beside_those_of_the_calibration(model, artifact, text):
    cache = generated(model, BPCCache(model.config, artifact, **EVERY), text)
    found = cache.residuals()
    assert list(found) == list(artifact.layers)
    length = cache.get_seq_length()
    for index, (newest, calibrated) in found.items():
        layer = cache.layers[index]
        keys = layer.keys[:, :, range(length - NEWEST, length, 4)]
        lengths = torch.tensor(artifact.metadata["metrics"]["held_out"]["length_by_head"][str(index)])
        assert newest == pytest.approx(residual(layer.codebook, keys, lengths).mean().item(), rel=1e-6)
        kept_aside = artifact.metadata["metrics"]["held_out"]["residual_by_layer"][str(index)]
        assert calibrated == pytest.approx(kept_aside)


def test_without_samples_kept_aside_the_fitted_keys_are_what_calibration_saw(model, artifact, text):
    metrics = {name: value for name, value in artifact.metadata["metrics"].items() if name != "held_out"}
    fitted = ProjectionArtifact(artifact.layers, {**artifact.metadata, "metrics": metrics})
    found = generated(model, BPCCache(model.config, fitted, **EVERY), text).residuals()
    expected = {index: layer.residual[:, -1].mean() for index, layer in artifact.layers.items()}
    assert {index: calibrated for index, (_, calibrated) in found.items()} == pytest.approx(expected)


def test_static_steps_leave_the_same_residuals(model, artifact, text):
    cache = BPCCache(model.config, artifact, **EVERY)
    static_generate(model, text, cache=cache, max_new_tokens=4, **GREEDY)
    assert cache.residuals() == generated(model, BPCCache(model.config, artifact, **EVERY), text).residuals()


def test_layers_without_codes_or_a_calibration_are_missing(model, artifact, text):
    assert BPCCache(model.config, artifact).residuals() == {}
    dense = generated(model, BPCCache(model.config, artifact, **{**EVERY, "dense_layers": (0, 2)}), text)
    assert list(dense.residuals()) == [1, 3]
    online = generated(model, BPCCache(model.config, **EVERY), text)
    assert online.layers[2].hashed
    assert online.residuals() == {}


def test_text_like_the_calibration_is_met_in_silence(model, artifact, text, caplog):
    cache = generated(model, BPCCache(model.config, artifact, **EVERY), text, NEWEST + 2)
    newest, calibrated = zip(*cache.residuals().values(), strict=True)
    assert sum(newest) == pytest.approx(sum(calibrated), rel=0.1)
    assert warnings(caplog) == []


def test_keys_that_the_projections_do_not_fit_are_told_once(model, artifact, text, caplog):
    mixed = {
        index: replace(layer, projection=layer.projection[..., ::-1].copy()) for index, layer in artifact.layers.items()
    }
    cache = BPCCache(model.config, ProjectionArtifact(mixed, artifact.metadata), **EVERY)
    generated(model, cache, text, NEWEST + 2)
    assert len(warnings(caplog)) == 1
    cache.residuals()
    cache.reset()
    generated(model, cache, text)
    (said,) = warnings(caplog)
    assert "calibrate these weights on such text" in said
    assert "-a online" in said


def test_generated_tokens_are_measured_once_there_are_enough(model, artifact, text, caplog):
    halved = {index: replace(layer, residual=layer.residual / 2) for index, layer in artifact.layers.items()}
    demanding = ProjectionArtifact(halved, {**artifact.metadata, "metrics": {}})
    cache = generated(model, BPCCache(model.config, demanding, **EVERY), text[:, :200], NEWEST - 199)
    assert (cache.get_seq_length(), warnings(caplog)) == (NEWEST, [])
    model(input_ids=text[:, :1], **with_cache(cache))  # the last one is hashed, and measured when the next comes
    assert len(warnings(caplog)) == 1


def test_text_of_another_kind_has_a_higher_residual(model, artifact, text):
    def newest(ids):
        found = generated(model, BPCCache(model.config, artifact, **EVERY), ids).residuals()
        return sum(each for each, _ in found.values())

    random = torch.randint(model.config.vocab_size, text.shape, generator=torch.Generator().manual_seed(0))
    assert newest(random) > 1.15 * newest(text)


def test_advice_compares_the_means_of_the_layers():
    assert not hardly_fit({})
    assert not hardly_fit({0: (0.9, 0.3), 1: (0.5, 0.9)})
    assert not hardly_fit({0: (0.6, 0.0)})
    assert hardly_fit({0: (0.9, 0.3), 1: (0.5, 0.4)})


def test_generate_reports_the_residual(bpc, artifact, tmp_path, tokenizer, text):
    save(artifact, tmp_path / "demo.safetensors")
    words = ["generate", "-m", "demo", "--json", "--min-context", "0", "--max-new-tokens", "3", "--no-compile"]
    words += ["--dense-layers", "none"]
    prompt = tokenizer.decode(text[0], skip_special_tokens=True)
    found = json.loads(bpc(*words, "-a", tmp_path / "demo.safetensors", stdin=prompt).out)["residual"]
    assert found["calibration"] == pytest.approx(artifact.metadata["metrics"]["held_out"]["residual"])
    assert found["newest_keys"] == pytest.approx(found["calibration"], rel=0.1)
    assert json.loads(bpc(*words, stdin=prompt).out)["residual"] is None


def test_each_turn_of_a_chat_reports_the_residual(model, artifact, tokenizer):
    talking = copy.deepcopy(tokenizer)
    talking.chat_template = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
    decoder = make_decoder(model, talking, {"do_sample": False}, seed=0)
    conversation = Conversation(decoder, BPCCache(model.config, artifact, **EVERY), "demo", None, [])
    turn = conversation.ask("The old teacher watched the river. " * 40, 4, show=False)
    newest = [each for each, _ in conversation.cache.residuals().values()]
    assert turn["residual"]["newest_keys"] == pytest.approx(sum(newest) / len(newest))
