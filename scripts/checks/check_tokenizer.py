#!/usr/bin/env python3
"""Compares the ids of `sherd prepare --tokenizer hf:FILE` with the tokenizers package's.

Of each FILE (a tokenizer.json; by default those of tests/data/tokenizers) first a text for every character of Unicode,
then random mixtures of many scripts, code, symbols, special tokens and random characters: --megabytes of them. Prints the
characters that make a difference, and the first texts.

Needs tokenizers, and a built `sherd`. Usage: check_tokenizer.py [--megabytes 12] [--seed 1] [--sherd PROGRAM] [FILE...]
"""
import argparse
import json
import pathlib
import random
import struct
import subprocess
import sys
import tempfile
import unicodedata

from tokenizers import Tokenizer, pre_tokenizers

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "references"))
import make_tokenizer_reference as reference  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parents[2]


def read_dataset(prefix):
    """The documents of an indexed dataset, as lists of ids."""
    index = pathlib.Path(prefix + ".idx").read_bytes()
    _, code, sequences, documents = struct.unpack_from("<QBQQ", index, 9)
    lengths = struct.unpack_from(f"<{sequences}i", index, 34)
    bounds = struct.unpack_from(f"<{documents}q", index, 34 + 12 * sequences)
    size, letter = {4: (4, "i"), 8: (2, "H")}[code]
    data = pathlib.Path(prefix + ".bin").read_bytes()
    ids = struct.unpack(f"<{len(data) // size}{letter}", data)
    out, at = [], 0
    for first, last in zip(bounds, bounds[1:]):
        count = sum(lengths[first:last])
        out.append(list(ids[at:at + count]))
        at += count
    return out


def prepared(program, spec, texts):
    with tempfile.TemporaryDirectory() as folder:
        with open(f"{folder}/texts.jsonl", "w") as out:
            out.writelines(json.dumps({"text": text}) + "\n" for text in texts)
        subprocess.run([program, "prepare", "--input", f"{folder}/texts.jsonl", "--tokenizer", spec, "--output",
                        f"{folder}/out"], check=True, stdout=subprocess.DEVNULL)
        return read_dataset(f"{folder}/out")


def differences(program, path, tok, texts):
    """Pairs of a text and both sides' ids."""
    end = next(t for t in ("<|endoftext|>", "<|end_of_text|>", "</s>", "[SEP]") if tok.token_to_id(t) is not None)
    end_id = tok.token_to_id(end)
    texts = [text for text in texts if text]
    found = prepared(program, f"hf:{path}?eod={end}&bos=", texts)
    assert len(found) == len(texts), f"{len(texts)} texts became {len(found)} documents"
    wanted = [e.ids for e in tok.encode_batch(texts, add_special_tokens=False)]
    return [(text, want, ids[:-1]) for text, want, ids in zip(texts, wanted, found) if ids != want + [end_id]]


def characters():
    return (chr(c) for c in range(0x110000) if not 0xD800 <= c < 0xE000)


def ranges_of(points):
    """Code points as ranges, with the names or categories that Python knows."""
    out, begin = [], None
    for i, point in enumerate(points):
        begin = point if begin is None else begin
        if i + 1 == len(points) or points[i + 1] != point + 1:
            name = unicodedata.name(chr(begin), unicodedata.category(chr(begin)))
            out.append(f"U+{begin:04X}" + (f"-{point:04X}" if point > begin else "") + f" ({name})")
            begin = None
    return out


def mixtures(rng, megabytes):
    pool = reference.SCRIPTS + reference.CODE + reference.SYMBOLS
    glue = ["", " ", "  ", "\n", "\n\n", "\t", "\u00a0", "\r\n", "'s", "'LL", "123", "4567", ", ", "...", " \n ", "\u3000", "▁"]
    left = int(megabytes * 1e6)
    while left > 0:
        parts = []
        for _ in range(rng.randint(1, 120)):
            kind = rng.random()
            if kind < 0.75:
                text = rng.choice(pool)
                at = rng.randrange(len(text))
                parts.append(text[at:at + rng.randint(1, 40)])
            elif kind < 0.85:
                low = rng.choice([0x20, 0xa0, 0x300, 0x370, 0x590, 0x900, 0xe00, 0x1e00, 0x2000, 0x3040, 0x4e00, 0xac00, 0x1f300])
                parts.append("".join(chr(low + rng.randrange(0x80)) for _ in range(rng.randint(1, 12))))
            else:
                parts.append(rng.choice(reference.SPECIALS))
            parts.append(rng.choice(glue))
        text = "".join(parts)
        left -= len(text.encode())
        yield text


def with_all_pairs(state):
    """The file's steps before a byte-level model, and a model that merges any two bytes: its ids tell where words end."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [(a, b) for a in alphabet for b in alphabet]
    random.Random(0).shuffle(pairs)
    vocab = {token: i for i, token in enumerate(alphabet + [a + b for a, b in pairs])}
    model = {"type": "BPE", "vocab": vocab, "merges": pairs}
    end = {"id": len(vocab), "content": "</s>", "special": True, "single_word": False, "lstrip": False, "rstrip": False,
           "normalized": False}
    return {**state, "model": model, "added_tokens": [end], "post_processor": None}


def check_characters(program, path):
    """Pairs as differences() gives them, for a text of each character."""
    state = json.loads(path.read_text())
    texts = [f"a{c} {c}1{c}{c}\n" for c in characters()]
    if "ByteLevel" not in json.dumps(state["pre_tokenizer"]):
        return differences(program, path, Tokenizer.from_file(str(path)), texts)
    with tempfile.TemporaryDirectory() as folder:
        other = pathlib.Path(folder) / "tokenizer.json"
        other.write_text(json.dumps(with_all_pairs(state)))
        return differences(program, other, Tokenizer.from_file(str(other)), texts)


def check(program, path, megabytes, seed):
    tok = Tokenizer.from_file(str(path))
    every = check_characters(program, path)
    points = [ord(text[1]) for text, _, _ in every]
    assigned = [p for p in points if unicodedata.category(chr(p)) != "Cn"]
    print(f"{path.name}: of 1112064 characters {len(points)} give other ids, {len(assigned)} of them assigned in Unicode "
          f"{unicodedata.unidata_version}", flush=True)
    for line in ranges_of(points):
        print("   ", line)
    texts = [text for text in mixtures(random.Random(seed), megabytes)]
    wrong = differences(program, path, tok, texts)
    different = set(points)
    wrong = [w for w in wrong if not any(ord(c) in different for c in w[0])]
    print(f"{path.name}: of {len(texts)} texts, {sum(len(t.encode()) for t in texts) / 1e6:.1f} MB, {len(wrong)} give other ids")
    for text, want, got in wrong[:5]:
        print("   ", repr(text[:300]), want[:40], got[:40])
    return not wrong


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("files", nargs="*", type=pathlib.Path)
    parser.add_argument("--megabytes", type=float, default=12)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--sherd", default=str(ROOT / "build/sherd"))
    options = parser.parse_args()
    files = options.files or sorted((ROOT / "tests/data/tokenizers").glob("*.json"))
    results = [check(options.sherd, path.resolve(), options.megabytes, options.seed) for path in files]
    sys.exit(0 if all(results) else 1)


if __name__ == "__main__":
    main()
