#!/usr/bin/env python3
"""Checks what `sherd export --format` writes against bitsandbytes and transformers: codes and scales of every matrix are
those that bitsandbytes makes of the same weights, and transformers loads the files and computes with them.

Needs torch, transformers, bitsandbytes, accelerate and safetensors; nothing that Sherd builds, tests or runs needs it.
Usage: check_low_bits.py [--program build/sherd] [--folder FOLDER]
"""
import argparse
import pathlib
import subprocess
import tempfile

import bitsandbytes
import safetensors.torch
import torch
import transformers


def sherd(program, *arguments):
    done = subprocess.run([program, *map(str, arguments)], capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(map(str, arguments))}: {done.stderr}")
    return done.stderr


def made_by_bitsandbytes(weight, form):
    """Codes, and the values that they stand for."""
    if form == "int8":
        codes, scales, _ = bitsandbytes.functional.int8_vectorwise_quant(weight.half())
        return codes, codes.float() * scales.flatten()[:, None] / 127
    codes, state = bitsandbytes.functional.quantize_4bit(weight.contiguous(), quant_type=form[:3],
                                                         compress_statistics="double" in form)
    return codes, bitsandbytes.functional.dequantize_4bit(codes, state).float()


def check(program, folder, plain, form):
    out = folder / form
    said = sherd(program, "export", folder / "imported", "--output", out, "--format", form, "--dtype", "fp32")
    files = safetensors.torch.load_file(out / "model.safetensors")
    model = transformers.AutoModelForCausalLM.from_pretrained(out, device_map="cpu")
    modules = 0
    for name, module in model.named_modules():
        if not isinstance(module, (bitsandbytes.nn.Linear4bit, bitsandbytes.nn.Linear8bitLt)):
            continue
        modules += 1
        weight = plain.state_dict()[name + ".weight"]
        codes, values = made_by_bitsandbytes(weight, form)
        assert torch.equal(files[name + ".weight"].flatten(), codes.flatten()), name
        if form != "int8":
            own = bitsandbytes.functional.dequantize_4bit(module.weight.data, module.weight.quant_state).float()
            # A scale in 8 bits that lies half-way may go the other way.
            most = 5e-3 if "double" in form else 1e-6
            assert (own - values).abs().max() <= most * weight.abs().max(), name
    assert modules == 14, modules
    ids = torch.arange(24).reshape(2, 12) * 7 % 300
    with torch.no_grad():
        one, other = model(ids).logits.float(), plain(ids).logits
    away = ((one - other).norm() / other.norm()).item()
    assert torch.isfinite(one).all() and away < 0.5
    print(f"{form}: codes of {modules} matrices as bitsandbytes', logits {100 * away:.1f} % away;",
          said.strip().rsplit("which ", 1)[1].split(",")[0])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--program", default="build/sherd")
    parser.add_argument("--folder", type=pathlib.Path)
    arguments = parser.parse_args()
    folder = arguments.folder or pathlib.Path(tempfile.mkdtemp())
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=300, hidden_size=192, intermediate_size=320, num_hidden_layers=2,
                                      num_attention_heads=6, num_key_value_heads=3, max_position_embeddings=64)
    plain = transformers.AutoModelForCausalLM.from_config(config).eval()
    plain.save_pretrained(folder / "published")
    sherd(arguments.program, "import", folder / "published", "--output", folder / "imported")
    for form in ("nf4", "nf4_double", "fp4", "fp4_double", "int8"):
        check(arguments.program, folder, plain, form)


if __name__ == "__main__":
    main()
