"""What one run of the benchmark measures. Importing this file is cheap, so the command line shows it in its help."""

from dataclasses import dataclass

__all__ = ["DECODE_LENGTHS", "LENGTHS", "PARTS", "PREFILL_TOKENS", "Settings"]

PARTS = ("layer", "decode", "prefill")
LENGTHS = (2048, 8192, 32768, 131072)  # of the layer part; the crossover walks to the last
DECODE_LENGTHS = {"cpu": (32768,), "cuda": (32768, 131072)}
PREFILL_TOKENS = {"cpu": 1024, "cuda": 32768}


@dataclass(frozen=True)
class Settings:
    """What is compared; None leaves it to the model or the machine."""

    parts: tuple[str, ...] = PARTS
    crossover: bool = False  # instead of the parts
    lengths: tuple[int, ...] | None = None
    batch_sizes: tuple[int, ...] = (1,)
    budgets: tuple[float | int, ...] = (0.02,)
    dense_layers: tuple[int, ...] = (0, 1)  # as in `BPCCache`
    prefill_tokens: int | None = None
    repeats: int = 7
