#!/usr/bin/env python3
"""Takes tiny models of every family through `sherd import` and `sherd export` and has transformers read what
comes out: nothing missing, nothing unexpected, every weight equal to the bit (bf16: rounded to nearest), the
same logits.

Needs torch and transformers, and the folders that make_hugging_face_reference.py wrote.
Usage: check_hugging_face.py [--sherd build/sherd] [--dtype fp32|bf16|fp16] [FOLDER...]
"""
import argparse
import pathlib
import subprocess
import sys
import tempfile

import torch
import transformers

ROOT = pathlib.Path(__file__).resolve().parents[2]
REFERENCE = ROOT / "tests/models/reference/hugging_face"
TORCH = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def load(folder, dtype="auto"):
    config = transformers.AutoConfig.from_pretrained(folder)
    config._attn_implementation = config._experts_implementation = "eager"
    kind = getattr(transformers, config.architectures[0])
    model, info = kind.from_pretrained(folder, config=config, dtype=dtype, output_loading_info=True)
    return model.eval(), info


def scores(model, tokens, options):
    """All of them: of tokens, and of pairs of texts."""
    return [value for name, value in model(tokens, **options).items() if name.endswith("logits")]


def check(sherd, folder, dtype):
    with tempfile.TemporaryDirectory() as scratch:
        checkpoint, out = f"{scratch}/checkpoint", f"{scratch}/out"
        for command in (["import", folder, "--output", checkpoint],
                        ["export", checkpoint, "--output", out, "--dtype", dtype, "--max-shard-size", "9KB"]):
            subprocess.run([sherd, *map(str, command)], check=True, stderr=subprocess.DEVNULL)
        model, info = load(folder)
        back, back_info = load(out)
        problems = [f"{kind}: {names}" for kind, names in back_info.items() if names]
        wide = {*(back._keep_in_fp32_modules or ()), *(back._keep_in_fp32_modules_strict or ())}
        for (name, a), (other, b) in zip(model.state_dict().items(), back.state_dict().items()):
            kept = b.dtype == torch.float32 and any(part in name for part in wide)
            state = name.endswith("e_score_correction_bias")  # written in fp32
            want = a if state else a.to(TORCH[dtype]).to(b.dtype)
            if name != other or not (kept or b.dtype == TORCH[dtype]) or not torch.equal(want, b):
                problems.append(f"{name} differs")
        tokens = torch.randint(0, model.config.vocab_size, (2, 10))
        options = {} if "Bert" in type(model).__name__ else {"use_cache": False}
        if model.config.is_encoder_decoder:
            options["decoder_input_ids"] = tokens
        if dtype == "fp32" and not all(map(torch.equal, scores(model, tokens, options), scores(back, tokens, options))):
            problems.append("logits differ")
        print(f"{folder.name:21} {dtype}: {'ok' if not problems else problems}")
        return not problems


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sherd", default=ROOT / "build/sherd")
    parser.add_argument("--dtype", nargs="+", default=list(TORCH), choices=TORCH)
    parser.add_argument("folders", nargs="*", type=pathlib.Path)
    options = parser.parse_args()
    folders = options.folders or sorted(
        path for path in REFERENCE.iterdir() if path.is_dir() and not path.name.endswith(("mxfp4", "fp8")))  # need a GPU there
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    sys.exit(not all([check(options.sherd, folder, dtype) for folder in folders for dtype in options.dtype]))


if __name__ == "__main__":
    main()
