"""Every use of another library's private parts.

Checked with transformers 5.17 (the oldest supported) and 5.23, numba 0.61.2 (the oldest supported) and 0.68.1.
"""

import functools
import inspect
import sys
from pathlib import Path
from typing import Any

from packaging.version import Version

__all__ = [
    "WHOLE",
    "attention_name",
    "can_set_attention",
    "continued_cache_restarts",
    "copied_heads",
    "cpu_features",
    "drafts_by_model",
    "eager_attention",
    "generate_arguments",
    "gguf_tokenizer_is_wrong",
    "keep_compiled",
    "read_gguf",
    "sampling_loop",
    "set_torch_threads",
]


WHOLE = "bpc_whole"  # registered by `copied_heads`: every process keeps all weights of the module


def attention_name(config: Any) -> str | None:
    """Return the attention implementation of a config: only the private `config._attn_implementation` has it."""
    name = config._attn_implementation
    return None if name is None else str(name)


def can_set_attention(model_class: Any) -> bool:
    """Return True if the attention implementation of models of this class can be changed."""
    return bool(model_class._can_set_attn_implementation())


def eager_attention(module: Any) -> Any:
    """Return the eager attention function of an attention module's modelling file, or None if the file has none."""
    for kind in type(module).__mro__:
        if function := getattr(sys.modules[kind.__module__], "eager_attention_forward", None):
            return function
    return None


def sampling_loop(model: Any) -> Any:
    """Return transformers' loop of greedy decoding and sampling, as a function with the model as first argument."""
    return type(model)._sample


def copied_heads(kv_heads: int) -> str:
    """Register a style of transformers' tensor parallelism and return its name, for the attention in a `tp_plan`.

    It is for fewer KV heads than processes. Both projections of keys and values are `WHOLE`, and compute only the KV
    head of this process, whose query heads follow the plan as usual.
    """
    from torch.nn import Linear
    from torch.nn.functional import linear
    from transformers.integrations.tensor_parallel import ALL_PARALLEL_STYLES, TensorParallelLayer

    class CopiedHeads(TensorParallelLayer):  # type: ignore[misc]
        def install_forward(self, module: Any, mesh: Any) -> Any:
            head = mesh.get_local_rank() * kv_heads // mesh.size()
            for projection in (module.k_proj, module.v_proj):
                if type(projection) is not Linear:
                    raise ValueError(f"a {type(projection).__name__} cannot compute one of its KV heads alone")
                rows = projection.out_features // kv_heads
                one = functools.partial(one_head, projection, slice(head * rows, (head + 1) * rows))
                projection.__dict__["forward"] = one
            module.num_key_value_groups = module.num_key_value_groups * kv_heads // mesh.size()
            return module

    def one_head(projection: Any, rows: slice, hidden: Any) -> Any:
        return linear(hidden, projection.weight[rows], None if projection.bias is None else projection.bias[rows])

    name = f"bpc_copied_{kv_heads}"
    ALL_PARALLEL_STYLES.register(WHOLE, TensorParallelLayer())
    ALL_PARALLEL_STYLES.register(name, CopiedHeads())
    return name


def set_torch_threads(count: int) -> None:
    """Set torch's number of threads, also where vLLM has replaced `torch.set_num_threads` by one that does nothing."""
    import torch

    torch._C.set_num_threads(count)


def generate_arguments() -> dict[str, Any]:
    """Return the local variables of the `generate` call on the stack, or an empty dict if there is none.

    transformers passes neither its streamer nor `synced_gpus` to the `custom_generate` function.
    """
    from transformers import GenerationMixin

    code = inspect.unwrap(GenerationMixin.generate).__code__
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return {} if frame is None else dict(frame.f_locals)


def drafts_by_model() -> bool:
    """Return True if a model makes the drafts. Call it only in a cache's `activate_past_recording`.

    transformers calls that method at the start of a generation with drafts, but does not pass the source of the drafts.
    The local variables of the caller show it: an assistant model, or a generation config without prompt lookup.
    """
    caller = sys._getframe(2).f_locals
    settings = caller.get("generation_config")
    looks_up = getattr(settings, "prompt_lookup_num_tokens", None) is not None
    return caller.get("assistant_model") is not None or (settings is not None and not looks_up)


@functools.cache
def continued_cache_restarts() -> bool:
    """Return True if `generate(prefill_chunk_size=...)` passes a continued cache the whole text again (before 5.21)."""
    import transformers

    return Version(transformers.__version__) < Version("5.21")


def read_gguf(path: Path) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the metadata of a GGUF file, with arrays of strings as their lengths, and the names of its tensors.

    It takes milliseconds; the reader of the package gguf takes seconds for a large vocabulary.
    """
    from transformers.integrations.gguf import read_gguf_metadata

    return read_gguf_metadata(str(path))


def gguf_tokenizer_is_wrong() -> bool:
    """Return True if transformers loses BOS and the pattern of splits of a GGUF file's tokenizer (before 5.23)."""
    import transformers

    return Version(transformers.__version__) < Version("5.23")


class _Locator:
    """Where numba keeps what it compiles, and what makes it stale: the methods that numba calls on a locator."""

    def __init__(self, folder: Path, stamp: str, line: int = 0) -> None:
        self._folder, self._stamp, self._line = folder, stamp, line

    def from_function(self, function: Any, file: str) -> "_Locator":
        return _Locator(self._folder, self._stamp, function.__code__.co_firstlineno)

    def get_cache_path(self) -> str:
        return str(self._folder)

    def ensure_cache_path(self) -> None:
        pass

    def get_source_stamp(self) -> str:
        return self._stamp

    def get_disambiguator(self) -> str:
        return str(self._line)


def keep_compiled(kernel: Any, folder: Path, stamp: str) -> None:
    """Have numba keep what it compiles of a kernel in a folder, and load it from there while the stamp is the same.

    numba's `cache=True` chooses the folder itself, and notices changes in the kernel's own file only. From 0.62 on
    `NUMBA_CACHE_LOCATOR_CLASSES` may name a locator class, but only for all functions of a process, those of other
    packages too, so it cannot replace these subclasses; where a user has set it, numba asks its classes instead.
    """
    from numba.core.caching import CompileResultCacheImpl, FunctionCache

    found = type("Impl", (CompileResultCacheImpl,), {"_locator_classes": (_Locator(folder, stamp),)})
    cache = type("Cache", (FunctionCache,), {"_impl_class": found})
    kernel._cache = cache(kernel.py_func)


def cpu_features() -> set[str]:
    """The instruction sets, by LLVM's names, that numba compiles for."""
    from numba.core import config
    from numba.core.codegen import get_host_cpu_features

    features = get_host_cpu_features() if config.CPU_FEATURES is None else config.CPU_FEATURES
    return {each[1:] for each in features.split(",") if each.startswith("+")}
