"""What one run of the benchmark measures, and the shapes of known models.

Importing this file is cheap, so the command line shows both in its help and checks its options with it.
"""

import re
from dataclasses import dataclass
from typing import Any

from bpc_calib.backends.sizes import MOST_DIM, MOST_HEADS, MOST_TOKENS
from bpc_calib.errors import InputError
from bpc_calib.method.budget import attended
from bpc_calib.method.defaults import BUDGET
from bpc_calib.method.numbers import check_count

__all__ = [
    "DECODE_LENGTHS", "DRAFT", "FEWEST", "LENGTHS", "PARTS", "PREFILL_TOKENS", "RIGHT", "SHAPES", "SHORTEST",
    "Settings", "check_settings", "shape_settings",
]  # fmt: skip

PARTS = ("layer", "decode", "prefill")
FEWEST = 16  # tokens
SHORTEST = 256  # of the crossover: at shorter lengths, the minimum of attended tokens is most of the context
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
DRAFT, RIGHT = 4, 0.9  # of exact decoding: tokens drafted at once, and the share of them that is right


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


def check_settings(settings: Settings) -> None:
    """Raise `InputError` for settings that cannot be measured on any model."""
    for name in settings.parts:
        if name not in PARTS:
            raise InputError(f"unknown part {name!r}: the parts are {', '.join(PARTS)}")
    if not settings.parts:
        raise InputError("--parts: give at least one")
    prefill, most_tokens = settings.prefill_tokens, MOST_TOKENS - 1
    for name, values, least, most in (
        ("--lengths", settings.lengths, FEWEST, most_tokens),
        ("--prefill-tokens", None if prefill is None else (prefill,), FEWEST, most_tokens),
        ("--batch-sizes", settings.batch_sizes, 1, 4096),
        ("--repeats", (settings.repeats,), 1, 1000),
    ):
        if values is not None and not values:
            raise InputError(f"{name}: give at least one")
        for value in values or ():
            check_count(name, value, least, most)
    if not settings.budgets:
        raise InputError("--budgets: give at least one")
    for budget in settings.budgets:
        attended(1, budget)
    if settings.crossover and max(settings.lengths or LENGTHS) < SHORTEST:
        raise InputError(f"--crossover starts at {SHORTEST} tokens: give a longer --lengths")


def shape_settings(name: str) -> dict[str, Any]:
    """Return the settings of a shape: a name of `SHAPES`, or such as 8x128x4.

    Raises:
        InputError: a name that is no shape; sizes out of range.
    """
    if name in SHAPES:
        return dict(SHAPES[name])
    found = re.fullmatch(r"(\d{1,4})x(\d{1,3})x(\d{1,2})", name)
    if found is None:
        raise InputError(
            f"unknown shape {name!r}: the shapes are {', '.join(SHAPES)}, or such as 8x128x4 (KV heads, head "
            "dimension, query heads per KV head)"
        )
    kv_heads, dim, group = map(int, found.groups())
    if not (1 <= kv_heads <= 1024 and 8 <= dim <= MOST_DIM and dim % 2 == 0 and 1 <= group <= MOST_HEADS):
        raise InputError(
            f"shape {name}: takes 1 to 1,024 KV heads, an even head dimension of 8 to {MOST_DIM}, and 1 to "
            f"{MOST_HEADS} query heads per KV head"
        )
    hidden = kv_heads * dim * group
    return SHAPES["llama-3.1-8b"] | {
        "num_key_value_heads": kv_heads, "head_dim": dim, "num_attention_heads": kv_heads * group,
        "hidden_size": hidden, "intermediate_size": hidden * 7 // 2,
    }  # fmt: skip
