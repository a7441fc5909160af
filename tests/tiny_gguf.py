"""A tiny random llama as a GGUF file, written as llama.cpp's converter writes one."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tiny
from gguf import GGMLQuantizationType, LlamaFileType

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers.": "blk.",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def save(
    file: Path,
    model: Any,
    *,
    quantised: bool = False,
    architecture: str = "llama",
    metadata: dict[str, str | int] | None = None,
    tensors: dict[str, np.ndarray] | None = None,
) -> Path:
    """Write a llama in float32, or with 8 bits per weight, and the byte tokenizer; `tensors` are added to its own."""
    config = model.config
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_name("a name of its own")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_file_type(LlamaFileType.MOSTLY_Q8_0 if quantised else LlamaFileType.ALL_F32)
    for key, value in (metadata or {}).items():
        if isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_uint32(key, value)
    _add_tokenizer(writer, config)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, weight in model.state_dict().items():
        array = weight.float().numpy()
        for part, count in heads.items():
            if part in name:  # llama.cpp rotates neighbouring pairs, transformers the two halves
                array = array.reshape(count, 2, -1, array.shape[1]).swapaxes(1, 2).reshape(array.shape)
        for theirs, ours in NAMES.items():
            name = name.replace(theirs, ours)
        if quantised and array.ndim == 2 and array.shape[1] % 32 == 0:
            kind = GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quantize(array, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, np.ascontiguousarray(array))
    for name, array in (tensors or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _add_tokenizer(writer: gguf.GGUFWriter, config: Any) -> None:
    vocabulary = tiny.tokenizer().get_vocab()
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    tokens += ["þÿ", *(f"<unused{i}>" for i in range(config.vocab_size - len(tokens) - 1))]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    writer.add_token_types([control if len(token) > 2 else normal for token in tokens])
    writer.add_token_merges(["þ ÿ"] * 2)  # older readers take one for a word; these two bytes are in no text
    writer.add_pad_token_id(config.pad_token_id)
    writer.add_bos_token_id(config.bos_token_id)
    writer.add_eos_token_id(config.eos_token_id)
    writer.add_add_bos_token(True)
