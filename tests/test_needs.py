"""What a KV head needs: against forced decoding, and against attention written out for one query."""

import shutil
from dataclasses import replace

import numpy as np
import pytest
import tiny
import torch

import bpc_artifacts
from bpc_calib import BPCCache, disable, enable, make_plan
from bpc_calib.calibration.calibrate import calibrate
from bpc_calib.calibration.needs import (
    REFERENCE,
    TOKENS,
    decoder_layers,
    joined,
    losses,
    output_projection,
    text_needs,
)
from bpc_calib.evaluation.forcing import compare, fork, keep, prefill
from bpc_calib.method.shares import GRID, counts, share_out
from bpc_calib.models.description import describe

IDS = torch.randint(250, (2, TOKENS + 300), generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def model():
    return tiny.model(max_position_embeddings=1024).float()


@pytest.fixture(scope="module")
def artifact(model):
    plan = make_plan(describe(model.config), samples=4, sequence_length=256)
    return calibrate(model, tiny.tokenizer(), ["demo-prose"], plan)


def test_the_sensitivity_of_a_layer_is_what_forced_decoding_loses(model, artifact):
    needs = text_needs(model, artifact, IDS[0])
    enable(model)
    try:
        prefix, rest = prefill(model, IDS[:1, :-TOKENS]), IDS[:1, -TOKENS:]
        layers = range(len(needs))
        kept = keep(model, fork(prefix, BPCCache(model.config, budget=1.0, dense_layers=())), rest)
        for layer in layers:
            others = [each for each in layers if each != layer]
            cache = BPCCache(model.config, artifact, budget=REFERENCE, min_tokens=1, dense_layers=others)
            apart = compare(model, fork(prefix, cache), rest, kept).divergence
            # The first of the tokens counts in one and not in the other, and predictions are kept in 16 bits.
            assert needs[layer][:, GRID.index(REFERENCE)].sum() == pytest.approx(apart.item(), rel=0.1)
    finally:
        disable(model)


def test_a_loss_is_the_change_behind_the_output_projection():
    generator = torch.Generator().manual_seed(0)
    tokens = TOKENS + 50
    query, key, value = (torch.randn(n, t, 8, generator=generator) for n, t in ((4, TOKENS), (2, tokens), (2, tokens)))
    module = torch.nn.Module()
    module.first, module.last, module.norm = torch.nn.Linear(32, 5), torch.nn.Linear(32, 12), torch.nn.LayerNorm(12)
    weight = module.last.weight.detach()
    ranks = torch.randint(-50, 50, (2, TOKENS, tokens), generator=generator).int()
    later = torch.arange(tokens) > torch.arange(50, tokens).unsqueeze(-1)
    ranks = ranks.masked_fill(later, torch.iinfo(torch.int32).min)
    with torch.no_grad():
        curve, chosen = losses(query, key, value, ranks, 0.5, output_projection(module))
    assert curve.shape == (2, len(GRID))
    assert curve[:, -1].abs().max() < 1e-10

    share, expected = GRID.index(0.1), torch.zeros(2, dtype=torch.float64)
    places = range(1, TOKENS, 2)
    for place in places:
        length = 50 + place + 1
        count = int(0.1 * length)
        whole, changed = torch.zeros(12, dtype=torch.float64), []
        for head in range(4):
            k, v = key[head // 2, :length].double(), value[head // 2, :length].double()
            likely = (k @ query[head, place].double() * 0.5).softmax(0)
            best = sorted(range(length), key=lambda i: (-ranks[head // 2, place, i].item(), i))[:count]
            out = weight[:, head * 8 : head * 8 + 8].double()
            whole += out @ (likely @ v)
            changed.append(out @ (likely[best] @ v[best] / likely[best].sum() - likely @ v))
        for kv_head in range(2):
            change = changed[2 * kv_head] + changed[2 * kv_head + 1]
            expected[kv_head] += change.square().sum() / whole.square().sum() / len(places)
    torch.testing.assert_close(curve[:, share], expected, rtol=1e-4, atol=0)
    assert chosen.shape == (1, TOKENS, 4, 8)


def test_a_layer_that_adds_nothing_needs_nothing():
    """As layers of merged models, whose output projection is 0."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(n, TOKENS, 8, generator=generator) for n in (4, 2, 2))
    module = torch.nn.Module()
    module.last = torch.nn.Linear(32, 12)
    torch.nn.init.zeros_(module.last.weight)
    ranks = torch.zeros(2, TOKENS, TOKENS, dtype=torch.int32)
    with torch.no_grad():
        curve, _ = losses(query, key, value, ranks, 0.5, output_projection(module))
    assert torch.equal(curve, torch.zeros(2, len(GRID), dtype=torch.float64))


def test_an_artifact_with_needs(model, artifact, tmp_path):
    made = [joined(artifact, [428, 428], [text_needs(model, artifact, text) for text in IDS]) for _ in range(2)]
    for i, each in enumerate(made):
        bpc_artifacts.save(each, tmp_path / f"{i}.safetensors")
    assert (tmp_path / "0.safetensors").read_bytes() == (tmp_path / "1.safetensors").read_bytes()
    loaded = bpc_artifacts.load(tmp_path / "0.safetensors")
    assert loaded.metadata["format_version"] == 3
    for layer, found in loaded.layers.items():
        both = np.mean([text_needs(model, artifact, text)[layer].numpy() for text in IDS], axis=0)
        np.testing.assert_allclose(found.need, both, rtol=1e-6)
    assert all(layer.rules.shares for layer in BPCCache(model.config, loaded).layers)


def test_an_artifact_with_needs_of_two_lengths(model, artifact, tmp_path):
    long, short = (text_needs(model, artifact, IDS[0, :length]) for length in (428, 300))
    bpc_artifacts.save(joined(artifact, [428, 300], [long, short]), tmp_path / "both.safetensors")
    loaded = bpc_artifacts.load(tmp_path / "both.safetensors")
    for layer, found in loaded.layers.items():
        np.testing.assert_array_equal(found.need, long[layer].float())
        np.testing.assert_array_equal(found.need_short, short[layer].float())
    spent = [layer.rules for layer in BPCCache(model.config, loaded, budget=0.1, min_tokens=1).layers]
    expected = share_out({i: each.need_short for i, each in loaded.layers.items()})
    assert [rules.by_head(200, 2000) for rules in spent] == [counts(200, 2000, each) for each in expected.values()]


def test_layers_with_windows_have_no_needs():
    model = tiny.model("gemma3_text").float()
    found = text_needs(model, tiny.artifact(model.config), IDS[0])
    assert list(found) == describe(model.config).full_layers


def test_a_module_without_an_output_projection():
    heads = torch.randn(2, 3, 5, 4)
    alone = output_projection(torch.nn.Module())(heads)
    assert torch.equal(alone.sum(0), heads.flatten(0, 1).transpose(0, 1).flatten(1))


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_moe", "stablelm"])
def test_weights_of_16_bits_give_the_needs_of_float32(family):
    model = tiny.model(family, max_position_embeddings=1024).bfloat16()
    artifact = tiny.artifact(model.config)
    found = text_needs(model, artifact, IDS[0])
    assert model.dtype == torch.bfloat16
    expected = text_needs(model.float(), artifact, IDS[0])
    for layer, need in expected.items():
        # The keys of the prefix have 16 bits in one, and so the codes of both differ a little.
        torch.testing.assert_close(found[layer].sum(0), need.sum(0), rtol=0.2, atol=1e-6)


@pytest.mark.parametrize("family", [*sorted(tiny.FAMILIES.keys() - {"phi3"}), "qwen3_moe"])
def test_layers_below_the_sparse_one_are_not_computed_anew(family, monkeypatch):
    model = tiny.model(family, max_position_embeddings=1024).float()
    artifact = tiny.artifact(model.config)
    found, ran = text_needs(model, artifact, IDS[0]), []
    hooks = [block.register_forward_hook(lambda *_: ran.append(1)) for block in decoder_layers(model)]
    assert len(hooks) == 3
    monkeypatch.setattr("bpc_calib.calibration.needs.decoder_layers", lambda model: [])
    every = text_needs(model, artifact, IDS[0])
    assert len(ran) == 3 * (2 + len(artifact.layers))
    for layer in artifact.layers:
        torch.testing.assert_close(found[layer], every[layer], rtol=0, atol=0)
    assert all("forward" not in vars(block) for block in decoder_layers(model))


@pytest.fixture
def run(model, text_folder, tmp_path):
    """Calibrate on samples that are long enough for needs; return the file's bytes and the steps; stop at a step."""

    def run(work=None, *, stop=None, **changes):
        seen = []

        def progress(*step):
            seen.append(step)
            if step[:2] == stop:
                raise KeyboardInterrupt

        plan = make_plan(describe(model.config), **({"samples": 4, "bits": 32, "sequence_length": 1024} | changes))
        folder = None if work is None else tmp_path / work
        corpora = [f"notes={text_folder}"]
        made = calibrate(model, tiny.tokenizer(), corpora, plan, work_dir=folder, progress=progress)
        bpc_artifacts.save(made, tmp_path / "made.safetensors", overwrite=True)
        return (tmp_path / "made.safetensors").read_bytes(), seen

    return run


def test_a_calibration_measures_needs_and_goes_on_where_it_was_stopped(run, tmp_path, caplog):
    expected, steps = run()
    counted = [0, 3, 4, 5, 6, 9, 10, 11, 12]  # of each text the first pass, then the three layers
    assert [step for step in steps if step[0] == "needs"] == [("needs", done, 12) for done in counted]
    assert bpc_artifacts.load(tmp_path / "made.safetensors").has_needs
    for stop, left in ((0, 12), (9, 6), (12, 6), (None, 0)):  # a text that was not finished is measured again
        if stop is not None:
            shutil.rmtree(tmp_path / "work" / "needs", ignore_errors=True)
            with pytest.raises(KeyboardInterrupt):
                run("work", stop=("needs", stop))
        made, steps = run("work")
        assert made == expected
        shown = [("needs", done, 12) for done in counted if done >= 12 - left]
        assert [step for step in steps if step[0] == "needs"] == shown
    (tmp_path / "work" / "needs" / "000001.safetensors").write_bytes(b"other")
    made, steps = run("work")
    assert made == expected
    assert "1 damaged and made again; the first: 000001.safetensors" in caplog.text
    assert steps[-5] == ("needs", 6, 12)


def test_other_bits_have_other_needs(run, tmp_path):
    expected, _ = run(bits=64)
    run("work")
    made, steps = run("work", bits=64)
    assert made == expected
    assert "keys" not in {stage for stage, *_ in steps}
    assert ("needs", 0, 12) in steps


def test_on_which_samples_needs_are_measured():
    description = describe(tiny.config(max_position_embeddings=4096))

    def measured(samples, description=description, **settings):
        return make_plan(description, samples=samples, **({"sequence_length": 1024} | settings)).measured

    assert measured(180) == [(sample, 1024) for sample in (15, 45, 75, 105, 135, 165)]
    assert measured(24) == [(sample, 1024) for sample in (2, 6, 10, 14, 18, 22)]
    assert measured(2) == [(0, 1024), (1, 1024)]
    assert measured(8, sequence_length=2048) == [(2, 2048), (6, 2048)]
    assert measured(8, sequence_length=4096) == [(2, 4096), (6, 4096), (2, 2048), (6, 2048)]
    assert measured(24, sequence_length=1023) == []
    assert measured(24, method="paper") == []
    assert measured(24, replace(description, ranks=2)) == []
