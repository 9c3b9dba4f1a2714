#!/usr/bin/env python3
"""Makes tests/models/reference/{mixtral,qwen3_moe,deepseek_v3_router}.safetensors: what Hugging Face's
transformers says about three tiny models with experts.

transformers' own classes compute everything, in double from fp32 weights (norms, softmaxes and what else they
would do in fp32 anyway, too), so that a comparison shows the other side's rounding alone. Names and shapes
are those of published checkpoints, an expert's matrices each by itself; transformers itself translates,
weights and gradients alike. Experts and losses are also written out here in a few lines: a difference is an
error.

mixtral and qwen3_moe hold, in fp32 where nothing else is said:
  the weights; `tokens`, `labels` (int32: the label of every position, -100: none); `logits`;
  `lm_loss`       mean cross-entropy of the labels that are not -100;
  `aux_loss`      load_balancing_loss_func of all layers' logits together: E·Σ_i f_i·P_i, f_i: choices of
                  expert i per token (they add up to k), P_i: its mean probability, of all layers' tokens;
  `loss`          lm_loss + 0.02·aux_loss, as the model itself gives it;
  `grad_lm.NAME`, `grad.NAME`  gradients of lm_loss and of loss for every weight;
  and of each layer with experts: `layer_balance`, load_balancing_loss_func of it alone, over k; `layer_z`,
  the mean of (log Σ exp logits)² (router_z_loss_func of Switch transformers); `layer_counts` (int32 [layers,
  experts]), choices.
mixtral also holds `grad_layers.NAME`, gradients of lm_loss + Σ over layers of (0.02·layer_balance +
0.001·layer_z). In its second layer no token chooses expert 2.
qwen3_moe has experts in the second of its three blocks. Its q_norm and k_norm, of each head's queries and
keys, are left out (torch.nn.Identity), as Sherd has none yet. `logits_raw` are those of norm_topk_prob =
False.

deepseek_v3_router holds one layer of experts of DeepSeek-V3 with its router and shared expert, names without
"model.layers.0.mlp.": the weights; `gate.e_score_correction_bias`, with which no token chooses expert 5;
`input`, `output`; `chosen` (int32 [tokens, 4], ascending) and `chosen_weights`; `grad.NAME` and `grad.input`
of Σ output·`output_gradient`; `z_loss` of its logits as above, `grad_z.gate.weight` and `grad_z.input`.

Needs torch, transformers and safetensors; nothing that Sherd builds, tests or runs needs this file.
Usage: make_moe_reference.py [OUTPUT_FOLDER]
"""
import copy
import pathlib
import sys
import tempfile

import safetensors.torch
import torch
import torch.nn.functional as F
import transformers
from torch.overrides import TorchFunctionMode
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func
from transformers.models.switch_transformers.modeling_switch_transformers import router_z_loss_func

from make_reference import is_gain, save

AUX, Z = 0.02, 0.001
SHARED = dict(num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32, use_cache=False,
              tie_word_embeddings=False, output_router_logits=True, router_aux_loss_coef=AUX)
MIXTRAL = transformers.MixtralConfig(
    vocab_size=37, hidden_size=24, intermediate_size=14, num_hidden_layers=2, num_local_experts=4,
    num_experts_per_tok=2, rms_norm_eps=1e-5, sliding_window=None,
    rope_parameters={"rope_type": "default", "rope_theta": 1e6}, **SHARED)
QWEN3_MOE = transformers.Qwen3MoeConfig(
    vocab_size=43, hidden_size=24, intermediate_size=20, moe_intermediate_size=12, num_hidden_layers=3,
    num_experts=8, num_experts_per_tok=3, norm_topk_prob=True, decoder_sparse_step=2, head_dim=6,
    rms_norm_eps=1e-6, rope_parameters={"rope_type": "default", "rope_theta": 1e4}, **SHARED)
