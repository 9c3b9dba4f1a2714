#!/usr/bin/env python3
"""Tunes tiny models on conversations with `sherd train`, exports them, and has transformers go on: the
template and the tokenizer of the files give the ids that `sherd prepare` gave the conversations, and generate()
gives the answers that `sherd generate --chat` gives, likeliest tokens each. Of weights that came with a
tokenizer and its settings, and of some that came without.

Needs torch and transformers.
Usage: check_chat.py [--sherd build/sherd] [CASE...]
"""
import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

import numpy
import tokenizers
import torch
import transformers

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "references"))
from make_template_reference import KINDS  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parents[2]
TOKENIZERS = ROOT / "tests/data/tokenizers"
LLAMA = dict(hidden_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
             intermediate_size=96, max_position_embeddings=160)
LLAMA3 = ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
GPT2 = dict(n_embd=48, n_layer=2, n_head=4, n_positions=160)
LLAMA3_ENDS = ("<|begin_of_text|>", "<|end_of_text|>")
# Model, its sizes, tokenizer, further tokens of it, template (none: one of its own, with thoughts), what begins and ends a text, whether the weights
# come with the tokenizer.
CASES = {
    "gpt2_plain": (transformers.GPT2Config, GPT2, "gpt2", [], "plain", (None, "<|endoftext|>"), False),
    "qwen3_chatml": (transformers.Qwen3Config, dict(LLAMA, head_dim=16), "qwen", [], "chatml",
                     (None, "<|endoftext|>"), True),
    "qwen3_thoughts": (transformers.Qwen3Config, dict(LLAMA, head_dim=16), "qwen", [], None, (None, "<|endoftext|>"), True),
    "llama_llama3": (transformers.LlamaConfig, LLAMA, "llama3", LLAMA3, "llama3", LLAMA3_ENDS, True),
    "llama_own": (transformers.LlamaConfig, LLAMA, "llama3", LLAMA3, "llama3", LLAMA3_ENDS, False),
    "mistral_mistral": (transformers.MistralConfig, LLAMA, "mistral", [], "mistral", ("<s>", "</s>"), True),
    "mistral_tokens": (transformers.MistralConfig, LLAMA, "mistral", ["[INST]", "[/INST]"], "mistral",
                       ("<s>", "</s>"), True),
    "mistral_plain": (transformers.MistralConfig, LLAMA, "mistral", [], "plain", ("<s>", "</s>"), True),
    "mixtral_plain": (transformers.MixtralConfig, dict(LLAMA, num_local_experts=4), "llama2", [], "plain",
                      ("<s>", "</s>"), False),
}
TALKS = [
    [("user", "Hi"), ("assistant", "Hello!")],
    [("system", "Be brief."), ("user", " What is 2 + 2?\n"), ("assistant", "4")],
    [("user", "Name a colour."), ("assistant", "Blue, or\n\nred."), ("user", "  and  then? "),
     ("assistant", "über — 敏捷")],
    [("user", "a"), ("assistant", "b"), ("user", "c\n"), ("assistant", "d"), ("user", "[x] <y> word"),
     ("assistant", "e f g")],
]


def run(sherd, *arguments):
    done = subprocess.run([sherd, *map(str, arguments)], capture_output=True)
    if done.returncode != 0:
        sys.exit(f"sherd {' '.join(map(str, arguments))}\n{done.stderr.decode(errors='replace')}")


def messages_of(talk):
    return [{"role": role, "content": content} for role, content in talk]


def write_lines(path, objects):
    path.write_text("".join(json.dumps(o) + "\n" for o in objects))
    return path


def chosen(template):
    return ["--chat-template", template] if template else []


def ids_of(sherd, spec, template, talk, scratch):
    """Those that `sherd prepare` gives a conversation, up to the last answer."""
    lines = write_lines(scratch / "one.jsonl", [{"messages": messages_of(talk)}])
    run(sherd, "prepare", "--input", lines, "--tokenizer", spec, *chosen(template), "--output", scratch / "one")
    ids = numpy.fromfile(scratch / "one.bin", dtype=numpy.uint16).tolist()
    learned = numpy.unpackbits(numpy.fromfile(scratch / "one.mask", dtype=numpy.uint8), bitorder="little")[:len(ids)]
    end = numpy.flatnonzero(learned)[-1]
    while end and learned[end - 1]:
        end -= 1
    return ids[:end]


