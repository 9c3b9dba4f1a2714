#!/usr/bin/env python3
"""GPT-2 training step in PyTorch, the peer of bench/gpt2_step and bench/train_step: prints one JSON object.

Modes: fp32, autocast (bf16 autocast, fp32 weights), bf16 (pure bf16 weights), each eager or compiled, with SDPA and
fused AdamW. --sharding trains through FSDP (fully_shard) or DeepSpeed (ZeRO stage 2) instead, in a world of one rank, with
--offload keeping what they can in host memory. With --serve it answers the lines "steps N" with the seconds of N optimizer
steps, "report" with loss and memory, and "release" after giving unused memory back (bench/contenders.py).
Needs torch; nothing that Sherd builds or runs needs this file.
"""
import argparse
import json
import os
import socket
import sys
import time

import torch
import torch.nn as nn
import torch.nn.functional as F


class Block(nn.Module):
    def __init__(self, h, heads):
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(h), nn.LayerNorm(h)
        self.qkv, self.proj = nn.Linear(h, 3 * h), nn.Linear(h, h)
        self.fc1, self.fc2 = nn.Linear(h, 4 * h), nn.Linear(4 * h, h)

    def forward(self, x):
        b, s, h = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(b, s, 3, self.heads, h // self.heads).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(a.transpose(1, 2).reshape(b, s, h))
        return x + self.fc2(F.gelu(self.fc1(self.ln2(x)), approximate="tanh"))


class GPT(nn.Module):
    def __init__(self, vocab, s, h, layers, heads):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, h), nn.Embedding(s, h)
        self.blocks = nn.ModuleList(Block(h, heads) for _ in range(layers))
        self.ln_f = nn.LayerNorm(h)
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02)

    def forward(self, tokens, labels):
        x = self.wte(tokens) + self.wpe.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.ln_f(x) @ self.wte.weight.t()
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1))


