"""Every operation of a cache, on every family and under every setting, against the masked reference."""

import pytest
import suite
import tiny
import torch
from suite import OPERATIONS, check

from bpc_calib import BPCCache
from bpc_calib.cache import BPCLayer

MODELS = {family: (family, {}) for family in tiny.FAMILIES} | {
    "mistral sliding": ("mistral", {"sliding_window": 128}),  # as wide as the context: full attention
}


def model(family: str = "llama", **changes):
    """In float64, so that no selection hangs on how a product is rounded."""
    return tiny.model(family, **changes).double()


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.__name__)
@pytest.mark.parametrize("name", MODELS)
def test_families(name, operation):
    family, changes = MODELS[name]
    check(model(family, **changes), operation, online=operation in (suite.beams, suite.batch_changes))
