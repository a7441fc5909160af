"""Tiny random models and a byte tokenizer: real transformers objects, created in milliseconds.

`python tests/tiny.py FOLDER` writes into FOLDER: `tiny-llama`, a small random model; `tiny-llama.gguf`, the same model,
if the package gguf is installed; `notes`, text for its calibration; and `prompt.txt`.
"""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from bpc_artifacts import ProjectionArtifact
from bpc_calib import calibrate, describe, make_plan
from bpc_calib.calibration.keys import sample_keys

VOCAB = 260  # 256 bytes and four special tokens

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 256,
    "bos_token_id": 257,
    "eos_token_id": 258,
}

# Every supported family, with its special settings.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": None, "head_dim": 16},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "phi3": {"sliding_window": 128},  # a window that covers the whole context is full attention
    "gemma3_text": {
        "head_dim": 16,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    },
    "smollm3": {"no_rope_layers": [1, 0, 1]},
    "granite": {},
    "olmo2": {},
    "starcoder2": {"sliding_window": None},
    "cohere": {},
    "glm": {"head_dim": 16},
    "stablelm": {},
}


def config(family: str = "llama", **changes: Any) -> Any:
    """Return a tiny config of a family."""
    return transformers.AutoConfig.for_model(family, **(_COMMON | FAMILIES.get(family, {}) | changes))


def model(family: str = "llama", *, seed: int = 0, **changes: Any) -> Any:
    """Return a tiny model with random weights, which are larger than usual so that the attention is not uniform."""
    torch.manual_seed(seed)
    made = transformers.AutoModelForCausalLM.from_config(config(family, **changes)).eval()
    with torch.no_grad():
        for name, weight in made.named_parameters():
            if weight.dim() == 2 and "embed" not in name:
                weight.normal_(0, weight.shape[1] ** -0.5)
    return made


def multimodal() -> Any:
    """Return a tiny model for images and text: gemma3, which contains a language model."""
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return model("gemma3", text_config=config("gemma3_text").to_dict(), vision_config=vision)


