#!/usr/bin/env python3
"""Tensor, context and pipeline parallel training steps on the cores of this machine, in alternating rounds.

  bench/parallel_vs_pytorch.py [--config configs/gpt2_small_zero0.json] [--set a.b.c=V]... [--ranks 2]
                               [--seq 512] [--long 8192] [--micro-batches 8] [--rounds 3] [--steps 2] [--python PYTHON_WITH_TORCH]

Each contender trains GPT-2 (no dropout, untied tables) on the same number of tokens of random ids:
  one rank             with --ranks threads
  tensor               --ranks ranks of one thread, each with its slice of every layer (sequence parallel)
  pytorch tensor       the same by PyTorch: parallelize_module and loss_parallel over gloo
and with one sequence of --long tokens: `one rank, long`, `context ring`, `context ulysses`, and `pytorch context`.
With --micro-batches of one sequence: `one rank, accumulating`, --ranks stages by `1f1b` and `zero_bubble`, and `pytorch 1f1b`
(torch.distributed.pipelining over gloo). Of stages the rate of one rank less 1F1B's bubble is the ideal.
Prints a JSON line per round, then ratios of medians of tokens/s, and activations' bytes. Contenders that cannot run here
are named with the reason.
"""
import json
import os
import sys

from contenders import HERE, Contender, alternate, median_of_ratios, medians, options, program
from gpt_configs import as_options, load, override, padded_vocabulary


def parse():
    ap = options(__doc__, ranks=2, batch=4, seq=512, long=8192, micro_batches=8, rounds=3, steps=2)
    ap.add_argument("--config", default=os.path.join(HERE, "..", "configs", "gpt2_small_zero0.json"))
    ap.add_argument("--set", action="append", default=[], metavar="a.b.c=V")
    ap.add_argument("--only", nargs="*", help="names of contenders")
    ap.add_argument("--python", default=sys.executable, help="one that has torch")
    ap.add_argument("--timeout", type=float, default=900)
    return ap.parse_args()


def ours(a, name, ranks, settings):
    common = ["model.dropout=0", "model.tie_embeddings=false", "device.type=cpu",
              f"device.threads_per_rank={a.ranks // ranks}"]
    command = [program(a.build, "bench_train_step"), "--serve", "--ranks", ranks, "--config", a.config,
               *as_options(common + a.set + settings)]
    return Contender(name, command, {"OMP_NUM_THREADS": a.ranks // ranks}, a.timeout)


def torch(a, name, batch, seq, arguments):
    model = override(load(a.config), a.set)["model"]
    command = [a.python, os.path.join(HERE, "gpt2_parallel_pytorch.py"), *arguments, "--threads", 1, "--batch", batch,
               "--seq", seq, "--layers", model["num_layers"], "--hidden", model["hidden_size"], "--heads", model["num_heads"],
               "--vocab", padded_vocabulary(model)]
    return Contender(name, command, {"OMP_NUM_THREADS": 1}, a.timeout)


def contenders(a):
    once = "gradient_accumulation_steps=1"
    short = [f"model.seq_length={a.seq}", f"train_micro_batch_size_per_gpu={a.batch}", once]
    long = [f"model.seq_length={a.long}", "train_micro_batch_size_per_gpu=1", once]
    many = [f"model.seq_length={a.seq}", "train_micro_batch_size_per_gpu=1", f"gradient_accumulation_steps={a.micro_batches}"]
    stages = f"parallel.pipeline={a.ranks}"
    context = f"parallel.context={a.ranks}"
    out = [ours(a, "one rank", 1, short), ours(a, "tensor", a.ranks, short + [f"parallel.tensor={a.ranks}"]),
           torch(a, "pytorch tensor", a.batch, a.seq, ["--tensor", a.ranks]),
           ours(a, "one rank, long", 1, long), ours(a, "context ring", a.ranks, long + [context]),
           ours(a, "context ulysses", a.ranks, long + [context, "parallel.context_method=ulysses"]),
           torch(a, "pytorch context", 1, a.long, ["--context", a.ranks]),
           ours(a, "one rank, accumulating", 1, many),
           *(ours(a, name, a.ranks, many + [stages, f"parallel.schedule={name}"]) for name in ["1f1b", "zero_bubble"]),
           torch(a, "pytorch 1f1b", 1, a.seq, ["--pipeline", a.ranks, "--micro-batches", a.micro_batches])]
    return [c for c in out if not a.only or c.name in a.only]


def main():
    a = parse()
    all_contenders = contenders(a)

    def rate(contender):
        fresh = contender.process is None
        facts = contender.start()
        if fresh:
            contender.ask("steps 1")
        seconds = contender.ask(f"steps {a.steps}")
        contender.facts["report"] = contender.ask("report")
        return a.steps * facts["tokens_per_step"] / seconds

    rounds = []
    for taken in alternate(all_contenders, a.rounds, rate, restart=True):
        rounds.append(taken)
        print(json.dumps({"round": len(rounds) - 1, **{name: round(value, 1) for name, value in taken.items()}}), flush=True)
    taken = medians(rounds)
    ideal = a.micro_batches / (a.micro_batches + a.ranks - 1)  # 1 - bubble
    for contender in all_contenders:
        if contender.name not in taken:
            print(f"{contender.name}: unavailable: {contender.facts.get('unavailable', 'not measured')}")
            continue
        report = contender.facts.get("report", {})
        memory = f", activations at most {report['activation_peak'] / 2 ** 20:.0f} MiB per rank" if "activation_peak" in report else ""
        print(f"{contender.name}: {taken[contender.name]:.0f} tokens/s, loss {report.get('loss', 0):.4f}{memory}")
    for above, below in [("tensor", "one rank"), ("tensor", "pytorch tensor"), ("context ring", "one rank, long"),
                         ("context ulysses", "one rank, long"), ("context ring", "pytorch context"),
                         ("1f1b", "one rank, accumulating"), ("zero_bubble", "one rank, accumulating"),
                         ("1f1b", "pytorch 1f1b"), ("zero_bubble", "pytorch 1f1b")]:
        if above in taken and below in taken:
            print(f"{above} / {below}: {taken[above] / taken[below]:.3f} "
                  f"(of rounds {median_of_ratios(rounds, above, below):.3f})"
                  + (f", of the ideal {taken[above] / taken[below] / ideal:.3f}" if "accumulating" in below else ""))


if __name__ == "__main__":
    main()
