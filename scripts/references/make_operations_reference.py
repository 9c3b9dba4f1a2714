#!/usr/bin/env python3
"""Writes tests/autograd/reference/operations.safetensors: values and gradients of single operations by PyTorch.

Of each case the inputs, the result y, a gradient dy of it and the inputs' gradients, all in fp64:
softmax and log_softmax along the middle axis, binary_cross_entropy_with_logits, weighted too, and
scaled_dot_product_attention among them cross-attention with a padding mask, a causal mask and grouped heads.

Needs torch; nothing that Sherd builds, tests or runs needs this file.
Usage: make_operations_reference.py [FILE]
"""
import json
import pathlib
import struct
import sys

import torch
import torch.nn.functional as F

torch.manual_seed(5)
torch.set_default_dtype(torch.float64)
held = {}


def keep(case, inputs, result, dy=None):
    dy = torch.randn_like(result) if dy is None else dy
    result.backward(dy)
    for name, tensor in inputs.items():
        held[f"{case}.{name}"] = tensor.detach()
        if tensor.grad is not None:
            held[f"{case}.d{name}"] = tensor.grad
    held[f"{case}.y"], held[f"{case}.dy"] = result.detach(), dy


def leaf(*shape, by=1.0):
    return (torch.randn(*shape) * by).requires_grad_()


x = leaf(2, 5, 3, by=3.0)
keep("softmax", {"x": x}, torch.softmax(x, 1))
x = leaf(2, 5, 3, by=3.0)
keep("log_softmax", {"x": x}, torch.log_softmax(x, 1))

x, t = leaf(4, 3, by=4.0), torch.rand(4, 3)
keep("bce", {"x": x, "t": t}, F.binary_cross_entropy_with_logits(x, t).reshape(1))
x, w = leaf(4, 3, by=4.0), torch.rand(4, 3)
losses = F.binary_cross_entropy_with_logits(x, t, weight=w, reduction="sum") / w.sum()
keep("weighted_bce", {"x": x, "t": t, "w": w}, losses.reshape(1))


def attention(case, q, k, v, lengths=None, causal=False):
    """Sherd's layout is [batch, rows, heads, width]; lengths: of keys that are there."""
    mask = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool)
    if causal:
        mask = mask.tril()
    if lengths is not None:
        there = torch.arange(k.shape[1])[None, :] < lengths[:, None]
        mask = mask[None, None] & there[:, None, None, :]
    group = q.shape[2] // k.shape[2]
    heads = [each.transpose(1, 2) for each in (q, k, v)]
    heads[1:] = [each.repeat_interleave(group, dim=1) for each in heads[1:]]
    out = F.scaled_dot_product_attention(*heads, attn_mask=mask).transpose(1, 2).contiguous()
    inputs = {"q": q, "k": k, "v": v}
    if lengths is not None:
        inputs["lengths"] = lengths.to(torch.int32)
    keep(case, inputs, out)


attention("cross", leaf(2, 3, 2, 4), leaf(2, 5, 2, 4), leaf(2, 5, 2, 6))
attention("padded", leaf(3, 4, 4, 4), leaf(3, 6, 2, 4), leaf(3, 6, 2, 4), torch.tensor([6, 1, 4]))
attention("causal", leaf(2, 4, 2, 4), leaf(2, 6, 1, 4), leaf(2, 6, 1, 4), causal=True)
attention("padded_causal", leaf(2, 5, 2, 4), leaf(2, 5, 2, 4), leaf(2, 5, 2, 4), torch.tensor([3, 5]), True)
attention("self", leaf(2, 5, 4, 4), leaf(2, 5, 2, 4), leaf(2, 5, 2, 4), causal=True)

header, blobs, at = {}, [], 0
for name, tensor in held.items():
    blob = tensor.contiguous().numpy().tobytes()
    kind = "I32" if tensor.dtype == torch.int32 else "F64"
    header[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [at, at + len(blob)]}
    blobs.append(blob)
    at += len(blob)
text = json.dumps(header, separators=(",", ":")).encode()
default = pathlib.Path(__file__).resolve().parents[2] / "tests/autograd/reference/operations.safetensors"
path = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else default
path.parent.mkdir(parents=True, exist_ok=True)
path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(blobs))
