"""Codes that a prompt adapts: its queries count in the metric of its keys."""

from dataclasses import replace

import pytest
import tiny
import torch

from bpc_artifacts import ProjectionArtifact
from bpc_calib import BPCCache, codebook_of, enable, static_generate
from bpc_calib.backends.dispatch import find
from bpc_calib.compat import with_cache
from bpc_calib.method.codebook import make_codebook
from bpc_calib.method.metric import score_metric, second_moment
from bpc_calib.runtime.online_fit import ASKED, moment_metric, prompt_metric, prompt_moment

LONG = ASKED + 88
SPARSE = {"budget": 20, "min_tokens": 1, "min_context": 0, "dense_layers": ()}


@pytest.fixture(scope="module")
def model():
    made = tiny.model(max_position_embeddings=4096)
    enable(made)
    return made


@pytest.fixture(scope="module")
def artifact(model):
    return tiny.artifact(model.config, metric=True, centred=True)


def ids(*shape, seed=0):
    return torch.randint(250, shape, generator=torch.Generator().manual_seed(seed))


def filled(model, artifact, tokens, mask=None, *, chunks=1, **rules):
    """A cache after a prompt, hashed."""
    cache = BPCCache(model.config, artifact, **SPARSE | rules)
    done = 0
    for part in tokens.chunk(chunks, 1):
        done += part.shape[1]
        seen = None if mask is None else mask[:, :done]
        with torch.no_grad():
            model(part, attention_mask=seen, **with_cache(cache))
    cache.prepare(mask)
    return cache


def test_both_metrics_count_alike(model, artifact):
    layer, dtype, cpu = artifact.layers[1], torch.bfloat16, torch.device("cpu")
    own = score_metric(second_moment(torch.randn(3, 2, 40, 8, generator=torch.Generator().manual_seed(0))))
    projection, metric, mean = map(torch.from_numpy, (layer.projection, layer.metric, layer.mean))
    found = codebook_of(layer, slice(None), dtype, cpu, own)
    for sequence in range(3):
        both = (metric + own[sequence]) / 2
        expected = make_codebook(projection, dtype, metric=both, mean=mean)
        for name in ("projection", "matrix", "gram", "metric", "mean"):
            assert torch.equal(getattr(found, name)[sequence], getattr(expected, name)), name
    assert found.by_sequence
    assert not codebook_of(layer, slice(None), dtype, cpu).by_sequence


def test_a_long_prompt_adapts_the_codes_of_every_layer(model, artifact):
    cache = filled(model, artifact, ids(1, LONG))
    for index, layer in enumerate(cache.layers):
        plain = torch.from_numpy(artifact.layers[index].metric)
        assert layer.codebook.by_sequence
        assert not torch.allclose(layer.codebook.metric[0], plain, atol=0.01)
        assert layer.asked is None
        assert layer.hashed == LONG


def test_codes_fit_the_prompts_queries_better(model, artifact):
    """The error that the prompt's queries see is smaller than with the metric of calibration."""
    tokens = ids(1, LONG)
    waiting = BPCCache(model.config, artifact, **SPARSE)
    with torch.no_grad():
        model(tokens, **with_cache(waiting))
    asked = [layer.asked for layer in waiting.layers]
    seen = []
    for adapt in (True, False):
        cache = filled(model, artifact, tokens, adapt=adapt)
        error = 0.0
        for layer, queries in zip(cache.layers, asked, strict=True):
            metric = prompt_metric(queries, 2, None)
            centred = layer.keys.float() - torch.from_numpy(artifact.layers[layer.index].mean)[None, :, None]
            codes = layer.buffers["codes"][:, :, :LONG, 0]
            signs = 2.0 * ((codes.unsqueeze(-1) >> torch.arange(64)) & 1) - 1
            rest = centred - signs @ layer.codebook.projection.float()
            error += float(((rest @ metric) * rest).sum() / ((centred @ metric) * centred).sum())
        seen.append(error)
    assert seen[0] < seen[1]


