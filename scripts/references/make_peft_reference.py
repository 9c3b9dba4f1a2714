#!/usr/bin/env python3
"""Makes tests/models/reference/peft/NAME/: adapters of the tiny models that make_hugging_face_reference.py wrote, as
PEFT saves them (adapter_config.json, adapter_model.safetensors), and in expected.safetensors what PEFT makes of them.

All values of the adapters are random, LoRA's B too; IA3's factors are near 1. expected.safetensors holds `tokens` and
`labels` of the model's own expected.safetensors, `logits`, `loss` (the mean of the labels that are not -100) and
`grad.NAME` for every tensor of the adapter, in fp32, computed in double, but beside a base in bitsandbytes' 4 bits.
Where the adapter begins as a part of the weights, `begun.NAME` is what it began as.

Of prompts (PROMPTS) `logits` have a row for each virtual token too, and `loss` counts the first token of each text as
the label of the last of these, as PEFT's own loss does, with which it is compared. Of p-tuning PEFT saves the prompt
that its network made; `encoder.NAME` and `grad.NAME` are the network's.

Needs torch, transformers, peft and safetensors; nothing that Sherd builds, tests or runs needs this file.
Usage: make_peft_reference.py [OUTPUT_FOLDER [NAME...]]
"""
import contextlib
import json
import pathlib
import shutil
import sys

import peft
import safetensors.torch
import torch
import transformers

from make_hugging_face_reference import SOURCE
from make_moe_reference import InDouble

