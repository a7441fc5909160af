"""Product codes by the compiled kernels: bit for bit those of plain torch, from the same rotated keys and tables."""

import pytest
import torch

from bpc_calib.backends import plain
from bpc_calib.method.appending import Slots
from bpc_calib.method.choosing import Cached, Choice, choose_quantized
from bpc_calib.method.encoded import Encoded
from bpc_calib.method.encoding import make_encoder
from bpc_calib.method.product import Product, by_dimension, encode_parts, pack_bytes
from bpc_calib.method.selection import worst_first
from bpc_calib.method.stepping import Hashed

numba = pytest.importorskip("bpc_calib.backends.cpu.backend")
calls = pytest.importorskip("bpc_calib.backends.cpu.product")

SHAPES = {  # batch, query heads on each of 2 KV heads, head_dim, parts, tokens
    "one head": (1, 1, 32, 4, 77),
    "three heads": (2, 3, 64, 8, 1000),
    "four heads": (1, 4, 128, 8, 3000),
    "eight heads of 128 bits": (1, 8, 64, 16, 500),
    "five heads in parts": (1, 5, 64, 8, 20_000),
}


def draw(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=generator)


def draw_product(generator: torch.Generator, dim: int, parts: int) -> Product:
    rows = torch.linalg.qr(draw(generator, 2, dim, dim)).Q
    return Product(rows, draw(generator, 2, parts, 256, dim // parts))


def draw_codes(generator: torch.Generator, batch: int, tokens: int, parts: int) -> Encoded:
    places = torch.randint(256, (batch, 2, tokens, parts), generator=generator)
    gain = torch.randint(256, (batch, 2, tokens), generator=generator).to(torch.uint8)
    return Encoded(pack_bytes(places), torch.rand(batch, 2, tokens, generator=generator), gain)


@pytest.mark.parametrize("gain", [True, False])
@pytest.mark.parametrize("group", ["relative", "max", "sum"])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_same_choice_from_the_same_tables(shape: str, group: str, gain: bool) -> None:
    batch, heads, dim, parts, tokens = SHAPES[shape]
    generator = torch.Generator().manual_seed(tokens)
    product, encoded = draw_product(generator, dim, parts), draw_codes(generator, batch, tokens, parts)
    query = draw(generator, batch, 2, heads, dim)
    asked, expected = numba.quantize_query(query, product), plain.quantize_query(query, product)
    assert asked.values.dtype == torch.int16
    assert (asked.values.int() - expected.values.int()).abs().max() <= 1  # products rounded at a half
    torch.testing.assert_close(asked.scale, expected.scale)
    valid = torch.rand(batch, tokens, generator=generator) > 0.2
    lengths = torch.tensor([tokens - 3 * row for row in range(batch)])
    cached = Cached(encoded.codes, encoded.gain if gain else None, valid, lengths, worst_first(encoded.error))
    for choice in (Choice(0.1, group), Choice(0.1, group, recent=2, sink=1, safeguard=0.2)):
        found = numba.choose(query, product, cached, tokens // 20, choice)
        assert torch.equal(found, choose_quantized(asked, cached, tokens // 20, choice))


def test_tables_are_exact_where_products_are() -> None:
    generator = torch.Generator().manual_seed(3)
    centroids = torch.randint(-3, 4, (2, 8, 256, 4), generator=generator).float()
    centroids[..., 0, :] = 127 / 4  # so that the unit is 1: 8 parts of 4 products of 127 / 4 and 64
    product = Product(64 * torch.eye(32).expand(2, 32, 32), centroids)
    query = torch.randint(-1, 2, (1, 2, 3, 32), generator=generator).float()
    query[:, :, 0] = 1
    found, expected = numba.quantize_query(query, product), plain.quantize_query(query, product)
    assert expected.scale.unique().numel() == 1
    assert torch.equal(found.scale, expected.scale)
    assert torch.equal(found.values, expected.values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("dim", "parts"), [(32, 4), (80, 8), (256, 16)])
def test_the_same_codes_from_the_same_rotated_keys(dim: int, parts: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(dim)
    centroids = by_dimension(draw(generator, 2, parts, 256, dim // parts).to(dtype).float())
    centroids[:, :, 200] = centroids[:, :, 3]  # the lower number wins
    halves, rotated = centroids.square().sum(-1) / 2, draw(generator, 3, 2, 130, dim)
    rotated[:, :, :5] = centroids[:, :, 200].flatten(1).unsqueeze(1)
    found, expected = (each(rotated, centroids, halves) for each in (calls.encode_parts, encode_parts))
    assert torch.equal(found.codes, expected.codes)
    assert torch.equal(found.gain, expected.gain)
    assert torch.equal(found.error, expected.error)
    assert (found.codes[:, :, 0].contiguous().view(torch.uint8)[..., :parts] == 3).all()


@pytest.mark.parametrize("lead", [(2,), (3, 2)], ids=["shared", "each sequence's own"])
@pytest.mark.parametrize("tokens", [1, 4, 5, 100])
def test_few_keys_and_many_are_hashed_alike(tokens: int, lead: tuple[int, ...]) -> None:
    """One kernel rotates and finds; for many keys torch rotates. Small integers make every product exact."""
    generator = torch.Generator().manual_seed(tokens)
    swap = torch.randperm(32, generator=generator)
    centroids = torch.randint(-4, 5, (*lead, 8, 256, 4), generator=generator).float()
    product = Product(2 * torch.eye(32)[swap].expand(*lead, 32, 32), centroids)
    mean = torch.randint(-3, 4, (*lead, 32), generator=generator).float()
    encoder = make_encoder(product, torch.bfloat16, mean=mean)
    keys = torch.randint(-9, 10, (3, 2, tokens, 32), generator=generator).bfloat16()
    found, expected = numba.encode_with(encoder, keys), plain.encode_with(encoder, keys)
    assert torch.equal(found.codes, expected.codes)
    assert torch.equal(found.gain, expected.gain)
    assert torch.equal(found.error, expected.error)


@pytest.mark.parametrize("shape", ["three heads", "eight heads of 128 bits", "five heads in parts"])
def test_a_whole_step_is_its_stages(shape: str) -> None:
    batch, heads, dim, parts, tokens = SHAPES[shape]
    generator = torch.Generator().manual_seed(tokens)
    product, encoded = draw_product(generator, dim, parts), draw_codes(generator, batch, tokens, parts)
    encoder = make_encoder(product, torch.float32, mean=draw(generator, 2, dim))
    keys, values = draw(generator, batch, 2, tokens, dim), draw(generator, batch, 2, tokens, dim)
    query, choice, k = draw(generator, batch, 2, heads, dim), Choice(dim**-0.5), tokens // 10
    slots = Slots(keys, values, encoded.codes, encoded.gain, encoded.error)
    out = numba.step(query, Hashed(product, encoder, slots, tokens), k, choice)
    newest = numba.encode_with(encoder, keys[:, :, -1:])
    assert torch.equal(encoded.codes[:, :, -1:], newest.codes)
    assert torch.equal(encoded.gain[:, :, -1:], newest.gain)
    chosen = numba.choose(query, product, Cached(encoded.codes, encoded.gain), k, choice)
    torch.testing.assert_close(out, numba.sparse_attention(query, keys, values, chosen, choice.scaling))
