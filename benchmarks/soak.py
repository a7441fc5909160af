"""Does one process that runs for hours stay as it was? Conversations, batches, static steps and calibrations in turn.

Each kind of work runs first in a process of its own. Then one process does all of them again and again, in random
order: its answers must be those of the fresh processes, its memory and open files must not grow, and no file may stay.

    python benchmarks/soak.py --minutes 120 --output soak.json
"""

import contextlib
import gc
import hashlib
import io
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import report

NEW = 24  # tokens of an answer
RULES: dict[str, Any] = {"min_tokens": 16, "min_context": 0}
GREEDY = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
# Its turns crop the cache.
FORGETFUL = TEMPLATE.replace("m.content", "(m.content if m.role == 'user' else m.content[-9:])")
WORDS = "the old stone bridge over a river where every lantern of that harbour burns until morning".split()
ARTIFACT, MADE = "artifact.safetensors", "made.safetensors"
WARM_UP = 0.1  # of the time
FLAT = 0.02  # largest growth of memory after the warm-up, as a share


@dataclass(frozen=True)
class Held:
    """What the process keeps all the time."""

    model: Any
    tokenizer: Any
    artifact: Any
    folder: Path


def main() -> int:
    """Run all kinds of work until the time is over, print a line per minute, and say what was wrong."""
    parser = report.make_parser(__doc__)
    parser.add_argument("--minutes", type=float, default=120.0)
    parser.add_argument("--kind", choices=KINDS, help="print the answers of one kind of work, in the given folder")
    parser.add_argument("--folder", type=Path)
    arguments = parser.parse_args()
    if arguments.kind is not None:
        print(json.dumps(KINDS[arguments.kind](hold(arguments.folder))))
        return 0
    minutes, kinds = arguments.minutes, list(KINDS)
    if arguments.tiny:
        minutes, kinds = 0.05, ["conversation", "interrupts"]
    with tempfile.TemporaryDirectory() as outer:
        folder, temporary = Path(outer, "work"), Path(outer, "tmp")
        folder.mkdir()
        temporary.mkdir()
        os.environ |= {"TMPDIR": str(temporary), "TORCHINDUCTOR_CACHE_DIR": outer}  # torch keeps an empty folder
        tempfile.tempdir = str(temporary)
        calibrate(folder / ARTIFACT)
        expected = {kind: fresh(kind, folder) for kind in kinds}
        rows, faults = run(hold(folder), expected, minutes, temporary)
    if not arguments.tiny:
        faults += grown(rows)
    for fault in faults:
        print(fault, file=sys.stderr)
    report.keep(arguments.output, report.about() | {"minutes": minutes, "faults": faults, "rows": rows})
    return bool(faults)


def run(
    held: Held, expected: dict[str, Any], minutes: float, temporary: Path
) -> tuple[list[dict[str, Any]], list[str]]:
    """Do all kinds of work in random order; return one row per run, and what was wrong."""
    rng, began, shown = random.Random(0), time.monotonic(), 0
    rows: list[dict[str, Any]] = []
    faults: list[str] = []
    left: list[str] = []
    while (passed := (time.monotonic() - began) / 60) < minutes or left or not rows:
        left = left or rng.sample(list(expected), len(expected))
        kind = left.pop()
        if KINDS[kind](held) != expected[kind]:
            faults.append(f"{passed:.1f} min: the answers of {kind} are not those of a fresh process")
        files = [*held.folder.rglob("*"), *temporary.iterdir()]
        faults += [f"{passed:.1f} min: {kind} left {file.name}" for file in files if file.name != ARTIFACT]
        gc.collect()
        sizes = {"resident_bytes": resident(), "open_files": open_files()}
        rows.append({"minute": round(passed, 2), "kind": kind} | sizes)
        if passed >= shown:
            row, shown = rows[-1], shown + 1
            print(
                f"{passed:6.1f} min, {len(rows):,} runs: {row['resident_bytes'] / 2**20:,.0f} MiB, "
                f"{row['open_files']} open files, {len(faults)} faults",
                flush=True,
            )
    return rows, faults


