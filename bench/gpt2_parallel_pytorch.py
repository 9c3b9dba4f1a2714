#!/usr/bin/env python3
"""GPT-2 training step in PyTorch over several processes of this machine (gloo), the peer of bench/parallel_vs_pytorch.py.

--tensor N cuts layers with parallelize_module: column and row parallel linear layers, sequence parallel norms, a vocabulary
cut over ranks with loss_parallel. --context N cuts sequences with torch.distributed.tensor.experimental.context_parallel,
where this PyTorch has attention that takes part in it on this device. --pipeline N cuts the model into stages, for
torch.distributed.pipelining's 1F1B over --micro-batches of --batch sequences. Serves as bench/gpt2_pytorch.py does: "steps N"
gives the seconds of N optimizer steps. Needs torch; nothing that Sherd builds or runs needs this file.
"""
import argparse
import contextlib
import json
import os
import socket
import sys
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (ColwiseParallel, RowwiseParallel, SequenceParallel, loss_parallel,
                                               parallelize_module)


class Block(nn.Module):
    def __init__(self, h, heads):
        super().__init__()
        self.dim = h // heads
        self.ln1, self.ln2 = nn.LayerNorm(h), nn.LayerNorm(h)
        self.qkv, self.proj = nn.Linear(h, 3 * h), nn.Linear(h, h)  # qkv by head, so that columns are whole heads
        self.fc1, self.fc2 = nn.Linear(h, 4 * h), nn.Linear(4 * h, h)

    def attend(self, x):
        qkv = self.qkv(x)
        b, s, width = qkv.shape
        q, k, v = qkv.view(b, s, width // (3 * self.dim), 3, self.dim).permute(3, 0, 2, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(out.transpose(1, 2).reshape(b, s, width // 3))

    def forward(self, x):
        x = x + self.attend(self.ln1(x))
        return x + self.fc2(F.gelu(self.fc1(self.ln2(x)), approximate="tanh"))


class GPT(nn.Module):
    def __init__(self, vocab, s, h, layers, heads):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, h), nn.Embedding(s, h)
        self.blocks = nn.ModuleList(Block(h, heads) for _ in range(layers))
        self.ln_f, self.head = nn.LayerNorm(h), nn.Linear(h, vocab, bias=False)
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02)

    def forward(self, tokens, positions):
        x = self.wte(tokens) + self.wpe(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln_f(x))


def cut_layers(model, mesh):
    embedding = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
    parallelize_module(model, mesh, {
        "wte": embedding, "wpe": embedding, "ln_f": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False)})
    column, row = ColwiseParallel(input_layouts=Shard(1)), RowwiseParallel(output_layouts=Shard(1))
    for block in model.blocks:
        parallelize_module(block, mesh, {"ln1": SequenceParallel(), "qkv": column, "proj": row,
                                         "ln2": SequenceParallel(), "fc1": column, "fc2": row})


class Training:
    def __init__(self, a):
        torch.set_num_threads(a.threads)
        torch.manual_seed(0)
        self.a, self.mesh = a, init_device_mesh("cpu", (a.tensor * a.context,))
        self.model = GPT(a.vocab, a.seq, a.hidden, a.layers, a.heads).to(torch.bfloat16 if a.mode == "bf16" else torch.float32)
        if a.tensor > 1:
            cut_layers(self.model, self.mesh)
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=1e-4, foreach=True)
        data = torch.randint(0, a.vocab, (a.batch, a.seq + 1))
        self.tokens, self.labels = data[:, :-1].contiguous(), data[:, 1:].contiguous()
        self.positions = torch.arange(a.seq)[None].contiguous()
        self.loss = None

    def cut_sequences(self):
        if self.a.context == 1:
            return contextlib.nullcontext()
        from torch.distributed.tensor.experimental import context_parallel
        buffers = [self.tokens.clone(), self.labels.clone(), self.positions.clone()]
        self.parts = buffers
        return context_parallel(self.mesh, buffers=buffers, buffer_seq_dims=[1, 1, 1], no_restore_buffers=set(buffers))

    def step(self):
        self.parts = [self.tokens, self.labels, self.positions]
        with self.cut_sequences():
            tokens, labels, positions = self.parts
            with loss_parallel() if self.a.tensor > 1 else contextlib.nullcontext():
                logits = self.model(tokens, positions)
                loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
                loss.backward()
        if self.a.context > 1:  # the data-parallel part: one flat all-reduce, as DDP's buckets do
            gradients = [p.grad for p in self.model.parameters()]
            flat = torch._utils._flatten_dense_tensors(gradients)
            dist.all_reduce(flat, op=dist.ReduceOp.SUM)
            flat /= self.a.context
            for g, part in zip(gradients, torch._utils._unflatten_dense_tensors(flat, gradients)):
                g.copy_(part)
        self.opt.step()
        self.opt.zero_grad(set_to_none=True)
        self.loss = loss

    def steps(self, count):
        start = time.perf_counter()
        for _ in range(count):
            self.step()
        return time.perf_counter() - start


