#!/usr/bin/env python3
"""Layered accumulation with everything on NVMe beside `accumulate`, and beside the same model on the device.

  bench/layered.py --path DIR [--model gpt2_small] [--accumulation 8 32] [--only NAME...] [--set a.b.c=V]...
                   [--rounds 5] [--steps 4] [--threads 2] [--recompute none] [--build build] [--deepspeed PYTHON]

One rank trains a GPT (GPT-2 small, one of 350 million parameters, or GPT-2 XL; micro-batches of 128 tokens) on random
tokens, in alternating rounds of bench_train_step; each turn is --steps steps. DIR needs 50 bytes per parameter.
Contenders: `on_device` (accumulate, every state in memory, no recompute), `in_memory` (layered, every state in memory),
`accumulate` and `layered` with all on NVMe, with clipping and, as `layered_unclipped`, without clipping and overflow check.
GPT-2 XL does not fit the first two's memory here: take --only accumulate layered.

The bound is what layered cannot beat: computing takes what `in_memory` takes; what travels, by the counts of a step, at the
drive's rate measured while `in_memory` computes. With clipping the update's transfers hide behind forward alone (a third
of a step without recompute, a quarter with full), and parameters of backward behind backward; without, all of them behind
all of the step. With --deepspeed, a Python that has it, its ZeRO-3 with everything on the same drive takes turns too
(gpt2_pytorch.py), with clipping.
Prints a JSON line per round and one of all per accumulation: median seconds, ratios of medians, and bounds.
"""
import json
import os
import statistics
import subprocess
import sys

from contenders import CORES, HERE, Contender, Unavailable, alternate, medians, options, program
from gpt_configs import as_options

CONFIGS = os.path.join(HERE, "..", "configs")
SIZES = {"gpt2_small": (12, 768, 12), "gpt_350m": (24, 1024, 16), "gpt2_xl": (48, 1600, 25)}  # layers, hidden, heads
VOCABULARY = 50304


def parse():
    ap = options(__doc__, rounds=5, steps=4, threads=CORES)
    ap.add_argument("--path", required=True)
    ap.add_argument("--model", default="gpt2_small", choices=SIZES)
    ap.add_argument("--only", nargs="*", metavar="NAME", help="of the contenders; default all")
    ap.add_argument("--accumulation", type=int, nargs="*", default=[8, 32])
    ap.add_argument("--set", action="append", default=[], metavar="a.b.c=V")
    ap.add_argument("--recompute", default="none", choices=["none", "selective", "full"])
    ap.add_argument("--deepspeed", metavar="PYTHON")
    ap.add_argument("--timeout", type=float, default=900)
    return ap.parse_args()


def model_options(a):
    """Of the configuration files, which are GPT-2 small's. What is cached or staged has room for the largest parameter."""
    layers, hidden, heads = SIZES[a.model]
    table, block = VOCABULARY * hidden, 12 * hidden * hidden
    return [f"model.num_layers={layers}", f"model.hidden_size={hidden}", f"model.num_heads={heads}",
            "model.seq_length=128", f"zero_optimization.offload_param.buffer_size={round(1.03 * table)}",
            f"zero_optimization.stage3_max_live_parameters={round(max(0.75 * table, 4 * block))}"]


def contenders_of(a, micro_batches):
    nvme = [f"zero_optimization.{part}.nvme_path={a.path}" for part in ("offload_param", "offload_optimizer")]
    unclipped = ["gradient_clipping=0", "bf16.check_grad_overflow=false"]
    recompute = [f"training.recompute={a.recompute}"]
    kinds = {"on_device": ("on_device", ["parallel.schedule=accumulate"]),
             "in_memory": ("on_device", ["parallel.schedule=layered", *recompute]),
             "accumulate": ("everything_on_nvme", ["parallel.schedule=accumulate", *nvme, *recompute]),
             "layered": ("everything_on_nvme", ["parallel.schedule=layered", *nvme, *recompute]),
             "layered_unclipped": ("everything_on_nvme", ["parallel.schedule=layered", *nvme, *recompute, *unclipped])}
    sizes = {"on_device": model_options(a)[:4], "everything_on_nvme": model_options(a)}
    out = []
    for name, (config, keys) in kinds.items():
        folder = [key if "nvme_path" not in key else f"{key}/{name}" for key in keys]
        if any("nvme_path" in key for key in keys):
            os.makedirs(os.path.join(a.path, name), exist_ok=True)
        out.append(Contender(name, [program(a.build, "bench_train_step"), "--serve", "--config",
                                    os.path.join(CONFIGS, f"gpt2_small_{config}.json"),
                                    *as_options([f"gradient_accumulation_steps={micro_batches}",
                                                 "train_micro_batch_size_per_gpu=1", *sizes[config],
                                                 f"device.threads_per_rank={a.threads}", *folder, *a.set])],
                             {"OMP_NUM_THREADS": a.threads}, a.timeout))
    if a.deepspeed:
        layers, hidden, heads = SIZES[a.model]
        folder = os.path.join(a.path, "deepspeed")
        os.makedirs(folder, exist_ok=True)
        out.append(Contender("deepspeed", [a.deepspeed, os.path.join(HERE, "gpt2_pytorch.py"), "--serve", "--sharding",
                                           "deepspeed", "--nvme", folder, "--threads", a.threads, "--batch", 1,
                                           "--seq", 128, "--vocab", VOCABULARY, "--layers", layers, "--hidden", hidden,
                                           "--heads", heads, "--accumulation", micro_batches],
                             {"OMP_NUM_THREADS": a.threads}, a.timeout))
    return [contender for contender in out if not a.only or contender.name in a.only]


