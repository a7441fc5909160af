"""What some methods learn from text before they choose, layer by layer; kept part by part, as an evaluation is."""

import base64
import hashlib
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from bpc_calib.errors import InputError
from bpc_calib.evaluation.forcing import PrefixLayer, prefill
from bpc_calib.models.description import describe
from bpc_calib.text.known_corpora import Corpus
from bpc_calib.text.samples import draw_samples

__all__ = ["LENGTH", "REPEATED", "TEXTS", "LayerText", "Learned", "Learner", "draw_lessons", "learn"]

TEXTS, LENGTH = 16, 2048  # tokens; fewer where the model takes fewer
REPEATED = 64  # last tokens of each text, which repeat a passage in its middle
OTHER_TEXT = 1 << 33  # added to the seed, so that the text differs from that of an evaluation with the same seed

Learned = Mapping[int, Mapping[str, Tensor]]  # by layer


@dataclass(frozen=True)
class LayerText:
    """What one layer makes of texts whose last `REPEATED` tokens repeat those from `passage` on."""

    keys: Tensor  # [texts, kv_heads, N, head_dim]
    values: Tensor  # as the keys
    queries: Tensor  # [texts, query_heads, n, head_dim]; the last `REPEATED` are those of the repetition
    places: Tensor  # int64 [n], ascending: the tokens of the queries
    passage: int
    scaling: float  # factor on the products q k


Learner = Callable[[LayerText, int], dict[str, Tensor]]  # with a seed, of what is drawn by chance


def draw_lessons(config: Any, tokenizer: Any, corpora: Sequence[Corpus], seed: int) -> Tensor:
    """Return texts to learn from, int64 `[TEXTS, N]`; none without a corpus.

    Raises:
        InputError: the model takes too few tokens.
        CorpusError: a corpus cannot be read, or has too little text.
        ModelError: the tokenizer does not belong to the model.
    """
    if not corpora:
        return torch.empty(0, 0, dtype=torch.int64)
    about = describe(config)
    length = min(LENGTH, about.context_limit or LENGTH)
    if length < 4 * REPEATED:
        raise InputError(f"methods learn from texts of at least {4 * REPEATED} tokens: the model's limit is {length}")
    ids, _ = draw_samples(
        list(corpora),
        tokenizer,
        samples=TEXTS,
        sequence_length=length,
        seed=seed + OTHER_TEXT,
        vocab_size=about.vocab_size,
    )
    return ids


def learn(
    model: Any,
    ids: Tensor,
    learners: Mapping[str, Learner],
    layers: Sequence[int],
    finished: MutableMapping[str, Any],
    *,
    seed: int = 0,
    progress: Callable[[float, str], None] = lambda share, what: None,
) -> tuple[Mapping[str, Learned], dict[str, float]]:
    """Return what each method learns from texts, and the seconds that it took.

    Args:
        model: an enabled model.
        ids: int64 `[texts, N]`, with room for a passage and its repetition.
        learners: of one layer, by the name of their method.
        layers: that choose.
        finished: what an earlier call with this model has learned; what is new is put in as soon as it is learned.
            Values are what JSON can hold.
        seed: of what is drawn by chance.
        progress: called with the finished share and what is being learned.
    """
    digest = hashlib.sha256(f"{seed} {ids.shape}".encode() + ids.numpy().tobytes()).hexdigest()[:32]
    parts = {(method, layer): f"learned {method} {layer} {digest}" for method in learners for layer in layers}
    texts: dict[int, LayerText] = {}
    for place, ((method, layer), part) in enumerate(parts.items()):
        if part not in finished:
            texts = texts or collect(model, ids, layers)
            began = time.perf_counter()
            found = learners[method](_on(model.device, texts[layer]), seed)
            took = time.perf_counter() - began
            found = {name: tensor.detach().cpu().contiguous() for name, tensor in found.items()}
            finished[part] = {"tensors": base64.b64encode(safetensors.torch.save(found)).decode(), "seconds": took}
            progress((place + 1) / len(parts), f"{method}, layer {layer}")
    learned: dict[str, dict[int, Mapping[str, Tensor]]] = {method: {} for method in learners}
    seconds = dict.fromkeys(learners, 0.0)
    for (method, layer), part in parts.items():
        own = safetensors.torch.load(base64.b64decode(finished[part]["tensors"]))
        learned[method][layer] = {name: tensor.to(model.device) for name, tensor in own.items()}
        seconds[method] += finished[part]["seconds"]
    return learned, seconds


def collect(model: Any, ids: Tensor, layers: Sequence[int]) -> dict[int, LayerText]:
    """Run texts `[texts, N]` through the model, their ends replaced, and keep what the layers make of them.

    It stays in main memory: the keys and values of all tokens.
    """
    passage = (ids.shape[1] - REPEATED) // 2
    ids = torch.cat([ids[:, :-REPEATED], ids[:, passage : passage + REPEATED]], dim=1)
    kept: dict[int, list[PrefixLayer]] = {layer: [] for layer in layers}
    for text in ids.split(1):
        cache = prefill(model, text.to(model.device))
        for layer, own in kept.items():
            source = cache.layers[layer]
            assert isinstance(source, PrefixLayer)
            assert source.asked is not None
            own.append(source)
            source.keys, source.values = source.keys.cpu(), source.values.cpu()
            source.asked = replace(source.asked, queries=source.asked.queries.cpu(), places=source.asked.places.cpu())
            source.buffers = {}
    return {layer: _joined(own, passage) for layer, own in kept.items()}


def _joined(layers: Sequence[PrefixLayer], passage: int) -> LayerText:
    asked = [layer.asked for layer in layers if layer.asked is not None]
    return LayerText(
        torch.cat([layer.keys for layer in layers]),
        torch.cat([layer.values for layer in layers]),
        torch.cat([each.queries for each in asked]),
        asked[0].places,
        passage,
        layers[0].scaling,
    )


def _on(device: torch.device, text: LayerText) -> LayerText:
    moved = {name: getattr(text, name).to(device) for name in ("keys", "values", "queries", "places")}
    return replace(text, **moved)