class Stage(nn.Module):
    """A run of a GPT's layers: with the embedding where it begins, with the head where it ends."""

    def __init__(self, a, rank):
        super().__init__()
        model = GPT(a.vocab, a.seq, a.hidden, a.layers, a.heads)
        cuts = balanced(a)
        self.first, self.last = rank == 0, rank + 1 == a.pipeline
        self.blocks = model.blocks[cuts[rank]:cuts[rank + 1]]
        if self.first:
            self.wte, self.wpe = model.wte, model.wpe
        if self.last:
            self.ln_f, self.head = model.ln_f, model.head

    def forward(self, x):
        if self.first:
            x = self.wte(x) + self.wpe.weight
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln_f(x)) if self.last else x


def balanced(a):
    """Where stages begin, by the parameters that layers compute with; the head counts to the last one."""
    block, head = 12 * a.hidden * a.hidden, a.vocab * a.hidden
    share = (a.layers * block + head) / a.pipeline
    return [0, *(min(round(s * share / block), a.layers) for s in range(1, a.pipeline)), a.layers]


class Pipeline:
    """One stage of a pipeline in training."""

    def __init__(self, a):
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B
        torch.set_num_threads(a.threads)
        torch.manual_seed(0)
        self.a, rank = a, dist.get_rank()
        self.stage = Stage(a, rank).to(torch.bfloat16 if a.mode == "bf16" else torch.float32)
        self.opt = torch.optim.AdamW(self.stage.parameters(), lr=1e-4, foreach=True)
        data = torch.randint(0, a.vocab, (a.batch, a.seq + 1)).repeat(a.micro_batches, 1)
        self.tokens, self.labels = data[:, :-1].contiguous(), data[:, 1:].contiguous()
        self.schedule = Schedule1F1B(PipelineStage(self.stage, rank, a.pipeline, torch.device("cpu")), a.micro_batches,
                                     loss_fn=lambda y, t: F.cross_entropy(y.flatten(0, 1), t.flatten()))
        self.loss = torch.zeros(())

    def step(self):
        losses = []
        if self.stage.last:
            self.schedule.step(target=self.labels, losses=losses)
            self.loss = torch.stack([each.detach().float() for each in losses]).mean()
        elif self.stage.first:
            self.schedule.step(self.tokens)
        else:
            self.schedule.step()
        self.opt.step()
        self.opt.zero_grad(set_to_none=True)

    def steps(self, count):
        dist.barrier()
        start = time.perf_counter()
        for _ in range(count):
            self.step()
        dist.barrier()
        seconds = time.perf_counter() - start
        dist.broadcast(self.loss, self.a.pipeline - 1)
        return seconds


def ranks_of(a):
    return a.tensor * a.context * a.pipeline


def lead(a, training, out):
    """Rank 0 answers, and tells the others how many steps to make; 0 ends them."""
    facts = {"peer": f"torch {torch.__version__}", "tensor": a.tensor, "context": a.context, "pipeline": a.pipeline,
             "mode": a.mode, "tokens_per_step": a.batch * a.seq * (a.micro_batches if a.pipeline > 1 else 1)}
    print("ready", json.dumps(facts), file=out, flush=True)
    for line in sys.stdin:
        word, *rest = line.split()
        if word == "report":
            loss = training.loss
            print(json.dumps({"loss": (loss.full_tensor() if hasattr(loss, "full_tensor") else loss).item()}), file=out, flush=True)
            continue
        dist.broadcast(torch.tensor([int(rest[0])]), 0)
        print(json.dumps(training.steps(int(rest[0]))), file=out, flush=True)
    dist.broadcast(torch.tensor([0]), 0)


def rank_main(rank, a, port, out):
    os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks_of(a)),
                       "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": str(a.threads)})
    dist.init_process_group("gloo")
    training = Pipeline(a) if a.pipeline > 1 else Training(a)
    if rank == 0:
        lead(a, training, out)
    else:
        count = torch.tensor([1])
        while True:
            dist.broadcast(count, 0)
            if count.item() == 0:
                break
            training.steps(int(count.item()))
    dist.destroy_process_group()


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--tensor", type=int, default=1)
    ap.add_argument("--context", type=int, default=1)
    ap.add_argument("--pipeline", type=int, default=1)
    ap.add_argument("--micro-batches", type=int, default=8)
    ap.add_argument("--mode", choices=["fp32", "bf16"], default="bf16")
    ap.add_argument("--threads", type=int, default=1)
    for name, value in [("batch", 4), ("seq", 512), ("layers", 12), ("hidden", 768), ("heads", 12), ("vocab", 50304)]:
        ap.add_argument("--" + name, type=int, default=value)
    a = ap.parse_args()
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries log to standard output
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    others = [context.Process(target=rank_main, args=(r, a, port, None), daemon=True) for r in range(1, ranks_of(a))]
    for process in others:
        process.start()
    rank_main(0, a, port, out)
    for process in others:
        process.join(30)


if __name__ == "__main__":
    main()
