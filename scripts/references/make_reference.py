#!/usr/bin/env python3
"""Makes tests/models/reference/{gpt2,llama}.safetensors: what PyTorch says about two tiny models.

Each file holds, in fp32 under Hugging Face's names: the weights; `tokens`, `labels` (int32); `logits`; `loss`;
`grad.<name>` for every weight; and `adamw_losses`, the losses before each of ten AdamW steps and after the last.
Logits, loss and gradients are computed in double from the fp32 weights, so that a comparison shows the other side's
rounding alone; the AdamW losses are plain fp32 PyTorch. The models are written out here as Hugging Face defines them;
where `transformers` is installed the two definitions are compared and a difference is an error.

Needs torch; nothing that Sherd builds, tests or runs needs this file. Usage: make_reference.py [OUTPUT_FOLDER]
"""
import json
import math
import pathlib
import struct
import sys

import numpy as np
import torch
import torch.nn.functional as F

GPT2 = dict(vocab=97, max_seq=24, hidden=48, layers=2, heads=4, eps=1e-5, batch=2, seq=19)
LLAMA = dict(vocab=101, max_seq=32, hidden=48, layers=2, heads=6, kv_heads=2, ffn=80, eps=1e-6, base=10000.0,
             batch=2, seq=21)
ADAMW = dict(lr=1e-3, betas=(0.9, 0.95), eps=1e-8)
WEIGHT_DECAY = 0.1  # on matrices and tables; none on biases and norms
STEPS = 10


def gpt2_shapes(c):
    h = c["hidden"]
    shapes = {"transformer.wte.weight": (c["vocab"], h), "transformer.wpe.weight": (c["max_seq"], h)}
    for i in range(c["layers"]):
        at = f"transformer.h.{i}."
        for name, shape in [("ln_1.weight", (h,)), ("ln_1.bias", (h,)), ("attn.c_attn.weight", (h, 3 * h)),
                            ("attn.c_attn.bias", (3 * h,)), ("attn.c_proj.weight", (h, h)),
                            ("attn.c_proj.bias", (h,)), ("ln_2.weight", (h,)), ("ln_2.bias", (h,)),
                            ("mlp.c_fc.weight", (h, 4 * h)), ("mlp.c_fc.bias", (4 * h,)),
                            ("mlp.c_proj.weight", (4 * h, h)), ("mlp.c_proj.bias", (h,))]:
            shapes[at + name] = shape
    shapes["transformer.ln_f.weight"] = shapes["transformer.ln_f.bias"] = (h,)
    return shapes


