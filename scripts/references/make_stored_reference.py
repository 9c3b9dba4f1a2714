#!/usr/bin/env python3
"""Prints tests/tensor/stored_reference.h: what bitsandbytes makes of weights in 4 bits, on the processor.

Elements follow from their index (element()). As CRC-32C over bytes: packed codes, the largest magnitudes of blocks and
the decoded values, in fp32 and bf16, of numbers of which the last block is not whole; and with scales in 8 bits the
codes of these, the scale and the offset, of each 16,384 elements by themselves, and their decoded values.

Needs torch and bitsandbytes; nothing that Sherd builds, tests or runs needs this file.
Usage: make_stored_reference.py > tests/tensor/stored_reference.h
"""
import bitsandbytes
import bitsandbytes.functional as F
import torch

from make_fp8_reference import crc32c

COUNT, DOUBLES = 64 * 100 + 37, 2
KINDS = ("nf4", "fp4")


def element(i):
    """About normal, of another size in each block: a sum of four numbers that the index scatters."""
    bits = [(i * 2654435761 + k * 2246822519) % 2**32 >> 8 & 0xffff for k in range(4)]
    return (sum(bits) - 131070) / 65536 * 2.0 ** ((i // 64) * 7 % 5 - 6)


def raw(tensor):
    return tensor.contiguous().flatten().view(torch.uint8).tolist()


def show(name, tensor):
    print(f"inline constexpr std::uint32_t {name} = {crc32c(raw(tensor)):#010x};")


def main():
    print("#pragma once\n\n#include <cstdint>\n")
    print(f"// Made by scripts/references/make_stored_reference.py with bitsandbytes {bitsandbytes.__version__}, torch "
          f"{torch.__version__.split('+')[0]}.")
    print("namespace sherd::test::stored_reference {\n")
    print(f"inline constexpr std::int64_t count = {COUNT}, doubles = {DOUBLES};")
    show("scale_values", F.create_dynamic_map())
    x = torch.tensor([element(i) for i in range(max(COUNT, DOUBLES * 16384))])
    assert x[:9].double().tolist() == [element(i) for i in range(9)]
    for kind in KINDS:
        codes, state = F.quantize_4bit(x[:COUNT], quant_type=kind)
        show(f"{kind}_codes", codes)
        show(f"{kind}_scales", state.absmax)
        values = F.dequantize_4bit(codes, state)
        show(f"{kind}_values", values)
        state.dtype = torch.bfloat16
        show(f"{kind}_bf16", F.dequantize_4bit(codes, state))
        parts = []
        for part in x[: DOUBLES * 16384].split(16384):
            codes, state = F.quantize_4bit(part, quant_type=kind, compress_statistics=True)
            parts.append((codes, state.absmax, state.state2.absmax, state.offset.view(1), F.dequantize_4bit(codes, state)))
        for name, tensors in zip(("codes", "scale_codes", "scale_scales", "offsets", "values"), zip(*parts)):
            show(f"{kind}_double_{name}", torch.cat([t.flatten() for t in tensors]))
    print("\n}  // namespace sherd::test::stored_reference")


if __name__ == "__main__":
    main()
