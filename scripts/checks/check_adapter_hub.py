#!/usr/bin/env python3
"""Trains bottleneck adapters of tiny models with `sherd train`, exports them, and has AdapterHub's `adapters` load
them: what its model continues a text with against `sherd generate`, and with what probability it reads one against
`sherd evaluate`. Then trains on from AdapterHub's own files.

Needs torch, and adapters with the transformers that it asks for.
Usage: check_adapter_hub.py [--sherd build/sherd] [CASE...]
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

import adapters
import torch
import transformers

from adapter_checks import ROOT, continued, run, says_the_same, scores

LLAMA = dict(vocab_size=257, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=64)
PFEIFFER = {"mh_adapter": False, "non_linearity": "relu", "original_ln_before": True}
CASES = {
    "gpt2": (transformers.GPT2Config(vocab_size=257, n_embd=64, n_layer=2, n_head=4, n_positions=64),
             {"reduction_factor": 4}, []),
    "llama_tensor": (transformers.LlamaConfig(**LLAMA), {"bottleneck_size": 7, "name": "own", **PFEIFFER},
                     ["--ranks", "2", "--set", "parallel.tensor=2"]),
    "mistral_pipeline": (transformers.MistralConfig(**LLAMA, sliding_window=16),
                         {"reduction_factor": 5, "non_linearity": "gelu", "scaling": 2},
                         ["--ranks", "2", "--set", "parallel.pipeline=2", "--set", "gradient_accumulation_steps=2"]),
}

def check(sherd, name, scratch):
    config, keys, extra = CASES[name]
    torch.manual_seed(3)
    base = transformers.AutoModelForCausalLM.from_config(config)
    base.save_pretrained(scratch / "base")
    run(sherd, "prepare", "--input", ROOT / "README.md", ROOT / "docs/config.md", "--output", scratch / "data")
    settings = {"train_micro_batch_size_per_gpu": 4, "data": {"path": str(scratch / "data"), "split": [1, 0]},
                "training": {"steps": 40, "learning_rate": 1e-2, "init_from": str(scratch / "base"),
                             "save_dir": str(scratch / "run"), "adapter": {"type": "bottleneck", **keys}}}
    (scratch / "config.json").write_text(json.dumps(settings))
    run(sherd, "train", "--config", scratch / "config.json", "--set", "model.seq_length=48", *extra)
    run(sherd, "export", scratch / "run", "--output", scratch / "adapter", "--adapter")
    ours = transformers.AutoModelForCausalLM.from_pretrained(scratch / "base").eval()
    plain = continued(ours, 24)
    adapters.init(ours)
    ours.set_active_adapters(ours.load_adapter(str(scratch / "adapter"), use_safetensors=True))
    ours.eval()
    same, text = says_the_same(sherd, ours, scratch / "run"), continued(ours, 24)
    found, wanted = scores(sherd, ours, scratch / "run", scratch)
    saved = scratch / "saved"
    saved.mkdir()
    ours.save_adapter(str(saved), keys.get("name", "adapter"), use_safetensors=True)
    settings["training"].update(steps=3, save_dir=str(scratch / "again"), adapter={"init_from": str(saved)})
    (scratch / "again.json").write_text(json.dumps(settings))
    run(sherd, "train", "--config", scratch / "again.json", "--set", "model.seq_length=48")
    merged = subprocess.run([sherd, "export", str(scratch / "run"), "--output", str(scratch / "x")],
                            capture_output=True)
    good = same and text != plain and abs(found - wanted) < 1e-3 and merged.returncode == 2
    print(f"{name}: {'the same text' if same else 'OTHER text'}, "
          f"{'another than the base' if text != plain else 'the BASE'}, log likelihood {found:.6f} for {wanted:.6f}: "
          f"{'ok' if good else 'WRONG'}")
    return good


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sherd", default=ROOT / "build/sherd")
    parser.add_argument("cases", nargs="*", default=list(CASES))
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    good = True
    for name in options.cases:
        with tempfile.TemporaryDirectory() as scratch:
            good &= check(options.sherd, name, pathlib.Path(scratch))
    sys.exit(not good)


if __name__ == "__main__":
    main()
