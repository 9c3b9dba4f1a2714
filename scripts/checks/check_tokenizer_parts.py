#!/usr/bin/env python3
"""Draws tokenizers of rare parts (normalizers, pre-tokenizers, added tokens) and compares the ids of `sherd prepare` with
those of the tokenizers package on random texts.

A tokenizer that Sherd refuses is counted, and a text on which the package itself panics is left out.

Needs tokenizers, sentencepiece and numpy; nothing that Sherd builds, tests or runs needs this file.
Usage: check_tokenizer_parts.py [--sherd build/sherd] [--tokenizers N] [--seed S]
"""
import argparse
import json
import pathlib
import random
import subprocess
import sys
import tempfile

import numpy
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "references"))
import make_tokenizer_reference as reference  # noqa: E402
import unigram_tokenizers  # noqa: E402

END = "</s>"
CHARACTERS = [chr(c) for c in range(32, 127)] + list("▁²³¹¼½¾ªºéµ\u00a0\u3000\n\t")
EXPRESSIONS = [r"\w", r"\w+", r"[\w]+", r"[^\w]+", r"\W", r"\W+", r"[^\s\w]+", r"\s+", r"\d+", r"\w+|x", r"(?i:\w)a", r"[\w²]"]
CONTENTS = ["<a>", END, " ", "  ", "x ", " x", "ab", "▁", "²", "X", "aXb", "\n"]
PIECES = [" ", "  ", "a", "b", "ab", "<a>", END, "x", "X", "²", "½", "ª", "\u00a0", "\u3000", "\n", "▁", "_", "1", "12", ".", "é",
          "q", "aXb", "\t", "\r\n", "\u0301", "\u0323", "½", "ﬁ", "™", "\x01", "\x1e", "\ufe0f", "\u200d", "\u0958", "\u0e33", "Å", "\0", "☃"]
CHARSMAP = unigram_tokenizers.trained(reference.corpus(), 900)[1]


def model(r):
    """Of byte pairs, or unigrams whose sums are often equal."""
    pieces = [*CHARACTERS, "aa", "ab", "▁a", "▁▁", "ba", "▁ab"]
    if r.random() < 0.5:
        merges = [("a", "a"), ("a", "b"), ("▁", "a"), ("▁", "▁"), ("b", "a"), ("▁", "ab")]
        return models.BPE(vocab={token: i for i, token in enumerate(["<unk>", END, *pieces])}, merges=merges, unk_token="<unk>")
    if r.random() < 0.5:
        pieces += [f"<0x{byte:02X}>" for byte in range(256) if r.random() < 0.99]
    lone = r.random()
    score = lambda piece: r.choice([-1.0, -2.0, -0.1, -0.2, -0.3, -r.random()]) * len(piece)
    scored = [(piece, score(piece)) for piece in pieces if len(piece) > 1 or r.random() < 0.3 + lone]
    return models.Unigram([("<unk>", 0.0), (END, 0.0), *scored], unk_id=0, byte_fallback=r.random() < 0.5)


def distinct(normalizer, contents):
    """Without those that are normalised to the text of another: the package takes any of them, anew in each process."""
    return list({normalizer.normalize_str(content): content for content in contents}.values())


def drawn(r):
    """A tokenizer.json's object, as the package saves it."""
    coin = lambda: r.random() < 0.5
    normalizer = [lambda: normalizers.Strip(left=coin(), right=coin()), lambda: normalizers.Prepend("▁"),
                  lambda: normalizers.Replace(" ", "▁"), normalizers.Lowercase, normalizers.NFKC,
                  lambda: normalizers.Replace(Regex(r"\s{2,}"), " "), lambda: normalizers.Replace("x", ""),
                  lambda: normalizers.Precompiled(CHARSMAP), normalizers.Nmt, normalizers.StripAccents]
    step = [lambda: pre_tokenizers.Metaspace("▁", prepend_scheme=r.choice(["first", "always", "never"]), split=coin()),
            lambda: pre_tokenizers.Split(Regex(r.choice(EXPRESSIONS)), r.choice(
                ["isolated", "removed", "merged_with_next", "contiguous", "merged_with_previous"])),
            lambda: pre_tokenizers.Digits(individual_digits=coin()), lambda: pre_tokenizers.Punctuation(r.choice(["isolated", "removed"])),
            pre_tokenizers.WhitespaceSplit, pre_tokenizers.Whitespace]
    made = Tokenizer(model(r))
    made.normalizer = normalizers.Sequence([r.choice(normalizer)() for _ in range(r.randrange(3))])
    made.pre_tokenizer = pre_tokenizers.Sequence([r.choice(step)() for _ in range(r.randrange(3))])
    made.add_tokens([AddedToken(content, lstrip=coin(), rstrip=coin(), single_word=r.random() < 0.3, normalized=coin(), special=coin())
                     for content in distinct(made.normalizer, r.sample(CONTENTS, r.randrange(6)))])
    made.add_special_tokens([END])
    return json.loads(Tokenizer.from_str(made.to_str()).to_str())


def ids_of_sherd(sherd, folder, texts):
    """Of each text, without the end of a document; a message where the file is refused."""
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    run = subprocess.run([sherd, "prepare", "--input", folder / "texts.jsonl", "--tokenizer",
                          f"hf:{folder}/tokenizer.json?eod={END}&bos=", "--output", folder / "out", "--threads", "1"],
                         capture_output=True, text=True)
    if run.returncode:
        return run.stderr.strip()
    index, ids = (folder / "out.idx").read_bytes(), numpy.fromfile(folder / "out.bin", dtype=numpy.uint16).tolist()
    count = int.from_bytes(index[18:26], "little")
    lengths = numpy.frombuffer(index, dtype=numpy.int32, count=count, offset=34).tolist()
    out = []
    for length in lengths:
        out.append(ids[:length - 1])
        ids = ids[length:]
    return out


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sherd", default="build/sherd")
    parser.add_argument("--tokenizers", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    r = random.Random(options.seed)
    refused = differ = 0
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        for number in range(options.tokenizers):
            try:
                state = drawn(r)
                package = Tokenizer.from_str(json.dumps(state))
            except BaseException as error:  # the package's panics are no Exception
                if isinstance(error, KeyboardInterrupt):
                    raise
                continue
            (folder / "tokenizer.json").write_text(json.dumps(state))
            texts = ["".join(r.choice(PIECES) for _ in range(r.randrange(1, 9))) for _ in range(60)]
            got = ids_of_sherd(options.sherd, folder, texts)
            if isinstance(got, str):
                refused += 1
                continue
            for text, ids in zip(texts, got):
                try:
                    wanted = package.encode(text, add_special_tokens=False).ids
                except BaseException:
                    continue
                if ids != wanted:
                    differ += 1
                    print(f"tokenizer {number}: {text!r}: {ids}, and the package gives {wanted}\n{json.dumps(state, ensure_ascii=False)}")
                    break
    print(f"{options.tokenizers} tokenizers, {refused} refused, {differ} with a difference")
    return differ > 0


if __name__ == "__main__":
    sys.exit(main())
