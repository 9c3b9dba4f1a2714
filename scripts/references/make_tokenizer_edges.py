#!/usr/bin/env python3
"""Makes tests/data/tokenizers/edges.jsonl: rare parts of tokenizers, and tokens that only the files beside them name.

A line has `files`, a folder's texts by name, and what transformers (a folder with tokenizer_config.json) or the tokenizers
package (without) makes of `texts`: `ids`.

Needs transformers and tokenizers; nothing that Sherd builds, tests or runs needs this file.
Usage: make_tokenizer_edges.py [FILE]
"""
import json
import pathlib
import sys
import tempfile

from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer

END = "</s>"
TEXTS = ["a <tool> b <x>c [PAD] d", "<tool><x> <tool>  hi</s>k", "ab  ab", "x²³¹¼½¾ªº a_1-²", " x</s>\u3000x\n1é",
         "²\n\n b", "  1 2", "\u00a0a", "ab \n ab", "X\nX \n X"]


def tokenizer(normalizer=None, pre_tokenizer=None, added=(), empty=False):
    characters = [chr(c) for c in range(32, 127)] + list("▁²³¹¼½¾ªºé\u00a0\u3000\n\t")
    vocab = {token: i for i, token in enumerate(["<unk>", END] + characters + ["aa", "ab", "▁a", "▁▁", "▁ab"])}
    merges = [("a", "a"), ("a", "b"), ("▁", "a"), ("▁", "▁"), ("▁", "ab")]
    made = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>"))
    if normalizer:
        made.normalizer = normalizer
    if pre_tokenizer:
        made.pre_tokenizer = pre_tokenizer
    made.add_special_tokens([END])
    made.add_tokens(list(added))
    state = json.loads(made.to_str())
    if empty:  # as some files have it; the package passes it over
        state["added_tokens"].append({"id": 5, "content": "", "single_word": False, "lstrip": False, "rstrip": False,
                                      "normalized": False, "special": True})
    return json.dumps(state, ensure_ascii=False, separators=(",", ":"))


def described(content, **more):
    return {"content": content, "lstrip": False, "rstrip": False, "normalized": False, "single_word": False, "special": True, **more}


def of_package():
    """Expressions, added tokens and Metaspace."""
    metaspace = lambda scheme, split=True: pre_tokenizers.Metaspace("▁", prepend_scheme=scheme, split=split)
    sequence = pre_tokenizers.Sequence
    for expression in [r"\w", r"\w+", r"[\w]+", r"[^\w]+", r"\W", r"\W+", r"(?i:\w)a", r"[\w²]"]:
        yield tokenizer(pre_tokenizer=pre_tokenizers.Split(Regex(expression), "removed"))
    strip = lambda content, **more: AddedToken(content, **{"lstrip": True, "rstrip": True, "normalized": False, **more})
    yield tokenizer(added=[strip("²"), strip("\n")])
    yield tokenizer(added=[strip("ab", lstrip=False), strip(" ")])
    yield tokenizer(added=[strip("X"), strip("\n", lstrip=False)])
    yield tokenizer(normalizers.Replace(Regex(r"\s{2,}"), " "), added=[AddedToken("  ", lstrip=True, rstrip=True, normalized=True)])
    first = metaspace("first")
    for normalizer in [normalizers.Replace("x", ""), normalizers.Strip(left=True, right=False), normalizers.Prepend("▁"),
                       normalizers.NFKC(), normalizers.Replace("a", "bb"), normalizers.Lowercase(),
                       normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])]:
        yield tokenizer(normalizer, first)
        yield tokenizer(normalizer, sequence([pre_tokenizers.Digits(individual_digits=True), first]))
        yield tokenizer(normalizer, sequence([pre_tokenizers.Punctuation(), metaspace("first", split=False), first]),
                        [AddedToken("▁", normalized=True, rstrip=True)])
    yield tokenizer(empty=True)


def of_folders():
    """What of a folder transformers adds to the tokenizer.json: (settings, other files)."""
    base = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END}
    tokens = {"eos_token": END, "pad_token": "[PAD]", "additional_special_tokens": ["<x>", "<tool>"]}
    yield {**base, "added_tokens_decoder": {"200": described("<tool>"), "201": described("<x>", special=False, normalized=True)}}, {}
    yield {**base, "added_tokens_decoder": {"900": described("<x>"), "950": described("<tool>", lstrip=True)}}, {}
    yield {**base, "added_tokens_decoder": {"1": described(END, lstrip=True, rstrip=True)}}, {}
    yield {**base, "pad_token": "[PAD]"}, {}
    yield {**base, "pad_token": "ab"}, {}
    yield {**base, "pad_token": {"__type": "AddedToken", **described("[PAD]", lstrip=True)}}, {}
    yield {**base, "additional_special_tokens": ["<tool>"]}, {}
    yield {**base, "extra_special_tokens": ["<tool>", "<x>"]}, {}
    yield {**base, "extra_special_tokens": {"tool_token": "<tool>"}}, {}
    yield base, {"added_tokens.json": {"<tool>": 200, "<x>": 201, "[PAD]": 1}}
    yield {**base, "pad_token": "<tool>"}, {"added_tokens.json": {"<tool>": 200, "<x>": 201}}
    yield base, {"special_tokens_map.json": tokens}
    yield {**base, "added_tokens_decoder": {"200": described("<tool>")}}, {"special_tokens_map.json": tokens}


def main():
    lines = []
    for state in of_package():
        made = Tokenizer.from_str(state)
        ids = [made.encode(text, add_special_tokens=False).ids for text in TEXTS]
        lines.append({"files": {"tokenizer.json": state}, "texts": TEXTS, "ids": ids})
    for settings, others in of_folders():
        added = [AddedToken("<y>", normalized=False)] if settings.get("pad_token") == "[PAD]" else []
        files = {"tokenizer.json": tokenizer(added=added), "tokenizer_config.json": json.dumps(settings),
                 **{name: json.dumps(content) for name, content in others.items()}}
        with tempfile.TemporaryDirectory() as folder:
            for name, text in files.items():
                pathlib.Path(folder, name).write_text(text)
            made = AutoTokenizer.from_pretrained(folder)
            ids = [made(text, add_special_tokens=False)["input_ids"] for text in TEXTS]
        lines.append({"files": files, "texts": TEXTS, "ids": ids})
    out = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).resolve().parents[2] / "tests/data/tokenizers/edges.jsonl")
    out.write_text("".join(json.dumps(line, ensure_ascii=False, separators=(",", ":")) + "\n" for line in lines))


if __name__ == "__main__":
    main()
