"""Centring, metric and least squares together, and the paper's algorithm without them."""

from itertools import pairwise

import literal
import pytest
import torch
from test_decomposition import draws, random_keys

from bpc_calib import InputError, decompose, encode
from bpc_calib.method.codebook import make_codebook
from bpc_calib.method.codes import unpack_codes
from bpc_calib.method.decomposition import BLOCK
from bpc_calib.method.encoding import encode_with
from bpc_calib.method.fitting import _products, fit, least_squares, mean_key, residual_norms
from bpc_calib.method.float32 import proven_codes, sum_by_signs
from bpc_calib.method.metric import query_metric, second_moment

METRIC = query_metric(second_moment(random_keys(300, 16, seed=8)), 0.5)


@pytest.mark.parametrize("bits", [32, 64, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_iteration_and_nothing_else_is_the_paper(bits, dtype):
    keys = random_keys(3000, 64, dtype=dtype)
    found = fit(keys, bits, iterations=1)
    codes, projection, residual = literal.decompose(keys, draws(bits, 64))
    torch.testing.assert_close(found.projection, projection.float(), rtol=0, atol=1e-7)
    torch.testing.assert_close(found.residual_norms[-1], residual.norm(), rtol=1e-12, atol=0)
    assert found.metric is None
    assert found.mean is None
    plain = decompose(keys, bits, iterations=1)
    assert torch.equal(plain.projection, found.projection)
    assert torch.equal(unpack_codes(plain.codes, bits).double(), codes)
    # Algorithm 2 with that projection.
    fresh = random_keys(2000, 64, seed=4).double()
    expected, _, _ = literal.encode(fresh, found.projection)
    assert torch.equal(unpack_codes(encode(fresh, found.projection).codes, bits).double(), expected)


@pytest.mark.parametrize("metric", [None, METRIC])
@pytest.mark.parametrize("centred", [False, True])
def test_residual_norms_match_the_encoded_keys(metric, centred):
    keys = random_keys(3, 2 * BLOCK + 31, 16)
    metric = None if metric is None else metric.expand(3, 16, 16)
    found = fit(keys, 32, rounds=2, metric=metric, mean=mean_key(keys) if centred else None)
    encoded = encode(keys.double(), found.projection, metric=metric, mean=found.mean)
    torch.testing.assert_close(found.residual_norms[:, -1], encoded.error.double().norm(dim=-1), rtol=1e-5, atol=0)
    left = keys.double() - (found.mean.double().unsqueeze(-2) if centred else 0)
    codes, whole = unpack_codes(encoded.codes, 32).double(), torch.eye(16) if metric is None else metric
    for bit in range(33):
        norm = (left @ whole.double() * left).sum((-2, -1)).sqrt()
        torch.testing.assert_close(found.residual_norms[:, bit], norm, rtol=1e-6, atol=1e-6)
        if bit < 32:
            left = left - codes[..., bit, None] * found.projection[:, None, bit].double()


@pytest.mark.parametrize("metric", [None, METRIC])
def test_least_squares_lowers_the_residual_and_never_raises_it(metric):
    keys = random_keys(2, 3000, 16)
    metric = None if metric is None else metric.expand(2, 16, 16)
    begin = decompose(keys, 32, iterations=1, metric=metric)
    norms = [least_squares(keys, begin.projection, rounds, metric=metric)[1][:, -1] for rounds in range(6)]
    assert all((after <= before).all() for before, after in pairwise(norms))
    assert (norms[-1] < 0.97 * norms[0]).all()


def test_the_projection_of_a_round_is_the_least_squares_solution():
    keys, begin = random_keys(500, 16), decompose(random_keys(500, 16), 32, iterations=1).projection
    codes = unpack_codes(encode(keys.double(), begin).codes, 32).double()
    solution = torch.linalg.lstsq(codes, keys.double()).solution
    found, _ = least_squares(keys, begin, 1)
    torch.testing.assert_close(found.double(), solution, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("options", [{}, {"rounds": 2}, {"rounds": 1, "metric": METRIC}])
def test_padding_is_ignored_and_a_batch_equals_its_members(options, centred):
    keys = random_keys(2, 300, 16)
    weights = torch.ones(2, 300)
    weights[0, :40] = 0
    padded = keys.clone()
    padded[0, :40] = torch.nan
    if "metric" in options:
        options = options | {"metric": options["metric"].expand(2, 16, 16)}
    found = fit(padded, 32, weights=weights, mean=mean_key(padded, weights) if centred else None, **options)
    for row, member in enumerate((keys[0, 40:], keys[1])):
        member_options = options | ({"metric": METRIC} if "metric" in options else {})
        expected = fit(member, 32, mean=mean_key(member) if centred else None, **member_options)
        torch.testing.assert_close(found.projection[row], expected.projection, rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(found.residual_norms[row], expected.residual_norms, rtol=1e-9, atol=1e-9)
        if found.mean is not None:
            torch.testing.assert_close(found.mean[row], member.mean(0))


def test_keys_far_from_zero_are_coded_better_when_centred():
    keys = random_keys(2000, 16) + 20
    plain, centred = fit(keys, 32), fit(keys, 32, mean=mean_key(keys))
    assert centred.residual_norms[-1] < 0.97 * plain.residual_norms[-1]


def test_zero_keys_have_no_residual():
    found = fit(torch.zeros(100, 8), 32, rounds=2, mean=mean_key(torch.zeros(100, 8)), metric=torch.eye(8))
    assert found.projection.isfinite().all()
    assert found.residual_norms.eq(0).all()


def test_a_round_that_raises_the_residual_is_discarded():
    discarded = 0
    for seed in range(8):
        keys = random_keys(150, 16, seed=seed)
        good, norms = least_squares(keys, decompose(keys, 64, iterations=8).projection, 8)
        again, after = least_squares(keys, good, 1)
        if torch.equal(again, good):
            discarded += 1
            assert torch.equal(after, norms)
        else:
            assert after[-1] < norms[-1]
    assert discarded


def test_refuses_keys_and_weights_that_do_not_fit():
    with pytest.raises(InputError, match="keys must be floating"):
        fit(torch.randn(8))
    with pytest.raises(InputError, match="weights must be 0 or 1"):
        fit(torch.randn(20, 8), 32, weights=torch.ones(19))


@pytest.mark.parametrize(("heads", "seed"), [((), 0), ((1,), 1), ((2,), 2), ((2,), 3)])
def test_the_same_bytes_with_one_or_two_threads(heads, seed):
    keys = random_keys(*heads, 2 * BLOCK + 9, 32, seed=seed)
    metric = query_metric(second_moment(random_keys(*heads, 9000, 32, seed=2)), 0.25)
    threads, found = torch.get_num_threads(), []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            found.append(fit(keys, 64, iterations=2, rounds=3, metric=metric, mean=mean_key(keys)))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(found[0].projection, found[1].projection)
    assert torch.equal(found[0].residual_norms, found[1].residual_norms)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("bits", "dim", "heads"), [(64, 64, (2,)), (32, 16, ()), (128, 80, (2, 3))])
def test_float32_products_give_what_float64_gives(bits, dim, heads, weighted):
    keys = random_keys(*heads, 1500, dim).double() * torch.linspace(3, 0.01, dim)
    keys[..., 7, :] = 0
    metric = query_metric(second_moment(random_keys(*heads, 300, dim, seed=8)), 0.5)
    weights = (torch.rand(keys.shape[:-1]) > 0.2) if weighted else None
    codebook = make_codebook(
        decompose(keys, bits, iterations=1, metric=metric).projection, torch.float64, metric=metric
    )
    one, two = (_products(keys, codebook, weights, torch.zeros(heads), single=single) for single in (False, True))
    assert torch.equal(proven_codes(codebook, keys), encode_with(codebook, keys).codes)
    assert torch.equal(one.squares, two.squares)
    assert (one.cross - two.cross).abs().max() <= 2.0**-43 * keys.shape[-2] * keys.abs().max()


def test_signs_that_float32_gets_wrong_are_computed_in_float64():
    projection = random_keys(32, 16, seed=3).float()
    codebook = make_codebook(projection, torch.float64)
    normal = projection[0].double() / projection[0].norm()
    keys = random_keys(4000, 16, seed=4).double()
    keys = keys - (keys @ normal)[:, None] * normal  # in the plane where the first bit changes, to 16 digits
    keys = keys + 1e-9 * torch.linspace(-1, 1, 4000).double()[:, None] * normal
    plain = encode_with(make_codebook(projection, torch.float32), keys.float()).codes
    exact = encode_with(codebook, keys).codes
    assert (plain != exact).any()
    assert torch.equal(proven_codes(codebook, keys), exact)


def test_sums_by_signs_do_not_depend_on_the_order():
    keys = random_keys(BLOCK, 16).double() * 10.0 ** torch.linspace(-6, 6, BLOCK)[:, None].double()
    signs = random_keys(BLOCK, 32, seed=2).sign()
    order = torch.randperm(BLOCK, generator=torch.Generator().manual_seed(0))
    found = sum_by_signs(signs, keys)
    assert torch.equal(found, sum_by_signs(signs[order], keys[order]))
    assert (found - signs.double().mT @ keys).abs().max() <= 2.0**-43 * keys.shape[-2] * keys.abs().max()


@pytest.mark.parametrize("metric", [None, METRIC])
def test_residual_norms_of_the_fitted_keys_are_those_of_the_fit(metric):
    keys = random_keys(5000, 16, dtype=torch.bfloat16)
    found = fit(keys, 32, rounds=2, metric=metric, mean=mean_key(keys))
    again = residual_norms(keys, found.projection, metric=metric, mean=found.mean)
    torch.testing.assert_close(again, found.residual_norms, rtol=1e-12, atol=0)
    other = random_keys(3000, 16, seed=9)
    codes = encode(other - found.mean, found.projection, metric=metric).codes
    signs = unpack_codes(codes, 32).float()
    error = other - found.mean - signs @ found.projection
    inner = error.double() if metric is None else error.double() @ metric.double()
    expected = (error.double() * inner).sum().sqrt()
    measured = residual_norms(other, found.projection, metric=metric, mean=found.mean)
    torch.testing.assert_close(measured[-1], expected, rtol=1e-5, atol=0)
    other[7, 3] = torch.nan
    with pytest.raises(InputError, match="keys hold NaN or infinity"):
        residual_norms(other, found.projection)
