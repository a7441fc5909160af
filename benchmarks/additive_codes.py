"""How near nibbles are to keys, and how long they take, beside FAISS's additive quantizers of the same size.

    pip install faiss-cpu==1.15.1
    python benchmarks/additive_codes.py MODEL --corpus prose=FOLDER --corpus code=FOLDER -o RESULT

All are fitted to the same keys and encode the same keys of other texts, 64 bits each, in the same metric and around the
same mean, on one thread. Errors are squared, summed over the keys, and divided by the keys' own squares.
"""

import os
import statistics
import time
from collections.abc import Callable
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before a library reads it

import faiss
import torch
from report import about, keep, make_parser
from torch import Tensor

from bpc_calib import describe
from bpc_calib.backends.dispatch import find
from bpc_calib.bench.timing import clock
from bpc_calib.compat import with_cache
from bpc_calib.method.codebook import make_codebook
from bpc_calib.method.decomposition import cholesky
from bpc_calib.method.fitting import mean_key
from bpc_calib.method.metric import score_metric, second_moment
from bpc_calib.method.nibble_fitting import fit_nibbles, nibble_residuals
from bpc_calib.models.loading import load_model, load_tokenizer
from bpc_calib.models.observation import observing
from bpc_calib.text.corpora import open_corpora
from bpc_calib.text.samples import draw_samples

NIBBLES, REPEATS = 16, 3


@torch.inference_mode()
def keys_of(model: Any, texts: Tensor, layers: list[int]) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
    """Return the keys of layers, float32 `[kv_heads, N, head_dim]`, and the second moments of the queries on them."""
    from transformers import DynamicCache

    keys: dict[int, list[Tensor]] = {layer: [] for layer in layers}
    moments: dict[int, Tensor] = {}

    def add(module: Any, query: Tensor, *given: Any) -> None:
        if (layer := module.layer_idx) in keys:
            groups = query[0].unflatten(0, (describe(model.config).kv_heads, -1)).flatten(1, 2)
            moments[layer] = moments.get(layer, 0) + second_moment(groups)

    for text in texts:
        cache = DynamicCache(config=model.config)
        with observing(model, add):
            model.base_model(input_ids=text[None].long(), **with_cache(cache))
        for layer in layers:
            keys[layer].append(cache.layers[layer].keys[0].float())
    return {layer: torch.cat(each, 1) for layer, each in keys.items()}, moments


def seconds(run: Callable[[], Any]) -> float:
    """Return the median of some runs."""
    return statistics.median(clock(run, torch.device("cpu")) for _ in range(REPEATS))


def of_bpc(fitted: Tensor, others: Tensor, metric: Tensor, mean: Tensor) -> dict[str, float]:
    """Measure nibbles on keys `[1, N, D]`."""
    encode = find(fitted.unsqueeze(0)).encode_with
    began = time.perf_counter()
    found = fit_nibbles(fitted, 4 * NIBBLES, metric=metric, mean=mean, encode=encode)
    took = time.perf_counter() - began
    norms = nibble_residuals(others, found.projection, metric=metric, mean=mean, encode=encode)[0]
    book = make_codebook(found.projection, torch.float32, metric=metric, mean=mean, nibbles=True)
    encoding = seconds(lambda: encode(book, others.unsqueeze(0)))
    return {"error": float(norms[-1] / norms[0]) ** 2, "fit": took, "encode": encoding}


def of_faiss(quantizer: Any, fitted: Tensor, others: Tensor) -> dict[str, float]:
    """Measure a quantizer of FAISS on keys `[N, D]` whose plain distances are those of the metric."""
    began = time.perf_counter()
    quantizer.train(fitted.numpy())
    took = time.perf_counter() - began
    encoding = seconds(lambda: quantizer.compute_codes(others.numpy()))
    left = others - torch.from_numpy(quantizer.decode(quantizer.compute_codes(others.numpy())))
    error = left.double().square().sum() / others.double().square().sum()
    return {"error": float(error), "fit": took, "encode": encoding}


def main() -> None:
    """Measure every head of three layers; print and keep the figures."""
    parser = make_parser(__doc__)
    parser.add_argument("model")
    parser.add_argument("--corpus", action="append", required=True)
    asked = parser.parse_args()
    faiss.omp_set_num_threads(1)
    torch.set_num_threads(1)
    model, corpora = load_model(asked.model), open_corpora(asked.corpus)
    shape = describe(model.config)
    samples, length = (4, 256) if asked.tiny else (24, 2048)
    words = load_tokenizer(asked.model)
    ids, _ = draw_samples(corpora, words, samples=samples, sequence_length=length, seed=0, vocab_size=shape.vocab_size)
    full = shape.full_layers
    layers = sorted({full[len(full) * part // 6] for part in (1, 3, 5)})
    fitted, moments = keys_of(model, ids[samples // 4 :], layers)
    others, _ = keys_of(model, ids[: samples // 4], layers)
    rows = []
    for layer in layers:
        metrics = score_metric(moments[layer])
        for head in range(shape.kv_heads):
            keys, held, metric = fitted[layer][None, head, ::2], others[layer][None, head], metrics[None, head]
            mean = mean_key(keys)
            root = cholesky(metric, keys).float()
            flat, flat_held = (((each - mean.unsqueeze(-2)) @ root)[0].contiguous() for each in (keys, held))
            found = {"nibbles": of_bpc(keys, held, metric, mean)}
            for name, kind in (("LSQ16x4", faiss.LocalSearchQuantizer), ("RQ16x4", faiss.ResidualQuantizer)):
                found[name] = of_faiss(kind(flat.shape[1], NIBBLES, 4), flat, flat_held)
            rows += [
                {"layer": layer, "head": head, "codes": name}
                | {"keys": keys.shape[1], "encoded": held.shape[1]}
                | {figure: round(value, 6) for figure, value in each.items()}
                for name, each in found.items()
            ]
            print(rows[-3:], flush=True)
    made = {"faiss": faiss.__version__, "model": shape.id, "head_dim": shape.head_dim, "rows": rows}
    keep(asked.output, about() | made)


if __name__ == "__main__":
    main()
