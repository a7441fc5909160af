"""`bpc generate`: text from a model whose steps attend to the best-ranked tokens only."""

from typing import Annotated, Any

import typer

from bpc_cli import decoding
from bpc_cli.command import command
from bpc_cli.console import fail, note, print_json, quiet_libraries
from bpc_cli.decoding_report import (
    answer_line,
    first_difference,
    online_hint,
    print_comparison,
    prompt_line,
    what_to_try,
    why_empty,
)
from bpc_cli.opening import LoadOptions, OpenedModel, load_artifact, open_model, open_tokenizer, open_weights
from bpc_cli.options import ONLINE, Artifact, CacheOptions, Model, SamplingOptions
from bpc_cli.prompt import PromptOptions, has_template, read_prompt, tokenize
from bpc_cli.ranks import joined_ranks


@command
def generate(
    *,
    model: Model,
    artifact: Artifact = ONLINE,
    prompt: PromptOptions,
    attended: CacheOptions,
    sampling: SamplingOptions,
    load: LoadOptions,
    compare: Annotated[
        bool,
        typer.Option(
            "--compare",
            help="Also decode with full attention; print both texts, their first difference, the times and the bytes.",
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON when it is complete.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print no messages except errors.")] = False,
) -> None:
    """Answer or continue a prompt; each new token attends to the best-ranked tokens of the KV cache only.

    A model with a chat template answers the prompt as a user's message; any other model, and --raw, continues it.
    Under torchrun the processes shard the model's heads: torchrun --nproc-per-node 2 -m bpc_cli generate ...

    Example: bpc generate -m meta-llama/Llama-3.1-8B-Instruct -a llama.safetensors --prompt-file book.txt
    """
    with joined_ranks():
        rules, how = attended.rules(), sampling.arguments()
        text = read_prompt(prompt)
        quiet_libraries(quiet=quiet, warnings=not quiet)
        projections = None if artifact == ONLINE else load_artifact(artifact)
        from bpc_calib import BPCCache, enable

        opened, online = open_model(model, load, shared=True), projections is None
        name = opened.description.id
        cache = BPCCache(opened.config, projections, seed=sampling.seed, **rules)
        tokenizer = open_tokenizer(opened)
        ids, templated = tokenize(tokenizer, text, prompt, name)
        new = _new_tokens(ids.shape[1], sampling.max_new_tokens, opened, quiet)
        loaded = open_weights(opened, quiet)
        enable(loaded)
        if templated and not quiet:
            note(f"Sending the prompt in the chat template of {name}; --raw continues it as it is")
        decoder = decoding.make_decoder(loaded, tokenizer, how, sampling.seed)
        decoder, seconds = decoding.warm_up(decoder, ids, cache, new, online=online, compare=compare, quiet=quiet)

        show = not as_json
        if compare and show:
            print(f"--- BPC ({ONLINE if online else 'calibrated'}, budget {attended.budget}) ---")
        ours = decoding.decode(decoder, ids, cache, new, show)
        result = {"model": name, "artifact": artifact, **rules, "device": opened.device, "chat_template": templated}
        result |= {"prompt_tokens": ids.shape[1], "compile_seconds": round(seconds, 4), **ours}
        result |= decoding.kv_bytes(cache, ids.shape[1], len(ours["tokens"]))
        if compare:
            if show:
                print("--- full attention ---")
            theirs = decoding.decode(decoder, ids, decoding.full_attention(decoder), new, show)
            difference = first_difference(tokenizer, ours["tokens"], theirs["tokens"])
            result |= {"full_attention": theirs, "first_difference": difference}
        if as_json:
            print_json(result)
        elif compare:
            print_comparison(result, online)
        if not quiet:
            _note_result(result, model, summarise=not (as_json or compare), template=has_template(tokenizer))


def _note_result(result: dict[str, Any], model: str, summarise: bool, template: bool) -> None:
    """Say on stderr how long the parts took, and what looks wrong."""
    online = result["artifact"] == ONLINE
    if summarise:
        note(f"Prompt: {prompt_line(result, online)}")
        note(f"Answer: {answer_line(result)}")
    if (why := why_empty(result)) is not None:
        note(f"{why} {what_to_try(result['chat_template'], template)}")
    if online and (hint := online_hint(result, model)) is not None:
        note(hint)


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
