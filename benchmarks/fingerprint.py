"""Hash what the bundled model's calibration, codes, scores and choices are, to see whether a change altered a bit.

    python benchmarks/fingerprint.py

Run it before and after a change on one machine with the same versions: the lines must be equal.
"""

import argparse
import hashlib
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bpc_artifacts import save
from bpc_calib import BPCCache, calibrate, describe, enable, find, hash_scores, make_plan, quantize_query
from bpc_calib.compat import with_cache
from bpc_calib.method.codebook import make_codebook
from bpc_calib.method.encoding import encode_with
from bpc_calib.method.rules import Rules
from bpc_calib.method.state import Rows, State
from bpc_calib.models.loading import load_model, load_tokenizer

TOKENS = 1500


def main() -> None:
    """Print a name and a hash per line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="check the script in seconds, with other hashes")
    tiny = parser.parse_args().tiny
    samples, length, count = (3, 128, 150) if tiny else (6, 1024, TOKENS)
    torch.set_num_threads(1)
    model, tokenizer = load_model("demo"), load_tokenizer("demo")
    for method in ("score-aware", "paper"):
        plan = make_plan(describe(model.config), samples=samples, sequence_length=length, method=method)
        artifact = calibrate(model, tokenizer, ["demo"], plan)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "artifact.safetensors")
            save(artifact, path)
            show(f"{method} artifact", path.read_bytes())
        hash_choices(method, artifact, count)
        enable(model)
        ids = torch.arange(count).unsqueeze(0) * 7919 % model.config.vocab_size
        cache = BPCCache(model.config, artifact, dense_layers=(), min_tokens=1, min_context=0)
        tokens = model.generate(ids, **with_cache(cache), max_new_tokens=16, min_new_tokens=16, do_sample=False)
        show(f"{method} generated tokens", tokens)


def hash_choices(method: str, artifact: Any, count: int) -> None:
    """Codes, scores and chosen tokens of random keys and queries under every layer's projection."""
    generator = torch.Generator().manual_seed(0)
    for index, layer in artifact.layers.items():
        projection = torch.from_numpy(layer.projection)
        metric, mean = (None if array is None else torch.from_numpy(array) for array in (layer.metric, layer.mean))
        heads, _, dim = projection.shape
        keys = torch.randn(1, heads, count, dim, generator=generator).bfloat16()
        query = torch.randn(1, heads, 2, dim, generator=generator).bfloat16()
        codebook = make_codebook(projection, keys.dtype, metric=metric, mean=mean)
        encoded = encode_with(codebook, keys)
        show(f"{method} layer {index} codes", encoded.codes)
        show(f"{method} layer {index} gain", encoded.gain)
        show(f"{method} layer {index} error", encoded.error)
        show(
            f"{method} layer {index} scores",
            hash_scores(quantize_query(query, projection), encoded.codes, encoded.gain),
        )
        state = State(keys, keys, encoded.codes, encoded.gain)
        rows = Rows(torch.tensor([count]), torch.tensor([[40]]), count, 40)
        for group in ("relative", "max"):
            rules = Rules(group=group, recent=3, sink=2)
            _, chosen = find(query, state).sparse_decode(query, codebook, state, rows, rules)
            show(f"{method} layer {index} chosen, {group}", chosen)


def show(name: str, data: Tensor | bytes) -> None:
    """Print the first digits of a SHA-256."""
    raw = data if isinstance(data, bytes) else data.contiguous().numpy().tobytes()
    print(f"{hashlib.sha256(raw).hexdigest()[:24]}  {name}", flush=True)


if __name__ == "__main__":
    main()
