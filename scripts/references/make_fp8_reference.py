#!/usr/bin/env python3
"""Prints tests/tensor/fp8_reference.h: what PyTorch makes of numbers in FP8.

- The codes that torch.float8_e4m3fn and torch.float8_e5m2 give for all 65,536 numbers of bf16 where Sherd's rules are
  the same, as CRC-32C over "code, code, ..." in the order of their bits: what is infinite or a NaN is left out, as is
  what rounds beyond the largest number.
- Of a matrix whose elements follow from their index, codes and scales by DeepSeek-V3.1's published formula (scales of
  powers of two: 2^ceil(log2(largest/448))), for runs of 128 columns and for blocks of 128 x 128, with torch's casts.

Needs torch; nothing that Sherd builds, tests or runs needs this file.
Usage: make_fp8_reference.py > tests/tensor/fp8_reference.h
"""
import torch

ROWS, COLS = 130, 300


def crc32c(data):
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def element(i):
    """Of element i of the matrix: exact in bf16, magnitudes from 2^-20 to 2^11."""
    bits = (i * 2654435761) % 2**32
    return (-1) ** (bits >> 31) * (128 + (bits >> 8) % 128) / 128 * 2.0 ** ((bits >> 20) % 32 - 20)


def quantise(x, rows, cols):
    """Codes and scales of blocks of rows x cols."""
    r, c = -(-x.shape[0] // rows), -(-x.shape[1] // cols)
    padded = torch.zeros(r * rows, c * cols)
    padded[: x.shape[0], : x.shape[1]] = x
    blocks = padded.view(r, rows, c, cols)
    scales = torch.exp2(torch.ceil(torch.log2(blocks.abs().amax(dim=(1, 3)) / 448.0)))
    codes = (blocks / scales[:, None, :, None]).clamp(-448, 448).to(torch.float8_e4m3fn)
    return codes.view(torch.uint8).reshape(r * rows, c * cols)[: x.shape[0], : x.shape[1]], scales


def main():
    every = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    print("#pragma once\n\n#include <cstdint>\n")
    print(f"// Made by scripts/references/make_fp8_reference.py with torch {torch.__version__.split('+')[0]}.")
    print("namespace sherd::test::fp8_reference {\n")
    for name, dtype, beyond in (("e4m3", torch.float8_e4m3fn, 464.0), ("e5m2", torch.float8_e5m2, 61440.0)):
        agree = every.isfinite() & (every.float().abs() < beyond)
        codes = every[agree].to(dtype).view(torch.uint8)
        print(f"inline constexpr std::int64_t {name}_count = {codes.numel()};")
        print(f"inline constexpr std::uint32_t {name} = {crc32c(codes.tolist()):#010x};")
    x = torch.tensor([element(i) for i in range(ROWS * COLS)]).view(ROWS, COLS)
    assert torch.equal(x.bfloat16().float(), x)
    print(f"\ninline constexpr std::int64_t rows = {ROWS}, cols = {COLS};")
    for name, block in (("runs", (1, 128)), ("squares", (128, 128))):
        codes, scales = quantise(x, *block)
        exponents = [int(e) + 128 for e in torch.log2(scales).flatten().tolist()]
        print(f"inline constexpr std::uint32_t {name}_codes = {crc32c(codes.flatten().tolist()):#010x};")
        print(f"inline constexpr std::uint32_t {name}_exponents = {crc32c(exponents):#010x};")
    print("\n}  // namespace sherd::test::fp8_reference")


if __name__ == "__main__":
    main()
