#!/usr/bin/env python3
"""Makes tests/models/compressed/reference, what compressed-tensors and a plain GPTQ in NumPy make of given numbers.

matrix.safetensors: `values` [7, 48], for int8, fp8 and int4 (groups of 16) the files that compressed-tensors' compressors
write of it with scales by its min-max rule (`int8.weight`, `int8.weight_scale`, …), and `inputs`, rounded by a scale for each
row and by one (`int8.token`, `int8.tensor`, …). configs.json: `quantization_config` as its classes write it.
gptq.safetensors: `values` [10, 192], `inputs` [240, 192], and codes and scales by GPTQ column by column in fp64, as the paper
has it: for groups of 64 and 96, for whole rows, and in the order of activations.
llama.safetensors: `tokens` [180, 12], and what block-by-block calibration on them makes of the model
tests/models/reference/hugging_face/llama: codes (`int4.NAME`) and scales by GPTQ in groups of 4, with transformers' modules,
whose later blocks see the earlier ones rounded; and of the first three texts, likewise, `input_scale` of int8
(`int8.NAME.scale`) and the error of a layer's outputs, weights and inputs being rounded (`int8.NAME.error`).

Needs numpy, torch, transformers, compressed_tensors and safetensors; nothing that Sherd builds, tests or runs needs this
file. Usage: make_compressed_reference.py [FOLDER]
"""
import json
import pathlib
import sys

import numpy
import torch
import transformers
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.utils import calculate_qparams, compute_dynamic_scales_and_zp
from safetensors.torch import save_file

ROOT = pathlib.Path(__file__).resolve().parents[2]
FORMAT = {"int8": "int-quantized", "fp8": "float-quantized", "int4": "pack-quantized"}


def scheme_of(kind, group=128, static=False, order=False):
    number = "float" if kind == "fp8" else "int"
    if kind == "int4":
        weights = QuantizationArgs(num_bits=4, type=number, strategy="group", group_size=group,
                                   **({"actorder": "weight"} if order else {}))
        return QuantizationScheme(targets=["Linear"], weights=weights, format=FORMAT[kind])
    inputs = (QuantizationArgs(num_bits=8, type=number, strategy="tensor") if static
              else QuantizationArgs(num_bits=8, type=number, strategy="token", dynamic=True))
    return QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(num_bits=8, type=number, strategy="channel"),
                              input_activations=inputs, format=FORMAT[kind])


def scales_of(values, args):
    group = args.group_size or values.shape[1]
    grouped = values.reshape(values.shape[0], -1, group)
    return calculate_qparams(grouped.amin(-1), grouped.amax(-1), args)[0]


def compressed(values, scheme):
    compressor = BaseCompressor.get_value_from_registry(scheme.format)
    state = {"weight": values, "weight_scale": scales_of(values, scheme.weights)}
    return compressor.compress(state, scheme)


def matrix():
    random = numpy.random.default_rng(3)
    x = random.standard_normal((7, 48)).astype(numpy.float32)
    x[1] = 0
    x[2] = numpy.abs(x[2])
    x[3] = numpy.linspace(-7.5, 7.5, 48)  # halves of a code
    x[4, 5] = -60
    x[5, :16] *= 1e-4
    x[6] *= numpy.exp(random.standard_normal(48))
    values, inputs = torch.tensor(x), torch.tensor(random.standard_normal((5, 48)).astype(numpy.float32) * 3)
    out = {"values": values, "inputs": inputs}
    for kind in FORMAT:
        scheme = scheme_of(kind, group=16)
        for name, tensor in compressed(values, scheme).items():
            out[f"{kind}.{name}"] = tensor
        if kind == "int4":
            continue
        args = scheme.input_activations
        scale, zero = compute_dynamic_scales_and_zp(inputs[None], args, None)  # of a batch of one text
        out[f"{kind}.token"] = fake_quantize(inputs[None], scale, zero, args)[0]
        args = scheme_of(kind, static=True).input_activations
        scale, zero = calculate_qparams(inputs.min(), inputs.max(), args)
        out[f"{kind}.tensor"], out[f"{kind}.input_scale"] = fake_quantize(inputs, scale, zero, args), scale
    return out


def configs():
    cases = {"int8": scheme_of("int8"), "int8_static": scheme_of("int8", static=True), "fp8": scheme_of("fp8"),
             "fp8_static": scheme_of("fp8", static=True), "int4": scheme_of("int4"),
             "int4_ordered": scheme_of("int4", group=64, order=True)}
    out = {}
    for name, scheme in cases.items():
        config = QuantizationConfig(config_groups={"group_0": scheme}, format=scheme.format,
                                    quantization_status="compressed", ignore=["lm_head"])
        out[name] = json.loads(config.model_dump_json())
    return out


