"""BPC: fast long-context decoding with binary codes of the cached keys.

A public name is imported from its module when it is first used, so `import bpc_calib` takes no time.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bpc_calib.backends.dispatch import find
    from bpc_calib.calibration.calibrate import calibrate
    from bpc_calib.calibration.plan import Plan, make_plan
    from bpc_calib.errors import BPCError, CacheFileError, CorpusError, InputError, ModelError, WorkError
    from bpc_calib.method.budget import attended
    from bpc_calib.method.codebook import Codebook, codebook_of, make_codebook
    from bpc_calib.method.decomposition import Decomposition, decompose
    from bpc_calib.method.encoded import Encoded
    from bpc_calib.method.encoding import encode
    from bpc_calib.method.fitting import Fit, fit
    from bpc_calib.method.metric import query_metric, second_moment
    from bpc_calib.method.rules import Rules, shares_of
    from bpc_calib.method.scoring import QuantizedQuery, group_scores, hash_scores, quantize_query
    from bpc_calib.method.selection import select
    from bpc_calib.method.state import Rows, State
    from bpc_calib.models.description import ModelDescription, describe
    from bpc_calib.models.tensor_parallel import tensor_parallel
    from bpc_calib.runtime.cache import BPCCache
    from bpc_calib.runtime.checked import checked_decoding
    from bpc_calib.runtime.compiled_layers import compile_layers
    from bpc_calib.runtime.enabling import disable, enable
    from bpc_calib.runtime.exact import exact_decoding
    from bpc_calib.runtime.static_steps import static_generate, static_steps

__all__ = [
    "BPCCache",
    "BPCError",
    "CacheFileError",
    "Codebook",
    "CorpusError",
    "Decomposition",
    "Encoded",
    "Fit",
    "InputError",
    "ModelDescription",
    "ModelError",
    "Plan",
    "QuantizedQuery",
    "Rows",
    "Rules",
    "State",
    "WorkError",
    "attended",
    "calibrate",
    "checked_decoding",
    "codebook_of",
    "compile_layers",
    "decompose",
    "describe",
    "disable",
    "enable",
    "encode",
    "exact_decoding",
    "find",
    "fit",
    "group_scores",
    "hash_scores",
    "make_codebook",
    "make_plan",
    "quantize_query",
    "query_metric",
    "second_moment",
    "select",
    "shares_of",
    "static_generate",
    "static_steps",
    "tensor_parallel",
]

_MODULES = {
    "bpc_calib.backends.dispatch": ("find",),
    "bpc_calib.calibration.calibrate": ("calibrate",),
    "bpc_calib.calibration.plan": ("Plan", "make_plan"),
    "bpc_calib.errors": ("BPCError", "CacheFileError", "CorpusError", "InputError", "ModelError", "WorkError"),
    "bpc_calib.method.budget": ("attended",),
    "bpc_calib.method.codebook": ("Codebook", "codebook_of", "make_codebook"),
    "bpc_calib.method.decomposition": ("Decomposition", "decompose"),
    "bpc_calib.method.encoded": ("Encoded",),
    "bpc_calib.method.encoding": ("encode",),
    "bpc_calib.method.fitting": ("Fit", "fit"),
    "bpc_calib.method.metric": ("query_metric", "second_moment"),
    "bpc_calib.method.rules": ("Rules", "shares_of"),
    "bpc_calib.method.scoring": ("QuantizedQuery", "group_scores", "hash_scores", "quantize_query"),
    "bpc_calib.method.selection": ("select",),
    "bpc_calib.method.state": ("Rows", "State"),
    "bpc_calib.models.description": ("ModelDescription", "describe"),
    "bpc_calib.models.tensor_parallel": ("tensor_parallel",),
    "bpc_calib.runtime.cache": ("BPCCache",),
    "bpc_calib.runtime.checked": ("checked_decoding",),
    "bpc_calib.runtime.compiled_layers": ("compile_layers",),
    "bpc_calib.runtime.enabling": ("disable", "enable"),
    "bpc_calib.runtime.exact": ("exact_decoding",),
    "bpc_calib.runtime.static_steps": ("static_generate", "static_steps"),
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
