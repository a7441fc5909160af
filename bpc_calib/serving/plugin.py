"""The entry point of `vllm.general_plugins`: vLLM calls `register` in each of its processes when it starts."""

__all__ = ["VLLM", "register", "supported"]

VLLM = "0.32"  # the private parts of vLLM that the plugin extends change between minor versions


def supported(version: str) -> bool:
    """Return whether this is a version of vLLM that the plugin extends."""
    return version.split(".")[:2] == VLLM.split(".")


def register() -> None:
    """Offer BPC's attention to vLLM; it serves only a model with `additional_config["bpc"]`."""
    import vllm
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    if current_platform.is_cpu():
        # The CPU platform takes no backend but CPU_ATTN, whatever is asked for.
        extended, name = AttentionBackendEnum.CPU_ATTN, "attention.CPUBackend"
    elif current_platform.is_cuda():
        extended, name = AttentionBackendEnum.FLASH_ATTN, "attention.GPUBackend"
    else:
        return
    if not supported(vllm.__version__):
        name = "other_version.Backend"
    register_backend(extended, f"bpc_calib.serving.{name}")
