#!/usr/bin/env python3
"""Makes tests/data/tokenizers/unigram.jsonl: rare turns of unigram models and of what stands before them.

A line has `files`, a folder's texts by name, and the `ids` that the tokenizers package makes of `texts`, as edges.jsonl.

Needs tokenizers and sentencepiece; nothing that Sherd builds, tests or runs needs this file.
Usage: make_unigram_edges.py [FILE]
"""
import json
import pathlib
import sys

from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

import make_tokenizer_reference as reference
import unigram_tokenizers

END = "</s>"
MODEL_TEXTS = ["abcabc", "abcd", "xab", "xabxab", "ab x y ab", "éx", "xéyé", "é", "☃☃a☃", "<unk>a<unk>", "x<unk>y", "aaaaaaa", "bca",
               "abababcb", "xy", "xyz", "zyx", "<0xC3>a", "a" * 300 + "b" * 300, "x" * 300]
STEP_TEXTS = ["ab ab", " ab", "\x01\x02ab", "\x01 ab", "™\x1eab", "½\ufe0fa", "½a", "a\r\nb", "\r\nab", "\ufb01\u0301b", "\ufb01ab",
              "e\u0301ab", "e\u0301\u0323b", "\u0958a", "\u0958\u0300a", "\u200dab", "ab\u200dab", "\u0344\u0301a", "①\u0300\u0301a",
              "a" + "\u0301" * 9 + "b", "🇩🇪🇩a", "👩\u200d👩a", "\u1100\u1161\u11a8a", "\u0e01\u0e33a", "क\u093eक\u0902", "\u1cf2a\u1cf7",
              "\u3000ab", "\t\tab", "ab1ab12", "<x>ab", "ab<x>ab", "<x> ab", "a\0b", "\0", "\x01", "™", "AB", "Å\u0301b", "\xa0\u0301b",
              "™®a", "क\u094d\u0958\u0300a", "\U0001fbf1a",
              "½\x1ea", "ê", "Ãª"]


def state_of(model, normalizer=None, pre_tokenizer=None, added=()):
    made = Tokenizer(model)
    if normalizer:
        made.normalizer = normalizer
    if pre_tokenizer:
        made.pre_tokenizer = pre_tokenizer
    made.add_special_tokens([END])
    made.add_tokens(list(added))
    return json.dumps(json.loads(made.to_str()), ensure_ascii=False, separators=(",", ":"))


def unigram(*pieces, unk_id=0, byte_fallback=False):
    return models.Unigram([("<unk>", 0.0), (END, 0.0), *pieces], unk_id=unk_id, byte_fallback=byte_fallback)


def of_models():
    letters = [(c, -1.0) for c in "abc"]
    yield unigram(*letters, ("ab", -2.0), ("bc", -2.0), ("abc", -3.0))  # all sums are equal
    yield unigram(("a", -0.1), ("b", -0.2), ("c", -0.3), ("ab", -0.3), ("bc", -0.5), ("abc", -0.6))  # but for their last bits
    yield unigram(("a", -0.1), ("aa", -0.2), ("aaa", -0.3), ("b", -0.7), ("ab", -0.8))
    for of_b in (-12.0, -11.0, -10.0, -6.0):  # what an unknown character counts
        yield unigram(("a", -1.0), ("xa", -12.0), ("b", of_b), ("ab", -0.5), ("c", -1.0))
    yield unigram(*[(c, 30.0) for c in "abc"], ("xy", 30.0), ("xyz", 35.0))  # together unknown ones are a piece
    yield unigram(*letters, ("<0xC3>", -2.0), ("<0xA9>", -2.0), ("<0x78>", -2.0), ("é", -9.0), ("ab", -1.0), byte_fallback=True)
    yield unigram(*letters, ("<0xC3>", -2.0), ("<0xA9>", -2.0), ("<0x78>", -2.0), byte_fallback=True)
    yield unigram(*letters, ("<0xC3>", -2.0), ("<0xA9>", -2.0))
    yield unigram(*letters, ("ab", -5.0), ("ab", -0.5), ("bc", -0.5), ("bc", -5.0), ("", -1.0), ("a", -0.2))  # twice
    yield unigram(*letters, ("☃a", -2.0), ("<unk>a", -1.5), unk_id=1)
    yield unigram(*[(chr(c), -3.0) for c in range(32, 127)], *[(c, -4.0) for c in "é☃"], ("ab", -1.0), unk_id=None)


def of_steps():
    _, charsmap = unigram_tokenizers.trained(reference.corpus(), 900)
    precompiled = normalizers.Precompiled(charsmap)
    metaspace = lambda scheme, split=True: pre_tokenizers.Metaspace("▁", prepend_scheme=scheme, split=split)
    characters = [(c, -3.0) for c in "▁abef12/\u2044iTM\u0301\u0300\ufe0f\u200d\u0e01\u0e4d\u0e32\u0915\u093e\u1cf2\u1cf7"]
    pieces = [*characters, ("▁a", -2.5), ("▁ab", -2.0), ("ab", -2.0), ("▁▁", -2.5), ("a▁", -3.5), ("b▁a", -1.0)]
    every, apart = normalizers.Sequence, pre_tokenizers.Sequence
    steps = [metaspace("first", split=False), metaspace("first"), metaspace("always"), metaspace("never", split=False),
             apart([pre_tokenizers.WhitespaceSplit(), metaspace("first")]),
             apart([pre_tokenizers.Digits(individual_digits=True), metaspace("first")])]
    others = [every([normalizers.Strip(left=True, right=False), precompiled]), every([precompiled, precompiled]),
              every([normalizers.NFKD(), normalizers.StripAccents(), normalizers.Lowercase(), precompiled]),
              every([normalizers.Prepend("\x01"), precompiled]), normalizers.Nmt(), every([normalizers.Nmt(), normalizers.NFKC()])]
    for normalizer, step in [*((precompiled, step) for step in steps), *((normalizer, steps[0]) for normalizer in others)]:
        yield state_of(unigram(*pieces), normalizer, step, [AddedToken("<x>", normalized=False), AddedToken("<x>a", normalized=False)])
    yield state_of(unigram(("Ã", -1.0), ("ª", -1.0), ("a", -1.0), ("Ġa", -2.0), ("Ġ", -3.0), ("b", -1.0)), None,
                   pre_tokenizers.ByteLevel(add_prefix_space=False))


def main():
    lines = []
    for state, texts in [*((state_of(model), MODEL_TEXTS) for model in of_models()), *((state, STEP_TEXTS) for state in of_steps())]:
        made = Tokenizer.from_str(state)
        known = []
        for text in texts:
            try:
                known.append((text, made.encode(text, add_special_tokens=False).ids))
            except Exception as error:
                assert "unk_id" in str(error), error
        texts, ids = zip(*known)
        lines.append({"files": {"tokenizer.json": state}, "texts": texts, "ids": ids})
    out = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).resolve().parents[2] / "tests/data/tokenizers/unigram.jsonl")
    out.write_text("".join(json.dumps(line, ensure_ascii=False, separators=(",", ":")) + "\n" for line in lines))


if __name__ == "__main__":
    main()
