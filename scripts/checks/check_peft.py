#!/usr/bin/env python3
"""Trains adapters of tiny models with `sherd train`, exports them, and has PEFT load them: the logits of PEFT's model
against those of the model into which `sherd export` merged the adapter, and what both continue a text with against
`sherd generate`. Then trains on from PEFT's own files. A prompt is merged into nothing: texts, and the probability of
one, are compared, of several tasks each one's.

Needs torch, transformers and peft.
Usage: check_peft.py [--sherd build/sherd] [CASE...]
"""
import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

import peft
import torch
import transformers

from adapter_checks import PROMPT, ROOT, continued, run, says_the_same, scores

SIZES = dict(vocab_size=257, hidden_size=48, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=64)
LLAMA = dict(SIZES, intermediate_size=96, num_key_value_heads=2)
GPT2 = transformers.GPT2Config(vocab_size=257, n_embd=48, n_layer=2, n_head=4, n_positions=64, resid_pdrop=0, embd_pdrop=0,
                               attn_pdrop=0)
CASES = {
    "gpt2_lora": (GPT2, {"type": "lora", "rank": 4, "targets": "all-linear"}, []),
    "gpt2_rslora": (GPT2, {"type": "lora", "rank": 4, "alpha": 4, "use_rslora": True}, ["--ranks", "2", "--set",
                                                                                      "zero_optimization.stage=3"]),
    "gpt2_ia3": (GPT2, {"type": "ia3"}, []),
    "llama_lora": (transformers.LlamaConfig(**LLAMA), {"type": "lora", "targets": "all-linear", "dropout": 0.1},
                   ["--ranks", "2", "--set", "parallel.tensor=2"]),
    "llama_default": (transformers.LlamaConfig(**LLAMA), {"type": "lora", "alpha": 32}, []),
    "llama_ia3": (transformers.LlamaConfig(**LLAMA), {"type": "ia3"}, []),
    "llama_saved": (transformers.LlamaConfig(**LLAMA), {"type": "lora", "modules_to_save": ["embed_tokens", "lm_head"],
                                                        "layers": [1], "rank_pattern": {"v_proj": 4, "q_proj": 4}},
                    ["--ranks", "2", "--set", "zero_optimization.stage=2"]),
    "llama_dora": (transformers.LlamaConfig(**LLAMA), {"type": "lora", "targets": "all-linear", "use_dora": True},
                   ["--ranks", "2", "--set", "parallel.tensor=2"]),
    "llama_some": (transformers.LlamaConfig(**LLAMA),
                   {"type": "lora", "targets": [".*_proj"], "exclude": [r".*layers\.0\.mlp.*", "o_proj"], "alpha": 32}, []),
    "gpt2_saved": (GPT2, {"type": "lora", "modules_to_save": ["lm_head"]}, []),
    "qwen3_lora": (transformers.Qwen3Config(**LLAMA, head_dim=16), {"type": "lora", "targets": ["q_proj", "down_proj"]},
                   ["--ranks", "2", "--set", "parallel.pipeline=2", "--set", "gradient_accumulation_steps=2"]),
}
EXPERTS = {"type": "lora", "rank": 4, "targets": ["q_proj"], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
CASES.update({
    "mixtral_experts": (transformers.MixtralConfig(**LLAMA, num_local_experts=4), EXPERTS, ["--ranks", "2", "--set",
                                                                                           "parallel.expert=2"]),
    "qwen3_moe_experts": (transformers.Qwen3MoeConfig(**LLAMA, head_dim=16, num_experts=4, num_experts_per_tok=2,
                                                      moe_intermediate_size=32), EXPERTS,
                          ["--ranks", "2", "--set", "parallel.tensor=2"]),
    "gpt_oss_experts": (transformers.GptOssConfig(**LLAMA, head_dim=16, num_local_experts=4, num_experts_per_tok=2,
                                                  layer_types=["full_attention"] * 2), EXPERTS, []),
    "mixtral_modules": (transformers.MixtralConfig(**LLAMA, num_local_experts=4),
                        {"type": "lora", "rank": 4, "targets": "all-linear"}, []),
})
CASES.update({
    "gpt2_tokens": (GPT2, {"type": "lora", "rank": 2, "trainable_token_indices": [32, 101, 116, 117]}, []),
    "llama_tokens": (transformers.LlamaConfig(**LLAMA),
                     {"type": "lora", "trainable_token_indices": {"embed_tokens": [32, 101], "lm_head": [101, 32, 110]}},
                     ["--ranks", "2", "--set", "parallel.tensor=2"]),
    "gpt2_pissa": (GPT2, {"type": "lora", "rank": 4, "targets": "all-linear", "init_lora_weights": "pissa"}, []),
    "llama_pissa": (transformers.LlamaConfig(**LLAMA),
                    {"type": "lora", "alpha": 16, "targets": "all-linear", "init_lora_weights": "pissa", "use_rslora": True},
                    ["--ranks", "2", "--set", "parallel.tensor=2"]),
    "llama_olora": (transformers.LlamaConfig(**LLAMA), {"type": "lora", "targets": "all-linear", "init_lora_weights": "olora",
                                                        "rank_pattern": {"o_proj": 4}},
                    ["--ranks", "2", "--set", "zero_optimization.stage=3"]),
    "llama_gaussian": (transformers.LlamaConfig(**LLAMA), {"type": "lora", "init_lora_weights": "gaussian", "alpha": 32}, []),
})
TASKS = [{"name": "readme", "init_text": "Read me"}, {"name": "keys", "init_text": "Keys and what they mean"}]
PROMPTS = {
    "gpt2_prompt": (GPT2, {"type": "prompt_tuning", "virtual_tokens": 8, "init_text": "What it says:"}, []),
    "llama_prompt": (transformers.LlamaConfig(**LLAMA), {"type": "prompt_tuning", "num_virtual_tokens": 5,
                                                         "init": "sample_vocab"},
                     ["--ranks", "2", "--set", "parallel.tensor=2"]),
    "qwen3_p_tuning": (transformers.Qwen3Config(**LLAMA, head_dim=16), {"type": "p_tuning", "virtual_tokens": 6},
                       ["--ranks", "2", "--set", "zero_optimization.stage=3", "--set", "data.packing=documents"]),
    "gpt2_tasks": (GPT2, {"type": "prompt_tuning", "virtual_tokens": 8, "tasks": TASKS},
                   ["--ranks", "2", "--set", "parallel.pipeline=2", "--set", "gradient_accumulation_steps=2"]),
    "llama_tasks": (transformers.LlamaConfig(**LLAMA), {"type": "p_tuning", "virtual_tokens": 4, "tasks": TASKS,
                                                        "encoder_hidden_size": 32}, []),
}


def train(sherd, config, adapter, extra, scratch):
    """A base and a run with an adapter of it. Returns both models' settings."""
    torch.manual_seed(3)
    base = transformers.AutoModelForCausalLM.from_config(config)
    base.save_pretrained(scratch / "base")
    inputs = [ROOT / "README.md", ROOT / "docs/config.md"]
    tasks = [task["name"] for task in adapter.get("tasks", [])]
    data = {"path": str(scratch / "data"), "split": [1, 0]}
    if tasks:
        data = {"sources": [{"path": str(scratch / task), "task": task} for task in tasks], "split": [1, 0]}
    for prefix, files in zip(tasks, [[f] for f in inputs]) if tasks else [("data", inputs)]:
        run(sherd, "prepare", "--input", *files, "--output", scratch / prefix)
    settings = {"train_micro_batch_size_per_gpu": 4, "data": data,
                "training": {"steps": 40, "learning_rate": 1e-2, "init_from": str(scratch / "base"),
                             "save_dir": str(scratch / "run"), "adapter": adapter}}
    (scratch / "config.json").write_text(json.dumps(settings))
    run(sherd, "train", "--config", scratch / "config.json", "--set", "model.seq_length=48", *extra)
    return base, settings


def again(sherd, settings, adapter, scratch):
    settings["training"].update(steps=3, save_dir=str(scratch / "again"), adapter={"init_from": str(adapter)})
    (scratch / "again.json").write_text(json.dumps(settings))
    run(sherd, "train", "--config", scratch / "again.json", "--set", "model.seq_length=48")


def check_prompt(sherd, name, scratch):
    config, adapter, extra = PROMPTS[name]
    base, settings = train(sherd, config, adapter, extra, scratch)
    plain = continued(base.eval(), 24)
    good = True
    for task in [t["name"] for t in adapter.get("tasks", [])] or [None]:
        which = ["--task", task] if task else []
        folder = scratch / f"adapter_{task}"
        run(sherd, "export", scratch / "run", "--output", folder, "--adapter", *which)
        ours = peft.PeftModel.from_pretrained(
            transformers.AutoModelForCausalLM.from_pretrained(scratch / "base"), folder).eval()
        same, moved = says_the_same(sherd, ours, scratch / "run", *which), continued(ours, 24) != plain
        found, wanted = scores(sherd, ours, scratch / "run", scratch, *which)
        good &= same and moved and abs(found - wanted) < 1e-3
        print(f"{name} {task or ''}: {'the same text' if same else 'OTHER text'}, {'moved' if moved else 'STILL'}, "
              f"log likelihood {found:.6f} for {wanted:.6f}")
    # `again` takes the files that PEFT would write, without tasks.
    if "tasks" not in adapter:
        again(sherd, settings, folder, scratch)
    merged = subprocess.run([sherd, "export", str(scratch / "run"), "--output", str(scratch / "x")],
                            capture_output=True)
    good &= merged.returncode == 2 and b"no part of the weights" in merged.stderr
    print(f"{name}: {'ok' if good else 'WRONG'}")
    return good


def check(sherd, name, scratch):
    if name in PROMPTS:
        return check_prompt(sherd, name, scratch)
    config, adapter, extra = CASES[name]
    base, settings = train(sherd, config, adapter, extra, scratch)
    run(sherd, "export", scratch / "run", "--output", scratch / "adapter", "--adapter")
    run(sherd, "export", scratch / "run", "--output", scratch / "merged", "--dtype", "fp32")
    ours = peft.PeftModel.from_pretrained(
        transformers.AutoModelForCausalLM.from_pretrained(scratch / "base"), scratch / "adapter").eval()
    merged = transformers.AutoModelForCausalLM.from_pretrained(scratch / "merged").eval()
    ids = torch.randint(0, 257, (2, 48), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        plain = base.eval()(ids, use_cache=False).logits
        one, other = ours(ids, use_cache=False).logits, merged(ids, use_cache=False).logits
        text = continued(ours, 24)
    said = run(sherd, "generate", "--checkpoint", scratch / "run", "--prompt", PROMPT, "--temperature", "0", "--max-tokens",
               "24")
    scale = one.abs().max().item()
    difference, moved = (one - other).abs().max().item() / scale, (one - plain).abs().max().item() / scale
    again(sherd, settings, scratch / "adapter", scratch)
    good = difference < 2e-6 and moved > 0.05 and said.strip() == text.strip()
    print(f"{name}: merged differs by {difference:.1e}, training moved logits by {moved:.2f}, "
          f"{'the same text' if said.strip() == text.strip() else (said, text)}: {'ok' if good else 'WRONG'}")
    return good


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sherd", default=ROOT / "build/sherd")
    parser.add_argument("cases", nargs="*", default=[*CASES, *PROMPTS])
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    good = True
    for name in options.cases or [*CASES, *PROMPTS]:
        with tempfile.TemporaryDirectory() as scratch:
            good &= check(options.sherd, name, pathlib.Path(scratch))
    sys.exit(not good)


if __name__ == "__main__":
    main()