def check(sherd, name, scratch):
    config, sizes, file, more, template, (begin, end), came = CASES[name]
    raw = tokenizers.Tokenizer.from_file(str(TOKENIZERS / f"{file}.json"))
    raw.add_special_tokens(more)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=raw, bos_token=begin, eos_token=end)
    if not template:
        fast.chat_template = KINDS["thoughts"]
    torch.manual_seed(3)
    base = transformers.AutoModelForCausalLM.from_config(
        config(**sizes, vocab_size=len(fast), bos_token_id=fast.bos_token_id,
               eos_token_id=fast.eos_token_id))
    base.save_pretrained(scratch / "base")
    fast.save_pretrained(scratch / ("base" if came else "tokenizer"))
    spec = f"hf:{scratch / ('base' if came else 'tokenizer')}"

    talks = write_lines(scratch / "talks.jsonl", [{"messages": messages_of(talk)} for talk in TALKS * 16])
    run(sherd, "prepare", "--input", talks, "--tokenizer", spec, *chosen(template), "--output", scratch / "data")
    settings = {"train_micro_batch_size_per_gpu": 4,
                "data": {"path": str(scratch / "data"), "packing": "documents", "split": [1, 0]},
                "training": {"steps": 240, "learning_rate": 3e-3, "init_from": str(scratch / "base"),
                             "save_dir": str(scratch / "run")}}
    (scratch / "config.json").write_text(json.dumps(settings))
    run(sherd, "train", "--config", scratch / "config.json")
    run(sherd, "export", scratch / "run", "--output", scratch / "out", "--dtype", "fp32")
    tok = transformers.AutoTokenizer.from_pretrained(scratch / "out")
    model = transformers.AutoModelForCausalLM.from_pretrained(scratch / "out", dtype=torch.float32).eval()

    questions = write_lines(scratch / "questions.jsonl",
                            [{"messages": messages_of(talk[:-1])} for talk in TALKS])
    run(sherd, "generate", "--checkpoint", scratch / "run", "--chat", "--prompts", questions,
        "--temperature", "0", "--max-tokens", "40", "--output", scratch / "said.jsonl")
    said = [json.loads(line) for line in (scratch / "said.jsonl").read_text().splitlines()]
    problems = []
    for talk, line in zip(TALKS, said):
        asked = tok.apply_chat_template(messages_of(talk[:-1]), add_generation_prompt=True,
                                        return_tensors="pt", return_dict=True)
        ids = asked["input_ids"][0].tolist()
        if ids != ids_of(sherd, spec, template, talk, scratch):
            problems.append(f"ids of {talk[:-1]}")
        with torch.no_grad():
            out = model.generate(**asked, do_sample=False, max_new_tokens=40)[0].tolist()[len(ids):]
        text = tok.decode(out, skip_special_tokens=True)
        ours = line["completion"]
        if template == "mistral":
            text = text.removeprefix(" ")
        if (text, len(out)) != (ours, line["tokens"]):
            problems.append(f"{(text, len(out))} of transformers, {(ours, line['tokens'])} here")
        if ours.removeprefix("<think>\n\n</think>\n\n").strip() != talk[-1][1].strip():
            problems.append(f"not learned: {ours!r} for {talk[-1][1]!r}")
    print(f"{name:16} {'ok' if not problems else problems}")
    return not problems


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sherd", default=ROOT / "build/sherd")
    parser.add_argument("cases", nargs="*", default=list(CASES))
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    good = True
    for name in options.cases or list(CASES):
        with tempfile.TemporaryDirectory() as scratch:
            good &= check(options.sherd, name, pathlib.Path(scratch))
    sys.exit(not good)


if __name__ == "__main__":
    main()
