"""What each process of tests/test_tensor_parallel.py does: `torchrun tests/tensor_ranks.py FOLDER`.

The cases are in FOLDER/cases.json. Rank R writes what it found to FOLDER/rank-R.pt.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any, ClassVar

import tiny
import torch
import transformers
from transformers.distributed import DistributedConfig

import bpc_calib
from bpc_calib import BPCCache, describe
from bpc_calib.calibration.keys import sample_keys
from bpc_calib.compat import with_cache
from bpc_calib.models.loading import load_config, load_model, weights_identity
from bpc_calib.runtime.hashed_layer import BPCLayer

PROMPT, STEPS = 100, 5
# Every layer must choose, from the first step on.
HARD: dict[str, Any] = {"budget": 8, "min_tokens": 1, "min_context": 0, "dense_layers": ()}


class Noted(BPCLayer):
    """A layer that keeps which tokens it chose in each step."""

    chosen: ClassVar[list[tuple[int, torch.Tensor]]] = []

    def decode(self, query: torch.Tensor, rows: Any) -> Any:
        out, found = super().decode(query, rows)
        Noted.chosen.append((self.index, found))
        return out, found


class NotingCache(BPCCache):
    layer_class = Noted


def texts(vocabulary: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return prompts `[2, PROMPT]` and the tokens that follow `[2, STEPS]`."""
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randint(3, min(vocabulary, 250), (2, n), generator=generator) for n in (PROMPT, STEPS))


def artifact_of(config: Any, codes: str) -> Any:
    """Return projections of all heads, the same in every process; None: online."""
    return None if codes == "online" else tiny.artifact(config, metric=True, centred=True)


@torch.no_grad()
def decode(model: Any, artifact: Any, cache_class: Any = BPCCache, **changes: Any) -> torch.Tensor:
    """Return the logits `[1 + STEPS, 2, vocabulary]` of a prefill and of steps that choose."""
    bpc_calib.enable(model)
    prompt, new = texts(model.config.vocab_size)
    cache = cache_class(model.config, artifact, **(HARD | changes))
    parts = [prompt, *new.split(1, dim=1)]
    return torch.stack([model(part, **with_cache(cache)).logits[:, -1] for part in parts])


def chosen(model: Any, artifact: Any) -> list[tuple[int, torch.Tensor]]:
    """Return the tokens that each layer chose, `[2, kv_heads, 8]`, step after step."""
    Noted.chosen = []
    decode(model, artifact, NotingCache)
    return Noted.chosen


def sampled(model: Any, artifact: Any) -> list[list[int]]:
    """Return what a sampling generation from the same seed writes."""
    bpc_calib.enable(model)
    torch.manual_seed(7)
    cache = BPCCache(model.config, artifact, **HARD)
    prompt = texts(model.config.vocab_size)[0]
    made = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), **with_cache(cache), max_new_tokens=8, do_sample=True
    )
    return made[:, PROMPT:].tolist()


@torch.no_grad()
def static(model: Any, artifact: Any) -> torch.Tensor:
    """Return the logits of the steps in buffers of fixed size, `[STEPS, 2, vocabulary]`."""
    bpc_calib.enable(model)
    prompt, new = texts(model.config.vocab_size)
    cache = BPCCache(model.config, artifact, **HARD)
    model(prompt, **with_cache(cache))
    with bpc_calib.static_steps(model, cache, STEPS) as step:
        return torch.stack([step(each) for each in new.split(1, dim=1)])


@torch.no_grad()
def collectives(model: Any, cache: Any) -> dict[str, int]:
    """Count the collectives of one step after a prefill, by name."""
    prompt, new = texts(model.config.vocab_size)
    model(prompt, **with_cache(cache))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        model(new[:, :1], **with_cache(cache))
    return {each.key: each.count for each in profile.key_averages() if "c10d" in each.key}


def kept(model: Any) -> dict[str, Any]:
    """Return what calibration keeps of a sample, and which weights it finds."""
    described = describe(model.config)
    tokens = texts(model.config.vocab_size)[0][0]
    found = sample_keys(model, described, tokens, list(range(0, PROMPT, 3)), offset=5, moments=True)
    return {"keys": found.keys, "moments": found.moments, "weights": weights_identity(model)}


def load(case: dict[str, Any], ranks: int) -> Any:
    """Load the model of a case: as the command line does, or as users do, by BPC's plan where KV heads are copied."""
    dtype = case.get("dtype", "float64")
    if case["model"] == "demo":
        config = load_config("demo")[0]
        config.distributed_config = bpc_calib.tensor_parallel(config, ranks)
        return load_model("demo", config=config, dtype=dtype)
    how = DistributedConfig(tp_plan="auto")
    if case.get("copied"):
        how = bpc_calib.tensor_parallel(load_config(case["model"])[0], ranks)
    made = transformers.AutoModelForCausalLM.from_pretrained(
        case["model"], distributed_config=how, dtype=getattr(torch, dtype)
    )
    return made.eval()


def measure(case: dict[str, Any], ranks: int) -> dict[str, Any]:
    """Return what a case asks for."""
    model = load(case, ranks)
    if case.get("refused"):
        try:
            bpc_calib.enable(model)
        except bpc_calib.ModelError as fault:
            return {"refused": str(fault)}
    artifact = artifact_of(model.config, case["codes"])
    found: dict[str, Any] = {"kept": kept(model), "logits": decode(model, artifact), "chosen": chosen(model, artifact)}
    if case.get("more"):
        found |= {"sampled": sampled(model, artifact), "static": static(model, artifact)}
        found["full"] = decode(model, artifact, budget=1.0)
        caches = BPCCache(model.config, artifact, **HARD), transformers.DynamicCache(config=model.config)
        found["collectives"] = [collectives(model, cache) for cache in caches]
    return found


def main(folder: Path) -> None:
    """Run every case."""
    ranks = int(os.environ["WORLD_SIZE"])
    found = {name: measure(case, ranks) for name, case in json.loads((folder / "cases.json").read_text()).items()}
    torch.save(found, folder / f"rank-{os.environ['RANK']}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
