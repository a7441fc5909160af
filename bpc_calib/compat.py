"""Every use of other libraries' private parts, and what differs between their versions.

Checked from the oldest supported versions to `NEWEST`. Where a later version no longer has a part, what needs it raises
`BPCError` in one line.
"""

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from packaging.version import Version

from bpc_calib.errors import BPCError, first_line

__all__ = [
    "NEWEST",
    "WHOLE",
    "attention_name",
    "attention_with_sums",
    "cache_name",
    "can_set_attention",
    "compile_program",
    "continued_cache_restarts",
    "copied_heads",
    "eager_attention",
    "gguf_tokenizer_is_wrong",
    "has_amx",
    "is_x86",
    "keep_lm_eval_from_git",
    "load_program",
    "read_gguf",
    "sampling_loop",
    "set_torch_threads",
    "untested",
    "with_cache",
]


# The newest releases that passed the whole suite; a release of BPC updates them.
NEWEST = {"torch": "2.15", "transformers": "5.24", "triton": "3.9"}
WHOLE = "bpc_whole"  # registered by `copied_heads`: every process keeps all weights of the module


def untested() -> list[str]:
    """Return a line for each installed library that is newer than every version BPC was tested with."""
    return [
        f"{package} {found} is newer than {newest}, the newest that BPC was tested with"
        for package, newest in NEWEST.items()
        if (found := _installed(package)) is not None and Version(found).release[:2] > Version(newest).release
    ]


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


@contextmanager
def _needed(package: str, purpose: str) -> Iterator[None]:
    """Raise one line where a private part of a package is gone."""
    try:
        yield
    except (AttributeError, ImportError) as fault:
        raise BPCError(
            f"{package} {_installed(package)} lacks a part that BPC needs to {purpose} ({first_line(fault)}): install "
            f"{package} {NEWEST[package]}, or a newer bpc-calib"
        ) from fault


@functools.cache
def cache_name() -> str:
    """Return the argument by which this transformers takes a cache: "cache", and before 5.24 "past_key_values"."""
    from inspect import signature

    from transformers import GenerationMixin

    taken = signature(GenerationMixin.prepare_inputs_for_generation).parameters
    return "cache" if "cache" in taken else "past_key_values"


def sampling_loop(model: Any) -> Callable[..., Any]:
    """Return transformers' loop of greedy decoding and sampling, which takes the model as its first argument.

    Raises:
        BPCError: this transformers keeps it elsewhere.
    """
    with _needed("transformers", "verify drafts inside its decoding loop"):
        loop: Callable[..., Any] = type(model)._sample
        return loop


def with_cache(cache: Any) -> dict[str, Any]:
    """Return the argument that passes a cache to a model or to `generate`: `model(ids, **with_cache(cache))`."""
    return {cache_name(): cache}


def attention_name(config: Any) -> str | None:
    """Return the attention implementation of a config: only the private `config._attn_implementation` has it."""
    try:  # without a `with`, which would cost every layer of every step some microseconds
        name = config._attn_implementation
    except AttributeError:
        with _needed("transformers", "find a model's attention"):
            raise
    return None if name is None else str(name)


def can_set_attention(model_class: Any) -> bool:
    """Return False if transformers says that the attention of models of this class cannot be changed.

    So a model is refused before its weights are loaded; `observing` finds the same later, without private parts.
    """
    told = getattr(model_class, "_can_set_attn_implementation", None)
    return told is None or bool(told())


def eager_attention(module: Any) -> Any:
    """Return the eager attention function of an attention module's modelling file, or None if the file has none."""
    for kind in type(module).__mro__:
        if function := getattr(sys.modules[kind.__module__], "eager_attention_forward", None):
            return function
    return None


def copied_heads(kv_heads: int) -> str:
    """Register a style of transformers' tensor parallelism and return its name, for the attention in a `tp_plan`.

    It is for fewer KV heads than processes. Both projections of keys and values are `WHOLE`, and compute only the KV
    head of this process, whose query heads follow the plan as usual.
    """
    from torch.nn import Linear
    from torch.nn.functional import linear

    with _needed("transformers", "shard fewer KV heads than processes"):
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


def attention_with_sums(query: Any, keys: Any, values: Any, scaling: float) -> tuple[Any, Any]:
    """Return attention on a CPU `[B, H, M, D]`, and float32 `[B, H, M]` that torch's public function leaves out.

    Those are the logarithms of the sums of the exponentials of the logits, which put attention to parts together.
    """
    import torch

    with _needed("torch", "attend to parts of the keys on a CPU"):
        attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    found: tuple[Any, Any] = attend(query, keys, values, scale=scaling)
    return found


