#!/usr/bin/env python3
"""Prints tests/tensor/rotary_reference.h: what Hugging Face's transformers makes of scaled rotary positions.

transformers' own classes compute everything, in fp32 as they do. Of each case: the factor of cosines and
sines, the frequency of every pair, and a head, element i of which is i mod 7 - 3, turned to one position.

Needs torch and transformers; nothing that Sherd builds, tests or runs needs this file.
Usage: make_rotary_reference.py > tests/tensor/rotary_reference.h
"""
import textwrap

import torch
import transformers
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

POSITION = 37
# Name, size of a head, rope_parameters. Sizes are those of models, or small.
CASES = [
    ("default", 8, dict(rope_type="default", rope_theta=1e4)),
    ("linear", 8, dict(rope_type="linear", rope_theta=1e4, factor=4.0)),
    ("Llama 3.2 1B", 64, dict(rope_type="llama3", rope_theta=5e5, factor=32.0, low_freq_factor=1.0,
                              high_freq_factor=4.0, original_max_position_embeddings=8192)),
    ("llama3, other factors", 16, dict(rope_type="llama3", rope_theta=100.0, factor=3.0, low_freq_factor=2.0,
                                       high_freq_factor=6.0, original_max_position_embeddings=96)),
    ("Qwen2.5", 128, dict(rope_type="yarn", rope_theta=1e6, factor=4.0,
                          original_max_position_embeddings=32768)),
    ("gpt-oss", 64, dict(rope_type="yarn", rope_theta=150000.0, factor=32.0, beta_fast=32.0, beta_slow=1.0,
                         truncate=False, original_max_position_embeddings=4096)),
    ("DeepSeek-V3", 64, dict(rope_type="yarn", rope_theta=1e4, factor=40.0, beta_fast=32.0, beta_slow=1.0,
                             attention_factor=0.75, original_max_position_embeddings=4096)),
    ("yarn, a ramp of no width", 16, dict(rope_type="yarn", rope_theta=100.0, factor=2.0, beta_fast=4.0,
                                          beta_slow=4.0, original_max_position_embeddings=512)),
    ("yarn, a ramp beyond the pairs", 8, dict(rope_type="yarn", rope_theta=50.0, factor=0.5, beta_fast=1.0,
                                              beta_slow=0.001, original_max_position_embeddings=4)),
]
FIELDS = ["factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "truncate",
          "original_max_position_embeddings", "attention_factor"]


def number(value):
    return str(value).lower() if isinstance(value, bool) else f"{value:.9g}"


def rotary(parameters):
    """As C++ initialises tensor::Rotary."""
    scaling = parameters["rope_type"].replace("default", "none")
    out = [f".base = {number(parameters['rope_theta'])}", f".scaling = RotaryScaling::{scaling}"]
    names = {"original_max_position_embeddings": "original_positions"}
    out += [f".{names.get(key, key)} = {number(parameters[key])}" for key in FIELDS if key in parameters]
    return "{" + ", ".join(out) + "}"


def numbers(values):
    text = ", ".join(number(v) for v in values.tolist())
    return textwrap.fill("{" + text + "}", 108, initial_indent="     ", subsequent_indent="      ")


def main():
    print("#pragma once\n\n#include <cstdint>\n#include <vector>\n\n#include \"tensor/rotary.h\"\n")
    print("// Made by scripts/references/make_rotary_reference.py, which says what is what. Do not edit.")
    print("namespace sherd::test {\n\nusing tensor::RotaryScaling;\n")
    print("struct RotaryReference {\n  const char* name;\n  std::int64_t head;\n  tensor::Rotary rotary;")
    print("  double scale;\n  std::vector<double> frequencies, turned;\n};\n")
    print(f"inline constexpr std::int64_t rotary_reference_position = {POSITION};\n")
    print("// clang-format off\ninline const std::vector<RotaryReference> rotary_references = {")
    for name, head, parameters in CASES:
        config = transformers.LlamaConfig(hidden_size=head, num_attention_heads=1, head_dim=head,
                                          max_position_embeddings=65536, rope_parameters=dict(parameters))
        embedding = LlamaRotaryEmbedding(config)
        query = torch.tensor([float(i % 7 - 3) for i in range(head)]).reshape(1, 1, 1, head)
        cos, sin = embedding(query, torch.tensor([[POSITION]]))
        turned, _ = apply_rotary_pos_emb(query, query, cos, sin)
        given = textwrap.fill(rotary(parameters), 108, initial_indent="     ", subsequent_indent="      ")
        print(f'    {{"{name}", {head},\n{given},\n     {float(embedding.attention_scaling)!r},')
        print(f"{numbers(embedding.inv_freq)},\n{numbers(turned.flatten())}}},")
    print("};\n// clang-format on\n\n}  // namespace sherd::test")


main()
