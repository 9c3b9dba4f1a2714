#!/usr/bin/env python3
"""LoRA training steps of GPT-2 small: Sherd beside PEFT on PyTorch, in alternating rounds on the same cores.

  bench/lora_vs_peft.py [--python PYTHON_WITH_PEFT] [--build build] [--modes bf16 fp32] [--targets c_attn]
                        [--rank 8] [--batch 4] [--seq 512] [--rounds 3] [--steps 2] [--threads 2] [--recompute full]
              [--base nf4]

Both train the same adapter on transformers' GPT-2 shape without dropout, on one batch of random tokens, with clipping
and AdamW. PEFT's model is transformers' GPT2LMHeadModel with SDPA: `peft` with all weights in the mode's dtype,
`peft-compiled` through torch.compile, and of bf16 `peft-autocast` with fp32 weights. With --base Sherd keeps its base
so, beside `sherd-compute`, which keeps it as it computes, and `peft-bnb` has bitsandbytes' 4 bits. Prints a JSON line per round, then
per peer the ratio of medians of tokens/s (above 1: Sherd is faster) and the median of the rounds' ratios.
"""
import json
import os
import sys
import tempfile
import time

from contenders import Contender, alternate, median_of_ratios, medians, options, program

PEERS = {"bf16": ["peft", "peft-compiled", "peft-autocast", "peft-bnb"], "fp32": ["peft", "peft-compiled", "peft-bnb"]}


def parse():
    ap = options(__doc__, rank=8, batch=4, seq=512, layers=12, rounds=3, threads=2)
    ap.add_argument("--steps", type=int, default=2, help="of a turn")
    ap.add_argument("--modes", nargs="+", default=["bf16", "fp32"], choices=list(PEERS))
    ap.add_argument("--against", nargs="+", default=["peft", "peft-compiled", "peft-autocast"])
    ap.add_argument("--base", default="compute", help="training.adapter.base_format")
    ap.add_argument("--targets", default="c_attn", help="all-linear, or names with commas between")
    ap.add_argument("--recompute", choices=["none", "full"], default="none")
    ap.add_argument("--python", default=sys.executable, help="one that has peft")
    ap.add_argument("--timeout", type=float, default=600)
    ap.add_argument("--serve", metavar="PEER", help="be that peer")
    return ap.parse_args()


def targets(a):
    return a.targets if a.targets == "all-linear" else a.targets.split(",")


class Peer:
    def __init__(self, a, name, mode):
        import peft
        import torch
        import transformers
        self.a, self.torch = a, torch
        torch.set_num_threads(a.threads)
        torch.manual_seed(1)
        config = transformers.GPT2Config(n_positions=a.seq, n_layer=a.layers, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
                                         use_cache=False)
        pure = mode == "bf16" and name != "peft-autocast"
        dtype = torch.bfloat16 if pure else torch.float32
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=dtype)
        if name == "peft-bnb":
            how = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)
            with tempfile.TemporaryDirectory() as folder:
                model.save_pretrained(folder)
                model = transformers.AutoModelForCausalLM.from_pretrained(
                    folder, attn_implementation="sdpa", dtype=dtype, quantization_config=how, device_map="cpu")
        adapter = peft.LoraConfig(r=a.rank, lora_alpha=a.rank, target_modules=targets(a), fan_in_fan_out=True)
        self.model = peft.get_peft_model(model, adapter, autocast_adapter_dtype=not pure).train()
        if a.recompute == "full":
            self.model.enable_input_require_grads()
            self.model.base_model.model.gradient_checkpointing_enable({"use_reentrant": False})
        self.trained = [p for p in self.model.parameters() if p.requires_grad]
        self.run = torch.compile(self.model) if name == "peft-compiled" else self.model
        self.optimizer = torch.optim.AdamW(self.trained, lr=1e-4, fused=True)
        self.autocast = torch.autocast("cpu", torch.bfloat16, enabled=name == "peft-autocast")
        self.tokens = torch.randint(0, config.vocab_size, (a.batch, a.seq))

    def step(self):
        with self.autocast:
            loss = self.run(input_ids=self.tokens, labels=self.tokens).loss
        loss.backward()
        self.torch.nn.utils.clip_grad_norm_(self.trained, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def steps(self, count):
        begin = time.perf_counter()
        for _ in range(count):
            self.step()
        return time.perf_counter() - begin


def serve(a):
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries log to standard output
    name, mode = a.serve.split(":")
    peer = Peer(a, name, mode)
    facts = {"peer": name, "trained": sum(p.numel() for p in peer.trained), "torch": peer.torch.__version__}
    print("ready", json.dumps(facts), file=out, flush=True)
    for line in sys.stdin:
        print(json.dumps(peer.steps(int(line.split()[1]))), file=out, flush=True)


def ours(a, mode, folder, base):
    config = {"train_micro_batch_size_per_gpu": a.batch, "gradient_accumulation_steps": 1, "gradient_clipping": 1.0,
              "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}, "bf16": {"enabled": mode == "bf16"},
              "model": {"type": "gpt2", "vocab_size": 50257, "seq_length": a.seq, "hidden_size": 768,
                        "num_layers": a.layers, "num_heads": 12, "dropout": 0},
              "training": {"steps": 1, "recompute": a.recompute,
                           "adapter": {"type": "lora", "rank": a.rank, "alpha": a.rank, "targets": targets(a),
                                       "base_format": base}},
              "device": {"type": "cpu", "threads_per_rank": a.threads}}
    path = os.path.join(folder, f"{mode}-{base}.json")
    with open(path, "w", encoding="utf-8") as file:
        json.dump(config, file)
    return [program(a.build, "bench_train_step"), "--serve", "--config", path]


def compare(a, mode, folder):
    env = {"OMP_NUM_THREADS": a.threads}
    contenders = [Contender("sherd", ours(a, mode, folder, a.base), env, a.timeout)]
    if a.base != "compute":
        contenders.append(Contender("sherd-compute", ours(a, mode, folder, "compute"), env, a.timeout))
    same = ["--targets", a.targets, "--rank", a.rank, "--batch", a.batch, "--seq", a.seq, "--layers", a.layers,
            "--threads", a.threads, "--recompute", a.recompute]
    for name in PEERS[mode]:
        if name in a.against:
            contenders.append(Contender(name, [a.python, os.path.abspath(__file__), "--serve", f"{name}:{mode}", *same],
                                        env, a.timeout))

    def rate(contender):
        fresh = contender.process is None
        contender.start()
        if fresh:
            contender.ask("steps 1")
        return a.steps * a.batch * a.seq / contender.ask(f"steps {a.steps}")

    rounds = []
    for taken in alternate(contenders, a.rounds, rate):
        rounds.append(taken)
        print(json.dumps({"mode": mode, "round": len(rounds), "tokens_per_s": {k: round(v, 1) for k, v in taken.items()}}),
              flush=True)
    taken = medians(rounds)
    for contender in contenders[1:]:
        name = contender.name
        if name not in taken:
            print(f"{mode}, {name}: unavailable: {contender.facts.get('unavailable', 'not measured')}")
            continue
        print(f"{mode}, sherd / {name}: {taken['sherd'] / taken[name]:.3f} (of rounds "
              f"{median_of_ratios(rounds, 'sherd', name):.3f}); sherd {taken['sherd']:.0f}, {name} {taken[name]:.0f} tokens/s")


def main():
    a = parse()
    if a.serve:
        return serve(a)
    with tempfile.TemporaryDirectory() as folder:
        for mode in a.modes:
            compare(a, mode, folder)


if __name__ == "__main__":
    main()
