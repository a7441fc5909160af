"""What does an answer lose that depends on a whole list, where each step attends to a few tokens only?

The questions are those of common-words and frequent-words: lists that fill the prompt. The model is the one that
training/aggregation_model.py makes. BPC's projections are calibrated on other lists.

    python training/aggregation_model.py aggregation-model
    python benchmarks/aggregation.py --model aggregation-model --output aggregation.json
"""

import random
import tempfile
from pathlib import Path

import calibrated
import report

from bpc_calib import enable
from bpc_calib.evaluation.comparison import HARD, Comparison
from bpc_calib.evaluation.evaluate import evaluate
from bpc_calib.evaluation.tasks import TASKS
from bpc_calib.models.loading import load_model, load_tokenizer

LISTS = ("common-words", "frequent-words")
FILES, LISTS_PER_FILE = 20, 10


def main() -> None:
    parser = report.make_parser(__doc__)
    parser.add_argument("--model", "-m", default="demo")
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048])
    parser.add_argument("--budgets", type=float, nargs="+", default=[0.02, 0.05, 0.1, 0.2, 0.5])
    parser.add_argument("--methods", nargs="+", default=["full", "oracle", "bpc"])
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--samples", type=int, default=32, help="of calibration text")
    parser.add_argument("--sequence-length", type=int, default=1024, help="of these samples, in tokens")
    parser.add_argument("--seed", type=int, default=0)
    tiny = {"lengths": [256], "budgets": [0.1], "prompts": 2, "samples": 3, "sequence_length": 128}
    arguments = report.parse(parser, **tiny)

    model, tokenizer = load_model(arguments.model), load_tokenizer(arguments.model)
    plan = report.settings(arguments, ("samples", "sequence_length", "seed"))
    with tempfile.TemporaryDirectory() as folder:
        write_lists(Path(folder), arguments.seed)
        artifact = calibrated.projections(None, model, tokenizer, [folder], **plan)
    enable(model)
    comparison = Comparison(
        tasks=LISTS,
        lengths=arguments.lengths,
        budgets=arguments.budgets,
        methods=arguments.methods,
        prompts=arguments.prompts,
        seed=arguments.seed,
        rules=HARD,
    )

    rows = evaluate(model, tokenizer, artifact, comparison, progress=report.progress)
    for row in rows:
        print(row["task"], row["tokens"], row["method"], row["budget"], row["score"])
    settings = report.settings(arguments, ("lengths", "prompts", "samples", "sequence_length", "seed")) | HARD
    report.write(arguments.output, {"settings": settings, "rows": rows})


def write_lists(folder: Path, seed: int) -> None:
    """Write text for the calibration: lists of words with their questions and answers."""
    for number in range(FILES):
        rng = random.Random(f"calibration {seed}/{number}")
        problems = [TASKS[rng.choice(LISTS)](rng, size=rng.randrange(40, 400)) for _ in range(LISTS_PER_FILE)]
        texts = [part for each in problems for part in (*each.statements, each.question, each.start, each.answer)]
        (folder / f"{number}.txt").write_text("".join(texts))


if __name__ == "__main__":
    main()
