"""Tokens per second of a model that vLLM runs on a CPU, without BPC and with it: in turns, in one engine.

    .venv-vllm/bin/python benchmarks/serving.py --model FOLDER --artifact FILE

Two engines differ by several per cent from start to start; the same engine with its options taken away does not, and
is vLLM's own path. Whole answers to new prompts are timed, then answers of one token and of many to cached ones; the
difference of the last two is the decoding. `--transformers` also times the model in transformers, with full attention
and with BPC, after the first of the prompts.
"""

import json
import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import real_models
import report

from bpc_calib.demo import DEMO_MODEL
from bpc_calib.models.loading import load_tokenizer

os.environ |= {
    "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "5", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "VLLM_PLUGINS": "bpc",
    "THP_MEM_ALLOC_ENABLE": "1",  # large pages, as `bpc serve` asks
}  # fmt: skip
# Tokens of a prompt, requests at once, tokens to decode, and repeats.
SETTINGS: dict[str, Any] = {"lengths": [500, 2000, 7500], "requests": [1, 8], "new": 64, "repeats": 5}
TINY: dict[str, Any] = {"lengths": [200], "requests": [2], "new": 4, "repeats": 1}
READ_AGAIN = 20_000  # tokens of the prompts; longer ones are timed only once
FIRST = 100  # instead of the first token of a prompt, this and the next ones in turn: no cache holds such a prompt
STOCK, BPC = "stock", "BPC"
IN_TRANSFORMERS = "transformers", "BPC in transformers"


class Engine:
    """vLLM's engine in this process, which BPC can leave and enter again."""

    def __init__(self, model: str, artifact: Path, **settings: Any) -> None:
        from vllm import LLM

        self.options = {"bpc": {"artifact": str(artifact.absolute())}}
        settings |= {"skip_tokenizer_init": True, "distributed_executor_backend": "uni"}
        self.llm = LLM(model, additional_config=dict(self.options), **settings)

    def use(self, name: str) -> None:
        """Answer by vLLM alone, or with BPC; cached prompts are forgotten."""
        given = self.llm.llm_engine.vllm_config.additional_config
        given.clear()
        given.update(self.options if name == BPC else {})
        self.llm.reset_prefix_cache()

    def answered(self, prompts: Sequence[list[int]], new: int) -> tuple[float, list[list[int]]]:
        """Ask with all prompts at once; the seconds until the last answer, and the answers."""
        from vllm import SamplingParams

        asked = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
        began = time.perf_counter()
        made = self.llm.generate([{"prompt_token_ids": ids} for ids in prompts], asked, use_tqdm=False)
        return time.perf_counter() - began, [list(each.outputs[0].token_ids) for each in made]


def main() -> None:
    parser = report.make_parser(__doc__)
    parser.add_argument("--model", "-m", default="demo", help="folder of the model")
    parser.add_argument("--artifact", "-a", type=Path, required=True)
    parser.add_argument("--text", default="demo-prose", help="corpus of the prompts")
    parser.add_argument("--dtype", default="bfloat16", help="float32 reads prompts faster without AVX-512")
    parser.add_argument(
        "--transformers", metavar="PYTHON", help="time the model there, too, by BPC of this interpreter"
    )
    arguments = parser.parse_args()
    settings = TINY if arguments.tiny else SETTINGS
    model = str(DEMO_MODEL) if arguments.model == "demo" else arguments.model
    most, rows, tokenizer = max(settings["requests"]), [], load_tokenizer(model)
    sizes = [length * most for length in settings["lengths"]]
    texts = dict(zip(settings["lengths"], real_models.prompts(tokenizer, arguments.text, sizes), strict=True))
    room = max(settings["lengths"]) + settings["new"] + 1
    asked = {"dtype": arguments.dtype, "max_num_seqs": most, "max_model_len": room, "enforce_eager": arguments.tiny}
    engine = Engine(model, arguments.artifact, **asked)
    for length, text in texts.items():
        prompts = [text[i * length : (i + 1) * length] for i in range(most)]
        for count in settings["requests"]:
            rows += told(compared(engine, prompts[:count], settings["new"], settings["repeats"]))
        stock = next((row for row in rows if (row["prompt"], row["requests"]) == (length, 1)), None)
        if arguments.transformers and stock is not None:
            words = [arguments.transformers, "-m", "bpc_cli", "generate", "-m", model, "-a", str(arguments.artifact)]
            words += ["--max-new-tokens", str(settings["new"]), "--dtype", arguments.dtype]
            rows += told(in_transformers(words, tokenizer.decode(prompts[0]), stock, settings["repeats"]))
    import torch
    import vllm

    settings = settings | {"dtype": arguments.dtype, "vllm": vllm.__version__, "torch": torch.__version__}
    report.keep(arguments.output, report.about() | {"settings": settings, "rows": rows})


def told(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Print the rows, and return them."""
    for row in rows:
        about = f"{row['prompt']:>6} x {row['requests']}  {row['server']:<20}"
        print(f"{about}{row['tokens_per_second']:8.1f} tokens/s", flush=True)
    return rows


def compared(engine: Engine, prompts: Sequence[list[int]], new: int, repeats: int) -> list[dict[str, Any]]:
    """One row without BPC and one with it: seconds of whole answers, tokens per second, the ratios to stock.

    Whole answers count from the arrival of prompts that no cache holds, and so hash their keys, too.
    """
    names, tokens = (STOCK, BPC), len(prompts) * len(prompts[0])
    texts: dict[str, list[list[int]]] = {}
    reads, wholes, speeds = ({name: list[float]() for name in names} for _ in range(3))
    for turn in range(repeats if tokens <= READ_AGAIN else 1):
        asked = [[FIRST + turn, *prompt[1:]] for prompt in prompts]
        for name in names[:: 1 - turn % 2 * 2]:  # the other way round in every other turn
            engine.use(name)
            whole, _ = engine.answered(asked, new + 1)
            short, _ = engine.answered(asked, 1)
            long, texts[name] = engine.answered(asked, new + 1)
            reads[name].append(whole - (long - short))
            wholes[name].append(whole)
            speeds[name].append(len(prompts) * new / (long - short))
    return [
        {
            "server": name,
            "prompt": len(prompts[0]),
            "requests": len(prompts),
            "prefill_seconds": round(median(reads[name]), 3),
            "whole_seconds": round(median(wholes[name]), 3),
            "whole_ratio": round(
                median(stock / own for own, stock in zip(wholes[name], wholes[STOCK], strict=True)), 3
            ),
            "tokens_per_second": round(median(speeds[name]), 2),
            "ratio": round(median(own / stock for own, stock in zip(speeds[name], speeds[STOCK], strict=True)), 3),
            "same_answers": sum(own == stock for own, stock in zip(texts[name], texts[STOCK], strict=True)),
        }
        for name in names
    ]


def in_transformers(words: Sequence[str], text: str, stock: Mapping[str, Any], repeats: int) -> list[dict[str, Any]]:
    """Rows of full attention and of BPC in transformers, by `bpc generate --compare` alone: medians of several runs."""
    start = [*words, "--raw", "-p", text, "--compare", "--json", "-q"]
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


if __name__ == "__main__":
    main()
