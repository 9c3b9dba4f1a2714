#!/usr/bin/env python3
"""The optimizer's step with states on NVMe beside DeepSpeed's, in alternating rounds on the same disk and cores.

  bench/offload_vs_deepspeed.py --path DIR [--build build] [--parameters 100e6] [--threads 2] [--rounds 5]
                                [--block 1048576] [--depth 8] [--width 2048]

Run it with a Python that has torch and deepspeed, whose async_io (libaio) and cpu_adam ops are built on first use.
Theirs is a whole ZeRO-3 engine on the CPU, with offload_optimizer on NVMe, pipeline_read and pipeline_write: timed is
engine.step() after a backward pass that nobody times, over square layers of which each is one sub-group. Ours is
bench_offload_step, with chunks of as many elements, at the same block size and queue depth. Both have bf16 parameters
in memory and update in turn; theirs keeps fp32 gradients on NVMe too and so moves 28 bytes per parameter. DIR needs
room for 44 bytes per parameter.
Prints one JSON object: median nanoseconds per parameter, and medians of the ratios of each round (above 1: ours is
faster).
"""
import json
import os
import shutil
import statistics
import sys
import tempfile
import time

from contenders import CORES, Contender, options, program

FORMS = ["fp32", "split", "split_moments16"]


def make_ours(a, folder):
    return Contender("sherd", [program(a.build, "bench_offload_step"), "--serve", "--path", folder,
                               "--parameters", a.parameters, "--threads", a.threads, "--block", a.block,
                               "--depth", a.depth, "--sub-group", a.width ** 2, "--forms", ",".join(FORMS)])


class Theirs:
    def __init__(self, a, folder):
        import torch
        import deepspeed
        torch.set_num_threads(a.threads)
        self.torch, self.width = torch, a.width
        layers = max(1, round(a.parameters / a.width ** 2))
        model = torch.nn.Sequential(*[torch.nn.Linear(a.width, a.width, bias=False) for _ in range(layers)])
        self.parameters = layers * a.width ** 2
        offload = {"device": "nvme", "nvme_path": folder, "buffer_count": 12, "pin_memory": True,
                   "pipeline_read": True, "pipeline_write": True}  # 12: three sub-groups of four tensors
        config = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "steps_per_print": 10**9,
                  "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.1}},
                  "aio": {"block_size": a.block, "queue_depth": a.depth, "single_submit": False,
                          "overlap_events": True, "intra_op_parallelism": 1},
                  "zero_optimization": {"stage": 3, "sub_group_size": a.width ** 2, "offload_optimizer": offload,
                                        "stage3_param_persistence_threshold": 0}}
        deepspeed.init_distributed(dist_backend="gloo")
        self.engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
        if type(self.engine.optimizer.optimizer_swapper).__name__ != "PipelinedOptimizerSwapper":
            sys.exit("DeepSpeed does not pipeline its swapping")
        self.version = deepspeed.__version__

    def seconds(self):
        x = self.torch.randn(1, self.width, dtype=self.torch.bfloat16)
        self.engine.backward(self.engine(x).float().pow(2).mean())
        start = time.perf_counter()
        self.engine.step()
        return time.perf_counter() - start


def measure(a, folder):
    theirs, ours = Theirs(a, folder), make_ours(a, folder)
    parameters = ours.start()["parameters"]
    nanoseconds, ratios = {}, {}
    for r in range(a.rounds + 2):
        taken = {}
        for form in FORMS[r % 3:] + FORMS[:r % 3]:
            taken[form] = ours.ask(form) / parameters * 1e9
        taken["deepspeed"] = theirs.seconds() / theirs.parameters * 1e9
        if r < 2:
            continue  # warm-up: DeepSpeed makes its moments in the first step
        for name, value in taken.items():
            nanoseconds.setdefault(name, []).append(value)
        for form in FORMS:
            ratios.setdefault(f"{form}_against_deepspeed", []).append(taken["deepspeed"] / taken[form])
    ours.stop()
    return {"bench": "offload_vs_deepspeed", "deepspeed": theirs.version, "torch": theirs.torch.__version__,
            "parameters": theirs.parameters, "sub_group": a.width ** 2, "threads": a.threads, "block_size": a.block,
            "queue_depth": a.depth, "rounds": a.rounds,
            "ns_per_parameter": {k: round(statistics.median(v), 3) for k, v in nanoseconds.items()},
            "ratios": {k: round(statistics.median(v), 3) for k, v in ratios.items()}}


def main():
    ap = options(__doc__, threads=CORES, rounds=5, block=1 << 20, depth=8)
    ap.add_argument("--width", type=int, default=2048, help="a sub-group has its square of elements")
    ap.add_argument("--path", required=True)
    ap.add_argument("--parameters", type=lambda text: int(float(text)), default=100_000_000)
    a = ap.parse_args()
    if shutil.disk_usage(a.path).free < 48 * a.parameters:
        sys.exit(f"{a.path} has less than {48 * a.parameters} bytes free: name fewer --parameters or another --path")
    one_rank = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29611}
    for key, value in {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": a.threads, **one_rank}.items():
        os.environ.setdefault(key, str(value))  # before torch and the ops start their threads
    out = os.dup(1)
    os.dup2(2, 1)  # DeepSpeed logs to standard output
    with tempfile.TemporaryDirectory(dir=a.path, prefix="offload_vs_deepspeed.") as folder:
        result = measure(a, folder)
    os.write(out, (json.dumps(result) + "\n").encode())


if __name__ == "__main__":
    main()
