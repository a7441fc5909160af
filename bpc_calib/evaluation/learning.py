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

from bpc_calib.evaluation.forcing import PrefixLayer, prefill

__all__ = ["REPEATED", "LayerText", "Learned", "learn"]

REPEATED = 64  # last tokens of each text, which repeat a passage in its middle

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


def learn(
    model: Any,
    ids: Tensor,
    learners: Mapping[str, Callable[[LayerText, int], dict[str, Tensor]]],
    layers: Sequence[int],
    finished: MutableMapping[str, Any],
    *,
    seed: int = 0,
    report: Callable[[str, int], None] = lambda method, layer: None,
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
        report: called with the method and the layer before each part.
    """
    digest = hashlib.sha256(f"{seed} {ids.shape}".encode() + ids.numpy().tobytes()).hexdigest()[:32]
    parts = {(method, layer): f"learned {method} {layer} {digest}" for method in learners for layer in layers}
    texts: dict[int, LayerText] = {}
    for (method, layer), part in parts.items():
        if part not in finished:
            report(method, layer)
            texts = texts or collect(model, ids, layers)
            began = time.perf_counter()
            found = learners[method](_on(model.device, texts[layer]), seed)
            took = time.perf_counter() - began
            found = {name: tensor.detach().cpu().contiguous() for name, tensor in found.items()}
            finished[part] = {"tensors": base64.b64encode(safetensors.torch.save(found)).decode(), "seconds": took}
    learned: dict[str, dict[int, dict[str, Tensor]]] = {method: {} for method in learners}
    seconds = dict.fromkeys(learners, 0.0)
    for (method, layer), part in parts.items():
        found = safetensors.torch.load(base64.b64decode(finished[part]["tensors"]))
        learned[method][layer] = {name: tensor.to(model.device) for name, tensor in found.items()}
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