@pytest.mark.parametrize(
    ("tokens", "rules", "changes"),
    [
        (ASKED - 1, {}, {}),
        (LONG, {"adapt": False}, {}),
        (LONG, {}, {"metric": None}),
    ],
    ids=["a short prompt", "switched off", "no metric"],
)
def test_else_the_codes_are_those_of_calibration(model, artifact, tokens, rules, changes):
    layers = {index: replace(layer, **changes) for index, layer in artifact.layers.items()}
    given = ProjectionArtifact(layers, artifact.metadata)
    cache = filled(model, given, ids(1, tokens), **rules)
    for index, layer in enumerate(cache.layers):
        expected = codebook_of(given.layers[index], slice(None), layer.keys.dtype, layer.device)
        assert torch.equal(layer.codebook.gram, expected.gram)
        assert layer.asked is None


def test_a_prompt_adapts_nibbles_too(model, tmp_path):
    made = tiny.artifact(model.config, nibbles=True, metric=True, centred=True)
    tokens = ids(1, LONG)
    cache = filled(model, made, tokens)
    for index, layer in enumerate(cache.layers):
        assert layer.codebook.by_sequence
        assert layer.codebook.nibbles
        whole = moment_metric(layer.moments)
        own = codebook_of(made.layers[index], slice(None), layer.keys.dtype, layer.device, whole)
        assert torch.equal(layer.codebook.gram, own.gram)
        found = find(layer.keys).encode_with(own, layer.keys)
        assert torch.equal(layer.buffers["codes"][:, :, :LONG], found.codes)
    cache.save(tmp_path / "file", model, tokens)
    opened, _ = BPCCache.open(tmp_path / "file", model, made)
    assert torch.equal(decoded(model, opened, tokens), decoded(model, cache, tokens))


def test_each_sequence_has_its_own_and_padding_no_part(model, artifact):
    rows = [ids(1, LONG, seed=seed) for seed in range(2)]
    alone = [filled(model, artifact, row) for row in rows]
    padding = torch.full((1, 60), 256)
    together = torch.cat([torch.cat([padding, rows[0]], 1), torch.cat([ids(1, 60, seed=9), rows[1]], 1)])
    mask = torch.ones(together.shape, dtype=torch.int64)
    mask[0, :60] = 0
    cache = filled(model, artifact, together, mask)
    for first, layer in zip(alone[0].layers, cache.layers, strict=True):
        # Evenly spaced queries are others behind padding.
        torch.testing.assert_close(layer.codebook.metric[0], first.codebook.metric[0], rtol=0.2, atol=0.2)
    different = cache.layers[0].codebook.metric
    assert not torch.allclose(different[0], different[1], atol=0.01)
    changed = together.clone()
    changed[0, :60] = 7
    again = filled(model, artifact, changed, mask)
    for layer, other in zip(cache.layers, again.layers, strict=True):
        assert torch.equal(layer.codebook.metric, other.codebook.metric)


def test_a_short_sequence_of_a_batch_leaves_all_as_they_are(model, artifact):
    mask = torch.ones(2, LONG, dtype=torch.int64)
    mask[1, : LONG - ASKED + 1] = 0
    cache = filled(model, artifact, ids(2, LONG), mask)
    assert not any(layer.codebook.by_sequence for layer in cache.layers)


def test_chunks_of_a_prompt_adapt_as_the_whole(model, artifact):
    whole, parts = (filled(model, artifact, ids(1, LONG), chunks=chunks) for chunks in (1, 5))
    first, other = whole.layers[0], parts.layers[0]
    assert first.codebook.by_sequence
    assert other.codebook.by_sequence
    torch.testing.assert_close(first.codebook.metric, other.codebook.metric, rtol=0.2, atol=0.2)


def test_sequences_take_their_codes_along(model, artifact):
    cache = filled(model, artifact, ids(2, LONG))
    before = [layer.codebook.gram.clone() for layer in cache.layers]
    cache.reorder_cache(torch.tensor([1, 0]))
    for layer, gram in zip(cache.layers, before, strict=True):
        assert torch.equal(layer.codebook.gram, gram.flip(0))
    cache.crop(-LONG)
    assert all(layer.codebook is None for layer in cache.layers)


def decoded(model, cache, tokens, steps=12):
    """The logits of some greedy steps."""
    found, token = [], tokens[:, -1:]
    for _ in range(steps):
        with torch.no_grad():
            logits = model(token, **with_cache(cache)).logits[:, -1]
        found.append(logits)
        token = logits.argmax(-1, keepdim=True)
    return torch.stack(found)


