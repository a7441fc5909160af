"""Product codes fitted to keys: they describe them, alike on every machine."""

import functools

import pytest
import torch

from bpc_calib.backends.dispatch import encode_parts
from bpc_calib.errors import InputError
from bpc_calib.method import product_fitting
from bpc_calib.method.fitting import fit, mean_key, residual_norms
from bpc_calib.method.metric import query_metric
from bpc_calib.method.product import Product
from bpc_calib.method.product_fitting import product_residual_norms

# As calibration does, with the kernels of this machine.
fit_product = functools.partial(product_fitting.fit_product, encode=encode_parts)


def draw_keys(count: int = 3000, heads: int = 2, dim: int = 32, seed: int = 0) -> torch.Tensor:
    """Keys of a few kinds, as text has, in unequal directions."""
    generator = torch.Generator().manual_seed(seed)
    kinds = torch.randn(heads, 40, dim, generator=torch.Generator().manual_seed(99))
    chosen = torch.randint(40, (count,), generator=generator)
    noise = torch.randn(heads, count, dim, generator=generator)
    return (kinds[:, chosen] + 0.7 * noise) * torch.linspace(2, 0.2, dim) + 1.5


def draw_metric(dim: int = 32) -> torch.Tensor:
    queries = torch.randn(2, 200, dim, generator=torch.Generator().manual_seed(7)) * torch.linspace(1, 3, dim)
    return query_metric(queries.double().mT @ queries.double(), 0.5)


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def test_the_backend_of_a_cpu_fits_what_plain_torch_fits() -> None:
    keys, metric = draw_keys(), draw_metric()
    plain = product_fitting.fit_product(keys, 64, metric=metric, mean=mean_key(keys), generator=generator())
    found = fit_product(keys, 64, metric=metric, mean=mean_key(keys), generator=generator())
    assert plain.centroids is not None
    assert found.centroids is not None
    assert torch.equal(found.projection, plain.projection)
    assert torch.equal(found.centroids, plain.centroids)
    assert torch.equal(found.residual_norms, plain.residual_norms)


def test_shapes_and_the_residual_of_the_fitted_keys() -> None:
    keys, metric = draw_keys(), draw_metric()
    found = fit_product(keys, 64, metric=metric, mean=mean_key(keys), generator=generator())
    assert found.metric is None
    assert found.mean is not None
    assert found.centroids is not None
    assert found.projection.shape == (2, 32, 32)
    assert found.centroids.shape == (2, 8, 256, 4)
    assert found.residual_norms.shape == (2, 9)
    assert (found.residual_norms.diff(dim=-1) < 0).all()
    centred = keys.double() - found.mean.double().unsqueeze(1)
    norm = (centred @ metric.double() * centred).sum((1, 2)).sqrt()
    torch.testing.assert_close(found.residual_norms[:, 0], norm, rtol=1e-5, atol=0)
    product = Product(found.projection, found.centroids)
    again = product_residual_norms(keys, product, mean=found.mean)
    torch.testing.assert_close(again, found.residual_norms, rtol=1e-5, atol=0)


def test_product_codes_describe_other_keys_better_than_as_many_signs() -> None:
    keys, other, metric = draw_keys(8_000, dim=16), draw_keys(seed=1, dim=16), draw_metric(16)
    product = fit_product(keys, 32, metric=metric, mean=mean_key(keys), generator=generator())
    signs = fit(keys, 32, rounds=2, metric=metric, mean=mean_key(keys), generator=generator())
    assert product.centroids is not None
    norms = product_residual_norms(other, Product(product.projection, product.centroids), mean=product.mean)
    by_signs = residual_norms(other, signs.projection, metric=metric, mean=signs.mean)
    assert (norms[:, -1] < 0.9 * by_signs[:, -1]).all()


def test_seeds_and_the_order_of_heads() -> None:
    keys = draw_keys(600)
    one = fit_product(keys, 32, generator=generator())
    assert one.centroids is not None
    other = fit_product(keys, 32, generator=torch.Generator().manual_seed(1))
    assert other.centroids is not None
    assert not torch.equal(one.centroids, other.centroids)
    alone = fit_product(keys[1], 32, generator=generator())
    assert alone.centroids is not None
    assert torch.equal(alone.centroids, one.centroids[1])
    assert torch.equal(alone.projection, one.projection[1])


def test_fewer_different_keys_than_centroids() -> None:
    keys = draw_keys(300)
    keys[:, 5:] = keys[:, :1]
    found = fit_product(keys, 64, mean=mean_key(keys), generator=generator())
    assert found.centroids is not None
    assert found.centroids.isfinite().all()
    assert (found.residual_norms[:, -1] < 1e-4 * found.residual_norms[:, 0]).all()


def test_keys_that_are_all_zero() -> None:
    found = fit_product(torch.zeros(1, 300, 16), 64, generator=generator())
    assert found.centroids is not None
    assert found.projection.isfinite().all()
    assert not found.centroids.any()


@pytest.mark.parametrize(
    ("keys", "bits", "fault"),
    [
        (torch.zeros(1, 255, 32), 64, "at least 256 keys"),
        (torch.zeros(1, 300, 20), 64, "multiple of 8, not 20"),
        (torch.full((1, 300, 32), torch.nan), 64, "NaN or infinity"),
        (torch.zeros(1, 300, 32), 40, "bits must be"),
    ],
)
def test_what_cannot_be_fitted_is_refused(keys: torch.Tensor, bits: int, fault: str) -> None:
    with pytest.raises(InputError, match=fault):
        fit_product(keys, bits, generator=generator())


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({"mean": torch.zeros(32)}, r"mean must be of shape \[2, 32\], not \[32\]"),
        ({"metric": torch.eye(16)}, r"metric .* do not fit: \[16, 16\] and \[2, 300, 32\]"),
        ({"metric": torch.eye(32).expand(3, 32, 32)}, "metric .* do not fit"),
    ],
)
def test_a_mean_or_a_metric_of_another_shape_is_refused(options: dict[str, torch.Tensor], fault: str) -> None:
    with pytest.raises(InputError, match=fault):
        fit_product(torch.randn(2, 300, 32), 64, generator=generator(), **options)
