"""A small Llama with random weights, and the optimizers that train it fast."""

import torch
import transformers

__all__ = ["make_model", "make_optimizers"]

MUON_RATE, ADAM_RATE = 2e-3, 3e-3


def make_model(
    vocabulary: int, *, layers: int, kv_heads: int, head_dim: int, hidden: int = 256, length: int = 8192
) -> transformers.LlamaForCausalLM:
    """A Llama of 4 query heads with random weights, whose residual stream starts with room for what layers write."""
    config = transformers.LlamaConfig(
        vocab_size=-(-vocabulary // 64) * 64,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=length,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("embed_tokens.weight"):
                weight.normal_()
                weight[:, 0] = 1.0
            elif name.endswith("model.norm.weight"):
                weight.fill_(0.06)
            elif name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.normal_(0, 0.01)
            elif weight.dim() == 2:
                weight.normal_(0, hidden**-0.5)
    return model


def make_optimizers(model: torch.nn.Module) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, AdamW for embeddings and norms."""
    matrices = [p for name, p in model.named_parameters() if p.dim() == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.dim() != 2 or "embed" in name]
    optimizers = [
        torch.optim.Muon(matrices, lr=MUON_RATE, weight_decay=0.01, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=ADAM_RATE, weight_decay=0.0, betas=(0.9, 0.95)),
    ]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["initial_lr"] = group["lr"]
    return optimizers
