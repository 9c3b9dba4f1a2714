#!/usr/bin/env python3
"""DPO steps of a LoRA adapter on GPT-2 small: `sherd train` beside TRL's DPOTrainer with PEFT, in alternating rounds on the
same cores.

  bench/dpo_vs_trl.py [--build build] [--python PYTHON_WITH_TRL] [--modes bf16 fp32] [--references adapter precomputed]
                      [--targets c_attn] [--rank 8] [--pairs 8] [--tokens 64] [--layers 12] [--rounds 5] [--steps 3]
                      [--threads 2] [--packing documents] [--against trl trl-autocast trl-compiled]

Both train the same adapter on the same random weights of GPT-2's sizes, without dropout, and every step is of the same
pairs: prompts and answers of about so many tokens each. The reference is the model without its adapter, computed in each
step, or log-probabilities that are there before the first step. Here rows hold four pairs; TRL has a row per text, padded to
the longest. TRL runs as it does by default, with its fused head, but for gradient checkpointing, which is off, and with a
malloc that keeps what is freed: `trl` with weights in the mode's dtype, of bf16 `trl-autocast` with fp32 weights, which TRL
takes by default, and `trl-compiled` and `trl-autocast-compiled` through torch.compile. Prints a JSON line per round, then
per peer the ratio of medians of tokens/s (above 1: Sherd is faster) and the median of the rounds' ratios. Tokens are those
of all texts, without padding.
"""
import json
import os
import random
import subprocess
import sys
import tempfile
import time

from contenders import Contender, Unavailable, alternate, median_of_ratios, medians, options

PEERS = {"bf16": ["trl", "trl-autocast", "trl-compiled", "trl-autocast-compiled"], "fp32": ["trl", "trl-compiled"]}
VOCABULARY = 50257
# Else a third of the time goes into pages that are given back after each operation.
MALLOC = {"MALLOC_MMAP_MAX_": 0, "MALLOC_TRIM_THRESHOLD_": 10**11, "MALLOC_TOP_PAD_": 2**28}


def parse():
    ap = options(__doc__, rank=8, pairs=8, tokens=64, layers=12, rounds=5, steps=3, threads=2)
    ap.add_argument("--modes", nargs="+", default=["bf16", "fp32"], choices=list(PEERS))
    ap.add_argument("--references", nargs="+", default=["adapter", "precomputed"], choices=["adapter", "precomputed"])
    ap.add_argument("--against", nargs="+", default=["trl", "trl-autocast", "trl-compiled"])
    ap.add_argument("--targets", default="c_attn", help="all-linear, or names with commas between")
    ap.add_argument("--packing", default="documents", choices=["documents", "stream"])
    ap.add_argument("--python", default=sys.executable, help="one that has trl, peft, transformers and torch")
    ap.add_argument("--timeout", type=float, default=900)
    ap.add_argument("--folder", help="where model and data are")
    ap.add_argument("--make", action="store_true", help="make them there")
    ap.add_argument("--serve", metavar="PEER", help="be that peer")
    a = ap.parse_args()
    if a.pairs % 4 != 0:
        ap.error("--pairs: four of them fill a row")
    return a


def targets(a):
    return a.targets if a.targets == "all-linear" else a.targets.split(",")


# ---- model and data ----

