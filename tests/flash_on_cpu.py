"""FlashAttention's part of vLLM's GPU backend in plain torch, so that BPC's backend for GPUs runs in vLLM on a CPU."""

import torch
from vllm.v1.attention.backends import flash_attn

from bpc_calib.serving.attention import GPUBackend

__all__ = ["Backend", "attend", "cache"]


class Backend(GPUBackend):
    """To register as the backend of the CPU platform."""

    @classmethod
    def get_supported_kernel_block_sizes(cls, kv_cache_spec=None):
        return [flash_attn.MultipleOf(16)]


def cache(self, layer, key, value, kv_cache, slot_mapping):
    """`FlashAttentionImpl.do_kv_cache_update`."""
    size, kept = kv_cache.shape[2], slot_mapping >= 0
    slots = slot_mapping[kept]
    rows = torch.cat([key, value], -1)[: len(slot_mapping)][kept]
    kv_cache[slots // size, :, slots % size] = rows.to(kv_cache.dtype)


def attend(self, layer, query, key, value, kv_cache, attn_metadata, output, *scales):
    """`FlashAttentionImpl.forward`: each request alone."""
    if attn_metadata is None:
        return output.fill_(0)
    starts, lengths = attn_metadata.query_start_loc.tolist(), attn_metadata.seq_lens.tolist()
    for row, length in enumerate(lengths[: len(starts) - 1]):
        new = query[starts[row] : starts[row + 1]]
        if not len(new):
            continue
        pages = attn_metadata.block_table[row, : -(-length // kv_cache.shape[2])].long()
        keys, values = kv_cache[pages].transpose(0, 1).flatten(1, 2)[:, :length].chunk(2, -1)
        places = torch.arange(length)
        behind = torch.arange(length - len(new), length).unsqueeze(1) - places
        seen = behind >= 0
        if self.sliding_window[0] >= 0:
            seen &= behind <= self.sliding_window[0]
        found = torch.nn.functional.scaled_dot_product_attention(
            new.transpose(0, 1)[None], keys[None], values[None], attn_mask=seen, scale=self.scale, enable_gqa=True
        )
        output[starts[row] : starts[row + 1]] = found[0].transpose(0, 1).reshape(output[: len(new)].shape)
    return output
