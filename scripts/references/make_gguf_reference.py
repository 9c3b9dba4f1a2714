#!/usr/bin/env python3
"""Makes tests/models/gguf/reference: what the gguf package writes and reads.

blocks.safetensors has rows of numbers (`values`), the blocks that the package makes of them (`f16`, `bf16`, `q8_0`,
`q4_0`), and of types that it only reads blocks of random bits and what these stand for (`q4_k`, `q4_k.values`, `q6_k`,
`q6_k.values`). file.gguf is a small file with a value of each kind, two tensors of f32 and one of q8_0.

Needs numpy, gguf and safetensors; nothing that Sherd builds, tests or runs needs this file.
Usage: make_gguf_reference.py [FOLDER]
"""
import pathlib
import sys

import gguf
import numpy
import safetensors.numpy

Type = gguf.GGMLQuantizationType


def values():
    """Of several sizes, one-sided, all alike, zero, and with one that is far from the others."""
    random = numpy.random.default_rng(11)
    x = random.standard_normal((12, 256)).astype(numpy.float32)
    x[1] *= 1e-3
    x[2] = numpy.abs(x[2])
    x[3] = -numpy.abs(x[3]) - 1
    x[4] = 0
    x[5] = 0.75
    x[6, 100] = 40
    x[7, :128] = 0
    x[8] = numpy.linspace(-1, 1, 256)
    x[9] = x[9].round()
    x[10] *= numpy.exp(random.standard_normal(256))
    return x


def blocks(type, bytes_of_block, halves, random):
    """Blocks of random bits, whose half-precision numbers (at these places) are small and finite."""
    raw = random.integers(0, 256, (6, bytes_of_block), dtype=numpy.uint8)
    for at in halves:
        raw[:, at:at + 2] = random.uniform(0.001, 0.1, 6).astype(numpy.float16).view(numpy.uint8).reshape(6, 2)
    return raw, gguf.quants.dequantize(raw, type)


def write_file(path):
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("a.count", 7)
    writer.add_int32("a.number", -3)
    writer.add_float32("a.real", 0.5)
    writer.add_bool("a.flag", True)
    writer.add_string("a.text", "Grüße")
    writer.add_array("a.texts", ["x", "", "yz"])
    writer.add_array("a.reals", [1.5, -2.0])
    writer.add_array("a.numbers", [1, -1])
    writer.add_array("a.flags", [True, False, True])
    numbers = numpy.arange(96, dtype=numpy.float32)
    writer.add_tensor("first.weight", numbers[:15].reshape(3, 5))
    writer.add_tensor("second.bias", numbers[:3])
    writer.add_tensor("third.weight", gguf.quants.quantize(numbers.reshape(3, 32), Type.Q8_0), raw_dtype=Type.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main():
    folder = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else
                          pathlib.Path(__file__).resolve().parents[2] / "tests/models/gguf/reference")
    folder.mkdir(parents=True, exist_ok=True)
    random = numpy.random.default_rng(12)
    x = values()
    out = {"values": x}
    for name, type in (("f16", Type.F16), ("bf16", Type.BF16), ("q8_0", Type.Q8_0), ("q4_0", Type.Q4_0)):
        out[name] = numpy.ascontiguousarray(gguf.quants.quantize(x, type)).view(numpy.uint8)
    for name, type, size, halves in (("q4_k", Type.Q4_K, 144, (0, 2)), ("q6_k", Type.Q6_K, 210, (208,))):
        out[name], out[name + ".values"] = blocks(type, size, halves, random)
    safetensors.numpy.save_file(out, folder / "blocks.safetensors")
    write_file(folder / "file.gguf")


if __name__ == "__main__":
    main()
