#!/usr/bin/env python3
"""GPT-2 small training step: Sherd beside PyTorch, in alternating rounds on the same cores.

  bench/gpt2_vs_pytorch.py [--python PYTHON_WITH_TORCH] [--build build] [--rounds 3] [--modes bf16 bf16-compiled fp32]

Prints each round, then per comparison the ratio of medians of tokens/s (above 1: Sherd is faster) and the median of the
per-round ratios. PyTorch runs in every way that may be its best: eager and compiled, pure bf16 and autocast. (The whole
engine, on a GPU or on cores: bench/train_vs_peers.py.)
"""
import json
import os
import statistics
import sys

from contenders import HERE, Unavailable, options, program, run_json

PEERS = {  # name: (our mode, arguments of gpt2_pytorch.py)
    "bf16": ("bf16", ["--mode", "bf16"]),
    "bf16-compiled": ("bf16", ["--mode", "bf16", "--compile", "--warmup", "2"]),
    "autocast-compiled": ("bf16", ["--mode", "autocast", "--compile", "--warmup", "2"]),
    "fp32": ("fp32", ["--mode", "fp32"]),
    "fp32-compiled": ("fp32", ["--mode", "fp32", "--compile", "--warmup", "2"]),
}


def run(command):
    try:
        return run_json(command, timeout=3600)
    except Unavailable as why:
        sys.exit(str(why))


def main():
    ap = options(__doc__, rounds=3, steps=3)
    ap.add_argument("--python", default=sys.executable)
    ap.add_argument("--modes", nargs="+", default=["bf16", "bf16-compiled", "fp32"], choices=list(PEERS))
    a = ap.parse_args()
    ours = program(a.build, "bench_gpt2_step")
    results = {}
    for r in range(a.rounds):
        for name in a.modes:
            mode, peer_arguments = PEERS[name]
            mine = run([ours, "--mode", mode, "--steps", str(a.steps)])
            peer = run([a.python, os.path.join(HERE, "gpt2_pytorch.py"), "--steps", str(a.steps), *peer_arguments])
            results.setdefault(name, []).append((mine["tokens_per_s"], peer["tokens_per_s"]))
            print(json.dumps({"round": r, "against": name, "sherd_tokens_per_s": round(mine["tokens_per_s"], 1),
                              "torch_tokens_per_s": round(peer["tokens_per_s"], 1), "torch": peer["peer"],
                              "ratio": round(mine["tokens_per_s"] / peer["tokens_per_s"], 3),
                              "gemm_share": mine["gemm_share"]}), flush=True)
    for name, pairs in results.items():
        mine, peer = [p[0] for p in pairs], [p[1] for p in pairs]
        print(json.dumps({"against": name, "ratio_of_medians": round(statistics.median(mine) / statistics.median(peer), 3),
                          "median_of_ratios": round(statistics.median(m / p for m, p in pairs), 3)}))


if __name__ == "__main__":
    main()
