#!/usr/bin/env python3
"""Makes tests/engine/reference/sparsity.safetensors: what PyTorch makes of whole models that were pruned 2:4.

The models are those of make_reference.py, whose weights and tokens tests/models/reference/{gpt2,llama}.safetensors
hold. Masks are torch.ao.pruning's WeightNormSparsifier's, of blocks of 1 x 4 with two zeros each, of the linear layers
of blocks (GPT-2's, which lie transposed, are turned for it). Then training goes as NVIDIA's ASP has it: gradients are
masked before their norm is taken and clipped, and weights once they were moved, all in double. Four steps on the one
batch: `MODEL.RULE.losses` and `.norms` (fp64), and `MODEL.RULE.weights` (fp32), of every weight after the last, in the
order of their names, each 37th element.

Needs torch and numpy. Usage: make_sparsity_reference.py [OUTPUT_FILE]
"""
import pathlib
import sys

import numpy as np
import torch
from torch.ao.pruning import WeightNormSparsifier

import make_reference as models
from make_trust_reference import EACH, ROOT, STEPS, models_shapes, read

CLIPPING = 0.5
RULES = {"adamw": (torch.optim.AdamW, dict(lr=0.003, betas=(0.9, 0.99), eps=1e-4), 0.1),
         "sgd": (torch.optim.SGD, dict(lr=0.1, momentum=0.9, nesterov=True), 0.1)}


def is_pruned(name, weight):
    return weight.dim() == 2 and (".h." in name or ".layers." in name)


def mask_of(weight):
    """[out, in]: where weights stay."""
    layer = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    layer.weight = torch.nn.Parameter(weight.detach().clone())
    model = torch.nn.Sequential(layer)
    sparsifier = WeightNormSparsifier(sparsity_level=1.0, sparse_block_shape=(1, 4), zeros_per_block=2)
    sparsifier.prepare(model, [{"tensor_fqn": "0.weight"}])
    sparsifier.step()
    mask = model[0].parametrizations.weight[0].mask.bool()
    fours = mask.reshape(-1, 4).sum(1)
    assert (fours == 2).all(), fours
    return mask


def run(kind, shape, logits, given, make, params, decay):
    w = {name: given[name].double().requires_grad_() for name in models_shapes(kind, shape)}
    masks = {name: mask_of(x.t()).t() if kind == "gpt2" else mask_of(x)
             for name, x in w.items() if is_pruned(name, x)}

    def masked(of):
        with torch.no_grad():
            for name, mask in masks.items():
                of(w[name]).mul_(mask)

    masked(lambda x: x)
    optimizer = make([{"params": [p for p in w.values() if (p.dim() > 1) == which], "weight_decay": decay if which else 0.0}
                      for which in (True, False)], **params)
    losses, norms = [], []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = models.loss_of(logits(shape, w, given["tokens"].long()), given["labels"].long())
        loss.backward()
        masked(lambda x: x.grad)
        losses.append(loss.item())
        norms.append(torch.nn.utils.clip_grad_norm_(list(w.values()), CLIPPING).item())
        optimizer.step()
        masked(lambda x: x)
    return {"losses": np.array(losses), "norms": np.array(norms),
            "weights": np.concatenate([w[n].detach().flatten()[::EACH].numpy() for n in sorted(w)]).astype(np.float32)}


def main():
    tensors = {}
    for kind, shape, logits in (("gpt2", models.GPT2, models.gpt2_logits), ("llama", models.LLAMA, models.llama_logits)):
        given = read(ROOT / f"models/reference/{kind}.safetensors")
        for name, (make, params, decay) in RULES.items():
            for what, values in run(kind, shape, logits, given, make, params, decay).items():
                tensors[f"{kind}.{name}.{what}"] = values
            print(kind, name, tensors[f"{kind}.{name}.losses"], tensors[f"{kind}.{name}.norms"])
    models.save(pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "engine/reference/sparsity.safetensors", tensors)


if __name__ == "__main__":
    main()
