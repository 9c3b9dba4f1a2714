#!/usr/bin/env python3
"""The fused optimizer step beside DeepSpeed's CPU Adam, in alternating rounds on the same cores.

  bench/adam_vs_deepspeed.py [--build build] [--millions 50] [--threads 2] [--rounds 9]

Run it with a Python that has torch and deepspeed, whose cpu_adam op is built on first use. Both sides keep their
memory for all rounds and step in turn. Compared are:
  kernel   AdamW over fp32 weights, moments and gradients; ours writes the bf16 copy in the same pass, theirs does
           not ("kernel") or in a pass of its own ("kernel_and_copy")
  path     from bf16 gradients to bf16 weights: upcast, norm, unscale and clip, update, copy. Theirs in five passes
           over fp32 buffers, as its ZeRO-Offload does; ours as a norm and one fused pass, with fp32 masters,
           with split masters, and with split masters and bf16 moments
Prints one JSON object: median milliseconds, and medians of the ratios of each round (above 1: ours is faster).
"""
import json
import os
import statistics
import time

from contenders import CORES, Contender, options, program


class Theirs:
    def __init__(self, millions, threads):
        import torch
        from deepspeed.ops.op_builder import CPUAdamBuilder
        self.torch = torch
        torch.set_num_threads(threads)
        self.op = CPUAdamBuilder().load(verbose=False)
        self.op.create_adam(0, 1e-3, 0.9, 0.999, 1e-8, 0.1, True, False)
        n = int(millions * 1e6) // 65536 * 65536
        self.p, self.g = torch.full((n,), 0.5), torch.full((n,), 0.02)
        self.m, self.v = torch.zeros(n), torch.zeros(n)
        self.p16, self.g16 = self.p.bfloat16(), self.g.bfloat16()
        self.step = 0

    def kernel(self):
        self.step += 1
        self.op.adam_update(0, self.step, 1e-3, 0.9, 0.999, 1e-8, 0.1, True, self.p, self.g, self.m, self.v)

    def kernel_and_copy(self):
        self.kernel()
        self.p16.copy_(self.p)

    def path(self):
        self.g.copy_(self.g16)
        norm = self.g.norm().item()
        self.g.mul_(1 / max(1.0, norm + 1e-6))
        self.kernel_and_copy()

    def seconds(self, case):
        start = time.perf_counter()
        getattr(self, case)()
        return time.perf_counter() - start


# theirs, ours
PAIRS = [("kernel", "fused"), ("kernel_and_copy", "fused"), ("path", "path"), ("path", "path_split"),
         ("path", "path_moments16")]


def main():
    ap = options(__doc__, threads=CORES, rounds=9)
    ap.add_argument("--millions", type=float, default=50)
    a = ap.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(a.threads)  # before torch and the op start their threads
    theirs = Theirs(a.millions, a.threads)
    ours = Contender("sherd", [program(a.build, "bench_adam"), "--serve", "--millions", a.millions, "--threads", a.threads])
    times, ratios = {}, {}
    for r in range(a.rounds + 1):
        seconds = {}
        for case in dict.fromkeys(pair[0] for pair in PAIRS):
            seconds["deepspeed_" + case] = theirs.seconds(case)
        for case in ["limit"] + list(dict.fromkeys(pair[1] for pair in PAIRS)):
            seconds[case] = ours.ask(case)
        if r == 0:
            continue  # warm-up
        for name, value in seconds.items():
            times.setdefault(name, []).append(value)
        for their_case, our_case in PAIRS:
            ratios.setdefault(f"{our_case}_against_{their_case}", []).append(
                seconds["deepspeed_" + their_case] / seconds[our_case])
    ours.stop()
    import deepspeed
    print(json.dumps({"bench": "adam_vs_deepspeed", "deepspeed": deepspeed.__version__,
                      "torch": theirs.torch.__version__, "millions": a.millions, "threads": a.threads,
                      "ms": {k: round(statistics.median(v) * 1e3, 2) for k, v in times.items()},
                      "ratios": {k: round(statistics.median(v), 3) for k, v in ratios.items()}}))


if __name__ == "__main__":
    main()
