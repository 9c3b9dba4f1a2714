#!/usr/bin/env python3
"""BERT-base's step of masked tokens beside transformers' under torch.compile: 8 x 512 tokens, AdamW, no dropout.

Rounds alternate: a run of `sherd train` whose metrics give the time of each step, then as many steps in PyTorch, which
was compiled and has run before. Both learn 15 % of the tokens. fp32, or bf16: Sherd keeps fp32 masters, PyTorch bf16
weights alone. Prints medians, and the ratio of these in each round.

Needs torch, transformers and tokenizers, and a built `sherd`.
Usage: bert_vs_hf.py [--sherd build/sherd] [--dtypes fp32 bf16] [--rounds 3] [--steps 3] [--threads 2]
"""
import argparse
import json
import pathlib
import random
import statistics
import subprocess
import tempfile
import time

import tokenizers
import torch
import transformers

ROWS, LENGTH = 8, 512
VOCABULARY = 30522


def make_tokenizer(folder):
    """Words of numbers, as many as BERT has tokens."""
    specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocabulary = {token: i for i, token in enumerate(specials + [f"w{i}" for i in range(VOCABULARY - len(specials))])}
    made = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.add_special_tokens(specials)
    made.post_processor = tokenizers.processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    made.save(str(folder / "tokenizer.json"))


def prepare(sherd, folder):
    make_tokenizer(folder)
    rng = random.Random(1)
    with open(folder / "text.txt", "w") as out:
        for _ in range(200):
            out.write(" ".join(f"w{rng.randrange(VOCABULARY - 5)}" for _ in range(500)) + "\n\n")
    subprocess.run([sherd, "prepare", "--input", folder / "text.txt", "--tokenizer", f"hf:{folder}", "--output",
                    folder / "data"], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def sherd_steps(sherd, folder, dtype, steps, threads):
    """Seconds of each step but the first two."""
    config = {
        "train_batch_size": ROWS, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "bf16": {"enabled": dtype == "bf16"}, "device": {"threads_per_rank": threads},
        "model": {"type": "bert", "seq_length": LENGTH, "hidden_size": 768, "num_layers": 12, "num_heads": 12,
                  "dropout": 0},
        "data": {"path": str(folder / "data"), "split": [1, 0]}, "training": {"steps": steps + 2}}
    (folder / "config.json").write_text(json.dumps(config))
    metrics = folder / "metrics.jsonl"
    metrics.unlink(missing_ok=True)
    subprocess.run([sherd, "train", "--config", folder / "config.json", "--metrics", metrics], check=True,
                   stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [line["step_ms"] / 1000 for line in lines if "step_ms" in line][2:]


class Peer:
    def __init__(self, dtype):
        config = transformers.BertConfig(hidden_dropout_prob=0, attention_probs_dropout_prob=0,
                                         attn_implementation="sdpa")
        self.model = transformers.BertForMaskedLM(config).to(torch.bfloat16 if dtype == "bf16" else torch.float32)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        torch.manual_seed(1)
        self.ids = torch.randint(5, VOCABULARY, (ROWS, LENGTH))
        self.labels = torch.where(torch.rand(ROWS, LENGTH) < 0.15, self.ids, -100)
        self.loss = torch.compile(lambda ids, labels: self.model(input_ids=ids, labels=labels).loss)

    def step(self):
        start = time.perf_counter()
        self.loss(self.ids, self.labels).backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return time.perf_counter() - start


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sherd", default=str(pathlib.Path(__file__).resolve().parent.parent / "build/sherd"))
    parser.add_argument("--dtypes", nargs="+", default=["fp32", "bf16"], choices=["fp32", "bf16"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        prepare(options.sherd, folder)
        for dtype in options.dtypes:
            peer = Peer(dtype)
            for _ in range(2):
                peer.step()
            ratios = []
            for i in range(options.rounds):
                own = statistics.median(sherd_steps(options.sherd, folder, dtype, options.steps, options.threads))
                other = statistics.median(peer.step() for _ in range(options.steps))
                ratios.append(other / own)
                print(f"{dtype} round {i + 1}: sherd {own:.3f} s, transformers compiled {other:.3f} s, "
                      f"{ratios[-1]:.2f} times as fast", flush=True)
            print(f"{dtype}: {statistics.median(ratios):.2f} times as fast as transformers compiled", flush=True)


if __name__ == "__main__":
    main()
