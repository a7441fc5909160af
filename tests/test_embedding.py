"""The engine of docs/embedding.md decodes what `BPCCache` decodes with codes that no prompt adapts."""

import re
from pathlib import Path

import torch

from bpc_calib import BPCCache, enable
from bpc_calib.compat import with_cache

PAGE = (Path(__file__).parent.parent / "docs/embedding.md").read_text()


def test_the_engine_in_pages(capsys):
    code, printed = (re.search(f"```{kind}\n(.*?)```", PAGE, re.DOTALL)[1] for kind in ("python", "text"))
    names = {}
    exec(code, names)
    assert capsys.readouterr().out == printed
    model, engine = names["model"], names["engine"]
    assert len(engine.free) < names["POOL"] - 50
    longer = engine.generate(names["encoded"], 8)
    model.set_attn_implementation("sdpa")
    enable(model)
    rules = {"budget": 0.02, "min_tokens": 32, "dense_layers": (), "adapt": False}
    for ids, answer, more in zip(names["encoded"], printed.splitlines(), longer, strict=True):
        cache = BPCCache(model.config, names["artifact"], **rules)
        made = model.generate(ids[None], **with_cache(cache), max_new_tokens=8, min_new_tokens=8, do_sample=False)
        assert made[0, len(ids) :].tolist() == torch.as_tensor(more).tolist()
        assert f"{len(ids)} {names['tokenizer'].decode(made[0, len(ids) : len(ids) + 4])}" == answer
        assert torch.equal(cache.layers[0].codebook.gram, engine.codebooks[0].gram)
