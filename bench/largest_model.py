#!/usr/bin/env python3
"""The largest GPT that trains in so much memory of one GPU, with host memory and NVMe behind it.

  bench/largest_model.py [--config configs/gpt_6_7b_on_a_16gb_gpu.json] [--limit 15GB] [--nvme DIR] [--device cuda|cpu]
                         [--build build] [--seconds 500] [--set a.b.c=V]... [--widths 4096,5120]

Sizes are walked up with `sherd estimate`, which computes nothing: for each placement of the states (optimizer and parameters
on the host or on NVMe) the largest size of a ladder of widths and depths that fits this machine. The largest of all
is then trained for two steps by bench_train_step; where that fails, another placement's or a smaller one. --limit is what Sherd may book
(device.device_memory_limit); leave a gigabyte of a card to its driver. --seconds bounds the whole.
Prints JSON lines, then lines "name: figures".
"""
import json
import os
import shutil
import subprocess
import sys
import time

from contenders import HERE, Unavailable, options, program, run_json
from gpt_configs import as_options, load, override, padded_vocabulary

PLACEMENTS = {
    "optimizer on host, parameters on NVMe": [],
    "everything on host": ["zero_optimization.offload_param.device=cpu"],
    "optimizer on NVMe, parameters on host": ["zero_optimization.offload_optimizer.device=nvme",
                                              "zero_optimization.offload_param.device=cpu"],
    "everything but gradients on NVMe": ["zero_optimization.offload_optimizer.device=nvme"],
}
WIDTHS = [768, 1024, 1536, 2048, 2560, 3072, 4096, 5120, 6144, 8192, 10240, 12288]


class Size:
    """A GPT of the ladder."""

    def __init__(self, width, depth, model):
        self.width, self.depth = width, depth
        self.block = 12 * width ** 2 + 13 * width
        self.root = (padded_vocabulary(model) + model["seq_length"] + 2) * width  # both tables and the last norm
        self.parameters = depth * self.block + self.root

    def sets(self):
        heads = self.width // (128 if self.width % 128 == 0 else 64)
        largest = max(self.block, self.root)  # elements that one read ahead, one gather and one bucket must hold
        return [f"model.hidden_size={self.width}", f"model.num_layers={self.depth}", f"model.num_heads={heads}",
                f"zero_optimization.offload_param.buffer_size={largest + 65536}",
                f"zero_optimization.stage3_prefetch_bucket_size={2 * self.block}",
                f"zero_optimization.stage3_max_live_parameters={largest + 3 * self.block}",
                f"zero_optimization.reduce_bucket_size={self.block}"]

    def __str__(self):
        return f"{self.parameters / 1e9:.3g}B ({self.depth} x {self.width})"


def ladder(widths, model):
    sizes = [Size(width, depth, model) for width in widths for depth in range(4, 129, 4)
             if 24 <= width / depth <= 256]
    return sorted(sizes, key=lambda size: size.parameters)


def available_memory():
    with open("/proc/meminfo", encoding="ascii") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return 0


