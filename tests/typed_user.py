"""What users of the Python interface write, for type checkers alone: `make lint` runs mypy on it, nothing runs it.

`assert_type` fails where a public name has no type, or another one.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from typing_extensions import assert_type

import bpc_artifacts
import bpc_calib
from bpc_artifacts import LayerProjection, ProjectionArtifact
from bpc_calib import Codebook, Encoded, Fit, ModelDescription, Plan, QuantizedQuery, Rows, Rules, State
from bpc_calib.demo import DEMO_MODEL


def generate(file: Path) -> None:
    """The example of the README, without devices: transformers gives `.to(device)` a type that refuses its argument."""
    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL)
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    bpc_calib.enable(model)
    cache = bpc_calib.BPCCache(model.config, bpc_artifacts.load(file), budget=0.02)

    inputs = tokenizer("The old teacher watched the river.", return_tensors="pt")
    output = model.generate(**inputs, cache=cache, max_new_tokens=20)
    print(tokenizer.decode(output[0]))


def decode(model: PreTrainedModel, artifact: ProjectionArtifact, ids: Tensor) -> Tensor:
    bpc_calib.enable(model)
    bpc_calib.compile_layers(model)
    cache = bpc_calib.BPCCache(model.config, artifact, budget=64, min_context=0, recent=8, group="max")
    assert_type(cache.kv_bytes(2048), tuple[int, int])
    assert_type(cache.min_context, int)
    cache.set_budget(0.01)
    cache.rewind(0)
    bpc_calib.static_generate(model, ids, cache=cache, max_new_tokens=8)
    with bpc_calib.static_steps(model, cache, 8) as step:
        assert_type(step, Callable[[Tensor], Tensor])
        logits = step(ids)
    bpc_calib.disable(model)
    return assert_type(logits, Tensor)


def shard(model: PreTrainedModel) -> None:
    AutoModelForCausalLM.from_pretrained("name", distributed_config=bpc_calib.tensor_parallel(model.config, 2))


def calibrate(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, file: Path) -> None:
    description = bpc_calib.describe(model.config, revision=None)
    assert_type(description, ModelDescription)
    assert_type(description.full_layers, list[int])
    plan = bpc_calib.make_plan(description, samples=12, sequence_length=1024, method="paper")
    assert_type(plan, Plan)
    assert_type(plan.artifact_bytes, int)

    def progress(stage: str, done: int, total: int) -> None:
        print(f"{stage}: {done} of {total}")

    try:
        artifact = bpc_calib.calibrate(model, tokenizer, ["demo", "notes=./notes"], plan, progress=progress)
    except (bpc_calib.CorpusError, bpc_calib.InputError, bpc_calib.ModelError, bpc_calib.WorkError) as fault:
        raise SystemExit(str(fault)) from fault
    assert_type(artifact, ProjectionArtifact)
    bpc_artifacts.check_writable(file, plan.artifact_bytes)
    bpc_artifacts.save(artifact, file, overwrite=True)


def inspect(file: str, description: ModelDescription) -> None:
    try:
        artifact = bpc_artifacts.load(file)
    except bpc_artifacts.ArtifactError as fault:
        raise bpc_calib.BPCError(str(fault)) from fault
    assert_type(artifact.layers, Mapping[int, LayerProjection])
    assert_type(bpc_artifacts.check_model(artifact, description.metadata()), list[str])
    assert_type(bpc_artifacts.verdict(artifact), list[str])
    assert_type(artifact.layers[0].bits, int)


def method(keys: Tensor, query: Tensor) -> Tensor:
    """The example of docs/reference.md."""
    metric = bpc_calib.query_metric(bpc_calib.second_moment(query), 0.5)
    found = bpc_calib.fit(keys, rounds=2, metric=assert_type(metric, Tensor))
    assert_type(found, Fit)
    assert_type(bpc_calib.decompose(keys).codes, Tensor)
    encoded = bpc_calib.encode(keys, found.projection, metric=found.metric)
    assert_type(encoded, Encoded)
    quantized = bpc_calib.quantize_query(query, found.projection)
    assert_type(quantized, QuantizedQuery)
    scores = bpc_calib.hash_scores(quantized, encoded.codes, encoded.gain)
    logit = 64 * 128**0.5 / quantized.scale
    ranked = bpc_calib.group_scores(scores, "relative", logit=logit)
    k = bpc_calib.attended(4096, 0.02)
    assert_type(k, int)
    return assert_type(bpc_calib.select(ranked, k, recent=4), Tensor)


def engine(artifact: ProjectionArtifact, keys: Tensor, query: Tensor, at: Tensor) -> Tensor:
    """The calls of docs/embedding.md."""
    codes, gain = torch.zeros(*keys.shape[:3], 1, dtype=torch.int64), torch.zeros(keys.shape[:3], dtype=torch.uint8)
    state = State(keys, keys.clone(), codes, gain)
    codebook = bpc_calib.codebook_of(artifact.layers[0], slice(0, 2), keys.dtype, keys.device)
    assert_type(codebook, Codebook)
    assert_type(bpc_calib.make_codebook(codebook.projection, keys.dtype), Codebook)
    rules = Rules(budget=0.02, shares=bpc_calib.shares_of(artifact, artifact.layers).get(0))
    lengths: Sequence[int] = [keys.shape[2]]
    k = torch.tensor([rules.by_head(rules.count(length), length) for length in lengths])
    rows = Rows(torch.tensor(lengths), k, max(lengths), int(k.max()))
    backend = bpc_calib.find(query, state)
    assert_type(backend.serves(query, state), str | None)
    assert_type(backend.encode_with(codebook, keys), Encoded)
    backend.append(state, codebook, keys, keys, at)
    out, chosen = backend.sparse_decode(query, codebook, state, rows, rules)
    assert_type(chosen, Tensor)
    return assert_type(out + backend.dense_decode(query, state, rows), Tensor)
