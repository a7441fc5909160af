"""`bpc generate`: text from a model whose steps attend to the best-ranked tokens alone."""

import copy
import math
import os
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from bpc_cli.arguments import (
    Device,
    Dtype,
    Model,
    Revision,
    TrustRemoteCode,
    WeightsDtype,
    find_artifact,
    parse_budget,
    parse_layers,
    pick_device,
)
from bpc_cli.console import command, fail, note, print_json, printable, quiet_libraries


@command
def generate(
    model: Model,
    artifact: Annotated[
        str,
        typer.Option(
            "--artifact",
            "-a",
            help="Projections of bpc calibrate: a file or a Hub id; online finds them in the prompt.",
        ),
    ] = "online",
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", help="The prompt itself.")] = None,
    prompt_file: Annotated[
        Path | None, typer.Option(help="File with the prompt. Without either, it is read from stdin.")
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Give the prompt as a user's message, in the model's chat template.")
    ] = False,
    budget: Annotated[
        str, typer.Option(help="Tokens attended: 2% or 0.02 of them, or 2048 of them.", metavar="SHARE|TOKENS")
    ] = "2%",
    min_tokens: Annotated[int, typer.Option(help="Attend to no fewer than these, where there are as many.")] = 128,
    min_context: Annotated[
        int, typer.Option(help="Attend to everything below so many tokens cached (bpc bench --crossover).")
    ] = 0,
    dense_layers: Annotated[
        str, typer.Option(help="Layers that attend to everything, like 0,1; or none.", metavar="LAYERS")
    ] = "0,1",
    max_new_tokens: Annotated[int, typer.Option(help="Stop after so many.", min=1)] = 256,
    temperature: Annotated[float, typer.Option(help="Of sampling; 0 takes the likeliest token.")] = 0.0,
    compare: Annotated[
        bool, typer.Option("--compare", help="Also run full attention; print both, where they differ, and speeds.")
    ] = False,
    revision: Revision = None,
    dtype: WeightsDtype = Dtype.auto,
    device: Device = "auto",
    seed: Annotated[int, typer.Option(help="Of sampling and of online projections.", min=0)] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON, at the end.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No messages on stderr but errors.")] = False,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Continue a prompt; each new token attends to the best-ranked tokens of the KV cache alone.

    Example: bpc generate -m meta-llama/Llama-3.1-8B-Instruct -a llama.safetensors --prompt-file book.txt --chat
    """
    dense = parse_layers(dense_layers)
    rules: dict[str, Any] = {
        "budget": parse_budget(budget),
        "min_tokens": min_tokens,
        "min_context": min_context,
        "dense_layers": dense,
    }
    if temperature and not (math.isfinite(temperature) and temperature >= 0.01):
        fail(f"--temperature {temperature}: expected 0, or a number of at least 0.01")
    text = _read_prompt(prompt, prompt_file)
    quiet_libraries(bars=not quiet, warnings=not quiet)
    from bpc_artifacts import load

    projections = None if artifact == "online" else load(find_artifact(artifact)[0])
    import torch

    from bpc_calib import BPCCache, BPCError, describe, enable, static_decoding
    from bpc_calib.models.loading import load_config, load_model, load_tokenizer

    device = pick_device(device)
    config, commit = load_config(model, revision=revision, trust_remote_code=trust_remote_code)
    description = describe(config, revision=commit)
    cache = BPCCache(config, projections, seed=seed, **rules)
    tokenizer = load_tokenizer(model, revision=commit, trust_remote_code=trust_remote_code)
    ids = _tokenize(tokenizer, text, chat, description.id)
    count, limit = ids.shape[1], description.context_limit
    if limit is not None and count >= limit:
        fail(f"the prompt has {count:,} tokens, and {description.id} takes {limit:,} in all: shorten it")
    if limit is not None and count + max_new_tokens > limit:
        max_new_tokens = limit - count
        if not quiet:
            note(f"Stopping after {max_new_tokens:,} tokens, at the limit of {description.id}")
    if not quiet and sys.stderr.isatty():
        note(f"Loading {description.id} on {device} ...")
    loaded = load_model(model, revision=commit, dtype=dtype.value, device=device, trust_remote_code=trust_remote_code)
    enable(loaded)

    # Some models come with settings of their own that one stream of text, or a cache, does not allow.
    own = loaded.generation_config
    own.num_beams, own.num_return_sequences, own.return_dict_in_generate, own.cache_implementation = 1, 1, False, None
    settings: dict[str, Any] = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    if temperature > 0:
        settings = {"do_sample": True, "temperature": temperature}

    def run(past: Any, new: int, inputs: Any, show: bool, **more: Any) -> dict[str, Any]:
        torch.manual_seed(seed)
        more |= settings
        return _run(loaded, tokenizer, inputs.to(device), show, past_key_values=past, max_new_tokens=new, **more)

    def full_attention() -> Any:
        """Its cache, behind steps of the same kind; None is transformers' own."""
        return BPCCache(config, budget=1.0, dense_layers=()) if "custom_generate" in settings else None

    def try_out() -> None:
        """What happens once in a process is in no figure, and a step that cannot be captured is found before a text."""
        new, short = min(4, max_new_tokens), ids[:, :64]
        whole = ids if compare else short  # kernels are compiled for sizes
        run(BPCCache(config, budget=1, min_tokens=1, dense_layers=()), new, short, False, min_new_tokens=new)
        run(copy.deepcopy(cache), new, whole, False, min_new_tokens=new)
        run(full_attention(), new, whole, False, min_new_tokens=new)

    show = not as_json
    if _captures(device):
        settings["custom_generate"] = static_decoding
        try:
            try_out()
        except BPCError as fault:
            del settings["custom_generate"]
            if not quiet:
                note(f"Decoding without CUDA graphs: {fault}")
    if compare:
        if "custom_generate" not in settings:
            try_out()
        if show:
            print(f"--- BPC ({artifact if projections is None else 'calibrated'}, budget {budget}) ---")
    ours = run(cache, max_new_tokens, ids, show)
    result = {
        "model": description.id,
        "artifact": artifact,
        "budget": rules["budget"],
        "min_tokens": min_tokens,
        "min_context": min_context,
        "dense_layers": list(dense),
        "device": device,
        "prompt_tokens": count,
        **ours,
        "kv_bytes_share": _share(cache, count, len(ours["tokens"])),
    }
    if not compare:
        if as_json:
            print_json(result)
        elif not quiet:
            note(f"{_figures(ours)}, {_percent(result['kv_bytes_share'])} of the KV bytes of full attention")
        return
    if show:
        print("--- full attention ---")
    theirs = run(full_attention(), max_new_tokens, ids, show)
    difference = _first_difference(tokenizer, ours["tokens"], theirs["tokens"])
    result |= {"full_attention": theirs, "first_difference": difference}
    if as_json:
        print_json(result)
        return
    print("--- comparison ---")
    print(f"first difference: {_say(difference, len(ours['tokens']))}")
    print(f"BPC: {_figures(ours)}, {_percent(result['kv_bytes_share'])} of the KV bytes of full attention")
    print(f"full attention: {_figures(theirs)}")


def _captures(device: str) -> bool:
    """Whether steps are replayed as CUDA graphs."""
    return device.startswith("cuda")


def _read_prompt(prompt: str | None, file: Path | None) -> str:
    if prompt is not None and file is not None:
        raise typer.BadParameter("give --prompt or --prompt-file, not both")
    if prompt is None and file is None and (sys.stdin is None or sys.stdin.isatty()):
        raise typer.BadParameter("give --prompt or --prompt-file, or pipe the prompt in")
    try:
        if prompt is None:
            raw = sys.stdin.buffer.read() if file is None else Path(os.path.expanduser(file)).read_bytes()
            prompt = raw.decode().removesuffix("\n")
        prompt.encode()
    except OSError as fault:
        fail(f"{file}: the prompt cannot be read: {fault.strerror}")
    except UnicodeError:
        fail(f"{file or 'the prompt'} is not UTF-8 text")
    if not prompt.strip():
        fail(f"{file or 'the prompt'} is empty")
    return prompt


def _tokenize(tokenizer: Any, text: str, chat: bool, name: str) -> Any:
    """Token ids `[1, N]`."""
    if not chat:
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
    elif not tokenizer.chat_template:
        fail(f"{name} has no chat template: leave out --chat")
    else:
        message = {"role": "user", "content": text}
        ids = tokenizer.apply_chat_template(
            [message], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )["input_ids"]
    if not ids.shape[1]:
        fail("the prompt has no tokens")
    return ids


def _run(model: Any, tokenizer: Any, ids: Any, show: bool, **settings: Any) -> dict[str, Any]:
    """Generate, print the text as it comes if it is to be shown, and measure."""
    import torch
    from transformers import TextStreamer

    times: list[float] = []

    class Printer(TextStreamer):  # type: ignore[misc]
        def put(self, value: Any) -> None:
            times.append(time.perf_counter())
            if show:
                super().put(value)

        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            print(printable(text, keep="\n\t"), end="\n" if stream_end else "", flush=True)

        def end(self) -> None:
            if show:
                super().end()

    printer = Printer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    padding = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    made = model.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=padding, streamer=printer, **settings)
    tokens = made[0, ids.shape[1] :].tolist()
    decoding = times[-1] - times[1]
    return {
        "text": tokenizer.decode(tokens, skip_special_tokens=True),
        "tokens": tokens,
        "seconds_to_first_token": round(times[1] - times[0], 4),
        "tokens_per_second": round((len(tokens) - 1) / decoding, 3) if len(tokens) > 1 else None,
    }


