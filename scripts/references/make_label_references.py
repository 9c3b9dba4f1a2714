#!/usr/bin/env python3
"""Makes what labels of tokens are held to: tests/data/tokenizers/words.txt, where WORDS (as in
tests/data/labelled_example_test.cpp), which are encoded apart as transformers does (is_split_into_words), have their
ids and their first tokens, -1 for none, without special tokens; and tests/cli/reference/entities.json, texts of random
labels, as they are and as they were given, with what seqeval 1.2.2 counts of their entities by default.

Needs transformers and seqeval. Usage: make_label_references.py
"""
import json
import pathlib
import random

import seqeval.metrics
import transformers

ROOT = pathlib.Path(__file__).resolve().parents[2]
WORDS = ["Anna", "Müller-Weber", "lives", "in", "São Paulo", ",", "", "unbelievably", "New-York", "\u200b", "don't",
         "3.5%", "."]
LABELS = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC", "B-a-b", "I-a-b"]


def words():
    lines = []
    for name in ("bert", "bert_cased", "gpt2", "llama2", "llama3", "qwen", "mistral", "albert",
                 "xlm_roberta"):
        file = ROOT / f"tests/data/tokenizers/{name}.json"
        encoded = transformers.PreTrainedTokenizerFast(tokenizer_file=str(file))(
            WORDS, is_split_into_words=True, add_special_tokens=False)
        of = encoded.word_ids()
        first = [of.index(i) if i in of else -1 for i in range(len(WORDS))]
        lines.append(" ".join([name, *(",".join(map(str, each)) for each in (encoded["input_ids"], first))]))
    (ROOT / "tests/data/tokenizers/words.txt").write_text("\n".join(lines) + "\n")


def entities():
    random.seed(7)
    true = [[random.choice(LABELS) for _ in range(random.randrange(12))] for _ in range(200)]
    given = [[label if random.random() < 0.8 else random.choice(LABELS) for label in text] for text in true]
    true[0], given[0] = ["B-PER", "I-PER"], ["I-PER", "I-PER"]  # the same entity
    report = seqeval.metrics.classification_report(true, given, output_dict=True, zero_division=0)
    scores = {name: {"precision": float(of["precision"]), "recall": float(of["recall"]),
                     "entities": int(of["support"]), "f1": float(of["f1-score"])} for name, of in report.items()}
    types = {name: of for name, of in scores.items() if not name.endswith(" avg")}
    numbers = [[[LABELS.index(label) for label in text] for text in texts] for texts in (true, given)]
    (ROOT / "tests/cli/reference/entities.json").write_text(json.dumps(
        {"labels": LABELS, "true": numbers[0], "given": numbers[1], "all": scores["micro avg"], "types": types}) + "\n")


if __name__ == "__main__":
    words()
    entities()