def artifact(config: Any, bits: int = 64, *, nibbles: bool = False, needs: bool = False, **algorithm: Any) -> Any:
    """Return random projections with the model's shapes, for tests that do not depend on good selections.

    With `needs`, some KV heads need ten times as many tokens as others.
    """
    from bpc_artifacts import LayerProjection, ProjectionArtifact
    from bpc_calib import describe

    described = describe(config)
    generator = torch.Generator().manual_seed(1)
    rows, steps = (4 * bits, bits // 4) if nibbles else (bits, bits)
    shape = (described.kv_heads, rows, described.head_dim)
    layers = {}
    for layer in described.full_layers:
        # The rows shrink as in a decomposition.
        projection = torch.randn(shape, generator=generator) * torch.linspace(1, 0.05, rows).unsqueeze(-1) * 0.3
        root = torch.randn(described.kv_heads, 2 * described.head_dim, described.head_dim, generator=generator)
        mean = torch.randn(described.kv_heads, described.head_dim, generator=generator)
        layers[layer] = LayerProjection(
            projection.numpy(),
            torch.zeros(described.kv_heads, steps + 1).numpy(),
            nibbles=nibbles,
            metric=(root.mT @ root / 2 / described.head_dim).numpy() if algorithm.get("metric") else None,
            mean=mean.numpy() if algorithm.get("centred") else None,
            need=need(described.kv_heads, generator) if needs else None,
        )
    made_by = {"name": "score-aware", "bits": bits, "codes": "nibbles" if nibbles else "signs"}
    made_by |= {"metric": False, "centred": False} | algorithm
    return ProjectionArtifact(layers, {"model": described.metadata(), "algorithm": made_by})


def need(kv_heads: int, generator: torch.Generator) -> Any:
    """Return losses by share that fall, each head's at its own pace: float32 `[kv_heads, 16]`."""
    from bpc_calib.method.shares import GRID

    pace = 0.05 + 3 * torch.rand(kv_heads, 1, generator=generator)
    return (torch.exp(-torch.tensor(GRID) / 0.02 / pace) * pace).numpy()


def tokenizer(*, bos: bool = True) -> Any:
    """Return a tokenizer with one token per byte; with `bos` it prepends BOS, as Llama's tokenizer does."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens(["<pad>", "<s>", "</s>"])
    if bos:
        raw.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 257)])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )


def merging_tokenizer() -> Any:
    """Return a byte tokenizer with one token for two newlines in a row, as in many vocabularies."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    newline = "\u010a"  # the byte level's character for a newline
    vocabulary = {c: i for i, c in enumerate([*alphabet, 2 * newline])}
    raw = Tokenizer(models.BPE(vocab=vocabulary, merges=[(newline, newline)]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=raw)


def save(folder: Path, family: str = "llama", **changes: Any) -> Path:
    """Write a model folder with `save_pretrained` and return it."""
    model(family, **changes).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def prompt(*lengths: int, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random sequences, padded on the left to the longest, and their attention mask."""
    width = max(lengths)
    ids = torch.randint(250, (len(lengths), width), generator=torch.Generator().manual_seed(seed))
    mask = torch.arange(width) >= width - torch.tensor(lengths).unsqueeze(-1)
    return ids.masked_fill(~mask, 256), mask.long()


def prose(words: int = 3000, seed: int = 0) -> str:
    """Return random text with varied lines."""
    names = "the a small old bright river stone lantern garden and over under carried opened saw 12 345 x y".split()
    picks = torch.randint(len(names), (words,), generator=torch.Generator().manual_seed(seed)).tolist()
    return " ".join(names[i] + (".\n" if n % 12 == 11 else "") for n, i in enumerate(picks))


def collect_keys(
    model: Any, samples: torch.Tensor, positions: list[list[int]], offsets: list[int], *, moments: bool = False
) -> tuple[dict[int, torch.Tensor], dict[int, torch.Tensor]]:
    """Return the keys `[kv_heads, N, head_dim]` of samples `[S, T]` by layer, and the sums of their moments."""
    description = describe(model.config)
    found = [
        sample_keys(model, description, *each, offset=offset, moments=moments)
        for *each, offset in zip(samples, positions, offsets, strict=True)
    ]
    keys = {layer: torch.cat([each.keys[layer] for each in found], dim=1) for layer in found[0].keys}
    return keys, {layer: torch.stack([each.moments[layer] for each in found]).sum(0) for layer in found[0].moments}


def write_playground(folder: Path) -> None:
    """Write a model folder, a text folder and a prompt to try the commands."""
    sizes: dict[str, Any] = {
        "hidden_size": 256,
        "num_hidden_layers": 4,
        "intermediate_size": 512,
        "max_position_embeddings": 1024,
    }
    save(folder / "tiny-llama", **sizes)
    if importlib.util.find_spec("gguf") is not None:
        import tiny_gguf

        tiny_gguf.save(folder / "tiny-llama.gguf", model(**sizes))
    (folder / "notes").mkdir(exist_ok=True)
    for i in range(8):
        (folder / "notes" / f"{i}.txt").write_text(prose(2000, seed=i))
    (folder / "prompt.txt").write_text(prose(2000)[:900])  # the model's limit is 1,024 tokens, one per byte
    print(f"Wrote {folder / 'tiny-llama'}, {folder / 'notes'} and {folder / 'prompt.txt'}")


if __name__ == "__main__":
    write_playground(Path(sys.argv[1]))


def calibrated(
    model: Any,
    tokenizer: Any,
    corpora: list[str],
    *,
    work_dir: Path | None = None,
    progress: Any = lambda *step: None,
    **settings: Any,
) -> ProjectionArtifact:
    """Run `calibrate` with a plan from these settings."""
    plan = make_plan(describe(model.config), **settings)
    return calibrate(model, tokenizer, corpora, plan, work_dir=work_dir, progress=progress)
