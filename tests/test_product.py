"""Product codes in plain torch: what they stand for, how they are found, and how they score."""

import pytest
import torch

import bpc_calib
from bpc_calib.errors import InputError
from bpc_calib.method.encoded import GAIN_OFFSET, GAIN_UNIT
from bpc_calib.method.encoding import encode_with, make_encoder
from bpc_calib.method.fitting import mean_key
from bpc_calib.method.product import Product, encode_parts, pack_bytes, unpack_bytes
from bpc_calib.method.scoring import LARGEST_SCORE, hash_scores, quantize_query


def draw(heads: int = 2, dim: int = 32, parts: int = 8, seed: int = 0) -> Product:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.linalg.qr(torch.randn(heads, dim, dim, generator=generator)).Q
    return Product(rows * 1.5, torch.randn(heads, parts, 256, dim // parts, generator=generator))


def stands_for(product: Product, codes: torch.Tensor) -> torch.Tensor:
    places = unpack_bytes(codes, product.bits // 8)  # [H_KV, N, m]
    parts = [
        torch.stack([product.centroids[h, j][places[h, :, j]] for j in range(product.bits // 8)], dim=-2).flatten(-2)
        for h in range(len(places))
    ]
    return torch.stack(parts) @ product.rows


@pytest.mark.parametrize("parts", [4, 8, 16])
def test_bytes_are_packed_by_part(parts: int) -> None:
    places = torch.randint(256, (3, 5, parts), generator=torch.Generator().manual_seed(1))
    codes = pack_bytes(places)
    assert codes.shape == (3, 5, -(-parts // 8))
    assert torch.equal(unpack_bytes(codes, parts), places)
    assert torch.equal(codes.view(torch.uint8)[..., :parts].long(), places)


@pytest.mark.parametrize("parts", [4, 8, 16])
def test_a_key_gets_the_nearest_centroid_of_every_part(parts: int) -> None:
    product = draw(parts=parts)
    mean = torch.randn(2, 32, generator=torch.Generator().manual_seed(2))
    keys = torch.randn(2, 300, 32, generator=torch.Generator().manual_seed(3))
    encoder = make_encoder(product, torch.float32, mean=mean)
    found = encode_with(encoder, keys)
    rotated = (keys - mean.unsqueeze(1)) @ torch.linalg.inv(product.rows)
    split = rotated.unflatten(-1, (parts, -1)).transpose(1, 2)
    distance = torch.cdist(split.double(), product.centroids.double())  # [H_KV, m, N, 256]
    places = unpack_bytes(found.codes, parts).transpose(1, 2)
    chosen = distance.gather(-1, places.unsqueeze(-1)).squeeze(-1)
    assert (chosen <= distance.amin(-1) + 1e-5).all()
    assert torch.allclose(found.error.double(), chosen.square().sum(1).sqrt(), atol=1e-4)
    coded = torch.linalg.solve(product.rows, stands_for(product, found.codes), left=False)
    gain = (rotated.square().sum(-1) / (rotated * coded).sum(-1)).clamp(0.5, (255 + GAIN_OFFSET) / GAIN_UNIT)
    inside = (rotated * coded).sum(-1) > 0.3 * rotated.square().sum(-1)
    assert ((found.gain.float() + GAIN_OFFSET) / GAIN_UNIT - gain)[inside].abs().max() <= 0.51 / GAIN_UNIT


def test_the_functions_of_the_package_work_together() -> None:
    keys = torch.randn(2, 400, 32, generator=torch.Generator().manual_seed(8))
    found = bpc_calib.fit_product(keys, 64, mean=mean_key(keys), generator=torch.Generator().manual_seed(0))
    assert found.centroids is not None
    product = bpc_calib.Product(found.projection, found.centroids)
    encoded = bpc_calib.encode(keys, product, mean=found.mean)
    query = torch.randn(2, 3, 32, generator=torch.Generator().manual_seed(9))
    asked = bpc_calib.quantize_query(query, product)
    scores = bpc_calib.hash_scores(asked, encoded.codes, encoded.gain) * asked.scale[:, None, None] / GAIN_UNIT
    exact = query @ (keys - found.mean.unsqueeze(1)).mT
    # 400 keys and 256 centroids of each of 8 parts: the scores are nearly exact.
    assert torch.corrcoef(torch.stack([scores.flatten(), exact.flatten()]))[0, 1] > 0.9
    with pytest.raises(InputError, match="do not fit"):
        bpc_calib.encode(keys[..., :16], product)


def test_equal_distances_go_to_the_lowest_number() -> None:
    centroids = torch.zeros(4, 256, 2)
    centroids[:, 7:] = 1.0
    found = encode_parts(torch.ones(1, 8), centroids, centroids.square().sum(-1) / 2)
    assert unpack_bytes(found.codes, 4).tolist() == [[7, 7, 7, 7]]
    assert found.error.tolist() == [0.0]
    assert found.gain.tolist() == [GAIN_UNIT - GAIN_OFFSET]


def test_blocks_of_keys_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    product = draw()
    encoder = make_encoder(product, torch.float32)
    keys = torch.randn(2, 50, 32, generator=torch.Generator().manual_seed(4))
    whole = encode_with(encoder, keys)
    monkeypatch.setattr("bpc_calib.method.product.AT_ONCE", 1)
    assert torch.equal(encode_with(encoder, keys).codes, whole.codes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_are_products_with_what_codes_stand_for(dtype: torch.dtype) -> None:
    product = draw().to(dtype).to(torch.float32)
    generator = torch.Generator().manual_seed(5)
    query = torch.randn(2, 3, 32, generator=generator).to(dtype)
    codes = pack_bytes(torch.randint(256, (2, 40, 8), generator=generator))
    asked = quantize_query(query, product.to(dtype))
    scores = hash_scores(asked, codes)
    exact = query.float() @ stands_for(product, codes).mT
    assert scores.abs().max() <= LARGEST_SCORE + 8
    assert (scores * asked.scale[:, None, None] - exact).abs().max() <= 4.1 * asked.scale.max()
    gain = torch.randint(256, (2, 40), generator=generator).to(torch.uint8)
    assert torch.equal(hash_scores(asked, codes, gain), scores * (gain.int() + GAIN_OFFSET).unsqueeze(1))


def test_a_zero_query_scores_zero() -> None:
    asked = quantize_query(torch.zeros(2, 1, 32), draw())
    assert asked.scale.tolist() == [0.0, 0.0]
    assert not asked.values.any()


def test_shapes_that_do_not_fit_are_refused() -> None:
    product = draw()
    with pytest.raises(InputError, match="product codes do not fit"):
        make_encoder(Product(product.rows, product.centroids[..., :3]), torch.float32)
    with pytest.raises(InputError, match="do not fit a projection of head_dim 32"):
        encode_with(make_encoder(product, torch.float32), torch.zeros(2, 4, 16))
    with pytest.raises(InputError, match="codes of 64 bits must be int64"):
        hash_scores(quantize_query(torch.zeros(2, 1, 32), product), torch.zeros(2, 4, 2, dtype=torch.int64))
