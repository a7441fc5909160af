"""The parts of `real_suite.py` that measure time: `bpc generate --compare`, a decoding step, and other engines."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from real_subjects import Subject

__all__ = ["bpc", "decode", "engines", "generate", "prompts"]

FOLDER = Path(__file__).parent


def bpc(*words: object) -> dict[str, Any]:
    """The JSON that a command of this checkout prints."""
    program = [sys.executable, "-c", "from bpc_cli.main import main; main()", *map(str, words)]
    return json.loads(subprocess.run(program, stdout=subprocess.PIPE, text=True, check=True).stdout)


def generate(subject: Subject, settings: Mapping[str, Any]) -> dict[str, Any]:
    """What `bpc generate --compare` reports after prompts of several lengths."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for prompt in _texts(subject, settings["lengths"], settings["new"]):
            path = Path(folder) / "prompt.txt"
            path.write_text(prompt)
            for projections, artifact in (("calibrated", subject.artifact("bpc")), ("online", "online")):
                found = bpc(
                    "generate", "--raw", "-m", subject.model, "-a", artifact, "--prompt-file", path,
                    "--max-new-tokens", settings["new"], "--compare", "--json", "-q",
                )  # fmt: skip
                found.pop("model"), found.pop("artifact")  # paths
                for run in (found, found["full_attention"]):
                    run.pop("text", None)
                    run["tokens"] = len(run["tokens"])
                rows.append({"projections": projections} | found)
                ours, theirs = (run["tokens_per_second"] or 0 for run in (found, found["full_attention"]))
                print(
                    f"{found['prompt_tokens']:,} tokens, {projections}: {ours:.1f} tokens/s, full {theirs:.1f}",
                    file=sys.stderr,
                )
    return {"rows": rows}


def decode(subject: Subject, settings: Mapping[str, Any]) -> dict[str, Any]:
    """What `real_decode.py` measures."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "decode.json"
        words = ["-m", subject.model, "-a", str(subject.artifact("bpc")), "-o", str(output)]
        lengths = [str(length) for length in settings["lengths"]]
        words += ["--tiny"] if subject.tiny else ["--lengths", *lengths]
        subprocess.run([sys.executable, FOLDER / "real_decode.py", *words], check=True)
        found = json.loads(output.read_text())
    return {name: value for name, value in found.items() if name not in ("command", "machine")}


def engines(subject: Subject, settings: Mapping[str, Any]) -> dict[str, Any]:
    """What `other_engines.py` measures."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "engines.json"
        words = ["-m", subject.model, "-a", subject.artifact("bpc"), "-o", output]
        words += ["--text", subject.corpora("held-out")[0].rpartition("=")[2]]
        words += ["--gguf", subject.gguf] if subject.gguf else []
        words += [word for name in ("llama_cpp", "vllm") if settings[name] for word in (_option(name), settings[name])]
        words += ["--tiny"] if subject.tiny else ["--lengths", *settings["lengths"]]
        subprocess.run([sys.executable, FOLDER / "other_engines.py", *map(str, words)], check=True)
        found = json.loads(output.read_text())
    return {name: value for name, value in found.items() if name not in ("command", "machine")}


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def prompts(tokenizer: Any, corpus: str, lengths: list[int]) -> list[list[int]]:
    """Token ids of the first documents of a corpus, one after the other, cut to each length."""
    import random
    from itertools import islice

    from bpc_calib.text.corpora import documents, open_corpus
    from bpc_calib.text.samples import beginning, pack

    longest = max(lengths)
    texts = documents(open_corpus(corpus), random.Random(0))
    (sample,) = islice(pack(texts, tokenizer, longest), 1)
    return [sample[:length] for length in lengths] if beginning(tokenizer) else [sample[-length:] for length in lengths]


def _texts(subject: Subject, lengths: list[int], new: int) -> list[str]:
    """Texts of about these lengths in tokens, that leave room for new tokens within the greatest length."""
    from bpc_calib.models.loading import load_tokenizer

    tokenizer = load_tokenizer(subject.model)
    room = 2 * new + 64  # also for a chat template
    cut = prompts(tokenizer, subject.corpora("held-out")[0], [length - room for length in lengths])
    return [tokenizer.decode(ids, skip_special_tokens=True) for ids in cut]
