"""Another kind of codes, and another ranking, take one file: this one."""

import pytest
import tiny
import torch

from bpc_calib import BPCCache, enable
from bpc_calib.compat import with_cache
from bpc_calib.method.codes import pack_codes
from bpc_calib.runtime.hashed_layer import BPCLayer
from bpc_calib.runtime.layers import RankingLayer


class PlainSigns(BPCLayer):
    """Codes without the greedy pass: the sign of each product. The kernels score them like any other."""

    def hash(self, visible):
        first = self.hashed
        super().hash(visible)
        wide, _ = self.codebook.centre(self.keys[:, :, first : self.hashed])
        self.buffers["codes"][:, :, first : self.hashed] = pack_codes(wide @ self.codebook.projection.mT > 0)

    def decode(self, query, rows):
        self.hash(rows.valid)
        return super().decode(query, rows)


class Longest(RankingLayer):
    """Ranks by the length of a key alone."""

    def rank(self, query, visible):
        return (1000 * self.keys.norm(dim=-1)).int()


@pytest.mark.parametrize("backend", ["torch", "native"])
@pytest.mark.parametrize("kind", [PlainSigns, Longest])
def test_a_kind_of_its_own(kind, backend, monkeypatch):
    monkeypatch.setenv("BPC_BACKEND", backend)
    model = tiny.model()
    enable(model)
    cache = type("Toy", (BPCCache,), {"layer_class": kind})
    cache = cache(model.config, tiny.artifact(model.config), budget=9, min_tokens=1, dense_layers=())
    seen = []
    layer, decode = cache.layers[1], cache.layers[1].decode
    layer.decode = lambda query, rows: seen.append(decode(query, rows)) or seen[-1]
    ids = torch.randint(250, (1, 60), generator=torch.Generator().manual_seed(0))
    made = model.generate(ids, **with_cache(cache), max_new_tokens=5, min_new_tokens=5, do_sample=False)
    assert made.shape == (1, 65)
    chosen = seen[-1][1]
    assert len(seen) == 4
    assert chosen.shape == (1, 2, 9)
    if kind is Longest:
        wanted = layer.keys.norm(dim=-1).topk(9).indices.sort(-1).values
        assert torch.equal(chosen, wanted)
    else:
        codes = layer.buffers["codes"][:, :, : layer.hashed, 0]
        keys = layer.keys - layer.codebook.mean.unsqueeze(-2) if layer.codebook.mean is not None else layer.keys
        assert torch.equal(codes >> 5 & 1 == 1, (keys @ layer.codebook.projection.mT)[..., 5] > 0)
