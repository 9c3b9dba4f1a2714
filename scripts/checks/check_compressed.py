#!/usr/bin/env python3
"""Checks what `sherd export --quantize` writes against compressed-tensors and transformers, for tiny models of several
families: the library's classes read `quantization_config` and write the same; its compressors make the same bytes of the same
weights; transformers loads each form and computes what the numbers stand for; `sherd import` reads them as the same numbers,
and `sherd evaluate` finds the loss that transformers finds.

Needs torch, transformers, compressed_tensors and safetensors; nothing that Sherd builds, tests or runs needs it.
Usage: check_compressed.py [--program build/sherd] [--folder FOLDER] [FAMILY...]
"""
import argparse
import json
import os
import pathlib
import shutil
import subprocess
import tempfile

os.environ["TQDM_DISABLE"] = "1"
import safetensors.torch
import torch
import transformers
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig
from compressed_tensors.quantization.utils import calculate_qparams

ROOT = pathlib.Path(__file__).resolve().parents[2]
VOCABULARY, LENGTH = 720, 48
SIZES = dict(vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=64, pad_token_id=None, bos_token_id=0, eos_token_id=0)
EXPERTS = dict(SIZES, num_experts_per_tok=2)
FAMILIES = {
    "llama": transformers.LlamaConfig(**SIZES),
    "qwen2": transformers.Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3": transformers.Qwen3Config(**SIZES, head_dim=32),
    "mistral": transformers.MistralConfig(**SIZES, sliding_window=32),
    "phi3": transformers.Phi3Config(**SIZES),
    "gemma2": transformers.Gemma2Config(**SIZES, head_dim=16, query_pre_attn_scalar=16),
    "mixtral": transformers.MixtralConfig(**EXPERTS, num_local_experts=4),
    "qwen3_moe": transformers.Qwen3MoeConfig(**EXPERTS, num_experts=4, moe_intermediate_size=64, head_dim=16),
}
FORMS = {"int8": ["int8"], "int8_static": ["int8", "--calibrate"], "fp8": ["fp8"], "fp8_static": ["fp8", "--calibrate"],
         "int4": ["int4", "--group", 32], "int4_gptq": ["int4", "--group", 32, "--calibrate"],
         "int4_ordered": ["int4", "--group", 32, "--activation-order", "--calibrate"]}


def sherd(program, *arguments):
    done = subprocess.run([program, *map(str, arguments)], capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(map(str, arguments))}: {done.stderr}")
    return done.stdout


def made(family, folder):
    """A model with some inputs that are large, as trained ones have them, and its tokenizer."""
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(FAMILIES[family]).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() >= 2:
                p.mul_(2)
            elif "norm" in name:
                p.mul_(torch.exp(torch.randn(p.shape)))
    model.save_pretrained(folder)
    shutil.copy(ROOT / "tests/data/tokenizers/gpt2.json", folder / "tokenizer.json")
    return model


def without_none(tree):
    if isinstance(tree, dict):
        return {key: without_none(value) for key, value in tree.items() if value is not None}
    return [without_none(value) for value in tree] if isinstance(tree, list) else tree


def check_bytes(files, plain, scheme, form):
    """Round to nearest has the bytes of the library's compressor. Returns the number of matrices."""
    compressor, count = BaseCompressor.get_value_from_registry(scheme.format), 0
    for name in files:
        if not name.endswith(".weight_scale"):
            continue
        module, count = name.removesuffix(".weight_scale"), count + 1
        weight = plain[module + ".weight"]
        group = scheme.weights.group_size or weight.shape[1]
        grouped = weight.reshape(weight.shape[0], -1, group)
        scale = calculate_qparams(grouped.amin(-1), grouped.amax(-1), scheme.weights)[0]
        for part, tensor in compressor.compress({"weight": weight, "weight_scale": scale}, scheme).items():
            own = files[f"{module}.{part}"]
            assert own.dtype == tensor.dtype and own.shape == tensor.shape, (module, part, own.shape, tensor.shape)
            if form in ("int8", "fp8", "int4") or (part == "weight" and form.endswith("static")):
                if part == "weight" and own.dtype == torch.float8_e4m3fn:
                    own, tensor = own.float(), tensor.float()
                assert torch.equal(own, tensor), (module, part)
    return count


def rounded_as(module, scheme, scale):
    """A hook that rounds a layer's inputs, by the formula."""
    top, low = (448.0, -448.0) if scheme.weights.type == "float" else (127.0, -128.0)
    def hook(_, given):
        x = given[0]
        s = scale if scale is not None else x.abs().amax(-1, keepdim=True) / (448 if top == 448 else 127.5)
        y = torch.clamp(x / s, low, top)
        y = y.to(torch.float8_e4m3fn).float() if top == 448 else y.round()
        return (y * s,)
    return hook


def logits_of(model, ids):
    with torch.no_grad():
        return model(ids).logits.float()


