"""The length from which a step that chooses tokens takes less time than one that attends to all."""

from dataclasses import dataclass

import torch

from bpc_calib.compat import has_amx, is_x86

__all__ = ["IN_TRANSFORMERS", "ON_X86", "Costs", "in_vllm", "sparse_from"]


@dataclass(frozen=True)
class Costs:
    """What choosing takes on a CPU. Measured on two cores (docs/performance.md), rounded up."""

    step: float  # of each layer, shared by the sequences of a step: bytes that one thread attends to in that time
    tokens: int  # of each sequence: tokens that as many threads as a step has attend to in that time


IN_TRANSFORMERS = Costs(step=1.15e6, tokens=350)
ON_X86 = Costs(step=0.5e6, tokens=750)  # in 16 bits: there dense steps run BPC's kernel, but short ones with AMX
# An answer of 64 tokens has to pay for hashing, too: with AMX from twice the length at which a step pays, and where
# vLLM's dense kernel is slower, from a third more.
IN_VLLM = Costs(step=1.25e6, tokens=2600)
IN_VLLM_WITHOUT_AMX = Costs(step=1.05e6, tokens=600)
SECONDS = 27e-6  # that choosing takes longer than dense attention in the shortest context, on an H200
BANDWIDTH = 1e12  # bytes per second of a GPU that does not tell


def sparse_from(
    token: int, sequences: int, query_heads: int, device: torch.device, costs: Costs = IN_TRANSFORMERS
) -> int:
    """Return the number of tokens of each sequence from which choosing pays.

    It depends on shapes, the number of torch's threads and the kind of GPU alone, so the same run attends to the same
    tokens again.

    Args:
        token: bytes of the keys and values that one layer keeps of a token.
        sequences: of a step.
        query_heads: of each sequence.
        device: of the cache.
        costs: of choosing on a CPU.
    """
    if device.type == "cuda":
        return int(SECONDS * _bandwidth(device) / (sequences * token))
    # torch's attention takes one thread for each query head.
    threads = min(torch.get_num_threads(), sequences * query_heads)
    return costs.tokens + int(threads * costs.step / (sequences * token))


def in_vllm() -> Costs:
    """Return what choosing costs where vLLM's attention on a CPU is the other choice."""
    return IN_VLLM_WITHOUT_AMX if is_x86() and not has_amx() else IN_VLLM


def _bandwidth(device: torch.device) -> float:
    """Return the bytes per second that a GPU's memory transfers at most."""
    about = torch.cuda.get_device_properties(device)
    clock, width = getattr(about, "memory_clock_rate", 0), getattr(about, "memory_bus_width", 0)  # kHz, bits
    return 2 * clock * 1e3 * width / 8 or BANDWIDTH