def gptq(values, hessian, group, ordered=False):
    """Codes and scales, by Frantar et al. 2022, without blocks of columns: each error goes to all that follow at once.
    The largest of a group, which lies half-way between two codes, goes to the outer one."""
    w, h = values.astype(numpy.float64), hessian.astype(numpy.float64)
    rows, n = w.shape
    alive = numpy.diag(h) > 0
    mean = numpy.diag(h)[alive].mean()
    h[~alive, ~alive] = mean
    order = numpy.argsort(-numpy.diag(hessian), kind="stable") if ordered else numpy.arange(n)
    scale = lambda part: numpy.maximum(numpy.abs(part).max(1) / 7.5, 1e-12).astype(numpy.float32).astype(numpy.float64)
    scales = numpy.stack([scale(w[:, i:i + group]) for i in range(0, n, group)], 1)
    w, h = w[:, order], h[order][:, order]
    h[numpy.arange(n), numpy.arange(n)] += 0.01 * mean
    upper = numpy.linalg.cholesky(numpy.linalg.inv(h)).T
    codes = numpy.zeros((rows, n))
    for i in range(n):
        column = order[i]
        if not ordered and column % group == 0:
            scales[:, column // group] = scale(w[:, i:i + group])
        s = scales[:, column // group]
        codes[:, column] = numpy.clip(numpy.round(w[:, i] * (1 + 2**-20) / s), -8, 7)
        error = (w[:, i] - codes[:, column] * s) / upper[i, i]
        w[:, i + 1:] -= numpy.outer(error, upper[i, i + 1:])
    return codes.astype(numpy.int8), scales.astype(numpy.float32)


def gptq_alone():
    random = numpy.random.default_rng(5)
    x = random.standard_normal((240, 192)) @ (random.standard_normal((192, 192)) * numpy.exp(random.standard_normal(192)))
    x[:, 17] = 0
    x = x.astype(numpy.float32)
    values = random.standard_normal((10, 192)).astype(numpy.float32)
    hessian = x.astype(numpy.float64).T @ x.astype(numpy.float64)
    out = {"values": values, "inputs": x}
    for name, group, ordered in (("group", 64, False), ("uneven", 96, False), ("rows", 192, False), ("ordered", 64, True)):
        out[name + ".codes"], out[name + ".scales"] = gptq(values, hessian, group, ordered)
    return {name: torch.tensor(value) for name, value in out.items()}


def calibrated():
    """Block by block, as Calibration has it."""
    out = {"tokens": torch.tensor(numpy.random.default_rng(9).integers(0, 37, (180, 12)), dtype=torch.int32)}
    for kind in ("int4", "int8"):
        model = transformers.AutoModelForCausalLM.from_pretrained(
            ROOT / "tests/models/reference/hugging_face/llama", dtype=torch.float32, attn_implementation="eager").eval()
        for number, layer in enumerate(model.model.layers):
            linear = {f"model.layers.{number}.{name}": module for name, module in layer.named_modules()
                      if isinstance(module, torch.nn.Linear)}
            inputs, hooks = {}, []
            for name, module in linear.items():
                def keep(module, given, name=name):
                    inputs[name] = given[0].reshape(-1, given[0].shape[-1])
                hooks.append(module.register_forward_pre_hook(keep))
            with torch.no_grad():
                model(out["tokens"][:None if kind == "int4" else 3].long())
            for hook in hooks:
                hook.remove()
            for name, module in linear.items():
                x, w = inputs[name].double().numpy(), module.weight.data
                if kind == "int4":
                    codes, scales = gptq(w.numpy(), x.T @ x, 4)
                    out[f"int4.{name}.codes"], out[f"int4.{name}.scales"] = torch.tensor(codes), torch.tensor(scales)
                    made = codes * numpy.repeat(scales, 4, axis=1)
                    module.weight.data = torch.tensor(made.astype(numpy.float32))
                else:
                    scheme = scheme_of("int8", static=True)
                    scale = scales_of(w, scheme.weights)
                    given, whole = inputs[name], inputs[name] @ w.T
                    module.weight.data = fake_quantize(w, scale, torch.zeros_like(scale), scheme.weights)
                    args = scheme.input_activations
                    scale, zero = calculate_qparams(given.min(), given.max(), args)
                    rounded = fake_quantize(given, scale, zero, args) @ module.weight.data.T
                    out[f"int8.{name}.scale"] = scale
                    out[f"int8.{name}.error"] = ((rounded - whole).norm() / whole.norm()).reshape(1)
    return out


def main():
    folder = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "tests/models/compressed/reference"
    folder.mkdir(parents=True, exist_ok=True)
    for name, tensors in (("matrix", matrix()), ("gptq", gptq_alone()), ("llama", calibrated())):
        save_file({key: value.contiguous() for key, value in tensors.items()}, folder / f"{name}.safetensors")
    (folder / "configs.json").write_text(json.dumps(configs(), indent=1) + "\n")


if __name__ == "__main__":
    main()