def _share(cache: Any, prompt: int, new: int) -> float | None:
    """Of the KV bytes of full attention, those read by the steps after the first token."""
    steps = [cache.kv_bytes(length) for length in range(prompt + 1, prompt + new)]
    return sum(read for read, _ in steps) / sum(full for _, full in steps) if steps else None


def _first_difference(tokenizer: Any, ours: list[int], theirs: list[int]) -> dict[str, Any] | None:
    for i in range(max(len(ours), len(theirs))):
        if ours[i : i + 1] != theirs[i : i + 1]:
            return {
                "token": i + 1,
                "bpc": tokenizer.decode(ours[i : i + 8]),
                "full": tokenizer.decode(theirs[i : i + 8]),
            }
    return None


def _say(difference: dict[str, Any] | None, count: int) -> str:
    if difference is None:
        return f"none in {count:,} tokens"
    ours, theirs = printable(difference["bpc"]), printable(difference["full"])
    return f'token {difference["token"]:,}: "{ours}" instead of "{theirs}"'


def _figures(run: dict[str, Any]) -> str:
    speed = f"{run['tokens_per_second']:.1f} tokens/s" if run["tokens_per_second"] else "no speed of one token"
    return f"{len(run['tokens']):,} tokens, {speed}, {run['seconds_to_first_token']:.1f} s to the first"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"