def is_x86() -> bool:
    """Whether this is an x86 processor with AVX2 or AVX-512."""
    import torch

    return torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")


def has_amx() -> bool:
    """Whether torch multiplies by AMX; True where it does not tell and there is AVX-512."""
    import torch

    told = getattr(torch.cpu, "_is_amx_tile_supported", None)
    return torch.backends.cpu.get_cpu_capability() == "AVX512" and (told is None or bool(told()))


def set_torch_threads(count: int) -> None:
    """Set torch's number of threads, also where vLLM has replaced `torch.set_num_threads` by one that does nothing."""
    import torch

    with _needed("torch", "set its number of threads inside vLLM"):
        torch._C.set_num_threads(count)


def compile_program(program: Any, file: Path, calls: dict[Any, str]) -> None:
    """Compile an exported program for the CPU without its weights, and write the code as a file `*.pt2`.

    Args:
        program: exported.
        file: to write.
        calls: C++ code by operators: functions that serve them; a torch that cannot call these calls Python.
    """
    with _needed("torch", "compile layers ahead of time"):
        import torch
        from torch._inductor import aoti_compile_and_package, config

    settings: dict[str, Any] = {
        "aot_inductor.package_constants_in_so": False,
        "cpp.dynamic_threads": True,  # as many as torch has when the code runs
    }
    if hasattr(config.aot_inductor, "custom_ops_to_c_shims"):
        settings["aot_inductor.custom_ops_to_c_shims"] = {operator: [code] for operator, code in calls.items()}
    with _calling(torch.ops.aten.addmv.default), _key_of_triton():
        aoti_compile_and_package(program, package_path=str(file), inductor_configs=settings)


@contextmanager
def _calling(operator: Any) -> Iterator[None]:
    """Let compiled code call torch's own kernel of an operator, for which inductor would write a loop."""
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.lowering import lowerings, make_fallback

    table = select_decomp_table()
    loop = table.pop(operator, None)
    try:
        if operator not in lowerings:
            make_fallback(operator, warn=False, override_decomp=True)
        yield
    finally:
        if loop is not None:
            table[operator] = loop


@contextmanager
def _key_of_triton() -> Iterator[None]:
    """Let an older torch find a function of Triton where an older Triton has it."""
    try:
        from triton.compiler import compiler
        from triton.runtime.cache import triton_key
    except ImportError:  # no Triton, or one that has it there
        yield
        return
    moved = not hasattr(compiler, "triton_key")
    if moved:
        compiler.triton_key = triton_key
    try:
        yield
    finally:
        if moved:
            del compiler.triton_key


def load_program(file: Path, weights: dict[str, Any]) -> Callable[[list[Any]], list[Any]]:
    """Load what `compile_program` wrote; the code reads these weights, of which it needs some, where they are."""
    with _needed("torch", "load compiled layers"):
        from torch._inductor import aoti_load_package

        compiled: Any = aoti_load_package(str(file))
        needed = {name: weights[name] for name in compiled.get_constant_fqns()}
        compiled.load_constants(needed, check_full_update=True, user_managed=True)
        run = compiled.loader.boxed_run
    # A run waits in C++ for that of another thread, and would keep the GIL, which the other needs to call back.
    alone = threading.Lock()

    def running(inputs: list[Any], held: dict[str, Any] = needed) -> list[Any]:  # the code holds only pointers
        with alone:
            found: list[Any] = run(inputs)
        return found

    return running


@functools.cache
def continued_cache_restarts() -> bool:
    """Return True if `generate(prefill_chunk_size=...)` passes a continued cache the whole text again (before 5.21)."""
    import transformers

    return Version(transformers.__version__) < Version("5.21")


def read_gguf(path: Path) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the metadata of a GGUF file, with arrays of strings as their lengths, and the names of its tensors.

    It takes milliseconds; the reader of the package gguf takes seconds for a large vocabulary.
    """
    with _needed("transformers", "read a GGUF file"):
        from transformers.integrations.gguf import read_gguf_metadata

    return read_gguf_metadata(str(path))


def gguf_tokenizer_is_wrong() -> bool:
    """Return True if transformers loses BOS and the pattern of splits of a GGUF file's tokenizer (before 5.23)."""
    import transformers

    return Version(transformers.__version__) < Version("5.23")


def keep_lm_eval_from_git() -> None:
    """Keep lm_eval from asking git for a commit: outside a repository git complains on stderr."""
    from lm_eval import evaluator

    evaluator.get_git_commit_hash = lambda: None
