#!/usr/bin/env python3
"""The gated delta rule of Qwen3-Next beside transformers' on the processor, in alternating rounds on the same cores.

  bench/delta_vs_hf.py [--build build] [--rows 4096] [--threads 2] [--rounds 5]

Run it with a Python that has torch and transformers 5.24 or newer. One sequence of 16 key heads and 32 value heads of
128 elements. transformers runs its chunked form, which it takes where flash-linear-attention is not there (that has
kernels for GPUs alone), and autograd for the gradient. Prints one JSON object: median milliseconds, and their time by
ours in each round, the median (above 1 ours is faster).
"""
import json
import os
import statistics
import time

from contenders import CORES, Contender, options, program


class Theirs:
    def __init__(self, rows, dtype):
        import torch
        def room(*shape):
            return torch.randn(1, rows, *shape).to(dtype).requires_grad_()
        self.inputs = [room(16, 128), room(16, 128), room(32, 128)]
        self.gates = [(-torch.rand(1, rows, 32)).requires_grad_(), torch.rand(1, rows, 32).requires_grad_()]

    def seconds(self, case):
        import torch
        from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule
        start = time.perf_counter()
        with torch.set_grad_enabled(case == "both"):
            out, _ = torch_chunk_gated_delta_rule(*self.inputs, *self.gates, use_qk_l2norm_in_kernel=True)
        if case == "both":
            torch.autograd.grad(out, self.inputs + self.gates, out.detach())
        return time.perf_counter() - start


def main():
    ap = options(__doc__, rows=4096, threads=CORES, rounds=5)
    a = ap.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(a.threads)  # before torch starts its threads
    import torch
    torch.set_num_threads(a.threads)
    theirs = {"fp32": Theirs(a.rows, torch.float32), "bf16": Theirs(a.rows, torch.bfloat16)}
    ours = Contender("sherd", [program(a.build, "bench_delta_step"), "--rows", a.rows, "--threads", a.threads],
                     env={"OMP_NUM_THREADS": 1})
    times, ratios = {}, {}
    for r in range(a.rounds + 1):
        for dtype, their in theirs.items():
            for case in ("forward", "both"):
                one, other = their.seconds(case), ours.ask(f"{case} {dtype}")
                if r:  # the first round warms up
                    times.setdefault(f"theirs {case} {dtype}", []).append(one)
                    times.setdefault(f"sherd {case} {dtype}", []).append(other)
                    ratios.setdefault(f"{case} {dtype}", []).append(one / other)
    ours.stop()
    print(json.dumps({"bench": "delta_vs_hf", "torch": torch.__version__, "rows": a.rows, "threads": a.threads,
                      "ms": {name: round(statistics.median(values) * 1e3, 1) for name, values in times.items()},
                      "ratios": {name: round(statistics.median(values), 2) for name, values in ratios.items()}}))


if __name__ == "__main__":
    main()
