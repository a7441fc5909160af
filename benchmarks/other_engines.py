"""What else decodes on this machine: tokens per second of BPC, transformers, llama.cpp and vLLM, from the same tokens.

    python benchmarks/other_engines.py -m FOLDER -a FILE.safetensors --gguf MODEL.gguf --text FOLDER -o engines.json

Every engine runs in a process of its own, one after the other, with weights, keys and values in 16 bits. llama.cpp and
vLLM want other libraries than this project: `--llama-cpp` and `--vllm` name the interpreters that have them. An engine
that is not installed there is left out, with one line.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import calibrated
import gguf_16bit
import real_speed
import report
import torch
from engine_run import ENGINES

from bpc_artifacts import save
from bpc_calib.demo import DEMO_MODEL
from bpc_calib.models.loading import load_model, load_tokenizer


def main() -> None:
    parser = report.make_parser(__doc__)
    parser.add_argument("--model", "-m", default="demo", help="folder with 16-bit weights")
    parser.add_argument("--artifact", "-a", type=Path, help="default: calibrate on made text")
    parser.add_argument("--gguf", type=Path, help="the same model, for llama.cpp")
    parser.add_argument("--text", default="demo-prose", help="corpus of the prompts")
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 8000], help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=64, help="tokens to decode")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--llama-cpp", metavar="PYTHON", default=sys.executable)
    parser.add_argument("--vllm", metavar="PYTHON", default=sys.executable)
    arguments = report.parse(parser, lengths=[96], new=4, repeats=1)

    tokenizer = load_tokenizer(arguments.model)
    threads = torch.get_num_threads()
    with tempfile.TemporaryDirectory() as folder:
        request: dict[str, Any] = {"threads": threads, "new": arguments.new, "repeats": arguments.repeats}
        request["model"] = str(DEMO_MODEL if arguments.model == "demo" else arguments.model)
        request["prompts"] = real_speed.prompts(tokenizer, arguments.text, arguments.lengths)
        request["artifact"] = str(_artifact(arguments, tokenizer, Path(folder)))
        if arguments.gguf:
            request["gguf"] = str(Path(folder) / "model.gguf")
            gguf_16bit.write(arguments.gguf, Path(request["gguf"]))
        path = Path(folder) / "request.json"
        path.write_text(json.dumps(request))
        interpreters = {"llama.cpp": arguments.llama_cpp, "vllm": arguments.vllm}
        rows = []
        for name, (package, _) in ENGINES.items():
            if name == "llama.cpp" and not arguments.gguf:
                print("llama.cpp is left out: --gguf names no file", file=sys.stderr)
                continue
            found = run(name, package, interpreters.get(name, sys.executable), path)
            rows += [] if found is None else [found]
    _agree(rows)
    settings = report.settings(arguments, ("lengths", "new", "repeats")) | {"threads": threads}
    report.write(arguments.output, {"settings": settings, "engines": rows})


def run(name: str, package: str, interpreter: str, request: Path) -> dict[str, Any] | None:
    """The times of one engine; None, with one line, if it is missing or fails."""
    asked = [interpreter, "-c", f"import importlib.metadata; importlib.metadata.version({package!r})"]
    if subprocess.run(asked, capture_output=True, check=False).returncode:
        print(f"{name} is left out: {Path(interpreter).name} has no {package}", file=sys.stderr)
        return None
    own = name in ("transformers", "bpc")  # other engines must not import this project's libraries
    environment = {key: value for key, value in os.environ.items() if own or key != "PYTHONPATH"}
    words = [interpreter, str(Path(__file__).with_name("engine_run.py")), name, str(request)]
    ran = subprocess.run(words, capture_output=True, text=True, check=False, env=environment)
    if ran.returncode:
        print(f"{name} failed: {(ran.stderr.strip().splitlines() or ['no message'])[-1]}", file=sys.stderr)
        return None
    found: dict[str, Any] = json.loads(ran.stdout.strip().splitlines()[-1])
    for row in found["rows"]:
        speeds = row["prefill_tokens_per_second"], row["decode_tokens_per_second"]
        print(f"{name:<13}{row['prompt']:>7,} tokens: prefill {speeds[0]:>8,.0f} tokens/s, decoding {speeds[1]:>6,.1f}")
    return found


def _agree(rows: list[dict[str, Any]]) -> None:
    """Replace the tokens of each row by the number of first tokens that are those of transformers."""
    if not rows:
        return
    exact = [row["tokens"] for row in rows[0]["rows"]]
    for engine in rows:
        for row, tokens in zip(engine["rows"], exact, strict=True):
            own = row.pop("tokens")
            row["same_tokens"] = next(
                (i for i, pair in enumerate(zip(own, tokens, strict=False)) if len({*pair}) > 1), len(own)
            )


def _artifact(arguments: Any, tokenizer: Any, folder: Path) -> Path:
    """The projections given, or those of a short calibration."""
    if arguments.artifact:
        return Path(arguments.artifact)
    plan = {"samples": 3 if arguments.tiny else 60, "sequence_length": 128 if arguments.tiny else 2048}
    made = calibrated.projections(None, load_model(arguments.model), tokenizer, ["demo"], **plan)
    save(made, folder / "projections.safetensors")
    return folder / "projections.safetensors"


if __name__ == "__main__":
    main()
