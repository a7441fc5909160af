"""BPC: fast long-context decoding with binary codes of the cached keys."""

from bpc_calib.calibration import calibrate
from bpc_calib.decomposition import Decomposition, decompose
from bpc_calib.encoding import Encoded, encode
from bpc_calib.errors import BPCError, CorpusError, InputError, ModelError
from bpc_calib.models import ModelDescription, describe
from bpc_calib.scoring import QuantizedQuery, hash_scores, quantize_query
from bpc_calib.selection import attended, select

__all__ = [
    "BPCError",
    "CorpusError",
    "Decomposition",
    "Encoded",
    "InputError",
    "ModelDescription",
    "ModelError",
    "QuantizedQuery",
    "attended",
    "calibrate",
    "decompose",
    "describe",
    "encode",
    "hash_scores",
    "quantize_query",
    "select",
]