DEEPSEEK_V3 = transformers.DeepseekV3Config(
    vocab_size=8, hidden_size=32, intermediate_size=8, moe_intermediate_size=12, num_hidden_layers=1,
    num_attention_heads=1, num_key_value_heads=1, q_lora_rank=4, kv_lora_rank=4, qk_rope_head_dim=2,
    qk_nope_head_dim=2, v_head_dim=2, first_k_dense_replace=0, n_routed_experts=16, num_experts_per_tok=4,
    n_group=4, topk_group=2, norm_topk_prob=True, routed_scaling_factor=2.5, n_shared_experts=1,
    num_nextn_predict_layers=0)


class InDouble(TorchFunctionMode):
    """While it is on, fp64 is what code gets that asks for fp32."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        wide = lambda x: torch.float64 if x is torch.float32 else x
        func = torch.Tensor.double if func is torch.Tensor.float else func
        return func(*map(wide, args), **{name: wide(x) for name, x in (kwargs or {}).items()})


def classic(model, gradients=False):
    """The model's weights or gradients, as transformers writes them into checkpoints."""
    of = copy.deepcopy(model)
    if gradients:
        for p, to in zip(model.parameters(), of.parameters()):
            to.data = torch.zeros_like(p) if p.grad is None else p.grad.clone()
    with tempfile.TemporaryDirectory() as folder:
        of.save_pretrained(folder)
        return safetensors.torch.load_file(f"{folder}/model.safetensors")


def made(kind, config, seed):
    """A model with random weights, exact in fp32."""
    torch.manual_seed(seed)
    model = kind(config).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = torch.randn(p.shape)
            scale = 0.4 if name.endswith("mlp.gate.weight") else 0.15
            p.copy_(1 + 0.1 * noise if is_gain(name) else scale * noise)
    for layer in model.model.layers:
        if hasattr(layer.self_attn, "q_norm"):
            layer.self_attn.q_norm = layer.self_attn.k_norm = torch.nn.Identity()
    return model


def in_double(model):
    """The same model; angles of rotary positions are not weights, and computed anew."""
    wide = copy.deepcopy(model).double()
    with InDouble():
        rotary = wide.model.rotary_emb
        rotary.inv_freq = rotary.compute_default_rope_parameters(model.config)[0]
    return wide


def feed_forward(x, weights, at, names):
    gate, up, down = (weights[f"{at}{name}.weight"] for name in names)
    return (F.silu(x @ gate.t()) * (x @ up.t())) @ down.t()


def chosen_of(values, k, margin=1e-4):
    """Ones where the k highest values of each row are, which must be clear of the others; otherwise zeros."""
    highest = values.topk(k + 1).values
    assert (highest[:, k - 1] - highest[:, k]).min() > margin, "the choice hangs on rounding; change the seed"
    return torch.zeros_like(values).scatter(1, values.topk(k).indices, 1.0)


def agree(what, ours, theirs):
    difference = (ours - theirs).abs().max().item()
    assert ours.shape == theirs.shape and difference < 1e-12, (what, difference)


def check_softmax_block(x, output, logits, weights, at, names, k):
    """Of a block that transformers computed; gives choices and summed probabilities of its experts."""
    agree("router", x @ weights[f"{at}gate.weight"].t(), logits)
    probabilities = logits.softmax(1)
    chosen = chosen_of(probabilities, k)
    combine = chosen * probabilities
    combine = combine / combine.sum(1, keepdim=True)
    agree("experts", sum(share[:, None] * feed_forward(x, weights, f"{at}experts.{e}.", names)
                         for e, share in enumerate(combine.t())), output)
    return chosen.sum(0), probabilities.sum(0)


def save_all(path, tensors):
    as_stored = lambda t: (t.float() if t.is_floating_point() else t.int()).numpy()
    save(path, {name: as_stored(t.detach().reshape(t.shape or (1,))) for name, t in tensors.items()})
    assert path.stat().st_size < 250_000


