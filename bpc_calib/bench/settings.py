"""What one run of the benchmark measures, and the shapes of known models.

Importing this file is cheap, so the command line shows both in its help.
"""

from dataclasses import dataclass
from typing import Any

from bpc_calib.method.defaults import BUDGET

__all__ = ["DECODE_LENGTHS", "LENGTHS", "PARTS", "PREFILL_TOKENS", "SHAPES", "Settings"]

PARTS = ("layer", "decode", "prefill")
LENGTHS = (2048, 8192, 32768, 131072)  # of the layer part; the crossover walks to the last
DECODE_LENGTHS = {"cpu": LENGTHS, "cuda": (32768, 131072)}
PREFILL_TOKENS = {"cpu": 1024, "cuda": 32768}
# The configs of known models.
_LLAMA: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 128256, "num_key_value_heads": 8, "head_dim": 128,
    "tie_word_embeddings": False, "max_position_embeddings": 131072,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.2-1b": _LLAMA | {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
        "head_dim": 64, "tie_word_embeddings": True,
    },
    "llama-3.2-3b": _LLAMA | {
        "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28, "num_attention_heads": 24,
        "tie_word_embeddings": True,
    },
    "llama-3.1-8b": _LLAMA | {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    },
    "llama-3.1-70b": _LLAMA | {
        "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
    },
    "qwen3-4b": _LLAMA | {
        "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 2560, "intermediate_size": 9728,
        "num_hidden_layers": 36, "num_attention_heads": 32, "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    },
    "qwen3-8b": _LLAMA | {
        "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288,
        "num_hidden_layers": 36, "num_attention_heads": 32,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    },
}  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """What is compared; None leaves it to the model or the machine."""

    parts: tuple[str, ...] = PARTS
    crossover: bool = False  # instead of the parts
    lengths: tuple[int, ...] | None = None
    batch_sizes: tuple[int, ...] = (1,)
    budgets: tuple[float | int, ...] = (BUDGET,)
    dense_layers: tuple[int, ...] | None = None
    compiled: bool = True  # whether the layers of a model on a CPU are compiled
    prefill_tokens: int | None = None
    repeats: int = 7
