#!/usr/bin/env python3
"""`sherd prepare --tokenizer hf:FILE` beside the tokenizers package's batch encoding, in alternating rounds.

  bench/tokenizer_vs_hf.py --text FILE... [--build build] [--megabytes 32] [--vocab 32000] [--train-megabytes 4]
                           [--threads 2] [--rounds 5] [--only gpt2,llama3,qwen,llama2,mistral,t5,…]

Run it with a Python that has tokenizers. The text is what the files hold, as often as it takes, cut into documents at blank
lines; tokenizers with the structure of public families (scripts/references/make_tokenizer_reference.py) are trained
on its beginning.
Ours is the whole command, from the start of the process to the files on disk, theirs encode_batch() and
encode_batch_fast() of a list of documents that is in memory. Prints a JSON object for each tokenizer: MB/s by medians, the
ratios, and whether both gave as many tokens.
"""
import argparse
import functools
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "scripts"))


def documents_of(paths, megabytes):
    texts = [path.read_text(errors="replace").replace("\r\n", "\n").replace("\0", "") for path in paths]
    text = "\n\n".join(texts)
    text *= int(megabytes * 1e6 / max(1, len(text.encode()))) + 1
    out, left = [], int(megabytes * 1e6)
    for part in text.split("\n\n"):
        part = part.strip("\n")
        if part.strip() and left > 0:
            out.append(part)
            left -= len(part.encode()) + 2
    return out


def seconds(work):
    start = time.perf_counter()
    out = work()
    return time.perf_counter() - start, out


def compare(a, name, tok, documents, folder):
    path = folder / f"{name}.json"
    path.write_text(tok.to_str())
    (folder / "text.txt").write_text("\n\n".join(documents) + "\n")
    end = next(t for t in ("<|endoftext|>", "<|end_of_text|>", "</s>", "[SEP]") if tok.token_to_id(t) is not None)
    command = [str(pathlib.Path(a.build) / "sherd"), "prepare", "--input", str(folder / "text.txt"), "--tokenizer",
               f"hf:{path}?eod={end}&bos=", "--output", str(folder / "out"), "--threads", str(a.threads)]
    ours, batch, fast, tokens = [], [], [], 0
    for _ in range(a.rounds):
        ours.append(seconds(lambda: subprocess.run(command, check=True, stdout=subprocess.DEVNULL,
                                                   stderr=subprocess.DEVNULL))[0])
        for method, times in ((tok.encode_batch, batch), (tok.encode_batch_fast, fast)):
            spent, tokens = 0, 0
            for first in range(0, len(documents), 4096):
                took, encodings = seconds(lambda: method(documents[first:first + 4096], add_special_tokens=False))
                spent += took
                tokens += sum(len(e.ids) for e in encodings)
                del encodings
            times.append(spent)
    megabytes = (folder / "text.txt").stat().st_size / 1e6
    rate = {k: megabytes / statistics.median(v) for k, v in (("ours", ours), ("encode_batch", batch), ("fast", fast))}
    info = json.loads((folder / "out.json").read_text())
    return {"tokenizer": name, "vocab": tok.get_vocab_size(), "megabytes": round(megabytes, 1), "documents": len(documents),
            "MB/s": {k: round(v, 1) for k, v in rate.items()}, "ratio": round(rate["ours"] / rate["encode_batch"], 2),
            "ratio to fast": round(rate["ours"] / rate["fast"], 2),
            "as many tokens": info["tokens"] == tokens + info["documents"]}


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--build", default=str(HERE.parent / "build"))
    ap.add_argument("--text", nargs="+", type=pathlib.Path, required=True)
    for name, default in (("megabytes", 32), ("vocab", 32000), ("train-megabytes", 4),
                          ("threads", len(os.sched_getaffinity(0))), ("rounds", 5)):
        ap.add_argument("--" + name, type=int, default=default)
    ap.add_argument("--only", default="gpt2,llama3,qwen,llama2,mistral")
    a = ap.parse_args()
    os.environ["RAYON_NUM_THREADS"] = str(a.threads)  # before the package starts its threads
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    import make_tokenizer_reference as reference
    documents = documents_of(a.text, a.megabytes)
    some = documents_of(a.text, a.train_megabytes)
    make = {"gpt2": reference.gpt2, "llama3": reference.llama3, "qwen": reference.qwen,
            "llama2": lambda *of: reference.llama2(False, *of), "mistral": lambda *of: reference.llama2(True, *of),
            **{name: functools.partial(of, full=True) for name, of in reference.unigram_tokenizers.FAMILIES.items()}}
    with tempfile.TemporaryDirectory() as folder:
        for name in a.only.split(","):
            print(json.dumps(compare(a, name, make[name](some, a.vocab), documents, pathlib.Path(folder))), flush=True)


if __name__ == "__main__":
    main()
