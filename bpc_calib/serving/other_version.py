"""What stands in for BPC's attention in a version of vLLM that the plugin does not extend: stock, or a refusal."""

import vllm
from vllm.config import get_current_vllm_config
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl

from bpc_calib.errors import ModelError
from bpc_calib.serving.options import given_options
from bpc_calib.serving.plugin import VLLM

__all__ = ["Backend"]


class Backend(CPUAttentionBackend):  # type: ignore[misc]
    """vLLM's own attention; refuses a model that asks for BPC."""

    @staticmethod
    def get_impl_cls() -> type[CPUAttentionBackendImpl]:
        """Return vLLM's implementation.

        Raises:
            ModelError: `additional_config["bpc"]` is given.
        """
        if given_options(get_current_vllm_config()) is not None:
            raise ModelError(
                f"BPC serves models with vLLM {VLLM}, not {vllm.__version__}: pip install 'vllm=={VLLM}.*'"
            )
        return CPUAttentionBackendImpl