class Search:
    def __init__(self, a):
        self.a = a
        self.sets = [f"device.type={a.device}", f"device.device_memory_limit={a.limit}", *a.set]
        if a.nvme:
            self.sets += [f"zero_optimization.offload_{what}.nvme_path={a.nvme}" for what in ("param", "optimizer")]
        self.model = override(load(a.config), self.sets)["model"]
        self.end = time.monotonic() + a.seconds
        os.makedirs(self.nvme_folder(), exist_ok=True)

    def nvme_folder(self):
        return override(load(self.a.config), self.sets)["zero_optimization"]["offload_param"]["nvme_path"]

    def options(self, size, placement):
        nvme = [f"zero_optimization.offload_optimizer.nvme_path={self.nvme_folder()}"]
        return ["--config", self.a.config, *as_options(self.sets + nvme + size.sets() + PLACEMENTS[placement])]

    def lacks(self, size, placement):
        """What this machine has too little of, with a tenth of the host's memory and of the drive to spare; nothing: it
        fits."""
        done = subprocess.run([os.path.join(self.a.build, "sherd"), "estimate", "--json",
                               *self.options(size, placement)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        if done.returncode not in (0, 3):  # 3: it does not fit
            sys.exit(f"largest_model: sherd estimate: {done.stderr.strip()[-400:]}")
        told = json.loads(done.stdout)
        known = "the memory of this machine" if self.a.host_memory else None  # by the caller, better than by the system
        missing = [lack["what"] for lack in told["missing"] if lack["what"] != known]
        if missing:
            return missing[0]
        peaks = {tier: book["peak"]["total"] for tier, book in told["tiers"].items()}
        if peaks["host"] > 0.9 * (self.a.host_memory or available_memory()):
            return "the host's memory"
        if peaks["nvme"] > 0.9 * shutil.disk_usage(self.nvme_folder()).free:
            return "the drive's space"
        return None

    def largest(self, sizes, placement):
        """Index of the largest size that fits (-1: none), and what the next one lacks."""
        low, high, lack = -1, len(sizes), None
        while high - low > 1:
            middle = (low + high) // 2
            lacking = self.lacks(sizes[middle], placement)
            if lacking:
                high, lack = middle, lacking
            else:
                low = middle
        return low, lack

    def left(self):
        return self.end - time.monotonic()

    def train(self, size, placement):
        """Trains two steps, in no more than most of the time that is left."""
        return run_json([program(self.a.build, "bench_train_step"), "--warmup", 0, "--steps", 2,
                         *self.options(size, placement)], timeout=0.65 * self.left())


def tell(a, size, placement, lack, result):
    report = result["report"]
    gpu = f", {report['gpu_in_use'] / 1e9:.1f} GB of the card in use" if "gpu_in_use" in report else ""
    beyond = f"the next size lacks {lack}" if lack else "no larger size was tried"
    print(f"largest model in {a.limit}: {size}: {placement}; device {report['device_peak'] / 1e9:.2f} GB{gpu}, host"
          f" {report['host_peak'] / 1e9:.1f} GB, NVMe {report['nvme_peak'] / 1e9:.1f} GB; {result['step_s']:.3g} s a step,"
          f" {result['tokens_per_s']:.0f} tokens/s; {beyond}")


def parse():
    ap = options(__doc__)
    ap.add_argument("--config", default=os.path.join(HERE, "..", "configs", "gpt_6_7b_on_a_16gb_gpu.json"))
    ap.add_argument("--set", action="append", default=[], metavar="a.b.c=V")
    ap.add_argument("--limit", default="15GB")
    ap.add_argument("--nvme", help="a folder on the drive (default: the configuration's)")
    ap.add_argument("--host-memory", type=float, metavar="BYTES", help="of the machine, where the system does not say it")
    ap.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    ap.add_argument("--seconds", type=float, default=500)
    ap.add_argument("--widths", type=lambda text: [int(word) for word in text.split(",")], default=WIDTHS)
    ap.add_argument("--placements", nargs="+", choices=list(PLACEMENTS), default=list(PLACEMENTS))
    return ap.parse_args()


def main():
    a = parse()
    search = Search(a)
    sizes, found = ladder(a.widths, search.model), []
    for placement in a.placements:
        index, lack = search.largest(sizes, placement)
        print(json.dumps({"placement": placement, "fits": str(sizes[index]) if index >= 0 else None, "next_lacks": lack}),
              flush=True)
        if index >= 0:
            found.append((index, placement, lack))
    attempts, tried = sorted(found, key=lambda f: -f[0]), []
    while attempts and len(tried) < 5 and search.left() > 5:
        index, placement, lack = attempts.pop(0)
        size = sizes[index]
        try:
            result = search.train(size, placement)
        except Unavailable as why:
            tried.append(f"{size}, {placement}: {why}")
            print(json.dumps({"failed": str(size), "placement": placement, "why": str(why)}), flush=True)
            while index >= 0 and sizes[index].parameters > 0.85 * size.parameters:
                index -= 1
            if index >= 0:
                attempts.append((index, placement, f"something that the estimate did not see: {str(why)[-160:]}"))
            continue
        print(json.dumps({"bench": "largest_model", "size": str(size), "parameters": size.parameters,
                          "placement": placement, "limit": a.limit, **result}), flush=True)
        return tell(a, size, placement, lack, result)
    print(f"largest model in {a.limit}: none trained: {'; '.join(tried[:2]) or 'no size fits'}")
    sys.exit(1)


if __name__ == "__main__":
    main()
