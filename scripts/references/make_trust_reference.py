#!/usr/bin/env python3
"""Makes tests/engine/reference/trust.safetensors: what rules that measure make of whole models, in PyTorch.

The models are those of make_reference.py, whose weights and tokens tests/models/reference/{gpt2,llama}.safetensors
hold, of 97 and 101 ids; the rules are make_engine_reference.py's, given every tensor that is published apart, all in
double. Four steps on the one batch: `MODEL.RULE.losses` (fp64), before each step and after the last, and
`MODEL.RULE.weights` (fp32), of every weight then, in the order of their names, each 37th element.

Needs torch and numpy. Usage: make_trust_reference.py [OUTPUT_FILE]
"""
import json
import pathlib
import struct
import sys

import numpy as np
import torch

import make_reference as models
from make_engine_reference import Lamb, Lars, NVLamb

ROOT = pathlib.Path(__file__).resolve().parents[2] / "tests"
STEPS, EACH = 4, 37
ADAM = dict(betas=(0.9, 0.99), eps=1e-4, weight_decay=0.1)
RULES = {"lamb": (Lamb, dict(ADAM, lr=0.01)), "nvlamb": (NVLamb, dict(ADAM, lr=0.01)),
         "lars": (Lars, dict(lr=5.0, momentum=0.9, trust_coefficient=0.02, eps=1e-8, weight_decay=0.1)),
         "larc": (Lars, dict(lr=0.1, momentum=0.9, trust_coefficient=0.02, eps=1e-8, weight_decay=0.1, clip=True))}


def read(path):
    data = path.read_bytes()
    size, = struct.unpack("<Q", data[:8])
    kinds = {"F32": np.float32, "F64": np.float64, "I32": np.int32}
    at = lambda t: data[8 + size + t["data_offsets"][0]:8 + size + t["data_offsets"][1]]
    return {name: torch.tensor(np.frombuffer(at(t), kinds[t["dtype"]]).reshape(t["shape"]))
            for name, t in json.loads(data[8:8 + size]).items()}


def run(kind, rule, params, shape, logits, given):
    w = {name: given[name].double().requires_grad_() for name in models_shapes(kind, shape)}
    decays = lambda name: w[name].dim() > 1
    Rule, everything = rule, list(w.values())
    optimizer = Rule([{"params": [p for n, p in w.items() if decays(n) == which],
                       **params, "weight_decay": params["weight_decay"] if which else 0.0} for which in (True, False)],
                     params["lr"])
    optimizer.everything = everything
    losses = []
    for step in range(STEPS + 1):
        optimizer.zero_grad()
        loss = models.loss_of(logits(shape, w, given["tokens"].long()), given["labels"].long())
        losses.append(loss.item())
        if step == STEPS:
            break
        loss.backward()
        optimizer.step()
    return {"losses": np.array(losses),
            "weights": np.concatenate([w[n].detach().flatten()[::EACH].numpy() for n in sorted(w)]).astype(np.float32)}


def models_shapes(kind, shape):
    return models.gpt2_shapes(shape) if kind == "gpt2" else models.llama_shapes(shape)


def main():
    tensors = {}
    for kind, shape, logits in (("gpt2", models.GPT2, models.gpt2_logits), ("llama", models.LLAMA, models.llama_logits)):
        given = read(ROOT / f"models/reference/{kind}.safetensors")
        for name, (rule, params) in RULES.items():
            for what, values in run(kind, rule, params, shape, logits, given).items():
                tensors[f"{kind}.{name}.{what}"] = values
            print(kind, name, tensors[f"{kind}.{name}.losses"])
    models.save(pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "engine/reference/trust.safetensors", tensors)


if __name__ == "__main__":
    main()
