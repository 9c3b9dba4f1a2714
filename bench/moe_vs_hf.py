#!/usr/bin/env python3
"""A layer of experts beside Hugging Face's Mixtral block and beside a dense layer, in alternating rounds on the same cores.

  bench/moe_vs_hf.py [--build build] [--hidden 768] [--ffn 3072] [--experts 8] [--top-k 2] [--batch 4] [--seq 512]
                     [--threads 2] [--rounds 7] [--peers eager,grouped_mm]

Run it with a Python that has torch and transformers 5 or newer; with `--peers ""` any will do. Everything runs forward and
backward in bf16, with gradients of the input and of all weights in bf16. Peers are transformers' implementations of the
experts of MixtralSparseMoeBlock (SwiGLU). (Its batched_mm copies an expert's weights for each row, 57 GB at these sizes.)
Ours are "moe" and, of as many multiply-adds per token, "dense", with SwiGLU and with GELU. Prints one JSON object: median
milliseconds, Gflop/s of the experts' products, the seconds of ours in each family of kernels, and ratios of medians: how
many times ours is faster than each peer, and our experts' rate by the dense layer's.
"""
import json
import os
import statistics
import time

from contenders import CORES, Contender, options, program


class Theirs:
    def __init__(self, a, implementation):
        import torch
        from transformers import MixtralConfig
        from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
        torch.set_num_threads(a.threads)
        torch.manual_seed(1)
        config = MixtralConfig(hidden_size=a.hidden, intermediate_size=a.ffn, num_local_experts=a.experts,
                               num_experts_per_tok=a.top_k)
        config._experts_implementation = implementation
        self.block = MixtralSparseMoeBlock(config).to(torch.bfloat16)
        for weight in self.block.parameters():
            torch.nn.init.normal_(weight, std=0.02)
        self.x = torch.randn(a.batch, a.seq, a.hidden).to(torch.bfloat16).requires_grad_()
        self.dy = (torch.randn(self.x.shape) * 1e-3).to(torch.bfloat16)

    def seconds(self):
        for tensor in (self.x, *self.block.parameters()):
            tensor.grad = None
        start = time.perf_counter()
        self.block(self.x).backward(self.dy)
        return time.perf_counter() - start


def main():
    ap = options(__doc__, hidden=768, ffn=3072, experts=8, top_k=2, batch=4, seq=512, threads=CORES, rounds=7)
    ap.add_argument("--peers", default="eager,grouped_mm")
    a = ap.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(a.threads)  # before torch starts its threads
    theirs = {name: Theirs(a, name) for name in a.peers.split(",") if name}
    command = [program(a.build, "bench_moe_step")]
    for name in ("hidden", "ffn", "experts", "top_k", "batch", "seq", "threads"):
        command += ["--" + name.replace("_", "-"), getattr(a, name)]
    ours = {kind: Contender(kind, command + options, env={"OMP_NUM_THREADS": 1})
            for kind, options in (("swiglu", ["--gated"]), ("gelu", []))}
    flops = {kind: our.start()["flops"] for kind, our in ours.items()}
    times, parts = {}, {}
    for r in range(a.rounds + 1):
        seconds = {name: their.seconds() for name, their in theirs.items()}
        for kind, our in ours.items():
            for case in ("moe", "dense"):
                told = our.ask(case)
                seconds[f"{case}_{kind}"] = told.pop("seconds")
                for family, value in told.items() if r else ():
                    parts.setdefault(f"{case}_{kind}", {}).setdefault(family, []).append(value)
        for name, value in seconds.items() if r else ():  # the first round warms up
            times.setdefault(name, []).append(value)
    for our in ours.values():
        our.stop()
    median = {name: statistics.median(values) for name, values in times.items()}
    ratios = {f"{name}_by_moe": median[name] / median["moe_swiglu"] for name in theirs}
    ratios |= {f"rate_by_dense_{kind}": median[f"dense_{kind}"] / median[f"moe_{kind}"] for kind in ours}
    versions = {}
    if theirs:
        import torch
        import transformers
        versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    print(json.dumps({"bench": "moe_vs_hf", **versions, **{name: value for name, value in vars(a).items()
                                                           if name not in ("build", "peers")},
                      "ms": {name: round(value * 1e3, 1) for name, value in median.items()},
                      "gflops": {name: round(flops.get(name.split("_")[-1], flops["swiglu"]) / value / 1e9, 1)
                                 for name, value in median.items()},
                      "kernel_ms": {name: {family: round(statistics.median(values) * 1e3, 2)
                                           for family, values in families.items()} for name, families in parts.items()},
                      "ratios": {name: round(value, 3) for name, value in ratios.items()}}))


if __name__ == "__main__":
    main()