@pytest.mark.parametrize("made", [True, False], ids=["adapted", "not adapted"])
def test_a_saved_cache_keeps_the_codes_it_has(model, artifact, tmp_path, made):
    """Whatever the setting is when it is opened: codes and codebook belong together."""
    tokens = ids(1, LONG)
    cache = filled(model, artifact, tokens, adapt=made)
    cache.save(tmp_path / "file", model, tokens)
    for opening in ({}, {"adapt": True}, {"adapt": False}):
        opened, _ = BPCCache.open(tmp_path / "file", model, artifact, **opening)
        for layer, other in zip(cache.layers, opened.layers, strict=True):
            assert torch.equal(layer.codebook.gram, other.codebook.gram)
            assert torch.equal(layer.buffers["codes"][:, :, :LONG], other.buffers["codes"][:, :, :LONG])
        first = filled(model, artifact, tokens, adapt=made)
        assert torch.equal(decoded(model, opened, tokens), decoded(model, first, tokens))


def test_queries_that_wait_are_saved(model, artifact, tmp_path):
    """A prompt that was not hashed yet adapts the codes after it was opened."""
    tokens = ids(1, LONG)
    cache = BPCCache(model.config, artifact, **SPARSE)
    with torch.no_grad():
        model(tokens, **with_cache(cache))
    cache.save(tmp_path / "file", model, tokens)
    opened, _ = BPCCache.open(tmp_path / "file", model, artifact)
    for each in (cache, opened):
        each.prepare()
    for layer, other in zip(cache.layers, opened.layers, strict=True):
        assert layer.codebook.by_sequence
        assert torch.equal(layer.codebook.gram, other.codebook.gram)


def test_static_steps_take_the_adapted_codes(model, artifact):
    tokens = ids(2, LONG)
    mask = torch.ones(tokens.shape, dtype=torch.int64)
    mask[0, :20] = 0
    more = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False, "attention_mask": mask}
    plain = model.generate(tokens, **with_cache(BPCCache(model.config, artifact, **SPARSE)), **more)
    static = static_generate(model, tokens, cache=BPCCache(model.config, artifact, **SPARSE), **more)
    assert torch.equal(plain, static)


def grown(model, cache, tokens, mask=None):
    """The queries that the layers keep of a further prompt, in a cache that is hashed after it."""
    with torch.no_grad():
        model(tokens, attention_mask=mask, **with_cache(cache))
    asked = [layer.asked for layer in cache.layers]
    cache.prepare(mask)
    return asked


def test_new_prompts_adapt_the_codes_of_a_cache_that_has_doubled(model, artifact):
    first, second = ids(1, LONG), ids(1, LONG + 40, seed=1)
    cache = BPCCache(model.config, artifact, **SPARSE)
    before, after = (grown(model, cache, tokens) for tokens in (first, second))
    for index, layer in enumerate(cache.layers):
        # Each prompt counts by its tokens.
        parts = [(LONG, before[index]), (LONG + 40, after[index])]
        expected = sum(tokens / ASKED * prompt_moment(asked, 2, None) for tokens, asked in parts)
        torch.testing.assert_close(layer.moments, expected.float())
        own = codebook_of(
            artifact.layers[index], slice(None), layer.keys.dtype, layer.device, moment_metric(layer.moments)
        )
        assert torch.equal(layer.codebook.gram, own.gram)
        found = find(layer.keys).encode_with(layer.codebook, layer.keys)
        assert torch.equal(layer.buffers["codes"][:, :, : 2 * LONG + 40], found.codes)
        assert torch.equal(layer.buffers["gain"][:, :, : 2 * LONG + 40], found.gain)
        assert layer.asked is None


@pytest.mark.parametrize(
    ("second", "rules"), [(LONG - 1, {}), (LONG, {"adapt": False})], ids=["not doubled", "switched off"]
)
def test_else_they_stay(model, artifact, second, rules):
    cache = filled(model, artifact, ids(1, LONG), **rules)
    books = [layer.codebook for layer in cache.layers]
    grown(model, cache, ids(1, second, seed=1))
    assert [layer.codebook for layer in cache.layers] == books
    assert all(layer.hashed == LONG + second for layer in cache.layers)