def all_words():
    """As many as GPT-2's vocabulary has room for, beside bytes and syllables, with and without a space before them."""
    lower, upper = [chr(c) for c in range(ord("a"), ord("z") + 1)], [chr(c) for c in range(ord("A"), ord("Z") + 1)]
    syllables = [a + b for a in lower for b in upper]
    count = (VOCABULARY - 256 - len(syllables) - 1) // 2
    words = [syllables[i // len(syllables)] + syllables[i % len(syllables)] for i in range(count)]
    return syllables, words


def make_tokenizer():
    import tokenizers
    import transformers
    syllables, words = all_words()
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    spaced = ["\u0120" + word for word in words]  # what a space becomes
    names = [*alphabet, *syllables, *words, *spaced, "<|endoftext|>"]
    merges = [(s[0], s[1]) for s in syllables] + [(w[:2], w[2:]) for w in words] + [(w[0], w[1:]) for w in spaced]
    model = tokenizers.models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=merges)
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>")


def pairs_of(a):
    """Four of them fill a row of 16 times --tokens, of which each leaves an eighth at most."""
    draw, out = random.Random(4), []
    words = all_words()[1]

    def text(count):
        return " ".join(draw.choice(words) for _ in range(count))

    for _ in range(a.pairs):
        near = a.tokens // 8
        asked, chosen = (draw.randint(a.tokens - near, a.tokens + near) for _ in range(2))
        rejected = 4 * a.tokens - draw.randint(0, near) - 2 * asked - chosen
        out.append({"prompt": text(asked), "chosen": " " + text(chosen), "rejected": " " + text(rejected)})
    return out


def make(a):
    import torch
    import transformers
    torch.manual_seed(1)
    config = transformers.GPT2Config(vocab_size=VOCABULARY, n_layer=a.layers, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
                                     bos_token_id=VOCABULARY - 1, eos_token_id=VOCABULARY - 1)
    model = os.path.join(a.folder, "model")
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(model)
    tokenizer = make_tokenizer()
    assert len(tokenizer) == VOCABULARY
    tokenizer.save_pretrained(model)
    tokens, longest = 0, 0
    with open(os.path.join(a.folder, "pairs.jsonl"), "w", encoding="utf-8") as file:
        for pair in pairs_of(a):
            file.write(json.dumps(pair) + "\n")
            for side in ("chosen", "rejected"):
                length = len(tokenizer(pair["prompt"] + pair[side])["input_ids"]) + 1
                tokens, longest = tokens + length, max(longest, length)
    with open(os.path.join(a.folder, "facts.json"), "w", encoding="utf-8") as file:
        json.dump({"tokens": tokens, "padded": longest * 2 * a.pairs}, file)


# ---- TRL ----

class Peer:
    def __init__(self, a, name, mode, reference):
        import datasets
        import peft
        import torch
        import transformers
        import trl
        torch.set_num_threads(a.threads)
        path = os.path.join(a.folder, "model")
        half = mode == "bf16" and "autocast" not in name
        model = transformers.AutoModelForCausalLM.from_pretrained(path, attn_implementation="sdpa",
                                                                  dtype=torch.bfloat16 if half else torch.float32)
        with open(os.path.join(a.folder, "pairs.jsonl"), encoding="utf-8") as file:
            pairs = datasets.Dataset.from_list([json.loads(line) for line in file])
        self.out = tempfile.TemporaryDirectory()
        config = trl.DPOConfig(
            output_dir=self.out.name, per_device_train_batch_size=a.pairs, max_steps=10**6, learning_rate=1e-4,
            lr_scheduler_type="constant", max_grad_norm=1.0, bf16=mode == "bf16", gradient_checkpointing=False,
            precompute_ref_log_probs=reference == "precomputed", logging_steps=1, save_strategy="no", report_to="none",
            use_cpu=True, disable_tqdm=True, dataloader_pin_memory=False, optim="adamw_torch_fused",
            torch_compile=name.endswith("compiled"))
        adapter = peft.LoraConfig(r=a.rank, lora_alpha=a.rank, target_modules=targets(a), fan_in_fan_out=True)
        self.trainer = trl.DPOTrainer(model=model, args=config, train_dataset=pairs, peft_config=adapter,
                                      processing_class=transformers.AutoTokenizer.from_pretrained(path))
        self.trainer.remove_callback(transformers.PrinterCallback)
        peer = self

        class Turns(transformers.TrainerCallback):
            """Lets the trainer make the steps that were asked for, and then waits."""

            def on_train_begin(self, *_, **__):
                self.left = peer.next_turn()
                self.begin = time.perf_counter()

            def on_step_end(self, args, state, control, **_):
                self.left -= 1
                if self.left == 0:
                    peer.answer(time.perf_counter() - self.begin)
                    self.left = peer.next_turn()
                    control.should_training_stop = self.left == 0
                    self.begin = time.perf_counter()

        self.trainer.add_callback(Turns())

    def run(self, out):
        self.next_turn = lambda: int((sys.stdin.readline().split() or [0, 0])[1])
        self.answer = lambda seconds: print(json.dumps(seconds), file=out, flush=True)
        self.trainer.train()


def serve(a):
    import warnings
    warnings.filterwarnings("ignore")
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries log to standard output
    peer = Peer(a, *a.serve.split(":"))
    print("ready", json.dumps({"peer": a.serve}), file=out, flush=True)
    peer.run(out)


# ---- Sherd ----

class Sherd:
    """`sherd train` of so many steps, from the beginning in each turn."""

    def __init__(self, a, mode, reference):
        self.name, self.facts, self.process, self.timeout = "sherd", {}, None, a.timeout
        self.program = os.path.join(a.build, "sherd")
        self.base = os.path.join(a.folder, f"{mode}-{reference}")
        packed = a.packing == "documents"
        rows = a.pairs // 4 if packed else 2 * a.pairs
        config = {"train_batch_size": rows, "train_micro_batch_size_per_gpu": rows, "gradient_clipping": 1.0,
                  "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0}},
                  "bf16": {"enabled": mode == "bf16"},
                  "model": {"seq_length": a.tokens * (16 if packed else 3)},
                  "data": {"path": os.path.join(a.folder, "pairs"), "packing": a.packing, "split": [1, 0]},
                  "training": {"objective": "dpo", "init_from": os.path.join(a.folder, "model"),
                               "preference": {"reference": reference, "reference_file": self.base + ".reference"},
                               "adapter": {"type": "lora", "rank": a.rank, "alpha": a.rank, "targets": targets(a)}},
                  "device": {"type": "cpu", "threads_per_rank": a.threads}}
        with open(self.base + ".json", "w", encoding="utf-8") as file:
            json.dump(config, file)

    def start(self):
        return self.facts

    def stop(self):
        pass

    def ask(self, line):
        """The first step is not counted: it may compute the reference of all."""
        count, metrics = int(line.split()[1]), self.base + ".jsonl"
        done = subprocess.run([self.program, "train", "--config", self.base + ".json", "--steps", str(count + 1),
                               "--metrics", metrics], capture_output=True, text=True, timeout=self.timeout)
        if done.returncode:
            raise Unavailable(done.stderr.strip().splitlines()[-1])
        with open(metrics, encoding="utf-8") as file:
            return sum(json.loads(each)["step_ms"] for each in file.readlines()[1:]) / 1e3


def compare(a, mode, reference, tokens):
    env = {"OMP_NUM_THREADS": a.threads, "TQDM_DISABLE": 1, **MALLOC}
    contenders = [Sherd(a, mode, reference)]
    same = ["--targets", a.targets, "--rank", a.rank, "--pairs", a.pairs, "--tokens", a.tokens, "--threads", a.threads,
            "--folder", a.folder]
    for name in PEERS[mode]:
        if name in a.against:
            command = [a.python, os.path.abspath(__file__), "--serve", f"{name}:{mode}:{reference}", *same]
            contenders.append(Contender(name, command, env, a.timeout))

    def rate(contender):
        if isinstance(contender, Contender) and contender.process is None:
            contender.ask("steps 4")  # torch.compile makes code in the third, too
        return a.steps * tokens / contender.ask(f"steps {a.steps}")

    what, rounds = f"{mode}, reference {reference}", []
    for taken in alternate(contenders, a.rounds, rate):
        rounds.append(taken)
        print(json.dumps({"mode": mode, "reference": reference, "round": len(rounds),
                          "tokens_per_s": {k: round(v, 1) for k, v in taken.items()}}), flush=True)
    taken = medians(rounds)
    for contender in contenders[1:]:
        name = contender.name
        if name not in taken or "sherd" not in taken:
            lost = contender if name not in taken else contenders[0]
            print(f"{what}, {name}: unavailable: {lost.facts.get('unavailable', 'not measured')}")
            continue
        ratio, of_rounds = taken["sherd"] / taken[name], median_of_ratios(rounds, "sherd", name)
        print(f"{what}, sherd / {name}: {ratio:.3f} (of rounds {of_rounds:.3f}); sherd {taken['sherd']:.0f}, "
              f"{name} {taken[name]:.0f} tokens/s", flush=True)


def main():
    a = parse()
    if a.serve:
        return serve(a)
    if a.make:
        return make(a)
    with tempfile.TemporaryDirectory() as a.folder:
        subprocess.run([a.python, os.path.abspath(__file__), "--make", "--folder", a.folder, "--pairs", str(a.pairs),
                        "--tokens", str(a.tokens), "--layers", str(a.layers)], check=True, stdout=subprocess.DEVNULL,
                       stderr=subprocess.DEVNULL)
        with open(os.path.join(a.folder, "facts.json"), encoding="utf-8") as file:
            facts = json.load(file)
        subprocess.run([os.path.join(a.build, "sherd"), "prepare", "--input", os.path.join(a.folder, "pairs.jsonl"),
                        "--tokenizer", "hf:" + os.path.join(a.folder, "model"), "--output",
                        os.path.join(a.folder, "pairs")], check=True, capture_output=True)
        print(f"{a.pairs} pairs have {facts['tokens']} tokens, and {facts['padded']} with TRL's padding", flush=True)
        for mode in a.modes:
            for reference in a.references:
                compare(a, mode, reference, facts["tokens"])


if __name__ == "__main__":
    main()