def grown(rows: list[dict[str, Any]]) -> list[str]:
    """What grew after the warm-up: the medians of memory at its beginning and its end, and the number of open files."""
    rows = [row for row in rows if row["minute"] >= WARM_UP * rows[-1]["minute"]]
    part = max(1, len(rows) // 4)
    first, last = (statistics.median(row["resident_bytes"] for row in some) for some in (rows[:part], rows[-part:]))
    print(f"memory after the warm-up: {first / 2**20:,.1f} MiB, at the end {last / 2**20:,.1f} MiB")
    faults = [f"memory grew by {last / first - 1:.1%}"] if last > first * (1 + FLAT) else []
    counts = sorted({row["open_files"] for row in rows})
    return faults + [f"open files: {counts[0]} to {counts[-1]}"] * (len(counts) > 1)


def hold(folder: Path) -> Held:
    """Load the bundled model and its projections."""
    import bpc_artifacts
    from bpc_calib import enable
    from bpc_calib.models.loading import load_model, load_tokenizer

    model, tokenizer = load_model("demo"), load_tokenizer("demo")
    enable(model)
    return Held(model, tokenizer, bpc_artifacts.load(folder / ARTIFACT), folder)


def fresh(kind: str, folder: Path) -> Any:
    """The answers of one kind of work in a process of its own."""
    words = [sys.executable, __file__, "--kind", kind, "--folder", str(folder)]
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def calibrate(path: Path) -> None:
    """Run `bpc calibrate` in this process, with a work folder beside the file."""
    from bpc_cli.main import app

    words = ["calibrate", "-m", "demo", "--corpus", "demo", "--samples", "3", "--sequence-length", "256", "-q"]
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            app([*words, "-o", str(path)])
    except SystemExit as ended:  # as every command ends
        if ended.code:
            raise


def resident() -> int:
    """Bytes of this process in main memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def open_files() -> int:
    """Open file descriptors of this process."""
    return len(os.listdir("/proc/self/fd"))


# Every kind of work returns numbers that depend on nothing but the folder.


def talk(held: Held, artifact: Any, template: str = TEMPLATE) -> Any:
    """A conversation as `bpc chat` holds it."""
    from bpc_calib import BPCCache
    from bpc_cli.chat import Conversation
    from bpc_cli.decoding import make_decoder

    held.tokenizer.chat_template = template
    decoder = make_decoder(held.model, held.tokenizer, GREEDY, 0)
    return Conversation(decoder, BPCCache(held.model.config, artifact, **RULES), "demo", None, [])


def say(count: int) -> str:
    """A message of so many words."""
    rng = random.Random(count)
    return " ".join(rng.choice(WORDS) for _ in range(count))


def turns(conversation: Any, *lengths: int) -> list[list[int]]:
    """The answers to messages of so many words."""
    return [conversation.ask(say(length), NEW, show=False)["tokens"] for length in lengths]


def calibrated_turns(held: Held) -> Any:
    """Turns with the projections of a file, begun anew after two."""
    conversation = talk(held, held.artifact)
    first = turns(conversation, 300, 40)
    conversation.reset()
    return first + turns(conversation, 40, 800, 5)


def online_turns(held: Held) -> Any:
    """Turns with projections found in the prompt."""
    return turns(talk(held, None), 600, 30, 30)


def cropped_turns(held: Held) -> Any:
    """Turns with a template that changes earlier answers, and a branch of the conversation."""
    import copy

    conversation = talk(held, held.artifact, FORGETFUL)
    first = turns(conversation, 300, 40)
    branch = copy.deepcopy(conversation.cache)
    rest = turns(conversation, 20)
    conversation.cache, conversation.messages = branch, conversation.messages[:-2]
    conversation.tokens = conversation.tokens[: branch.get_seq_length()]
    return [*first, *rest, *turns(conversation, 20)]


class Interrupting:
    """A streamer that interrupts the generation after some tokens."""

    def __init__(self, left: int) -> None:
        self.left = left

    def put(self, value: Any) -> None:
        """Count."""
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt

    def end(self) -> None:
        """Nothing is kept."""


def interrupts(held: Held) -> Any:
    """Answers that a streamer or a stopping criterion interrupts; the conversation goes on."""
    conversation = talk(held, held.artifact)
    first = turns(conversation, 200)

    def interrupt(ids: Any, scores: Any, **_: Any) -> Any:
        raise KeyboardInterrupt

    try:
        conversation.ask(say(60), NEW, show=False, stopping_criteria=[interrupt])
    except KeyboardInterrupt:
        first += turns(conversation, 30)
    cache, ids = conversation.cache, prompts(held, 400)
    cache.reset()
    try:
        generate(held, cache, ids, streamer=Interrupting(6))
    except KeyboardInterrupt:
        cache.crop(ids.shape[1] - 10 - cache.get_seq_length())
    return first + generate(held, cache, ids)


def prompts(held: Held, *lengths: int) -> Any:
    """Token ids of messages of so many words, padded on the left."""
    held.tokenizer.padding_side = "left"
    held.tokenizer.pad_token = held.tokenizer.pad_token or held.tokenizer.eos_token
    return held.tokenizer([say(length) for length in lengths], return_tensors="pt", padding=True)["input_ids"]


def generate(held: Held, cache: Any, ids: Any, **more: Any) -> Any:
    """The new tokens of `model.generate`."""
    from bpc_calib.compat import with_cache

    settings = GREEDY | {"max_new_tokens": NEW, "pad_token_id": held.tokenizer.pad_token_id} | more
    mask = (ids != held.tokenizer.pad_token_id).long()
    made = held.model.generate(ids, attention_mask=mask, **with_cache(cache), **settings)
    return made[:, ids.shape[1] :].tolist()


def batches(held: Held) -> Any:
    """A padded batch, greedy and with beams, and a sampled one."""
    import torch

    from bpc_calib import BPCCache

    ids, found = prompts(held, 300, 20, 120), []
    for more in ({}, {"num_beams": 2}, {"do_sample": True, "temperature": 0.7}):
        torch.manual_seed(0)
        found.append(generate(held, BPCCache(held.model.config, held.artifact, **RULES), ids, **more))
    return found


def static(held: Held) -> Any:
    """Static steps after a long prompt."""
    from bpc_calib import BPCCache, static_generate

    cache, ids = BPCCache(held.model.config, held.artifact, **RULES), prompts(held, 500)
    settings = GREEDY | {"max_new_tokens": NEW, "pad_token_id": held.tokenizer.pad_token_id}
    return static_generate(held.model, ids, cache=cache, **settings)[0, ids.shape[1] :].tolist()


def saved_and_loaded(held: Held) -> Any:
    """Projections written to a file and read again."""
    import bpc_artifacts
    from bpc_calib import BPCCache

    path = held.folder / MADE
    bpc_artifacts.save(held.artifact, path)
    loaded = bpc_artifacts.load(path)
    path.unlink()
    return generate(held, BPCCache(held.model.config, loaded, **RULES), prompts(held, 200))


def calibration(held: Held) -> Any:
    """The bytes of a calibration of the bundled model."""
    path = held.folder / MADE
    calibrate(path)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    path.unlink()
    return digest


KINDS: dict[str, Callable[[Held], Any]] = {
    "conversation": calibrated_turns,
    "online": online_turns,
    "crops": cropped_turns,
    "interrupts": interrupts,
    "batches": batches,
    "static": static,
    "files": saved_and_loaded,
    "calibration": calibration,
}


if __name__ == "__main__":
    sys.exit(main())