def test_few_new_queries_wait_for_more(model, artifact):
    cache = filled(model, artifact, ids(1, ASKED))
    books = [layer.codebook for layer in cache.layers]
    for step in range(3):
        grown(model, cache, ids(1, 170, seed=step + 1))
    assert [layer.codebook for layer in cache.layers] == books
    grown(model, cache, ids(1, 20, seed=8))  # so few may be drafts, and do not count
    assert [layer.codebook for layer in cache.layers] == books
    grown(model, cache, ids(1, 64, seed=9))
    assert not any(layer.codebook in books for layer in cache.layers)


def test_a_long_prompt_behind_a_short_one_adapts(model, artifact):
    cache = filled(model, artifact, ids(1, ASKED - 1))
    assert not any(layer.codebook.by_sequence for layer in cache.layers)
    grown(model, cache, ids(1, ASKED, seed=1))
    assert all(layer.codebook.by_sequence for layer in cache.layers)


def test_the_order_of_the_safeguard_is_that_of_the_new_codes(model, artifact):
    rules = {"safeguard": 0.2, "dense_layers": ()}
    tokens, more = ids(1, LONG), ids(1, LONG + 40, seed=1)
    cache = filled(model, artifact, tokens, **rules)
    decoded(model, cache, tokens, steps=2)
    grown(model, cache, more)
    decoded(model, cache, more, steps=1)
    for layer in cache.layers:
        worst = layer.buffers["worst"][0, 0]
        errors = layer.buffers["error"][0, 0, : layer.guarded]
        assert torch.equal(errors[worst.long()], errors.sort(descending=True).values)


def test_a_saved_cache_goes_on_adapting_as_the_first(model, artifact, tmp_path):
    first, second = ids(1, LONG), ids(1, LONG + 40, seed=1)
    cache = filled(model, artifact, first)
    grown(model, cache, second[:, :300])
    cache.save(tmp_path / "file", model, torch.cat([first, second[:, :300]], 1))
    opened, _ = BPCCache.open(tmp_path / "file", model, artifact)
    for each in (cache, opened):
        grown(model, each, second[:, 300:])
    for layer, other in zip(cache.layers, opened.layers, strict=True):
        assert layer.made_at == other.made_at == 2 * LONG + 40
        assert torch.equal(layer.codebook.gram, other.codebook.gram)
        assert torch.equal(layer.buffers["codes"][:, :, : layer.hashed], other.buffers["codes"][:, :, : layer.hashed])


def test_sequences_take_their_queries_along(model, artifact):
    """Sequences that change places adapt as those that were there from the beginning."""
    first, second = ids(2, LONG), ids(2, LONG + 40, seed=1)
    cache = filled(model, artifact, first)
    cache.reorder_cache(torch.tensor([1, 0]))
    straight = filled(model, artifact, first.flip(0))
    for each in (cache, straight):
        grown(model, each, second)
    for one, other in zip(cache.layers, straight.layers, strict=True):
        torch.testing.assert_close(one.moments, other.moments)


def test_a_cache_that_was_cut_waits_until_it_has_doubled_again(model, artifact):
    cache = filled(model, artifact, ids(1, LONG))
    books = [layer.codebook for layer in cache.layers]
    cache.crop(-(LONG - 100))
    grown(model, cache, ids(1, ASKED, seed=1))
    assert not any(layer.codebook in books for layer in cache.layers)
    assert all(layer.made_at == 100 + ASKED for layer in cache.layers)


def test_static_steps_take_codes_that_a_second_prompt_adapted(model, artifact):
    first, second = ids(1, LONG), ids(1, LONG + 40, seed=1)
    whole = torch.cat([first, second], 1)
    more = {"attention_mask": torch.ones_like(whole), "max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
    one, other = (filled(model, artifact, first) for _ in range(2))
    plain = model.generate(whole, **with_cache(one), **more)
    assert torch.equal(plain, static_generate(model, whole, cache=other, **more))
    assert all(layer.made_at >= whole.shape[1] for layer in other.layers)
