#!/usr/bin/env python3
"""Training steps of one rank: Sherd beside PyTorch, FSDP and DeepSpeed on the same card (or cores), in alternating rounds.

  bench/train_vs_peers.py --config configs/gpt_1_3b_on_one_gpu.json [--set a.b.c=V]... [--against compiled ...]
                          [--accumulation N] [--rounds 3] [--seconds 3 | --steps N] [--device cuda|cpu] [--build build]
                          [--target compiled:1.1] [--target-mfu 0.5]

All sides train the configuration's model, a GPT-2 without dropout, on one batch of random tokens, with clipping and
AdamW. Everybody keeps running for all rounds; each turn makes as many optimizer steps as fill --seconds, timed from
an idle device to an idle device. Contenders:
  sherd                the configuration as it is; `sherd-offload` with optimizer states in host memory, updated by the
                       processor; `sherd-fast-attention` with attention's gradient that sums atomically;
                       `sherd-graphs` with CUDA graphs; `sherd-fp8` with products in FP8, `sherd-fp8-current` with one
                       scale a tensor
  eager, compiled      PyTorch with SDPA and fused AdamW in pure bf16 (weights and moments); `autocast`,
                       `autocast-compiled` with fp32 weights, as Sherd's masters are
  fsdp, fsdp-offload, deepspeed, deepspeed-offload     a world of one rank
Prints a JSON line per round and contender and one of all; then lines "name: figures". Contenders that cannot run here
are named with the reason, and the others measured. MFU counts 6 FLOPs per parameter of a product and token, and the
causal half of attention's; in brackets all of it.
"""
import json
import math
import os
import signal
import sys

from contenders import CORES, HERE, Contender, alternate, median_of_ratios, medians, options, program
from gpt_configs import as_options, load, override, pytorch_options

OURS = {"sherd": [], "sherd-offload": ["zero_optimization.offload_optimizer.device=cpu"],
        "sherd-fast-attention": ["device.deterministic_attention=false"], "sherd-graphs": ["device.cuda_graphs=true"],
        "sherd-fp8": ["fp8.enabled=true"], "sherd-fp8-current": ["fp8.enabled=true", "fp8.recipe=current"]}
PEERS = {"eager": ["--mode", "bf16"], "compiled": ["--mode", "bf16", "--compile"],
         "autocast": ["--mode", "autocast"], "autocast-compiled": ["--mode", "autocast", "--compile"],
         "fsdp": ["--sharding", "fsdp"], "fsdp-offload": ["--sharding", "fsdp", "--offload"],
         "deepspeed": ["--sharding", "deepspeed"], "deepspeed-offload": ["--sharding", "deepspeed", "--offload"]}


def parse():
    ap = options(__doc__, rounds=3, threads=CORES)
    ap.add_argument("--warmup", type=int, default=2, help="steps before the first round")
    ap.add_argument("--config", required=True)
    ap.add_argument("--set", action="append", default=[], metavar="a.b.c=V")
    ap.add_argument("--against", nargs="*", default=["eager", "compiled"], choices=[*OURS, *PEERS])
    ap.add_argument("--accumulation", type=int)
    ap.add_argument("--seconds", type=float, default=3, help="that a turn lasts at least")
    ap.add_argument("--steps", type=int, help="steps of every turn, instead of --seconds")
    ap.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    ap.add_argument("--python", default=sys.executable, help="one that has torch")
    ap.add_argument("--timeout", type=float, default=300, help="seconds that a contender may take to start or answer")
    ap.add_argument("--restart", action="store_true", help="one contender at a time holds memory")
    ap.add_argument("--target", action="append", default=[], metavar="NAME:RATIO",
                    help="what Sherd's tokens/s by NAME's should be (or, for one of ours, what NAME's by Sherd's should)")
    ap.add_argument("--target-mfu", type=float)
    a = ap.parse_args()
    a.set = ["model.dropout=0", f"device.type={a.device}", f"device.threads_per_rank={a.threads}", *a.set]
    if a.accumulation:
        a.set.append(f"gradient_accumulation_steps={a.accumulation}")
    return a


