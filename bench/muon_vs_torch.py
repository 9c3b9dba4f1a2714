#!/usr/bin/env python3
"""Muon's step beside torch.optim.Muon, on the matrices of a transformer block, in alternating rounds on the same cores.

  bench/muon_vs_torch.py [--build build] [--hidden 768] [--threads 2] [--rounds 9]

Run it with a Python that has torch 2.9 or newer. Both iterate in bf16, on Q, K, V and the projection [h, h], up [4h, h]
and down [h, 4h]. Ours goes from bf16 gradients to fp32 masters and bf16 weights; torch has weights and gradients in fp32
("torch_fp32") or in bf16, without masters ("torch_bf16"). Prints one JSON object: median milliseconds, Gflop/s of the
five iterations' products (4·r²·c + 2·r³ each, r <= c), and ratios of medians (ours by theirs: below 1 ours is faster).
"""
import json
import os
import statistics
import time

from contenders import CORES, Contender, options, program


class Theirs:
    def __init__(self, hidden, threads, dtype):
        import torch
        torch.set_num_threads(threads)
        shapes = [(hidden, hidden)] * 4 + [(4 * hidden, hidden), (hidden, 4 * hidden)]
        weights = [torch.nn.Parameter((torch.randn(shape) * 0.02).to(dtype)) for shape in shapes]
        for w in weights:
            w.grad = (torch.randn(w.shape) * 0.01).to(dtype)
        self.optimizer = torch.optim.Muon(weights)
        self.flops = 5 * sum(4 * min(s)**2 * max(s) + 2 * min(s)**3 for s in shapes)

    def seconds(self):
        start = time.perf_counter()
        self.optimizer.step()
        return time.perf_counter() - start


def main():
    ap = options(__doc__, hidden=768, threads=CORES, rounds=9)
    a = ap.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(a.threads)  # before torch starts its threads
    import torch
    theirs = {"torch_fp32": Theirs(a.hidden, a.threads, torch.float32),
              "torch_bf16": Theirs(a.hidden, a.threads, torch.bfloat16)}
    ours = Contender("sherd", [program(a.build, "bench_muon_step"), "--hidden", a.hidden, "--threads", a.threads],
                     env={"OMP_NUM_THREADS": 1})
    times = {}
    for r in range(a.rounds + 1):
        seconds = {name: their.seconds() for name, their in theirs.items()}
        seconds |= {case: ours.ask(case) for case in ("step", "orthogonalize")}
        for name, value in seconds.items() if r else ():  # the first round warms up
            times.setdefault(name, []).append(value)
    ours.stop()
    median = {name: statistics.median(values) for name, values in times.items()}
    flops = theirs["torch_fp32"].flops
    print(json.dumps({"bench": "muon_vs_torch", "torch": torch.__version__, "hidden": a.hidden, "threads": a.threads,
                      "ms": {name: round(value * 1e3, 2) for name, value in median.items()},
                      "gflops": {name: round(flops / value / 1e9, 1) for name, value in median.items()},
                      "ratios": {f"step_by_{name}": round(median["step"] / median[name], 3) for name in theirs}}))


if __name__ == "__main__":
    main()
