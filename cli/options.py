"""Options that several commands have in common, and how their values are read."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from bpc_calib.errors import InputError
from bpc_calib.method.budget import attended
from bpc_calib.method.defaults import DENSE_LAYERS, MOST_DRAFTED, PRESETS, budget_text
from bpc_calib.method.numbers import check_count, check_seed
from bpc_calib.runtime.kv_device import kv_place
from bpc_cli.command import checked

MOST_DIGITS = 20  # of a number in a list: Python refuses to read thousands


def split(text: str) -> list[str]:
    """The parts of `a, b`, each once."""
    return list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


def parse_counts(text: str) -> tuple[int, ...]:
    """The numbers of `2048,8192`, each once."""
    found = split(text)
    if not found or not all(part.isdecimal() and len(part) < MOST_DIGITS for part in found):
        raise typer.BadParameter(f"{text}: expected numbers, like 2048,8192")
    return tuple(dict.fromkeys(map(int, found)))


def parse_budget(text: str) -> float | int:
    """`2%` and `0.02` are a share of the tokens, `2048` is a number of tokens."""
    try:
        if text.endswith("%"):
            budget: float | int = float(Decimal(text[:-1]) / 100)
        else:
            budget = int(text) if text.lstrip("+-").isdecimal() else float(Decimal(text))
    except (ArithmeticError, ValueError):
        expected = "a share of the tokens (2% or 0.02) or a number of tokens (2048)"
        raise typer.BadParameter(f"{text}: expected {expected}") from None
    try:
        attended(1, budget)
    except InputError as error:
        raise typer.BadParameter(f"{text}: {error}") from None
    return budget


def parse_budgets(text: str) -> tuple[float | int, ...]:
    """The budgets of `2%,2048`, each once."""
    if not (found := split(text)):
        raise typer.BadParameter("give at least one budget, such as 2%")
    return tuple(dict.fromkeys(map(parse_budget, found)))


def parse_layers(text: str) -> tuple[int, ...]:
    """The layers of `0,1`; `none` means no layer."""
    if text.strip() in ("", "none"):
        return ()
    found = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and len(part) < MOST_DIGITS for part in found):
        raise typer.BadParameter(f"{text}: expected layers like 0,1 or none")
    return tuple(map(int, found))


def check_temperature(value: float) -> None:
    """Refuse what is neither 0 nor a temperature that logits can be divided by."""
    if value and not (math.isfinite(value) and value >= 0.01):
        raise typer.BadParameter(f"{value}: expected 0, or a number of at least 0.01")


def check_top_p(value: float) -> None:
    """Refuse what is no probability, and 0, which leaves no token."""
    if not 0 < value <= 1:
        raise typer.BadParameter(f"{value}: expected a probability above 0 and at most 1")


MODEL_HELP = "Folder, GGUF file or Hub id of a causal language model; demo is the bundled model."
PROJECTIONS = "Projections made by bpc calibrate: a file or a Hub id, ORG/NAME or ORG/NAME@REVISION."
LAYERS_HELP = "Layers that attend to all tokens, such as 0,1; or none."
BUDGET_HELP = "Cached tokens that each step attends to: a share (2% or 0.02) or a number (2048)."

Model = Annotated[str, typer.Option("--model", "-m", help=MODEL_HELP)]
Output = Annotated[Path | None, typer.Option("--output", "-o", help="Also write the result as JSON to this file.")]
Force = Annotated[bool, typer.Option("--force", help="Replace files that exist.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress, neither bars nor lines.")]
ONLINE = "online"

Preset = Annotated[
    Literal["default", "fast", "hard"],
    typer.Option(
        help="; ".join(
            f"{name}: {budget_text(each['budget'])} of the tokens, at least {each['min_tokens']}"
            for name, each in PRESETS.items()
        )
        + ", no dense layer. The options below replace its parts."
    ),
]
MinTokens = Annotated[
    int | None,
    typer.Option(
        help="Attend to at least this many tokens. Default: the preset's.",
        callback=checked(partial(check_count, "the minimum")),
    ),
]
DenseLayers = Annotated[
    str | None,
    typer.Option(
        help=f"{LAYERS_HELP} Default: none, or "
        f"{','.join(map(str, DENSE_LAYERS))} with projections that do not say what each head needs and another preset "
        "than hard.",
        metavar="LAYERS",
        callback=checked(parse_layers),
    ),
]
EqualShares = Annotated[
    bool, typer.Option("--equal-shares", help="Give every KV head as many tokens, whatever it needs.")
]
Artifact = Annotated[
    str, typer.Option("--artifact", "-a", help=f"{PROJECTIONS} {ONLINE} finds projections in the prompt instead.")
]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run Python code that comes with the model.")
]
NoCompile = Annotated[
    bool,
    typer.Option("--no-compile", help="On a CPU, decode with the model's layers as they are, not compiled ones."),
]
KVDevice = Annotated[
    str | None,
    typer.Option(
        help="Where keys and values are kept: cpu, in main memory, for contexts larger than a GPU's; disk:FOLDER, in "
        "files there, for contexts larger than main memory. Default: where the model is.",
        metavar="cpu|disk:FOLDER",
        callback=checked(kv_place),
    ),
]
System = Annotated[
    str | None, typer.Option("--system", help="System message: what the model is told before the first message.")
]


def preset_rules(preset: str, min_tokens: int | None, dense_layers: str | None) -> dict[str, Any]:
    """The arguments of `BPCCache` in a preset, with the parts replaced that are given."""
    rules = dict(PRESETS[preset])
    if min_tokens is not None:
        rules["min_tokens"] = min_tokens
    if dense_layers is not None:
        rules["dense_layers"] = parse_layers(dense_layers)
    return rules


def preset_name(rules: Mapping[str, Any]) -> str | None:
    """The preset that these rules are, as far as they have its parts; None: one was replaced."""
    for name, parts in PRESETS.items():
        if all(rules.get(part, value) == value for part, value in parts.items()):
            return name
    return None


def setting_text(rules: Mapping[str, Any]) -> str:
    """Rules in words, like preset default: 2 % of the tokens, at least 192."""
    name, budget = preset_name(rules), budget_text(rules["budget"])
    share = "" if isinstance(rules["budget"], int) else " of the tokens"
    return f"{f'preset {name}: ' if name else ''}{budget}{share}, at least {rules['min_tokens']:,}"


@dataclass(frozen=True)
class CacheOptions:
    """Which tokens each step attends to: the settings of `bpc_calib.BPCCache`."""

    preset: Preset = "default"
    budget: Annotated[
        str | None,
        typer.Option(
            help=f"{BUDGET_HELP} Default: the preset's.", metavar="SHARE|TOKENS", callback=checked(parse_budget)
        ),
    ] = None
    min_tokens: MinTokens = None
    min_context: Annotated[
        int | None,
        typer.Option(
            help="Attend to all tokens while the context is shorter than this; 0 always chooses. Default: the length "
            "from which choosing is faster here.",
            metavar="TOKENS",
            callback=checked(partial(check_count, "the context", least=0)),
        ),
    ] = None
    dense_layers: DenseLayers = None
    equal_shares: EqualShares = False

    def rules(self) -> dict[str, Any]:
        """The arguments of `BPCCache`."""
        budget = {} if self.budget is None else {"budget": parse_budget(self.budget)}
        rules = preset_rules(self.preset, self.min_tokens, self.dense_layers) | budget
        return rules | {"min_context": self.min_context, "equal_shares": self.equal_shares}


@dataclass(frozen=True)
class SamplingOptions:
    """How new tokens are picked, and how many."""

    max_new_tokens: Annotated[int, typer.Option(help="Stop after this many new tokens.", min=1)] = 256
    temperature: Annotated[
        float,
        typer.Option(help="Sampling temperature; 0 picks the most likely token.", callback=checked(check_temperature)),
    ] = 0.0
    top_p: Annotated[
        float | None,
        typer.Option(
            help="Sample only from the most likely tokens that together have this probability, such as 0.9; "
            "without it the model's own setting holds.",
            callback=checked(check_top_p),
        ),
    ] = None
    seed: Annotated[
        int, typer.Option(help="Random seed of sampling and of online projections.", callback=checked(check_seed))
    ] = 0

    def __post_init__(self) -> None:
        """Refuse a setting of sampling where nothing is sampled."""
        if self.top_p is not None and not self.temperature:
            raise typer.BadParameter("--top-p changes only sampling: give --temperature too, such as --temperature 0.7")

    def arguments(self) -> dict[str, Any]:
        """The arguments of `model.generate`."""
        if not self.temperature:
            return {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
        return {"do_sample": True, "temperature": self.temperature} | ({"top_p": self.top_p} if self.top_p else {})


@dataclass(frozen=True)
class VerifyOptions:
    """Whether full attention verifies what sparse steps choose."""

    exact: Annotated[
        bool,
        typer.Option(
            "--exact", help="Write full attention's own text: sparse steps draft it, full attention verifies."
        ),
    ] = False
    draft: Annotated[
        int | None,
        typer.Option(
            help=f"With --exact: tokens drafted at once, at most {MOST_DRAFTED}. Default: as many as are fastest here.",
            callback=checked(partial(check_count, "the draft", most=MOST_DRAFTED)),
        ),
    ] = None
    check: Annotated[
        int | None,
        typer.Option(
            help="Compare one step in so many with full attention, and say how often both choose the same token.",
            metavar="STEPS",
            callback=checked(partial(check_count, "the steps")),
        ),
    ] = None
    fallback: Annotated[
        float | None,
        typer.Option(
            help="With --exact or --check: go on with full attention once less than this share of the last 64 checked "
            "tokens agrees, such as 0.9.",
            metavar="SHARE",
            min=0.0,
            max=1.0,
        ),
    ] = None

    def __post_init__(self) -> None:
        """Refuse options that exclude or miss each other."""
        if self.exact and self.check is not None:
            raise typer.BadParameter("--exact checks every token: leave --check out")
        if self.draft is not None and not self.exact:
            raise typer.BadParameter("--draft says how many tokens --exact drafts: give --exact too")
        if self.fallback is not None and not self.exact and self.check is None:
            raise typer.BadParameter("--fallback needs tokens that are checked: give --exact or --check too")

    def arguments(self) -> dict[str, Any]:
        """The arguments of `model.generate`; none: nothing is verified."""
        from bpc_calib import checked_decoding, exact_decoding

        fallback = self.fallback or 0.0
        if self.exact:
            return {"custom_generate": exact_decoding, "draft": self.draft, "fallback": fallback}
        if self.check is not None:
            return {"custom_generate": checked_decoding, "every": self.check, "fallback": fallback}
        return {}