class Run:
    """One forward pass of a causal language model, and what its layers of experts saw."""

    def __init__(self, model, tokens, labels):
        self.model, self.blocks = model, []
        hooks = [layer.mlp.register_forward_hook(lambda _, x, y: self.blocks.append((x[0], y)))
                 for layer in model.model.layers if hasattr(layer.mlp, "gate")]
        # Labels that are not to be shifted by one, as Sherd's are not.
        self.out = model(input_ids=tokens, labels=labels, shift_labels=labels)
        for hook in hooks:
            hook.remove()
        self.lm_loss = F.cross_entropy(self.out.logits.flatten(0, 1), labels.flatten(), ignore_index=-100)

    def gradients(self, loss):
        self.model.zero_grad()
        loss.backward(retain_graph=True)
        return classic(self.model, gradients=True)


def make_model(kind, model_type, config, block, names, seed, folder):
    k, experts = config.num_experts_per_tok, config.num_local_experts
    single = made(model_type, config, seed)
    weights, model = classic(single), in_double(single)
    text = torch.randint(0, config.vocab_size, (2, 17))
    tokens, labels = text[:, :-1].contiguous(), text[:, 1:].clone()
    labels[0, 3] = labels[1, -1] = -100
    with InDouble():
        run = Run(model, tokens, labels)
    out = {"tokens": tokens, "labels": labels, "logits": run.out.logits, "lm_loss": run.lm_loss,
           "aux_loss": run.out.aux_loss, "loss": run.out.loss}
    agree("loss", run.lm_loss + AUX * run.out.aux_loss, run.out.loss)

    sparse = [i for i, layer in enumerate(model.model.layers) if hasattr(layer.mlp, "gate")]
    wide = {name: w.double() for name, w in weights.items()}
    counts, sums = zip(*(check_softmax_block(x.flatten(0, 1), y.flatten(0, 1), logits, wide, block.format(i),
                                             names, k)
                         for i, (x, y), logits in zip(sparse, run.blocks, run.out.router_logits)))
    rows = tokens.numel()
    agree("aux_loss", experts * (sum(counts) * sum(sums)).sum() / (rows * len(sparse))**2, run.out.aux_loss)
    with InDouble():
        balance = torch.stack([load_balancing_loss_func((logits,), experts, k) / k
                               for logits in run.out.router_logits])
        z = torch.stack([router_z_loss_func(logits[None]) for logits in run.out.router_logits])
    agree("balance", torch.stack([experts * (n * p).sum() / (k * rows**2) for n, p in zip(counts, sums)]),
          balance)
    out.update({"layer_balance": balance, "layer_z": z, "layer_counts": torch.stack(counts).int()})

    losses = {"grad_lm.": run.lm_loss, "grad.": run.out.loss}
    if kind == "mixtral":
        assert out["layer_counts"][1, 2] == 0
        losses["grad_layers."] = run.lm_loss + AUX * balance.sum() + Z * z.sum()
    else:
        raw = copy.deepcopy(model)
        for i in sparse:
            raw.model.layers[i].mlp.gate.norm_topk_prob = False
        with InDouble():
            out["logits_raw"] = raw(input_ids=tokens).logits
        assert (out["logits_raw"] - out["logits"]).abs().max() > 1e-2
    out.update(weights)
    for prefix, loss in losses.items():
        out.update({prefix + name: grad for name, grad in run.gradients(loss).items()})

    # What transformers says in fp32, untouched.
    plain = Run(single, tokens, labels)
    scale = run.out.logits.abs().max()
    error = ((plain.out.logits - run.out.logits).abs().max() / scale).item()
    grads = plain.gradients(plain.out.loss)
    worst = max(((g - out["grad." + name]).abs().max() / out["grad." + name].abs().max().clamp(min=1)).item()
                for name, g in grads.items())
    print(f"{kind}: transformers {transformers.__version__}: lm_loss {run.lm_loss.item():.6f}, aux_loss "
          f"{run.out.aux_loss.item():.6f}, choices {out['layer_counts'].tolist()}; its own fp32 errors: "
          f"logits {error:.1e}, gradients {worst:.1e}")
    assert error < 1e-5 and worst < 1e-5
    save_all(folder / f"{kind}.safetensors", out)