def check(program, folder, family, form, model, plain):
    out, back = folder / form, folder / f"{form}_plain"
    arguments = FORMS[form] + ([folder / "data", "--calibrate-length", LENGTH] if "--calibrate" in FORMS[form] else [])
    told = json.loads(sherd(program, "export", folder / "imported", "--output", out, "--dtype", "fp32", "--json",
                            "--quiet", "--quantize", *arguments))["quantized"]
    section = json.loads((out / "config.json").read_text())["quantization_config"]
    config = QuantizationConfig.model_validate(section)
    assert without_none(json.loads(config.model_dump_json())) == without_none(section), section
    files = safetensors.torch.load_file(out / "model.safetensors")
    scheme = config.config_groups["group_0"]
    count = check_bytes(files, plain, scheme, form)
    assert count == len(told["layers"])
    # What Sherd reads of it, as plain weights.
    sherd(program, "import", out, "--output", folder / f"{form}_imported", "--dtype", "fp32", "--quiet")
    sherd(program, "export", folder / f"{form}_imported", "--output", back, "--dtype", "fp32", "--quiet")
    ids = torch.arange(2 * LENGTH).reshape(2, LENGTH) * 7 % VOCABULARY
    same = transformers.AutoModelForCausalLM.from_pretrained(back, dtype=torch.float32).eval()
    original, ours = logits_of(model, ids), logits_of(same, ids)
    away = lambda a, b: ((a - b).norm() / b.norm()).item()
    line = (f"{family} {form}: {count} matrices, weights {100 * told['weights_error']:.2f} % away, "
            f"logits {100 * away(ours, original):.1f} %")
    if told["outputs_error"] is not None:
        line += f", layers' outputs {100 * told['outputs_error']:.2f} %"
    loaded = theirs = None
    try:
        loaded = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
        theirs = logits_of(loaded, ids)
    except RuntimeError as error:  # transformers has no way for experts in int8
        if not (form.startswith("int8") and family in ("mixtral", "qwen3_moe")):
            raise
        print(f"{line}; transformers does not load it: {type(error).__name__}: {str(error).splitlines()[0][:150]}")
        return told
    hooks = []
    for name, module in same.named_modules():
        if scheme.input_activations and isinstance(module, torch.nn.Linear) and name + ".weight_scale" in files:
            scale = files.get(name + ".input_scale")
            hooks.append(module.register_forward_pre_hook(rounded_as(module, scheme, scale)))
    rounded = logits_of(same, ids)
    line += f"; transformers' are {away(theirs, rounded):.1e} from these{' with rounded inputs' if hooks else ''}"
    print(line)
    assert away(theirs, rounded) < (2e-3 if hooks else 1e-5), "logits differ"
    assert away(theirs, original) < 1
    assert not hooks or away(theirs, ours) > 1e-4, "inputs are not rounded"
    if form.startswith("int4"):
        check_loss(program, folder, form, loaded)
    return told


def check_loss(program, folder, form, loaded):
    found = json.loads(sherd(program, "evaluate", "--checkpoint", folder / f"{form}_imported", "--tasks",
                             folder / "task.jsonl", "--json", "--quiet"))
    text = json.loads((folder / "task.jsonl").read_text())["text"]
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "published" / "tokenizer.json"))
    ids = torch.tensor([[tokenizer.convert_tokens_to_ids("<|endoftext|>")] + tokenizer(text)["input_ids"]])
    scores = torch.log_softmax(logits_of(loaded, ids)[0, :-1].double(), -1)
    loss = -scores.gather(1, ids[0, 1:, None]).mean().item()
    own = next(value for key, value in walk(found) if key == "loss")
    own = own["value"] if isinstance(own, dict) else own
    assert abs(own - loss) < 1e-4, (own, loss)


def walk(tree):
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ():
        yield key, value
        yield from walk(value)


def compare(model, plain, folder):
    """GPTQ against rounding to nearest: outputs of the first block's layers, which see the same inputs."""
    inputs = {}
    hooks = [module.register_forward_pre_hook(lambda _, given, name=name: inputs.setdefault(name, given[0]))
             for name, module in model.named_modules()
             if isinstance(module, torch.nn.Linear) and ".layers.0." in name]
    tokens = torch.frombuffer(bytearray((folder / "data.bin").read_bytes()), dtype=torch.uint16).long()
    many = len(tokens) // LENGTH
    count = min(many, 128)
    step = len(tokens) // count
    logits_of(model, torch.stack([tokens[i * step:i * step + LENGTH] for i in range(count)]))
    for hook in hooks:
        hook.remove()
    nearest, other = (transformers.AutoModelForCausalLM.from_pretrained(folder / f"{form}_plain", dtype=torch.float32)
                      for form in ("int4", "int4_gptq"))
    ratios = []
    for name, given in inputs.items():
        x = given.reshape(-1, given.shape[-1])
        if name + ".weight" not in plain:
            continue
        error = [(x @ (of.get_submodule(name).weight - plain[name + ".weight"]).T).norm().item()
                 for of in (nearest, other)]
        ratios.append(error[1] / error[0])
    print(f"  GPTQ's errors of the first block's outputs over those to nearest: {min(ratios):.2f} to {max(ratios):.2f}")
    assert max(ratios) < 0.9


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--program", default=ROOT / "build/sherd")
    parser.add_argument("--folder", type=pathlib.Path)
    parser.add_argument("families", nargs="*", metavar="FAMILY")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    for family in options.families or FAMILIES:
        folder = (options.folder or pathlib.Path(tempfile.mkdtemp())) / family
        (folder / "published").mkdir(parents=True)
        model = made(family, folder / "published")
        plain = safetensors.torch.load_file(folder / "published/model.safetensors")
        words = "the of and to shard weights rank memory block 0 1 2 3 error".split()
        text = " ".join(words[i * i % 31 % len(words)] + str(i % 17) for i in range(3000))
        (folder / "text.txt").write_text(text)
        (folder / "task.jsonl").write_text(json.dumps({"text": text[:60]}) + "\n")
        sherd(options.program, "import", folder / "published", "--output", folder / "imported", "--quiet")
        sherd(options.program, "prepare", "--input", folder / "text.txt", "--tokenizer", f"hf:{folder / 'published'}",
              "--output", folder / "data", "--quiet")
        for form in FORMS:
            check(options.program, folder, family, form, model, plain)
        compare(model, plain, folder)


if __name__ == "__main__":
    main()
