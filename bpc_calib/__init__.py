"""BPC: fast long-context decoding with binary codes of the cached keys."""

from typing import TYPE_CHECKING, Any

from bpc_calib.calibration import calibrate
from bpc_calib.decoding import static_decoding
from bpc_calib.decomposition import Decomposition, decompose
from bpc_calib.dispatch import choose, sparse_attention
from bpc_calib.encoding import Encoded, encode
from bpc_calib.errors import BPCError, CorpusError, InputError, ModelError
from bpc_calib.fitting import Fit, fit
from bpc_calib.metric import query_metric, second_moment
from bpc_calib.models import ModelDescription, describe
from bpc_calib.runtime import disable, enable
from bpc_calib.scoring import QuantizedQuery, group_scores, hash_scores, quantize_query
from bpc_calib.selection import attended, select
from bpc_calib.static_steps import static_steps

if TYPE_CHECKING:
    from bpc_calib.cache import BPCCache

__all__ = [
    "BPCCache",
    "BPCError",
    "CorpusError",
    "Decomposition",
    "Encoded",
    "Fit",
    "InputError",
    "ModelDescription",
    "ModelError",
    "QuantizedQuery",
    "attended",
    "calibrate",
    "choose",
    "decompose",
    "describe",
    "disable",
    "enable",
    "encode",
    "fit",
    "group_scores",
    "hash_scores",
    "quantize_query",
    "query_metric",
    "second_moment",
    "select",
    "sparse_attention",
    "static_decoding",
    "static_steps",
]


def __getattr__(name: str) -> Any:
    if name == "BPCCache":  # a class of transformers', which takes seconds to import
        from bpc_calib.cache import BPCCache

        return BPCCache
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
