#!/usr/bin/env python3
"""Makes tests/optim/quantized_traces.h: codes of numbers by bitsandbytes' maps, and 50 steps of AdamW with such codes.

Numbers, gradients and first weights come from formulas that the test has too. Each step decodes both moments, computes
AdamW in fp32 with NumPy, and encodes them. Codes are those of the nearest values, as in bitsandbytes' kernels for GPUs:
its routine for processors goes by a table of evenly spaced numbers, which misses small ones, so it is asked for large
ones alone, to see that the two agree. Sherd's rule comes on top: a second moment above zero never takes the code of zero.

Needs torch, bitsandbytes and numpy. Usage: make_quantized_traces.py [OUTPUT_FILE]
"""
import pathlib
import sys

import numpy as np
import torch
from bitsandbytes.functional import create_dynamic_map, quantize_blockwise

N, BLOCK, STEPS, KEPT = 600, 256, 50, [1, 10, 50]
RATE, BETA1, BETA2, EPS, DECAY = 0.01, 0.9, 0.99, 1e-6, 0.1
F = np.float32
MAPS = {"signed": create_dynamic_map(signed=True), "unsigned": create_dynamic_map(signed=False)}
index = np.arange(N, dtype=np.int64)


def numbers():
    """Of both signs and eight decades."""
    x = ((index * 7919 + 13) % 2003 - 1001).astype(F) / F(1001)
    return x * F(10) ** (-(index % 8)).astype(F)


def gradient(step):
    numerator = (index * 7919 + step * 104729) % 2003 - 1001
    return numerator.astype(F) / F(1001) * (1 + index % 5).astype(F)


def encode(values, kind):
    table = MAPS[kind].numpy()
    borders = (table[:-1] + table[1:]) / 2
    codes, scales = np.zeros(N, np.uint8), []
    for begin in range(0, N, BLOCK):
        block = values[begin : begin + BLOCK]
        scale = np.abs(block).max()
        scales.append(scale)
        part = block / scale if scale > 0 else block
        codes[begin : begin + BLOCK] = np.searchsorted(borders, part)
        if kind == "unsigned":
            codes[begin : begin + BLOCK] = np.maximum(codes[begin : begin + BLOCK], part > 0)
    published, state = quantize_blockwise(torch.from_numpy(values), code=MAPS[kind], blocksize=BLOCK)
    large = np.abs(values) > 0.05 * np.repeat(scales, BLOCK)[:N]
    agree = (published.numpy()[large].astype(int) - codes[large].astype(int)) == 0
    assert agree.mean() > 0.98 if large.any() else True, f"{kind}: {agree.mean()}"
    assert np.array_equal(state.absmax.numpy(), np.array(scales, F))
    return codes, np.array(scales, F)


def decode(codes, scales, kind):
    return MAPS[kind].numpy()[codes] * np.repeat(scales, BLOCK)[:N]


def run():
    weights = ((index * 4813) % 997 - 498).astype(F) / F(498)
    moments = {kind: encode(np.zeros(N, F), kind) for kind in MAPS}
    kept = {}
    for step in range(1, STEPS + 1):
        g = gradient(step)
        m = F(BETA1) * decode(*moments["signed"], "signed") + F(1 - BETA1) * g
        v = F(BETA2) * decode(*moments["unsigned"], "unsigned") + F(1 - BETA2) * (g * g)
        moments = {"signed": encode(m, "signed"), "unsigned": encode(v, "unsigned")}
        c1, c2 = 1 - BETA1**step, 1 / np.sqrt(1 - BETA2**step)
        weights = weights - F(RATE * DECAY) * weights
        weights = weights - F(RATE / c1) * (m / (np.sqrt(v) * F(c2) + F(EPS)))
        if step in KEPT:
            kept[step] = weights
    return kept, moments


def floats(values):
    return ", ".join(f"{float(x).hex()}f" for x in values)


def array(kind, name, values, size):
    return f"inline constexpr {kind} {name}[{size}] = {{\n    {values}}};\n"


def main():
    here = pathlib.Path(__file__).parent
    out = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else here / "quantized_traces.h"
    text = "// Made by make_quantized_traces.py.\n#pragma once\n\n#include <cstdint>\n\nnamespace sherd::optim::quantized_traces {\n\n"
    for kind, values in MAPS.items():
        text += array("float", f"{kind}_map", floats(values), 256)
    x = numbers()
    for kind, values in (("signed", x), ("unsigned", np.abs(x))):
        codes, scales = encode(values, kind)
        text += array("std::uint8_t", f"{kind}_codes", ", ".join(map(str, codes.flatten().tolist())), N)
        text += array("float", f"{kind}_scales", floats(scales), len(scales))
    kept, moments = run()
    for step, weights in kept.items():
        text += array("float", f"weights_{step}", floats(weights), N)
    for kind, (codes, scales) in moments.items():
        text += array("std::uint8_t", f"trained_{kind}_codes", ", ".join(map(str, codes.flatten().tolist())), N)
        text += array("float", f"trained_{kind}_scales", floats(scales), len(scales))
    out.write_text(text + "\n}  // namespace sherd::optim::quantized_traces\n")


if __name__ == "__main__":
    main()
