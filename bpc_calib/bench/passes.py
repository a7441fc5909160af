"""How long a model's passes over long texts take: their products, counted, by the rates of this machine, measured."""

import functools
import statistics
from typing import Any

import torch
from torch.nn.functional import linear, scaled_dot_product_attention

from bpc_calib.bench.decode import has_experts
from bpc_calib.bench.timing import clock
from bpc_calib.models.description import ModelDescription
from bpc_calib.models.long_passes import slow_products

__all__ = ["pass_operations", "pass_seconds"]

WIDTH = {"cpu": 1024, "cuda": 4096}  # of the weight that is timed
TOKENS = {"cpu": 1024, "cuda": 8192}  # of the attention that is timed
HEADS, HEAD_DIM = 8, 128
REPEATS = 3


def pass_operations(model: Any, description: ModelDescription, length: int) -> tuple[int, int] | None:
    """Count the floating-point operations of the products in a pass over a text.

    Args:
        model: a transformers model, with or without memory for its weights.
        description: the same model.
        length: tokens of the text.

    Returns:
        Those with weights, without the output's, and those of attention; None for a mixture of experts, where a token
        multiplies some of the weights.
    """
    if has_experts(model.config):
        return None
    held = sum(weight.numel() for weight in model.base_model.parameters())
    weights = held - model.get_input_embeddings().weight.numel()
    window = min(length, getattr(model.config.get_text_config(decoder=True), "sliding_window", None) or length)
    slides = description.layer_types.count("sliding_attention")
    pairs = len(description.full_layers) * length**2 // 2 + slides * (length * window - window**2 // 2)
    return 2 * weights * length, 4 * description.query_heads * description.head_dim * pairs


def pass_seconds(operations: tuple[int, int], dtype: torch.dtype, device: torch.device) -> float:
    """Return the seconds that those operations of `pass_operations` take, by the measured rates of the device."""
    rates = _rates(dtype, device)
    return sum(count / rate for count, rate in zip(operations, rates, strict=True))


@functools.cache
def _rates(dtype: torch.dtype, device: torch.device) -> tuple[float, float]:
    """Measure the operations per second of a product with a weight, and of causal attention."""
    if device.type == "cpu" and slow_products(dtype) is not None:
        dtype = torch.float32  # as the model computes them there
    width, tokens = (sizes.get(device.type, sizes["cpu"]) for sizes in (WIDTH, TOKENS))
    matrix = torch.ones(width, width, dtype=dtype, device=device)
    heads = torch.ones(1, HEADS, tokens, HEAD_DIM, dtype=dtype, device=device)
    weigh = functools.partial(linear, matrix, matrix)
    attend = functools.partial(scaled_dot_product_attention, heads, heads, heads, is_causal=True)

    def taken(run: Any) -> float:
        run()
        return statistics.median(clock(run, device) for _ in range(REPEATS))

    with torch.inference_mode():
        return 2 * width**3 / taken(weigh), 2 * HEADS * HEAD_DIM * tokens**2 / taken(attend)
