"""The methods that are compared and their figures, by name. Importing this file is cheap: the help lists them."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from bpc_calib.errors import InputError

__all__ = ["BPC_LAYER", "FIGURES", "METHODS", "ComparedMethod", "Variant", "in_order", "method_of", "variants"]

BPC_LAYER = "bpc_calib.runtime.hashed_layer.BPCLayer"
Variant = tuple[str, float | int | None]  # a method and its budget, None for a method that takes none
_BASELINES = "bpc_calib.evaluation.baselines"


@dataclass(frozen=True)
class ComparedMethod:
    """One method; a method that takes no budget decides by itself what it reads."""

    label: str
    layer: str  # dotted name of the cache layer that ranks
    forced: int = 0  # tokens attended whatever the ranking says
    calibrated: bool = False  # needs an artifact
    by_need: bool = False  # shares the budget by what each KV head needs, where the artifact says it
    takes_budget: bool = True
    learns: bool = False  # from text, before it can choose: the layer has a function `learn`


METHODS = {
    "full": ComparedMethod("full attention", "bpc_calib.evaluation.forcing.FullLayer", takes_budget=False),
    "oracle": ComparedMethod("exact top-k", f"{_BASELINES}.bounds.OracleLayer", by_need=True),
    "bpc": ComparedMethod("BPC", BPC_LAYER, calibrated=True, by_need=True),
    "bpc-online": ComparedMethod("BPC online", BPC_LAYER),
    "twilight": ComparedMethod("Twilight", f"{_BASELINES}.twilight.TwilightLayer", calibrated=True, by_need=True),
    "twilight-own": ComparedMethod(
        "Twilight's own", f"{_BASELINES}.twilight.TwilightOwnLayer", calibrated=True, takes_budget=False
    ),
    "spotlight": ComparedMethod("Spotlight", f"{_BASELINES}.spotlight.SpotlightLayer", forced=2, learns=True),
    "hata": ComparedMethod("HATA", f"{_BASELINES}.hata.HataLayer", learns=True),
    "quest": ComparedMethod("Quest, page 16", f"{_BASELINES}.quest.QuestLayer"),
    "magicpig": ComparedMethod("MagicPIG LSH", f"{_BASELINES}.magicpig.MagicPIGLayer"),
    "magicpig-own": ComparedMethod(
        "MagicPIG's own", f"{_BASELINES}.magicpig.MagicPIGSamplingLayer", takes_budget=False
    ),
    "signs": ComparedMethod("random signs", f"{_BASELINES}.signs.SignsLayer"),
    "snapkv": ComparedMethod("SnapKV", f"{_BASELINES}.snapkv.SnapKVLayer"),
    "pyramidkv": ComparedMethod("PyramidKV", f"{_BASELINES}.pyramidkv.PyramidKVLayer"),
    "cake": ComparedMethod("CAKE", f"{_BASELINES}.cake.CakeLayer"),
    "compresskv": ComparedMethod("CompressKV", f"{_BASELINES}.compresskv.CompressKVLayer", learns=True),
    "window": ComparedMethod("window + sinks", f"{_BASELINES}.window.WindowLayer", forced=5),
    "random": ComparedMethod("random keys", f"{_BASELINES}.bounds.RandomLayer"),
}

_OWN = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")


def method_of(name: str) -> ComparedMethod:
    """Return a method of `METHODS`, or your own, which is named `package.module:Class`; nothing is imported.

    Raises:
        InputError: there is no such method.
    """
    if name in METHODS:
        return METHODS[name]
    if _OWN.fullmatch(name):
        return ComparedMethod(name.rpartition(":")[2], name.replace(":", "."))
    raise InputError(
        f"unknown method {name!r}: the methods are {', '.join(METHODS)}, and package.module:Class for one of your own"
    )


def in_order(names: Iterable[str]) -> list[str]:
    """Return each name once, in the order of `METHODS`, then those of your own methods."""
    given = dict.fromkeys(names)
    return [name for name in METHODS if name in given] + [name for name in given if name not in METHODS]


# What is compared with full attention on plain text, and its short names in tables.
FIGURES = {
    "loss_difference": "loss", "kl": "KL", "agreement": "same token", "recall": "recall", "mass": "mass",
    "best_kept": "best kept", "cosine": "cosine",
}  # fmt: skip


def variants(methods: Iterable[str], budgets: Iterable[float | int]) -> list[Variant]:
    """Every method at every budget, which is None for a method that takes none."""
    chosen = list(budgets)
    return [(name, budget) for name in methods for budget in (chosen if method_of(name).takes_budget else [None])]
