"""`bpc generate`: text from a model whose steps attend to the best-ranked tokens only."""

import json
from dataclasses import replace
from itertools import zip_longest
from typing import Annotated, Any

import typer

from bpc_cli import decoding
from bpc_cli.command import command
from bpc_cli.console import fail, note, print_json, printable, quiet_libraries
from bpc_cli.kept_cache import check_config, check_prompt_cache, fill_from_prompt_cache
from bpc_cli.opening import LoadOptions, OpenedModel, load_artifact, open_model, open_tokenizer, open_weights
from bpc_cli.options import (
    ONLINE,
    Artifact,
    CacheOptions,
    KVDevice,
    Model,
    NoCompile,
    SamplingOptions,
    VerifyOptions,
    preset_name,
    setting_text,
)
from bpc_cli.prompt import PromptOptions, has_template, read_prompt, tokenize
from bpc_cli.ranks import joined_ranks
from bpc_cli.streaming import LAYOUT

PARTS = {
    "sliding": "sliding-window layers",
    "dense": "dense layers",
    "ranking": "codes",
    "chosen": "chosen keys and values",
}


@command
def generate(
    *,
    model: Model,
    artifact: Artifact = ONLINE,
    prompt: PromptOptions,
    attended: CacheOptions,
    sampling: SamplingOptions,
    verify: VerifyOptions,
    load: LoadOptions,
    kv_device: KVDevice = None,
    no_compile: NoCompile = False,
    compare: Annotated[
        bool,
        typer.Option(
            "--compare",
            help="Also decode with full attention; print both texts, the times and the bytes.",
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON when it is complete.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print no messages except errors.")] = False,
) -> None:
    """Answer or continue a prompt.

    Each new token attends to the best-ranked tokens of the KV cache only. A model with a chat template answers the
    prompt as a user's message; any other model, and --raw, continues it. Under torchrun the processes shard the model's
    heads: torchrun --nproc-per-node 2 -m bpc_cli generate ...

    Example: bpc generate -m MODEL -a model.safetensors --prompt-file book.txt
    """
    with joined_ranks():
        rules, how = attended.rules(), sampling.arguments()
        text = read_prompt(prompt)
        quiet_libraries(quiet=quiet, warnings=not quiet)
        check_prompt_cache(prompt.prompt_cache)
        projections = None if artifact == ONLINE else load_artifact(artifact, model)
        from bpc_calib import BPCCache, enable

        opened, online = open_model(model, load, shared=True), projections is None
        name = opened.description.id
        check_config(prompt.prompt_cache, opened.description)
        cache = BPCCache(opened.config, projections, seed=sampling.seed, kv_device=kv_device, **rules)
        tokenizer = open_tokenizer(opened)
        ids, templated = tokenize(tokenizer, text, prompt, name)
        new = _new_tokens(ids.shape[1], sampling.max_new_tokens, opened, quiet)
        loaded = open_weights(opened, quiet)
        enable(loaded)
        if templated and not quiet:
            note(f"Sending the prompt in the chat template of {name}; --raw continues it as it is")
        decoder = decoding.make_decoder(loaded, tokenizer, how, sampling.seed, verify.arguments())
        if not no_compile:
            decoding.compile_decoder(decoder, new, quiet)
        decoder, seconds = decoding.warm_up(decoder, ids, cache, new, compare=compare, quiet=quiet)

        show = not as_json
        if compare and show:
            print(f"--- BPC ({ONLINE if online else 'calibrated'}, {setting_text(rules)}) ---")
        keep = fill_from_prompt_cache(prompt.prompt_cache, cache, loaded, ids[0].tolist(), quiet)
        ours = decoding.decode(decoder, ids, cache, new, show, keep)
        result = {"model": name, "artifact": artifact, "preset": preset_name(rules), **rules}
        result |= {"device": opened.device, "kv_device": kv_device, "chat_template": templated}
        result |= {"prompt_tokens": ids.shape[1], "compile_seconds": round(seconds, 4), **ours}
        result |= decoding.kv_bytes(cache, ids.shape[1], len(ours["tokens"]))
        result |= {"min_context": cache.min_context} | decoding.residual(cache) | decoding.agreement(decoder, cache)
        if compare:
            if show:
                print("--- full attention ---")
            plain = replace(decoder, verifying={})
            theirs = decoding.decode(plain, ids, decoding.full_attention(plain), new, show)
            difference = first_difference(tokenizer, ours["tokens"], theirs["tokens"])
            result |= {"full_attention": theirs, "first_difference": difference}
        if as_json:
            print_json(result)
        elif compare:
            print_comparison(result, online)
        if not quiet:
            if attended.min_context is None and (why := decoding.why_dense(result)) is not None:
                note(why)
            _note_result(result, model, summarise=not (as_json or compare), template=has_template(tokenizer))


def _note_result(result: dict[str, Any], model: str, summarise: bool, template: bool) -> None:
    """Say on stderr how long the parts took, and what looks wrong."""
    online = result["artifact"] == ONLINE
    if summarise:
        note(f"Prompt: {prompt_line(result, online)}")
        note(f"Answer: {decoding.answer_line(result)}")
        if "agreement" in result:
            note(decoding.agreement_line(result))
    if (why := decoding.why_empty(result)) is not None:
        note(f"{why} {what_to_try(result['chat_template'], template)}")
    if online and (hint := online_hint(result, model)) is not None:
        note(hint)


def _new_tokens(prompt: int, wanted: int, opened: OpenedModel, quiet: bool) -> int:
    """How many tokens to generate: no more than fit the model's limit behind the prompt."""
    name, limit = opened.description.id, opened.description.context_limit
    if limit is None or prompt + wanted <= limit:
        return wanted
    if prompt >= limit:
        fail(f"the prompt has {prompt:,} tokens, and {name} takes {limit:,} in all: shorten it, or take another model")
    if not quiet:
        note(f"Stopping after {limit - prompt:,} tokens, at the limit of {name}")
    return limit - prompt


def prompt_line(run: dict[str, Any], online: bool) -> str:
    """How long the prompt took, and what was made of it before the first step."""
    count, seconds = run["prefill_tokens"], run["prefill_seconds"]
    line = f"{count:,} tokens in {seconds:.1f} s ({count / seconds:,.0f} tokens/s)"
    if run["prepare_seconds"] < 0.05:
        return line
    return f"{line}, {'online projections' if online else 'hashing it'} {run['prepare_seconds']:.1f} s"


def print_comparison(result: dict[str, Any], online: bool) -> None:
    """Print the first difference, the times of both runs, and the bytes that BPC read."""
    full = result["full_attention"]
    print("--- comparison ---")
    if (found := result["first_difference"]) is None:
        print(f"first difference: none in {len(result['tokens']):,} tokens")
    else:
        texts = [printable(json.dumps(found[side], ensure_ascii=False), keep=LAYOUT) for side in ("bpc", "full")]
        print(f"first difference: token {found['token']:,}: {' instead of '.join(texts)}")
    print(
        f"BPC: prompt {prompt_line(result, online)}; answer {decoding.answer_line(result | {'kv_bytes_share': None})}"
    )
    print(f"full attention: prompt {prompt_line(full, online)}; answer {decoding.answer_line(full)}")
    print(decoding.agreement_line(result) if "agreement" in result else f"KV bytes read: {bytes_line(result)}")


def bytes_line(result: dict[str, Any]) -> str:
    """The share of the bytes that BPC read, and what they are; parts of less than 0.05 % are left out."""
    parts = result["kv_bytes_parts"]
    if parts is None:
        return "too few tokens to count"
    more = f"at least {result['min_tokens']:,} tokens"
    if result["min_context"]:
        more += f" and all below {result['min_context']:,}"
    shown = [f"{name} {parts[part]:.1%}" for part, name in (PARTS | {"minimum": more}).items() if parts[part] >= 0.0005]
    return f"{result['kv_bytes_share']:.1%} of full attention's: {', '.join(shown)}"


def first_difference(tokenizer: Any, ours: list[int], theirs: list[int]) -> dict[str, Any] | None:
    """The number of the first token that differs, counted from 1, and both texts from there; None for equal texts."""
    for place, (one, other) in enumerate(zip_longest(ours, theirs)):
        if one != other:
            here = slice(place, place + 8)
            return {"token": place + 1, "bpc": tokenizer.decode(ours[here]), "full": tokenizer.decode(theirs[here])}
    return None


def online_hint(run: dict[str, Any], model: str) -> str | None:
    """One line if finding projections took a second or more, and a tenth of the run; else None."""
    prepare = run["prepare_seconds"]
    if prepare < 1 or prepare < 0.1 * (run["prefill_seconds"] + prepare + run["decode_seconds"]):
        return None
    return f"Online projections took {prepare:.1f} s; a calibrated file saves that: bpc calibrate -m {model}"


def what_to_try(templated: bool, template: bool) -> str:
    """One sentence for a prompt whose answer is empty.

    `templated`: it was sent in the chat template. `template`: the model has one.
    """
    if templated:
        return "A model that only continues text wants --raw; else change the prompt, or sample with --temperature 0.7."
    if template:
        return "This model has a chat template: leave --raw out."
    return "Change the end of the prompt, or sample with --temperature 0.7."