def make_contenders(a):
    config = override(load(a.config), a.set)
    out = []
    for name in dict.fromkeys(["sherd", *a.against]):
        if name in OURS:
            command = [program(a.build, "bench_train_step"), "--serve", "--config", a.config,
                       *as_options(a.set + OURS[name])]
        else:
            command = [a.python, os.path.join(HERE, "gpt2_pytorch.py"), "--serve", "--device", a.device,
                       "--threads", a.threads, *PEERS[name], *pytorch_options(config)]
        out.append(Contender(name, command, {"OMP_NUM_THREADS": a.threads}, a.timeout))
    return out


class Turns:
    """Tokens per second of one contender's turn."""

    def __init__(self, a):
        self.a, self.steps = a, {}

    def __call__(self, contender):
        fresh = contender.process is None
        facts = contender.start()
        if fresh and self.a.warmup:
            contender.ask(f"steps {self.a.warmup}")
        if contender.name not in self.steps:
            self.steps[contender.name] = self.a.steps or math.ceil(self.a.seconds / contender.ask("steps 1"))
        steps = self.steps[contender.name]
        rate = steps * facts["tokens_per_step"] / contender.ask(f"steps {steps}")
        contender.facts["report"] = contender.ask("report")
        if contender.name in PEERS:
            contender.ask("release")  # what only its allocator holds
        elif "phases" not in facts:
            contender.facts["phases"] = contender.ask("phases")
        return rate


def mfu(facts, rate):
    """Of the GPU's peak, attention counted by half and as a whole; nothing where no peak is known."""
    peak = facts.get("peak_flops") or 0
    return [rate * facts[key] / peak for key in ("flops_per_token", "flops_per_token_full_attention")] if peak else None


def verdict(value, target):
    return "" if target is None else f", target {target:g}: {'reached' if value >= target else 'MISSED'}"


def title_of(a):
    name = os.path.splitext(os.path.basename(a.config))[0]
    return f"{name} x{a.accumulation}" if a.accumulation else name


def print_rows(a, contenders, rounds):
    """The lines that people, and scripts/gpu-check, read."""
    title, taken, targets = title_of(a), medians(rounds), dict(t.rsplit(":", 1) for t in a.target)
    for contender in contenders:
        if contender.name not in taken:
            print(f"{title}, {contender.name}: unavailable: {contender.facts.get('unavailable', 'not measured')}")
            continue
        rate, facts = taken[contender.name], contender.facts
        line = f"{rate:.0f} tokens/s"
        shares = mfu(contenders[0].facts, rate)  # the same work, and the same card
        if shares:
            line += f", MFU {shares[0]:.3f} ({shares[1]:.3f})"
            line += verdict(shares[0], a.target_mfu if contender.name == "sherd" else None)
        if "device_peak" in facts["report"]:
            line += f", peak {facts['report']['device_peak'] / 2 ** 30:.1f} GiB"
        own = facts["report"].get("attention_by_own_kernels", 0)
        if own:
            calls = own + facts["report"]["attention_by_library"]
            line += f", attention not by cuDNN in {own} of {calls} calls"
        print(f"{title}, {contender.name}: {line}")
    for contender in contenders[1:]:
        if contender.name not in taken or "sherd" not in taken:
            continue
        above, below = (contender.name, "sherd") if contender.name in OURS else ("sherd", contender.name)
        ratio, target = taken[above] / taken[below], targets.get(contender.name)
        print(f"{title}, {above} / {below}: {ratio:.3f}"
              f" (of rounds {median_of_ratios(rounds, above, below):.3f})"
              f"{verdict(ratio, float(target) if target else None)}")


def stop(*_):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise KeyboardInterrupt


def main():
    a = parse()
    contenders, rounds = make_contenders(a), []
    turns = Turns(a)
    signal.signal(signal.SIGTERM, stop)
    try:
        for taken in alternate(contenders, a.rounds, turns, a.restart):
            rounds.append(taken)
            print(json.dumps({"round": len(rounds), "tokens_per_s": {k: round(v, 1) for k, v in taken.items()}}),
                  flush=True)
    except KeyboardInterrupt:  # tells what whole rounds gave
        for contender in contenders:
            contender.stop()
    print(json.dumps({"bench": "train_vs_peers", "config": a.config, "set": a.set, "rounds": len(rounds),
                      "steps_per_turn": turns.steps, "tokens_per_s": medians(rounds),
                      "facts": {c.name: c.facts for c in contenders}}))
    print_rows(a, contenders, rounds)
    if not any("sherd" in taken for taken in rounds):
        sys.exit(1)


if __name__ == "__main__":
    main()
