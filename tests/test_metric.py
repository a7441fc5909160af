"""The query metric: its definition, its power, and its guaranteed properties."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_decomposition import random_keys

from bpc_calib import InputError
from bpc_calib.method.metric import DOMINANT, FLOOR, query_metric, second_moment


def test_the_second_moment_is_the_sum_of_products():
    queries = random_keys(2, 50, 6)
    expected = torch.stack([sum(torch.outer(q, q) for q in head) for head in queries.double()])
    torch.testing.assert_close(second_moment(queries), expected)


def test_power_one_is_the_moment_and_power_zero_the_identity():
    moment = second_moment(random_keys(3, 400, 8))
    scale = moment.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None]
    torch.testing.assert_close(query_metric(moment, 1.0), (moment / scale).float(), rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(query_metric(moment, 0.0), torch.eye(8).expand(3, 8, 8), rtol=0, atol=1e-6)


def test_the_square_of_power_one_half_is_the_moment():
    moment = second_moment(random_keys(400, 8))
    half = query_metric(moment, 0.5).double()
    square = half @ half
    torch.testing.assert_close(square / square.trace(), moment / moment.trace(), rtol=1e-3, atol=1e-5)


@settings(max_examples=50, deadline=None)
@given(
    count=st.integers(0, 20),
    dim=st.integers(1, 20),
    power=st.floats(0, 1),
    scale=st.sampled_from([1e-20, 1.0, 1e10]),
    seed=st.integers(0, 1000),
)
def test_the_metric_is_symmetric_and_positive_definite_for_any_queries(count, dim, power, scale, seed):
    metric = query_metric(second_moment(random_keys(count, dim, seed=seed) * scale), power)
    assert metric.dtype == torch.float32
    assert torch.equal(metric, metric.mT)
    values = torch.linalg.eigvalsh(metric.double())
    assert float(values.mean()) == pytest.approx(1, rel=1e-5)
    # FLOOR is a share of the mean before the power; the mean after the power is at most the largest eigenvalue.
    assert values.min() > FLOOR**power / dim / 2


def eigenvalues(metric):
    return torch.linalg.eigvalsh(metric.double()).flip(-1)


def test_the_part_of_an_eigenvalue_above_the_bound_has_its_own_power():
    energy = torch.tensor([40.0, 20.0] + [34 / 62] * 62, dtype=torch.float64)
    energy = 64 * torch.cat([energy[:1] * 20, energy[1:]]) / (energy.sum() + 19 * 40)  # a mean of 1
    found = eigenvalues(query_metric(energy.diag(), 0.25, 0.75))
    assert energy[0] > DOMINANT > energy[1] > energy[2]
    wanted = torch.cat([DOMINANT**0.25 * (energy[:1] / DOMINANT) ** 0.75, energy[1:] ** 0.25])
    torch.testing.assert_close(found / found[-1], wanted / wanted[-1], rtol=1e-5, atol=0)


def test_without_a_dominant_direction_the_second_power_changes_nothing():
    moment = second_moment(random_keys(3, 400, 8))
    assert torch.equal(query_metric(moment, 0.25, 0.75), query_metric(moment, 0.25))


def test_refuses_bad_moments_and_powers():
    with pytest.raises(InputError, match="moments of queries hold NaN or infinity"):
        query_metric(torch.full((2, 2), torch.nan), 0.5)
    with pytest.raises(InputError, match=r"moments of queries must be \[\.\.\., D, D\]"):
        query_metric(torch.ones(2, 3), 0.5)
    for power in (-0.1, 1.1):
        with pytest.raises(InputError, match="power of a metric"):
            query_metric(torch.eye(2), power)
        with pytest.raises(InputError, match="power of a metric"):
            query_metric(torch.eye(2), 0.5, power)
