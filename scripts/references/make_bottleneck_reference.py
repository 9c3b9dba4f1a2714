#!/usr/bin/env python3
"""Makes tests/models/reference/bottleneck: bottleneck adapters of the tiny models that lie in
tests/models/reference/hugging_face, as AdapterHub's `adapters` saves them as safetensors, with what it computes.

All values of the adapters are random. expected.safetensors: of `tokens` and `labels` of the model's own
expected.safetensors, `logits`, `loss` (the mean of the labels that are not -100) and `grad.NAME` for every tensor of
the adapter, in fp32, computed in double.

Needs torch, adapters with the transformers that it asks for, and safetensors; nothing that Sherd builds, tests or runs
needs this file.
Usage: make_bottleneck_reference.py [OUTPUT_FOLDER]
"""

import json
import pathlib
import shutil
import sys

import adapters
import safetensors.torch
import torch
import transformers

ROOT = pathlib.Path(__file__).resolve().parents[2] / "tests/models/reference"

CONFIGS = {
    "gpt2_houlsby": ("gpt2", adapters.DoubleSeqBnConfig(reduction_factor=3)),
    "gpt2_pfeiffer": ("gpt2", adapters.SeqBnConfig(reduction_factor=2, non_linearity="gelu_new", scaling=0.5)),
    "llama_houlsby": ("llama", adapters.DoubleSeqBnConfig(reduction_factor=4, non_linearity="gelu")),
    "llama_pfeiffer": ("llama", adapters.SeqBnConfig(reduction_factor=5.5)),
    "mistral_attention": ("mistral", adapters.BnConfig(mh_adapter=True, output_adapter=False, reduction_factor=2,
                                                       non_linearity="tanh", original_ln_before=True, scaling=2.0)),
}


def load(family):
    """Rotary frequencies are those of the parameters by which newer transformers describe them."""
    folder = ROOT / "hugging_face" / family
    config = transformers.AutoConfig.from_pretrained(folder)
    config._attn_implementation = "eager"
    config.use_cache = False
    rope = json.loads((folder / "config.json").read_text()).get("rope_parameters")
    if rope:
        config.rope_theta = rope["rope_theta"]
        config.rope_scaling = None if rope["rope_type"] == "default" else dict(rope)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=torch.float32).eval()


def make(name, family, config, root):
    folder = root / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    model = load(family)
    of_model = safetensors.torch.load_file(ROOT / "hugging_face" / family / "expected.safetensors")
    tokens, labels = of_model["tokens"].long(), of_model["labels"].long()
    with torch.no_grad():
        plain = (model(tokens).logits - of_model["logits"]).abs().max().item()
    assert plain < 1e-4, (name, plain)
    adapters.init(model)
    model.add_adapter("tiny", config=config)
    model.train_adapter("tiny")
    model.eval()
    torch.manual_seed(70 + list(CONFIGS).index(name))
    own = {key: p for key, p in model.named_parameters() if p.requires_grad}
    with torch.no_grad():
        for p in own.values():
            p.copy_(0.3 * torch.randn(p.shape))
    model.save_adapter(folder, "tiny", use_safetensors=True)
    for head in ("head_config.json", "model_head.safetensors"):
        (folder / head).unlink()
    description = json.loads((folder / "adapter_config.json").read_text())
    description["model_name"] = family
    (folder / "adapter_config.json").write_text(json.dumps(description, indent=2, sort_keys=True) + "\n")
    model.double()
    logits = model(tokens).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
    loss.backward()
    expected = {"tokens": tokens.int(), "labels": labels.int(), "logits": logits.detach().float(),
                "loss": loss.detach().float().reshape(1)}
    saved = safetensors.torch.load_file(folder / "adapter.safetensors")
    assert saved.keys() == own.keys(), (saved.keys(), own.keys())
    for key, p in own.items():
        expected["grad." + key] = p.grad.float().contiguous()
    safetensors.torch.save_file(expected, folder / "expected.safetensors")
    for file in folder.iterdir():
        file.chmod(0o644)
    print(f"{name}: loss {loss.item():.6f}, the model itself differs by {plain:.1e}, "
          f"{sum(f.stat().st_size for f in folder.iterdir())} bytes")


def main():
    root = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "bottleneck"
    for name, (family, config) in CONFIGS.items():
        make(name, family, config, root)


if __name__ == "__main__":
    main()