ROOT = pathlib.Path(__file__).resolve().parents[2] / "tests/models/reference"
LORA, IA3 = peft.LoraConfig, peft.IA3Config
ADAPTERS = {
    "gpt2_all": ("gpt2", LORA(r=3, lora_alpha=6, target_modules="all-linear", fan_in_fan_out=True)),
    "gpt2_default": ("gpt2", LORA(r=2, lora_alpha=5, use_rslora=True, fan_in_fan_out=True)),
    "llama_all": ("llama", LORA(r=2, lora_alpha=3, target_modules="all-linear")),
    "llama_default": ("llama", LORA(r=4, lora_alpha=4)),
    "qwen2_some": ("qwen2", LORA(r=2, lora_alpha=8, target_modules=["k_proj", "up_proj", "o_proj"], use_rslora=True)),
    "qwen3_moe_attention": ("qwen3_moe", LORA(r=2, lora_alpha=2, target_modules=["q_proj", "k_proj", "o_proj"])),
    "gpt2_ia3": ("gpt2", IA3(fan_in_fan_out=True)),
    "llama_ia3": ("llama", IA3()),
    "qwen2_ia3": ("qwen2", IA3(target_modules=["q_proj", "gate_proj", "o_proj"], feedforward_modules=[])),
    "t5_default": ("t5", LORA(r=2, lora_alpha=4)),
    "t5_all": ("t5", LORA(r=3, lora_alpha=3, target_modules="all-linear")),
    "t5_ia3": ("t5", IA3()),
    "llama_patterns": ("llama", LORA(r=2, target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "down_proj"],
                                     exclude_modules=["k_proj"], rank_pattern={"o_proj": 3, r"layers\.1\.mlp\.down_proj": 1},
                                     alpha_pattern={"down_proj": 5})),
    "llama_layers": ("llama", LORA(r=2, target_modules=["q_proj", "up_proj"], layers_to_transform=[1])),
    "llama_saved": ("llama", LORA(r=2, target_modules=["q_proj"], modules_to_save=["embed_tokens", "lm_head"])),
    "gpt2_saved": ("gpt2", LORA(r=2, modules_to_save=["lm_head"], ensure_weight_tying=True, fan_in_fan_out=True)),
    "llama_dora": ("llama", LORA(r=2, lora_alpha=3, target_modules=["q_proj", "v_proj", "o_proj", "up_proj"], use_dora=True)),
    "gpt2_dora": ("gpt2", LORA(r=2, target_modules="all-linear", use_dora=True, fan_in_fan_out=True)),
    "llama_nf4_all": ("llama_nf4", LORA(r=2, lora_alpha=3, target_modules="all-linear")),
    "gpt2_regex": ("gpt2", LORA(r=2, target_modules=r".*h\.0\..*c_attn|.*h\.1\.mlp\.c_(fc|proj)", fan_in_fan_out=True)),
    "mixtral_experts": ("mixtral", LORA(r=2, lora_alpha=3, target_modules=["q_proj"],
                                        target_parameters=["experts.gate_up_proj", "experts.down_proj"])),
    "gpt_oss_experts": ("gpt_oss", LORA(r=2, lora_alpha=3, target_modules="all-linear", rank_pattern={"down_proj": 3},
                                        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"])),
    "qwen2_moe_beside": ("qwen2_moe", LORA(r=2, lora_alpha=3, target_parameters=["experts.down_proj"],
                                           target_modules=["shared_expert.up_proj", "shared_expert.down_proj", "mlp.gate_proj"])),
    "qwen3_moe_modules": ("qwen3_moe", LORA(r=2, lora_alpha=3, target_modules=r".*v_proj|.*experts\.(\d+\.)?(gate|up|down)_proj")),
    "llama_tokens": ("llama", LORA(r=2, target_modules=["q_proj"],
                                   trainable_token_indices={"embed_tokens": [5, 6, 30, 7], "lm_head": [36, 5, 6]})),
    "gpt2_tokens": ("gpt2", LORA(r=2, trainable_token_indices=[36, 3, 4, 5], fan_in_fan_out=True)),
    "gemma2_tokens": ("gemma2", LORA(r=2, target_modules=["o_proj"], trainable_token_indices=[2, 3, 4])),
    "llama_pissa": ("llama", LORA(r=3, lora_alpha=5, target_modules="all-linear", init_lora_weights="pissa")),
    "gpt2_pissa": ("gpt2", LORA(r=2, lora_alpha=3, target_modules="all-linear", init_lora_weights="pissa", fan_in_fan_out=True)),
    "llama_olora": ("llama", LORA(r=3, lora_alpha=5, target_modules=["q_proj", "v_proj", "o_proj", "up_proj"],
                                  init_lora_weights="olora", use_rslora=True)),
}
# Of which every expert's modules have adapters of their own, as PEFT before 0.18 wrote them; PEFT makes of these, as
# it loads them, ones of all experts.
MODULES = {"qwen3_moe_modules": ["gate_proj", "up_proj"]}


PROMPTS = {
    "gpt2_prompt": ("gpt2", peft.PromptTuningConfig(num_virtual_tokens=3)),
    "llama_prompt": ("llama", peft.PromptTuningConfig(num_virtual_tokens=4)),
    "gpt2_ptuning": ("gpt2", peft.PromptEncoderConfig(num_virtual_tokens=4, encoder_hidden_size=6)),
    "llama_ptuning": ("llama", peft.PromptEncoderConfig(num_virtual_tokens=3)),
}


def load(family):
    folder = ROOT / "hugging_face" / family
    config = transformers.AutoConfig.from_pretrained(folder)
    config._attn_implementation = config._experts_implementation = "eager"
    kind = transformers.AutoModelForSeq2SeqLM if config.is_encoder_decoder else transformers.AutoModelForCausalLM
    return kind.from_pretrained(folder, config=config, dtype=torch.float32)


def run(model, tokens):
    """Of an encoder and a decoder what the latter gives for its own tokens, behind the former's."""
    if model.config.is_encoder_decoder:
        return model(tokens[:, :SOURCE], decoder_input_ids=tokens[:, SOURCE:], use_cache=False)
    return model(tokens, use_cache=False)


def widen(model):
    """The model in double, its rotary positions too."""
    inner = model.base_model.model
    model.double()
    if hasattr(inner, "model"):
        with InDouble():
            rotary, kind = inner.model.rotary_emb, inner.config.rope_parameters["rope_type"]
            rotary.inv_freq, rotary.attention_scaling = \
                rotary.compute_default_rope_parameters(inner.config) if kind == "default" else \
                transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS[kind](inner.config, torch.device("cpu"))


def by_module(tensors, fused, experts, rank):
    """A's [experts * n * rank, in] and B's [n * out, n * rank * experts] of all experts, n the number of `fused`
    modules, or one without `base_layer`, as tensors of each expert's modules."""
    out = {}
    for name, value in tensors.items():
        if ".experts." not in name:
            out[name] = value
            continue
        inner = ".base_layer." in name
        modules = fused if inner else ["down_proj"]
        n, kind = len(modules), name.split(".lora_")[1]
        at = name.split(".experts.")[0] + ".experts."
        for e in range(experts):
            for m, module in enumerate(modules):
                if kind.startswith("A"):
                    own = value.reshape(experts, n, rank, -1)[e, m]
                else:
                    width = value.shape[0] // n
                    own = value.reshape(n, width, n, rank, experts)[m, :, m, :, e]
                out[f"{at}{e}.{module}.lora_{kind}"] = own.contiguous()
    return out


def block_diagonal(parameter_name, p, n, rank, experts):
    """Takes out of B of all experts what would lead from one module's A to another's outputs."""
    if ".base_layer." in parameter_name and ".lora_B." in parameter_name:
        whole = p.view(n, -1, n, rank, experts)
        for i in range(n):
            for j in range(n):
                if i != j:
                    whole[i, :, j] = 0


def save_by_module(model, folder, fused, config, targets):
    """Writes them as PEFT once did; checks that PEFT still takes these for the same."""
    experts = model.config.num_local_experts
    tensors = safetensors.torch.load_file(folder / "adapter_model.safetensors")
    safetensors.torch.save_file(by_module(tensors, fused, experts, config.r), folder / "adapter_model.safetensors")
    written = json.loads((folder / "adapter_config.json").read_text())
    written.update(target_modules=targets, target_parameters=None, rank_pattern={}, alpha_pattern={})
    (folder / "adapter_config.json").write_text(json.dumps(written, indent=2, sort_keys=True) + "\n")
    again = peft.PeftModel.from_pretrained(load(config.base_model_name_or_path), folder)
    one, other = peft.get_peft_model_state_dict(model), peft.get_peft_model_state_dict(again)
    assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


@contextlib.contextmanager
def decomposing_in_double():
    """Singular vectors and QR decompositions in double, rounded: fp32's are right to a millionth over the gap alone."""
    found = torch.linalg.svd, torch.linalg.qr
    torch.linalg.svd = lambda x, **more: tuple(part.float() for part in found[0](x.double(), **more))
    torch.linalg.qr = lambda x, **more: tuple(part.float() for part in found[1](x.double(), **more))
    yield
    torch.linalg.svd, torch.linalg.qr = found


def make(name, family, config, root):
    folder = root / name
    shutil.rmtree(folder, ignore_errors=True)
    targets = config.target_modules
    config.task_type, config.base_model_name_or_path = "SEQ_2_SEQ_LM" if family == "t5" else "CAUSAL_LM", family
    with decomposing_in_double():
        model = peft.get_peft_model(load(family), config)
    in_4_bits = family == "llama_nf4"
    model.train(in_4_bits)  # where bitsandbytes computes as it does in training; nothing is dropped
    config.base_model_name_or_path = family
    begun = {n.replace(".default", ""): p.detach().clone() for n, p in model.named_parameters()
             if config.peft_type == "LORA" and config.init_lora_weights in ("pissa", "olora") and p.requires_grad}
    torch.manual_seed(70 + list(ADAPTERS).index(name))
    with torch.no_grad():
        for parameter_name, p in model.named_parameters():
            if p.requires_grad:
                noise = torch.randn(p.shape)
                if "magnitude" in parameter_name:
                    p.mul_(1 + 0.2 * noise)
                else:
                    p.copy_(1 + 0.2 * noise if "ia3" in parameter_name else 0.2 * noise)
                    if name in MODULES:
                        block_diagonal(parameter_name, p, len(MODULES[name]), config.r, model.config.num_local_experts)
    model.save_pretrained(folder)
    if name in MODULES:
        save_by_module(model, folder, MODULES[name], config, targets)
    (folder / "README.md").unlink(missing_ok=True)
    of_model = safetensors.torch.load_file(ROOT / "hugging_face" / family / "expected.safetensors")
    tokens, labels = of_model["tokens"].long(), of_model["labels"].long()
    single = run(model, tokens).logits
    if not in_4_bits:  # whose values are fp32's
        widen(model)
    with contextlib.nullcontext() if in_4_bits else InDouble():
        logits = run(model, tokens).logits
        wanted = labels[:, -logits.shape[1]:].reshape(-1)
        loss = torch.nn.functional.cross_entropy(logits.view(-1, 37), wanted, ignore_index=-100)
    loss.backward()
    expected = {"tokens": tokens.int(), "labels": labels.int(), "logits": logits.detach().float(),
                "loss": loss.detach().float().reshape(1)}
    saved = safetensors.torch.load_file(folder / "adapter_model.safetensors")
    grads = {n.replace(".default", "").replace(".modules_to_save", "").replace("_vector.weight", "_vector"): p.grad
             for n, p in model.named_parameters() if p.requires_grad}
    if name in MODULES:
        grads = by_module(grads, MODULES[name], model.config.num_local_experts, config.r)
    assert grads.keys() == saved.keys(), grads.keys() ^ saved.keys()
    expected.update({f"grad.{published}": grad.float().contiguous() for published, grad in grads.items()})
    expected.update({f"begun.{published}": value.contiguous() for published, value in begun.items()})
    safetensors.torch.save_file(expected, folder / "expected.safetensors")
    difference = (single.double() - logits).abs().max().item()
    assert difference < 1e-5, (name, difference)
    print(f"{name}: loss {loss.item():.6f}, single precision {difference:.1e}, {len(saved)} tensors, "
          f"{sum(f.stat().st_size for f in folder.iterdir())} bytes")


def make_prompt(name, family, config, root):
    folder = root / name
    shutil.rmtree(folder, ignore_errors=True)
    config.task_type, config.base_model_name_or_path = "CAUSAL_LM", family
    model = peft.get_peft_model(load(family), config).eval()
    config.base_model_name_or_path = family
    encoder = model.prompt_encoder["default"]
    torch.manual_seed(90 + list(PROMPTS).index(name))
    with torch.no_grad():
        for p in encoder.parameters():
            p.copy_(0.3 * torch.randn(p.shape))
    model.save_pretrained(folder)
    (folder / "README.md").unlink(missing_ok=True)
    of_model = safetensors.torch.load_file(ROOT / "hugging_face" / family / "expected.safetensors")
    tokens, labels = of_model["tokens"].long(), of_model["labels"].long()
    v = config.num_virtual_tokens
    single = model(tokens, use_cache=False).logits
    inner = model.base_model
    model.double()
    if hasattr(inner, "model"):
        with InDouble():
            rotary, kind = inner.model.rotary_emb, inner.config.rope_parameters["rope_type"]
            rotary.inv_freq, rotary.attention_scaling = \
                rotary.compute_default_rope_parameters(inner.config) if kind == "default" else \
                transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS[kind](inner.config, torch.device("cpu"))
    # PEFT's labels are the tokens themselves, which the loss moves by one place.
    own = torch.cat([tokens[:, :1], labels[:, :-1]], 1)
    ours = torch.cat([torch.full((2, v - 1), -100), own, labels[:, -1:]], 1)
    without_last = torch.cat([ours[:, :-1], torch.full((2, 1), -100)], 1)
    with InDouble():
        found = model(tokens, labels=own, use_cache=False)
        entropy = torch.nn.functional.cross_entropy
        assert abs(found.loss - entropy(found.logits.flatten(0, 1), without_last.flatten(), ignore_index=-100)) < 1e-6
        loss = entropy(found.logits.flatten(0, 1), ours.flatten(), ignore_index=-100)
    loss.backward()
    expected = {"tokens": tokens.int(), "labels": labels.int(), "logits": found.logits.detach().float(),
                "loss": loss.detach().float().reshape(1)}
    for parameter_name, p in encoder.named_parameters():
        expected[f"encoder.{parameter_name}"] = p.detach().float().contiguous()
        expected[f"grad.{parameter_name}"] = p.grad.float().contiguous()
    safetensors.torch.save_file(expected, folder / "expected.safetensors")
    difference = (single.double() - found.logits).abs().max().item()
    assert difference < 1e-5, (name, difference)
    print(f"{name}: loss {loss.item():.6f}, single precision {difference:.1e}, "
          f"{sum(f.stat().st_size for f in folder.iterdir())} bytes")


def main():
    root = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "peft"
    transformers.logging.disable_progress_bar()
    for table, make_it in ((ADAPTERS, make), (PROMPTS, make_prompt)):
        for name, (family, config) in table.items():
            if not sys.argv[2:] or name in sys.argv[2:]:
                make_it(name, family, config, root)


if __name__ == "__main__":
    main()