def one_rank(device):
    """What launchers tell the rank of a world of one."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for key, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
        os.environ[key] = str(value)
    if device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")


class Eager:
    """What every form without an engine of its own does once gradients are there; it has `model` and `opt`."""

    def update(self):
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.opt.step()
        self.opt.zero_grad(set_to_none=True)


class Plain(Eager):
    """One optimizer step of the model as it is."""

    def __init__(self, a, device, model):
        self.a, self.device = a, device
        self.model = model.bfloat16() if a.mode == "bf16" else model
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.called = torch.compile(self.model) if a.compile else self.model

    def step(self, tokens, labels):
        for _ in range(self.a.accumulation):
            with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.a.mode == "autocast"):
                loss = self.called(tokens, labels)
            (loss / self.a.accumulation).backward()
        self.update()
        return loss


class Fsdp(Eager):
    """Blocks sharded by fully_shard: fp32 masters, bf16 computing; gradients reduced at the last micro-batch."""

    def __init__(self, a, device, model):
        import torch.distributed as dist
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
        one_rank(device)
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
        mesh = dist.device_mesh.init_device_mesh(device.type, (1,))
        precision = MixedPrecisionPolicy(param_dtype=None if a.mode == "fp32" else torch.bfloat16)
        offload = CPUOffloadPolicy() if a.offload and device.type == "cuda" else OffloadPolicy()
        for block in model.blocks:
            fully_shard(block, mesh=mesh, mp_policy=precision, offload_policy=offload)
        self.a, self.model = a, fully_shard(model, mesh=mesh, mp_policy=precision, offload_policy=offload)
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)

    def step(self, tokens, labels):
        for i in range(self.a.accumulation):
            self.model.set_requires_gradient_sync(i == self.a.accumulation - 1)
            loss = self.model(tokens, labels)
            (loss / self.a.accumulation).backward()
        self.update()
        return loss


class DeepSpeed:
    """ZeRO stage 2 of DeepSpeed; with --offload its optimizer is updated by the processor (ZeRO-Offload). With --nvme
    stage 3, parameters and optimizer on that drive, pipelined (ZeRO-Infinity)."""

    def __init__(self, a, device, model):
        one_rank(device)
        import deepspeed
        self.a, self.version = a, deepspeed.__version__
        zero = {"stage": 2, "overlap_comm": True, "contiguous_gradients": True}
        if a.offload:
            zero["offload_optimizer"] = {"device": "cpu", "pin_memory": device.type == "cuda"}
        more = {}
        if a.nvme:
            on_nvme = {"device": "nvme", "nvme_path": a.nvme, "pin_memory": True}
            zero = {"stage": 3, "overlap_comm": True, "contiguous_gradients": True, "sub_group_size": 2 ** 24,
                    "stage3_param_persistence_threshold": 1e4, "stage3_prefetch_bucket_size": 20_000_000,
                    "stage3_max_live_parameters": 60_000_000, "stage3_max_reuse_distance": 0,
                    "offload_param": {**on_nvme, "buffer_count": 32, "max_in_cpu": 0,
                                      "buffer_size": max(50_000_000, a.vocab * a.hidden)},
                    "offload_optimizer": {**on_nvme, "buffer_count": 12, "pipeline_read": True, "pipeline_write": True}}
            more["aio"] = {"block_size": 1 << 20, "queue_depth": 32, "single_submit": False, "overlap_events": True,
                           "intra_op_parallelism": 1}
        config = {"train_micro_batch_size_per_gpu": a.batch, "gradient_accumulation_steps": a.accumulation,
                  "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.01}},
                  "bf16": {"enabled": a.mode != "fp32"}, "gradient_clipping": 1.0, "zero_optimization": zero,
                  "steps_per_print": 1 << 30, **more}
        if device.type == "cpu":
            deepspeed.init_distributed(dist_backend="gloo")
        self.engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]

    def step(self, tokens, labels):
        for _ in range(self.a.accumulation):
            loss = self.engine(tokens, labels)
            self.engine.backward(loss)
            self.engine.step()
        return loss


class Training:
    def __init__(self, a):
        self.a, self.device = a, torch.device(a.device)
        if self.device.type == "cuda":
            torch.backends.cuda.matmul.allow_tf32 = False
        else:
            torch.set_num_threads(a.threads)
        torch.manual_seed(0)
        with self.device:
            model = GPT(a.vocab, a.seq, a.hidden, a.layers, a.heads)
            data = torch.randint(0, a.vocab, (a.batch, a.seq + 1))
        self.tokens, self.labels = data[:, :-1].contiguous(), data[:, 1:].contiguous()
        self.peer = {"plain": Plain, "fsdp": Fsdp, "deepspeed": DeepSpeed}[a.sharding](a, self.device, model)
        self.loss = None

    def synchronize(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def steps(self, count):
        """Seconds of `count` optimizer steps, from an idle device to an idle device."""
        self.synchronize()
        start = time.perf_counter()
        for _ in range(count):
            self.loss = self.peer.step(self.tokens, self.labels)
        self.synchronize()
        return time.perf_counter() - start

    def facts(self):
        name = torch.cuda.get_device_name() if self.device.type == "cuda" else f"cpu, {self.a.threads} threads"
        peer = f"torch {torch.__version__}"
        if self.a.sharding == "deepspeed":
            peer = f"deepspeed {self.peer.version}, {peer}"
        elif self.a.sharding == "fsdp":
            peer += " fully_shard"
        return {"peer": peer, "device": name, "mode": self.a.mode, "compiled": self.a.compile,
                "offload": self.a.offload,
                "tokens_per_step": self.a.batch * self.a.seq * self.a.accumulation}

    def report(self):
        out = {"loss": self.loss.item()}
        if self.device.type == "cuda":
            out["device_peak"] = torch.cuda.max_memory_allocated()
        return out

    def answer(self, line):
        word, *rest = line.split()
        if word == "steps":
            return self.steps(int(rest[0]))
        if word == "report":
            return self.report()
        if word == "release":  # memory that only the allocator holds, to whoever is next
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
            return 0
        raise SystemExit(f"asked for {line!r}: steps N, report and release are answered")


def parse():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    ap.add_argument("--mode", choices=["fp32", "autocast", "bf16"], default="bf16")
    ap.add_argument("--compile", action="store_true")
    ap.add_argument("--sharding", choices=["plain", "fsdp", "deepspeed"], default="plain")
    ap.add_argument("--offload", action="store_true")
    ap.add_argument("--nvme", metavar="DIR", help="of DeepSpeed: parameters and optimizer lie there")
    ap.add_argument("--serve", action="store_true")
    ap.add_argument("--threads", type=int, default=2)
    ap.add_argument("--steps", type=int, default=3)
    ap.add_argument("--warmup", type=int, default=1)
    ap.add_argument("--batch", type=int, default=4)
    ap.add_argument("--accumulation", type=int, default=1)
    ap.add_argument("--seq", type=int, default=512)
    ap.add_argument("--layers", type=int, default=12)
    ap.add_argument("--hidden", type=int, default=768)
    ap.add_argument("--heads", type=int, default=12)
    ap.add_argument("--vocab", type=int, default=50257)
    a = ap.parse_args()
    if a.sharding == "plain" and a.offload:
        ap.error("--offload is a matter of --sharding fsdp or deepspeed")
    if a.sharding != "plain" and (a.compile or a.mode == "autocast"):
        ap.error("--sharding takes neither --compile nor autocast")
    return a


def main():
    a = parse()
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries log to standard output
    training = Training(a)
    if a.serve:
        print("ready", json.dumps(training.facts()), file=out, flush=True)
        for line in sys.stdin:
            print(json.dumps(training.answer(line)), file=out, flush=True)
        return
    training.steps(a.warmup)
    times = sorted(training.steps(1) for _ in range(a.steps))
    median = times[len(times) // 2]
    facts = training.facts()
    print(json.dumps({**facts, "step_s": median, "tokens_per_s": facts["tokens_per_step"] / median, **training.report()}),
          file=out, flush=True)


if __name__ == "__main__":
    main()