def gpt2_logits(c, w, tokens):
    h, heads = c["hidden"], c["heads"]
    b, s = tokens.shape
    mask = torch.ones(s, s, dtype=torch.bool).tril()
    norm = lambda x, at: F.layer_norm(x, (h,), w[at + ".weight"], w[at + ".bias"], c["eps"])
    conv1d = lambda x, at: x @ w[at + ".weight"] + w[at + ".bias"]
    split = lambda x: x.view(b, s, heads, h // heads).transpose(1, 2)
    x = w["transformer.wte.weight"][tokens] + w["transformer.wpe.weight"][:s]
    for i in range(c["layers"]):
        at = f"transformer.h.{i}."
        q, k, v = map(split, conv1d(norm(x, at + "ln_1"), at + "attn.c_attn").split(h, dim=2))
        scores = (q @ k.transpose(2, 3) / math.sqrt(h // heads)).masked_fill(~mask, -math.inf)
        attended = (scores.softmax(-1) @ v).transpose(1, 2).reshape(b, s, h)
        x = x + conv1d(attended, at + "attn.c_proj")
        wide = conv1d(norm(x, at + "ln_2"), at + "mlp.c_fc")
        gelu = 0.5 * wide * (1 + torch.tanh(math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3)))
        x = x + conv1d(gelu, at + "mlp.c_proj")
    return norm(x, "transformer.ln_f") @ w["transformer.wte.weight"].t()


def llama_shapes(c):
    h, f = c["hidden"], c["ffn"]
    kv = h // c["heads"] * c["kv_heads"]
    shapes = {"model.embed_tokens.weight": (c["vocab"], h)}
    for i in range(c["layers"]):
        at = f"model.layers.{i}."
        for name, shape in [("input_layernorm", (h,)), ("self_attn.q_proj", (h, h)), ("self_attn.k_proj", (kv, h)),
                            ("self_attn.v_proj", (kv, h)), ("self_attn.o_proj", (h, h)),
                            ("post_attention_layernorm", (h,)), ("mlp.gate_proj", (f, h)), ("mlp.up_proj", (f, h)),
                            ("mlp.down_proj", (h, f))]:
            shapes[at + name + ".weight"] = shape
    shapes["model.norm.weight"] = (h,)
    shapes["lm_head.weight"] = (c["vocab"], h)
    return shapes


def llama_logits(c, w, tokens):
    heads, kv_heads, d = c["heads"], c["kv_heads"], c["hidden"] // c["heads"]
    b, s = tokens.shape
    dtype = w["model.norm.weight"].dtype
    mask = torch.ones(s, s, dtype=torch.bool).tril()
    angles = torch.arange(s, dtype=torch.float64)[:, None] * c["base"] ** (-torch.arange(0, d, 2).double() / d)
    cos, sin = (f(torch.cat([angles, angles], -1)).to(dtype) for f in (torch.cos, torch.sin))
    rotate = lambda x: x * cos + torch.cat([-x[..., d // 2:], x[..., : d // 2]], -1) * sin
    norm = lambda x, at: x * torch.rsqrt((x * x).mean(-1, keepdim=True) + c["eps"]) * w[at + ".weight"]
    x = w["model.embed_tokens.weight"][tokens]
    for i in range(c["layers"]):
        at = f"model.layers.{i}."
        product = lambda x, name: x @ w[at + name + ".weight"].t()
        y = norm(x, at + "input_layernorm")
        q = rotate(product(y, "self_attn.q_proj").view(b, s, heads, d).transpose(1, 2))
        k = rotate(product(y, "self_attn.k_proj").view(b, s, kv_heads, d).transpose(1, 2))
        v = product(y, "self_attn.v_proj").view(b, s, kv_heads, d).transpose(1, 2)
        k, v = (t.repeat_interleave(heads // kv_heads, dim=1) for t in (k, v))
        scores = (q @ k.transpose(2, 3) / math.sqrt(d)).masked_fill(~mask, -math.inf)
        x = x + product((scores.softmax(-1) @ v).transpose(1, 2).reshape(b, s, heads * d), "self_attn.o_proj")
        y = norm(x, at + "post_attention_layernorm")
        x = x + product(F.silu(product(y, "mlp.gate_proj")) * product(y, "mlp.up_proj"), "mlp.down_proj")
    return norm(x, "model.norm") @ w["lm_head.weight"].t()


def is_gain(name):
    return name.endswith("weight") and ("ln_" in name or "norm" in name.lower())


def initial(shapes):
    out = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape)
        out[name] = 1 + 0.1 * noise if is_gain(name) else noise * (0.05 if name.endswith("bias") else 0.1)
    return out


def loss_of(logits, labels):
    return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1), ignore_index=-100)


def gradients(c, logits_fn, weights, tokens, labels, dtype):
    w = {n: p.detach().to(dtype).requires_grad_() for n, p in weights.items()}
    logits = logits_fn(c, w, tokens)
    loss = loss_of(logits, labels)
    loss.backward()
    return logits.detach(), loss.detach(), {n: p.grad for n, p in w.items()}


def adamw_losses(c, logits_fn, weights, tokens, labels, dtype):
    w = {n: p.detach().to(dtype).clone().requires_grad_() for n, p in weights.items()}
    decays = lambda n: not (n.endswith("bias") or is_gain(n))
    optimizer = torch.optim.AdamW([{"params": [p for n, p in w.items() if decays(n)], "weight_decay": WEIGHT_DECAY},
                                   {"params": [p for n, p in w.items() if not decays(n)], "weight_decay": 0.0}],
                                  **ADAMW)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(logits_fn(c, w, tokens), labels)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    losses.append(loss_of(logits_fn(c, w, tokens), labels).item())
    return np.array(losses)


def compare_with_transformers(kind, c, weights, tokens, logits):
    try:
        import transformers
    except ImportError:
        print("transformers is not installed: the definitions here were not compared with it")
        return
    if kind == "gpt2":
        config = transformers.GPT2Config(vocab_size=c["vocab"], n_positions=c["max_seq"], n_embd=c["hidden"],
                                         n_layer=c["layers"], n_head=c["heads"], resid_pdrop=0, embd_pdrop=0,
                                         attn_pdrop=0)
        model = transformers.GPT2LMHeadModel(config)
    else:
        config = transformers.LlamaConfig(vocab_size=c["vocab"], hidden_size=c["hidden"], intermediate_size=c["ffn"],
                                          num_hidden_layers=c["layers"], num_attention_heads=c["heads"],
                                          num_key_value_heads=c["kv_heads"], rms_norm_eps=c["eps"],
                                          max_position_embeddings=c["max_seq"], tie_word_embeddings=False)
        model = transformers.LlamaForCausalLM(config)
    missing, unexpected = model.load_state_dict(weights, strict=False)
    missing = [n for n in missing if n != "lm_head.weight"]  # GPT-2's is the token table
    assert not missing and not unexpected, (missing, unexpected)
    # In fp32, as transformers computes norms and rotary angles in fp32 whatever the weights are.
    theirs = model.eval()(tokens.long()).logits.detach().double()
    error = ((theirs - logits).abs().max() / logits.abs().max()).item()
    print(f"{kind}: largest difference to transformers {transformers.__version__} (fp32): {error:.2e} of the largest logit")
    assert error < 1e-5


def save(path, tensors):
    header, blobs, offset = {}, [], 0
    for name, array in tensors.items():
        data = np.ascontiguousarray(array).tobytes()
        header[name] = {"dtype": {"float32": "F32", "float64": "F64", "int32": "I32"}[str(array.dtype)], "shape": list(array.shape),
                        "data_offsets": [offset, offset + len(data)]}
        blobs.append(data)
        offset += len(data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(blobs))
    print(f"{path}: {path.stat().st_size} bytes")


def make(kind, c, shapes, logits_fn, folder):
    torch.manual_seed(20)
    weights = initial(shapes)
    text = torch.randint(0, c["vocab"], (c["batch"], c["seq"] + 1))
    tokens, labels = text[:, :-1].contiguous(), text[:, 1:].clone()
    labels[0, 3] = labels[1, -1] = -100
    logits, loss, grads = gradients(c, logits_fn, weights, tokens, labels, torch.float64)
    compare_with_transformers(kind, c, weights, tokens, logits)
    single = gradients(c, logits_fn, weights, tokens, labels, torch.float32)
    everything = math.sqrt(sum(g.norm().item() ** 2 for g in grads.values()))
    worst = max((grads[n] - single[2][n]).norm().item() / max(grads[n].norm().item(), 1e-3 * everything) for n in grads)
    losses = adamw_losses(c, logits_fn, weights, tokens, labels, torch.float32)
    exact = adamw_losses(c, logits_fn, weights, tokens, labels, torch.float64)
    print(f"{kind}: loss {loss.item():.6f}; PyTorch's own fp32 errors: logits "
          f"{((single[0] - logits).abs().max() / logits.abs().max()).item():.1e}, gradients {worst:.1e}, "
          f"AdamW losses {np.abs(losses / exact - 1).max():.1e}; losses {np.round(losses, 4)}")
    out = {"tokens": tokens.int().numpy(), "labels": labels.int().numpy(), "logits": logits.float().numpy(),
           "loss": loss.float().reshape(1).numpy(), "adamw_losses": losses.astype(np.float32)}
    out.update({n: p.numpy() for n, p in weights.items()})
    out.update({"grad." + n: g.float().numpy() for n, g in grads.items()})
    save(folder / f"{kind}.safetensors", out)


def main():
    folder = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else
                          pathlib.Path(__file__).resolve().parents[2] / "tests/models/reference")
    folder.mkdir(parents=True, exist_ok=True)
    make("gpt2", GPT2, gpt2_shapes(GPT2), gpt2_logits, folder)
    make("llama", LLAMA, llama_shapes(LLAMA), llama_logits, folder)


if __name__ == "__main__":
    main()
