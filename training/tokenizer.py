"""The demo model's tokenizer: one token per word of the made text or two digits, and bytes for everything else."""

import random
import re
from collections import Counter

import transformers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from bpc_calib.evaluation.tasks import TASKS
from bpc_calib.text import made_text

TRAINED = (  # tasks whose words are in the vocabulary
    "needle",
    "single",
    "multi-key",
    "multi-value",
    "multi-query",
    "tracking",
    "common-words",
    "frequent-words",
)
SPECIAL = ("<pad>", "<s>", "</s>")
PATTERN = r" ?[A-Za-z]+| ?[0-9]{1,2}| ?[^\sA-Za-z0-9]+|\s"


def make_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """The same tokenizer every time; it prepends BOS."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    entries = dict.fromkeys((*SPECIAL, *alphabet, *vocabulary()))
    # Without merges, a word outside the vocabulary becomes its bytes.
    raw = Tokenizer(models.BPE(vocab={entry: i for i, entry in enumerate(entries)}, merges=[], ignore_merges=True))
    raw.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens(list(SPECIAL))
    raw.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=raw,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        model_max_length=8192,
        model_input_names=["input_ids", "attention_mask"],
    )


def vocabulary() -> list[str]:
    """Every word in the made text and the tasks, sorted, in the byte-level spelling."""
    rng = random.Random(0)
    counts: Counter[str] = Counter()
    for style in made_text.STYLES.values():
        for _ in range(20_000):
            counts.update(re.findall(PATTERN, style(rng)))
    for task in TRAINED:
        for _ in range(400):
            problem = TASKS[task](rng)
            texts = *problem.statements, problem.question, problem.start, problem.answer
            counts.update(re.findall(PATTERN, "".join(texts)))
    for word in (*made_text.FIRST, *made_text.SECOND, *made_text.words()):
        counts.update([f" {word}"])
    for value in range(100):
        counts.update([f"{value:02d}", f" {value:02d}", f" {value}"])
    return sorted(word.replace(" ", "Ġ").replace("\n", "Ċ") for word in counts)