class Turns:
    """Seconds of a step; of what lies on NVMe also the bytes."""

    def __init__(self, a):
        self.a, self.bytes = a, {}

    def __call__(self, contender):
        if contender.process is None:
            contender.start()
            contender.ask("steps 2")
        before = contender.ask("report")
        seconds = contender.ask(f"steps {self.a.steps}") / self.a.steps
        after = contender.ask("report")
        if "nvme_read" not in after:
            return seconds
        self.bytes[contender.name] = [(after[k] - before[k]) / self.a.steps for k in ("nvme_read", "nvme_written")]
        return seconds


def drive_rate(a, computing):
    """Bytes per second of reads and writes in turn, while `computing` uses the cores."""
    store = subprocess.Popen([program(a.build, "bench_store"), "--folder", a.path, "--mode", "mixed", "--seconds", "4"],
                             stdout=subprocess.PIPE, text=True)
    while store.poll() is None:
        computing.ask("steps 1")
    answer = json.loads(store.stdout.read().strip().splitlines()[-1])
    return answer["gb_per_s"] * 1e9


def bounds(a, taken, moved, rate):
    """With clipping, and without: seconds."""
    compute = taken["in_memory"]
    forward = compute * (0.25 if a.recompute == "full" else 1 / 3)
    read, written = moved["layered"]
    update = 2 * written  # what it writes it has read
    clipped = max(forward, update / rate) + max(compute - forward, (read + written - update) / rate)
    return {"layered": clipped, "layered_unclipped": max(compute, sum(moved["layered_unclipped"]) / rate)}


def measure(a, micro_batches):
    contenders, rounds, turns = contenders_of(a, micro_batches), [], Turns(a)
    rates = []

    def turn(contender):
        seconds = turns(contender)
        if contender.name == "in_memory":
            rates.append(drive_rate(a, contender))
        return seconds

    for taken in alternate(contenders, a.rounds, turn):
        rounds.append(taken)
        print(json.dumps({"round": len(rounds), "micro_batches": micro_batches,
                          "step_s": {k: round(v, 3) for k, v in taken.items()}}), flush=True)
    for contender in contenders:
        if "unavailable" in contender.facts:
            print(f"{contender.name}: {contender.facts['unavailable']}", file=sys.stderr)
    taken = medians(rounds)
    rate = statistics.median(rates) if rates else 0
    limit = bounds(a, taken, turns.bytes, rate) if rate and {"layered", "layered_unclipped"} <= taken.keys() else {}
    of_device = {k: round(v / taken["on_device"], 3) for k, v in taken.items()} if "on_device" in taken else {}
    print(json.dumps({"bench": "layered", "model": a.model, "micro_batches": micro_batches,
                      "recompute": a.recompute, "rounds": len(rounds),
                      "step_s": {k: round(v, 3) for k, v in taken.items()}, "of_on_device": of_device,
                      "times_faster_than_deepspeed": {k: round(taken["deepspeed"] / v, 2) for k, v in taken.items()}
                                                     if "deepspeed" in taken else {},
                      "gb_read_written": {k: [round(b / 1e9, 3) for b in v] for k, v in turns.bytes.items()},
                      "drive_gb_per_s": round(rate / 1e9, 2), "bound_s": {k: round(v, 3) for k, v in limit.items()},
                      "of_bound": {k: round(v / taken[k], 3) for k, v in limit.items()}}))


def main():
    a = parse()
    for micro_batches in a.accumulation:
        try:
            measure(a, micro_batches)
        except Unavailable as why:
            sys.exit(str(why))


if __name__ == "__main__":
    main()
