"""`bpc generate`: text from a model whose steps attend to the best-ranked tokens only."""

import math
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from bpc_cli import decoding
from bpc_cli.command import command
from bpc_cli.console import fail, note, print_json
from bpc_cli.decoding_report import first_difference, print_comparison, summary
from bpc_cli.find_artifact import load_artifact
from bpc_cli.libraries import quiet_libraries
from bpc_cli.opening import LoadOptions, OpenedModel, open_model, open_tokenizer, open_weights
from bpc_cli.options import BUDGET_HELP, PROJECTIONS, Model
from bpc_cli.parsing import parse_budget, parse_layers
from bpc_cli.prompt import PromptOptions, read_prompt, tokenize

ONLINE = "online"


@dataclass(frozen=True)
class CacheOptions:
    """Which tokens each step attends to: the settings of `bpc_calib.BPCCache`."""

    budget: Annotated[str, typer.Option(help=BUDGET_HELP, metavar="SHARE|TOKENS")] = "2%"
    min_tokens: Annotated[int, typer.Option(help="Attend to at least this many tokens.")] = 128
    min_context: Annotated[
        int,
        typer.Option(
            help="Attend to all tokens while the context is shorter than this; bpc bench --crossover finds the value."
        ),
    ] = 0
    dense_layers: Annotated[
        str, typer.Option(help="Layers that attend to all tokens, such as 0,1; or none.", metavar="LAYERS")
    ] = "0,1"

    def rules(self) -> dict[str, Any]:
        """The arguments of `BPCCache`."""
        return {
            "budget": parse_budget(self.budget),
            "min_tokens": self.min_tokens,
            "min_context": self.min_context,
            "dense_layers": parse_layers(self.dense_layers),
        }


@dataclass(frozen=True)
class SamplingOptions:
    """How new tokens are picked, and how many."""

    max_new_tokens: Annotated[int, typer.Option(help="Stop after this many new tokens.", min=1)] = 256
    temperature: Annotated[float, typer.Option(help="Sampling temperature; 0 picks the most likely token.")] = 0.0
    seed: Annotated[int, typer.Option(help="Random seed of sampling and of online projections.", min=0)] = 0


@command
def generate(
    *,
    model: Model,
    artifact: Annotated[
        str,
        typer.Option("--artifact", "-a", help=f"{PROJECTIONS} {ONLINE} finds projections in the prompt instead."),
    ] = ONLINE,
    prompt: PromptOptions,
    attended: CacheOptions,
    sampling: SamplingOptions,
    load: LoadOptions,
    compare: Annotated[
        bool,
        typer.Option(
            "--compare",
            help="Also decode with full attention; print both texts, their first difference and the speeds.",
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON when it is complete.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print no messages except errors.")] = False,
) -> None:
    """Continue a prompt; each new token attends to the best-ranked tokens of the KV cache only.

    Example: bpc generate -m meta-llama/Llama-3.1-8B-Instruct -a llama.safetensors --prompt-file book.txt --chat
    """
    rules = attended.rules()
    _check_temperature(sampling.temperature)
    text = read_prompt(prompt)
    quiet_libraries(quiet=quiet, warnings=not quiet)
    projections = None if artifact == ONLINE else load_artifact(artifact)
    from bpc_calib import BPCCache, enable

    opened = open_model(model, load)
    cache = BPCCache(opened.config, projections, seed=sampling.seed, **rules)
    tokenizer = open_tokenizer(opened)
    ids = tokenize(tokenizer, text, prompt.chat, opened.description.id)
    new = _new_tokens(ids.shape[1], sampling.max_new_tokens, opened, quiet)
    loaded = open_weights(opened, quiet)
    enable(loaded)
    decoder = decoding.make_decoder(loaded, tokenizer, sampling.temperature, sampling.seed)
    decoder = decoding.warm_up(decoder, ids, cache, new, compare, quiet)

    show = not as_json
    if compare and show:
        print(f"--- BPC ({ONLINE if projections is None else 'calibrated'}, budget {attended.budget}) ---")
    ours = decoding.decode(decoder, ids, cache, new, show)
    result = {
        "model": opened.description.id,
        "artifact": artifact,
        **rules,
        "device": opened.device,
        "prompt_tokens": ids.shape[1],
        **ours,
        "kv_bytes_share": decoding.kv_bytes_share(cache, ids.shape[1], len(ours["tokens"])),
    }
    if compare:
        if show:
            print("--- full attention ---")
        theirs = decoding.decode(decoder, ids, decoding.full_attention(decoder), new, show)
        difference = first_difference(tokenizer, ours["tokens"], theirs["tokens"])
        result |= {"full_attention": theirs, "first_difference": difference}
    if as_json:
        print_json(result)
    elif compare:
        print_comparison(result)
    elif not quiet:
        note(summary(result))


def _check_temperature(temperature: float) -> None:
    if temperature and not (math.isfinite(temperature) and temperature >= 0.01):
        fail(f"--temperature {temperature}: expected 0, or a number of at least 0.01")


def _new_tokens(prompt: int, wanted: int, opened: OpenedModel, quiet: bool) -> int:
    """How many tokens to generate: no more than fit the model's limit behind the prompt."""
    name, limit = opened.description.id, opened.description.context_limit
    if limit is None or prompt + wanted <= limit:
        return wanted
    if prompt >= limit:
        fail(f"the prompt has {prompt:,} tokens, and {name} takes {limit:,} in all: shorten it")
    if not quiet:
        note(f"Stopping after {limit - prompt:,} tokens, at the limit of {name}")
    return limit - prompt