def make_router(config, seed, folder):
    single = made(transformers.DeepseekV3ForCausalLM, config, seed)
    bias = single.model.layers[0].mlp.gate.e_score_correction_bias
    bias.copy_(0.1 * torch.randn(bias.shape))
    bias[5] = -2
    at = "model.layers.0.mlp."
    model = in_double(single)
    mlp = model.model.layers[0].mlp
    x = torch.randn(2, 11, config.hidden_size).double().requires_grad_()
    upstream = torch.randn(x.shape).double()
    with InDouble():
        output = mlp(x)
        logits, weights, chosen = mlp.gate(x)
        z = router_z_loss_func(logits[None])
    cut = lambda tensors: {name.removeprefix(at): t for name, t in tensors.items() if name.startswith(at)}
    out = cut(classic(single))
    chosen, order = chosen.sort(1)
    out.update({"input": x, "output": output, "output_gradient": upstream, "chosen": chosen.int(),
                "chosen_weights": weights.gather(1, order), "z_loss": z})
    x.grad = None
    z.backward(retain_graph=True)
    out.update({"grad_z.input": x.grad, "grad_z.gate.weight": mlp.gate.weight.grad})
    x.grad = None
    model.zero_grad()
    (output * upstream).sum().backward()
    out["grad.input"] = x.grad
    out.update({"grad." + name: g for name, g in cut(classic(model, gradients=True)).items()
                if name != "gate.e_score_correction_bias"})

    # The same by the paper (DeepSeek-AI 2024, "DeepSeek-V3 technical report", 2.1.2).
    w = {name: t.double() for name, t in cut(classic(single)).items()}
    rows = x.detach().flatten(0, 1)
    scores = (rows @ w["gate.weight"].t()).sigmoid()
    biased = scores + w["gate.e_score_correction_bias"]
    by_group = biased.view(len(rows), config.n_group, -1)
    groups = chosen_of(by_group.topk(2).values.sum(2), config.topk_group)
    closed = groups.repeat_interleave(by_group.shape[2], 1) == 0
    combine = chosen_of(biased.masked_fill(closed, -10), config.num_experts_per_tok) * scores
    combine = 2.5 * combine / combine.sum(1, keepdim=True)
    names = ("gate_proj", "up_proj", "down_proj")
    made_of = sum(combine[:, e, None] * feed_forward(rows, w, f"experts.{e}.", names) for e in range(16))
    agree("DeepSeek-V3", made_of + feed_forward(rows, w, "shared_experts.", names), output.flatten(0, 1))
    agree("weights", combine.gather(1, chosen), out["chosen_weights"])
    without_bias = chosen_of(scores.masked_fill(closed, -10), config.num_experts_per_tok, margin=0)
    moved = (without_bias != (combine > 0)).any(1).sum().item()
    choices = (combine > 0).sum(0).int().tolist()
    assert moved > 0 and choices[5] == 0
    plain = single.model.layers[0].mlp(x.detach().float())
    error = ((plain - output).abs().max() / output.abs().max()).item()
    print(f"deepseek_v3_router: choices {choices}; the bias moves those of {moved} of {len(rows)} tokens; "
          f"transformers' own fp32 error {error:.1e}")
    assert error < 1e-5
    save_all(folder / "deepseek_v3_router.safetensors", out)


def main():
    folder = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else
                          pathlib.Path(__file__).resolve().parents[2] / "tests/models/reference")
    folder.mkdir(parents=True, exist_ok=True)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    for config in (MIXTRAL, QWEN3_MOE, DEEPSEEK_V3):
        config._attn_implementation = config._experts_implementation = "eager"
    make_model("mixtral", transformers.MixtralForCausalLM, MIXTRAL, "model.layers.{}.block_sparse_moe.",
               ("w1", "w3", "w2"), 106, folder)
    make_model("qwen3_moe", transformers.Qwen3MoeForCausalLM, QWEN3_MOE, "model.layers.{}.mlp.",
               ("gate_proj", "up_proj", "down_proj"), 20, folder)
    make_router(DEEPSEEK_V3, 20, folder)


if __name__ == "__main__":
    main()
