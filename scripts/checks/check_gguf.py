#!/usr/bin/env python3
"""Takes a tiny model of each family through `sherd import` and `sherd export --format gguf`, opens the file in the
gguf package, where each matrix is held to the weights that went in, and runs it in llama.cpp: its logits are
transformers', as near as the type is, the likeliest tokens are the same, and so are the ids of hard texts.

Configurations are those of make_hugging_face_reference.py, with wider layers; tokenizers those of tests/data/tokenizers.
Needs torch, transformers, gguf and llama_cpp (llama-cpp-python).
Usage: check_gguf.py [--sherd build/sherd] [--type f32 ...] [FAMILY...]
"""
import argparse
import contextlib
import copy
import json
import os
import pathlib
import subprocess
import sys
import tempfile

import gguf
import llama_cpp
import llama_cpp.llama_cpp as c
import numpy
import torch
import transformers
from tokenizers import Tokenizer

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "references"))
from make_hugging_face_reference import FAMILIES, made  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parents[2]
TOKENIZERS = ROOT / "tests/data/tokenizers"
LENGTH, ANSWER = 20, 12
# Root mean squares of logits' differences over their standard deviation. llama.cpp computes some functions from tables
# in half precision, and products of a type in few bits with inputs in 8 bits.
NEAR = {"f32": 3e-3, "f16": 1.2e-2, "bf16": 0.15, "q8_0": 0.15, "q6_k": 0.4, "q4_k": 0.8, "q4_0": 0.9}
# What one value may be from its weight, over the largest magnitude of its row.
BOUND = {"F32": 0, "F16": 2**-11, "BF16": 2**-8, "Q8_0": 0.6 / 127, "Q6_K": 1.2 / 31, "Q4_K": 0.16, "Q4_0": 0.13}
# What the graphs of llama.cpp have not, and another size than 16 where parts follow from it.
CHANGED = {
    "gemma2": dict(query_pre_attn_scalar=8), "gemma3_text": dict(query_pre_attn_scalar=8),
    "smollm3": dict(no_rope_layer_interval=4, num_hidden_layers=4, no_rope_layers=[1, 1, 1, 0],
                    layer_types=["full_attention"] * 4),
    "phi3_long": dict(rope_parameters={
        "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 8,
        "short_factor": [1.0 + i / 8 for i in range(8)], "long_factor": [1.25 + i / 2 for i in range(8)]}),
    "deepseek_v2_lite": dict(rms_norm_eps=1e-6), "deepseek_v3": dict(rms_norm_eps=1e-6),
    "qwen3_moe": dict(mlp_only_layers=[]), "qwen2_moe": dict(mlp_only_layers=[], tie_word_embeddings=True),
    "qwen3_next": dict(linear_value_head_dim=6), "qwen3_5": dict(linear_value_head_dim=6),
    "qwen3_5_moe": dict(linear_value_head_dim=6), "t5": dict(relative_attention_max_distance=128),
    "t5_gated": dict(relative_attention_max_distance=128, num_decoder_layers=2),
    "mt5": dict(relative_attention_max_distance=128), "mistral": dict(sliding_window=32),
    "phi3": dict(sliding_window=32), "qwen3": dict(sliding_window=32),
}
LEFT_OUT = {"deepseek_v2": "groups of experts", "bert_tokens": "labels of tokens", "modernbert_tokens": "labels of tokens"}
# Of 123 texts those for which llama.cpp is known to find other ids: it forms no NFC (qwen), has a space in front of
# texts that begin with one, and behind special tokens (mistral), white space that a token takes along (gpt2), marks of
# Indic scripts, Hangul and words of more than 20 letters (bert), and marks behind spaces (t5).
OTHER_IDS = {"qwen": 11, "mistral": 26, "gpt2": 3, "bert": 39, "t5": 10}
LORA = ("gpt2", "llama", "mistral", "qwen3", "gemma2", "phi3", "glm4", "olmo2")
TOKENIZER_OF = {"gpt2": "gpt2", "llama": "llama3", "mistral": "mistral", "mixtral": "llama2", "gemma2": "llama2",
                "gemma3_text": "mistral", "t5": "t5", "t5_gated": "t5", "mt5": "t5", "bert": "bert",
                "bert_classifier": "bert", "bert_pretraining": "bert"}


def all_merges(state):
    """The merges that a SentencePiece model of these tokens has: all pairs that make a token, token by token."""
    ids = state["model"]["vocab"]
    merges, there = [], set()
    for merge in state["model"]["merges"]:
        token = "".join(merge if isinstance(merge, list) else merge.split(" "))
        if token in there:
            continue
        there.add(token)
        parts = [(token[:i], token[i:]) for i in range(1, len(token)) if token[:i] in ids and token[i:] in ids]
        merges += [list(pair) for pair in sorted(parts, key=lambda pair: (ids[pair[0]], ids[pair[1]]))]
    state["model"]["merges"] = merges


def tokenizer_of(family, folder):
    """Writes tokenizer.json and tokenizer_config.json, and gives the former's tokenizer."""
    name = TOKENIZER_OF.get(family, "qwen")
    state = json.loads((TOKENIZERS / f"{name}.json").read_text())
    # Tokens that are found at whole words alone have no form in GGUF; ids of added ones follow each other.
    state["added_tokens"] = [token for token in state["added_tokens"] if not token["single_word"]]
    for token in state["added_tokens"]:
        if name == "gpt2" and token["id"] > 0:
            token["id"] = 700
    if state["model"].get("byte_fallback") and state["model"]["type"] == "BPE":
        all_merges(state)
    (folder / "tokenizer.json").write_text(json.dumps(state))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    names = {"eos_token": ("<|endoftext|>", "<|end_of_text|>", "</s>", "[SEP]"), "bos_token": ("<|begin_of_text|>", "<s>", "[CLS]"),
             "pad_token": ("<pad>", "[PAD]"), "mask_token": ("[MASK]",)}
    config = {key: next((t for t in tokens if tokenizer.token_to_id(t) is not None), None) for key, tokens in names.items()}
    config["chat_template"] = "{% for m in messages %}{{ m['content'] }}{{ eos_token }}{% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return tokenizer


def model_of(family, folder):
    """Saves a model whose weights fp16 holds, and gives it and its tokenizer."""
    kind, config, _ = FAMILIES[family]
    config = copy.deepcopy(config)
    tokenizer = tokenizer_of(family, folder)
    for key, value in CHANGED.get(family, {}).items():
        setattr(config, key, value)
    config.vocab_size = tokenizer.get_vocab_size() + 3  # rows of no token
    if config.is_encoder_decoder:
        config.d_model, config.d_ff, config.d_kv, config.n_positions = 64, 96, 16, 64
    else:
        hidden = 256 if family == "llama" else 64
        old_dim = getattr(config, "head_dim", None)
        config.hidden_size = hidden
        for key in ("max_position_embeddings", "n_positions"):
            if hasattr(config, key):
                setattr(config, key, 64)
        if old_dim == 4 and not hasattr(config, "kv_lora_rank"):  # which followed from the width
            config.head_dim = hidden // config.num_attention_heads
        if getattr(config, "intermediate_size", None):
            config.intermediate_size = 512 if family == "llama" else 96
    model = made(kind, config, 7)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p.half().float())
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    return model, tokenizer


def run(*command):
    result = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    return None if result.returncode == 0 else result.stderr.strip().splitlines()[-1]


def check_tensors(path, model):
    """Every matrix of the file has the values of some weight's rows, in whatever order, and nothing is not finite."""
    problems, rows = [], {}
    for name, weight in model.state_dict().items():
        if weight.dim() >= 2:
            stacked = weight.float().numpy().reshape(-1, *weight.shape[-2:])
            for matrix in (stacked.reshape(-1, weight.shape[-1]), stacked.transpose(0, 2, 1).reshape(-1, weight.shape[-2])):
                rows.setdefault(matrix.shape[1], []).append(matrix)
    for tensor in gguf.GGUFReader(path).tensors:
        kind = tensor.tensor_type.name
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(-1, tensor.shape[0])
        if not numpy.isfinite(values).all():
            problems.append(f"{tensor.name} is not finite")
        changed = ("ssm_", "attn_k_b", "rope_", "exps.bias")  # which are computed of weights, or of parts of them
        if len(tensor.shape) < 2 or any(part in tensor.name for part in changed):
            continue
        known = numpy.concatenate([m for m in rows.get(values.shape[1], [])] or [numpy.zeros((1, values.shape[1]))])
        for row in values[:: max(1, len(values) // 16)]:
            apart = numpy.abs(known - row).max(1) / numpy.maximum(numpy.abs(known).max(1), 1e-9)
            if apart.min() > BOUND[kind] + 1e-7:
                problems.append(f"{tensor.name} ({kind}) has a row {apart.min():.3g} from any weight's")
                break
    return problems


@contextlib.contextmanager
def quiet():
    saved = os.dup(2)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved), os.close(null)


def opened(path, **options):
    with quiet():
        return llama_cpp.Llama(str(path), n_ctx=64, n_batch=64, n_ubatch=64, logits_all=True, verbose=False, n_threads=1,
                               flash_attn=False, type_k=0, type_v=0, **options)


def answers(model, tokens, count):
    out = list(tokens)
    with torch.no_grad():
        for _ in range(count):
            out.append(int(model(torch.tensor([out]), use_cache=False).logits[0, -1].argmax()))
    return out[len(tokens):]


def llama_answers(llama, tokens, count):
    out = list(tokens)
    for _ in range(count):
        llama.reset()
        llama.eval(out)
        out.append(int(numpy.argmax(llama.scores[len(out) - 1])))
    return out[len(tokens):]


def encoder_decoder_logits(path, source, target):
    with quiet():
        model = c.llama_model_load_from_file(str(path).encode(), c.llama_model_default_params())
        params = c.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch, params.n_threads, params.type_k, params.type_v = 64, 64, 64, 1, 0, 0
        params.flash_attn_type = 0
        context = c.llama_init_from_model(model, params)
        vocabulary = c.llama_vocab_n_tokens(c.llama_model_get_vocab(model))

        def batch_of(tokens):
            batch = c.llama_batch_init(len(tokens), 0, 1)
            batch.n_tokens = len(tokens)
            for i, token in enumerate(tokens):
                batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, i, 1, 1
                batch.seq_id[i][0] = 0
            return batch
        assert c.llama_encode(context, batch_of(source)) == 0 and c.llama_decode(context, batch_of(target)) == 0
        out = numpy.array([numpy.ctypeslib.as_array(c.llama_get_logits_ith(context, i), (vocabulary,)).copy()
                           for i in range(len(target))])
        c.llama_free(context), c.llama_model_free(model)
    return out


def compare_logits(family, path, model, tokens, options):
    """The differences' root mean square over the deviation, and whether the likeliest tokens are the same."""
    with torch.no_grad():
        if model.config.is_encoder_decoder:
            half = LENGTH // 2
            want = model(torch.tensor([tokens[:half]]), decoder_input_ids=torch.tensor([tokens[half:]]), use_cache=False).logits[0]
            got = encoder_decoder_logits(path, tokens[:half], tokens[half:])
            # Of scores that are next to each other either may be the largest.
            chosen = numpy.take_along_axis(want.numpy(), got.argmax(1)[:, None], 1)[:, 0]
            same = bool((chosen >= want.numpy().max(1) - 2 * numpy.abs(want.numpy() - got).max()).all())
        elif "Bert" in type(model).__name__:
            classifies = "Sequence" in type(model).__name__
            base = getattr(model, "bert", None) or model.model
            want = model(torch.tensor([tokens])).logits if classifies else base(torch.tensor([tokens])).last_hidden_state[0]
            llama = opened(path, embedding=True, pooling_type=4 if classifies else 0)
            llama._batch.set_batch(tokens, 0, True)
            llama._ctx.encode(llama._batch) if hasattr(llama._ctx, "encode") else llama._ctx.decode(llama._batch)
            size = want.shape[-1]
            rows = [llama_cpp.llama_get_embeddings_seq(llama._ctx.ctx, 0)] if classifies else \
                [llama_cpp.llama_get_embeddings_ith(llama._ctx.ctx, i) for i in range(len(tokens))]
            got = numpy.array([numpy.ctypeslib.as_array(row, (size,)).copy() for row in rows])
            same = bool((want.numpy().argmax(1) == got.argmax(1)).all())
        else:
            want = model(torch.tensor([tokens]), use_cache=False).logits[0]
            llama = opened(path, **options)
            llama.eval(tokens)
            got = numpy.array(llama.scores[:len(tokens)])
            same = answers(model, tokens, ANSWER) == llama_answers(llama, tokens, ANSWER)
    want = want.numpy()
    return float(numpy.sqrt(((want - got) ** 2).mean()) / want.std()), same


def check_lora(sherd, family, scratch, model, tokens):
    """The problem with LoRA of all linear layers beside the file of the model; None: there is none."""
    import peft
    torch.manual_seed(9)
    keys = peft.LoraConfig(r=3, lora_alpha=5, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(copy.deepcopy(model), keys)
    adapted.save_pretrained(scratch / "peft")
    path = scratch / "lora.gguf"
    problem = run(sherd, "import", scratch / "hf", "--adapter", scratch / "peft", "--output", scratch / "adapted") or \
        run(sherd, "export", scratch / "adapted", "--adapter", "--output", path, "--format", "gguf")
    if problem:
        return problem
    error, same = compare_logits(family, scratch / "f32.gguf", adapted, tokens, {"lora_path": str(path)})
    plain, _ = compare_logits(family, scratch / "f32.gguf", adapted, tokens, {})
    print(f"{family:18} LoRA : logits within {error:.2g} ({plain:.2g} without), answers {'equal' if same else 'differ'}")
    return None if error < NEAR["f32"] < plain and same else "logits with LoRA differ"


def compare_ids(path, tokenizer):
    """Texts of which llama.cpp finds other ids, of all that are UTF-8."""
    llama = opened(path, vocab_only=True)
    differ, texts = [], [bytes.fromhex(line) if line != "-" else b"" for line in (TOKENIZERS / "texts.txt").read_text().splitlines()]
    texts = [text for text in texts if text and text.decode(errors="replace").encode() == text and b"\0" not in text]
    for text in texts:
        want = tokenizer.encode(text.decode(), add_special_tokens=False).ids
        if llama.tokenize(text, add_bos=False, special=True) != want:
            differ.append(text.decode())
    around = tokenizer.encode("a b").ids, llama.tokenize(b"a b", add_bos=True, special=True)
    return differ, len(texts), around[0] == around[1]


def check(sherd, family, types):
    with tempfile.TemporaryDirectory() as scratch:
        scratch = pathlib.Path(scratch)
        (scratch / "hf").mkdir()
        model, tokenizer = model_of(family, scratch / "hf")
        problem = run(sherd, "import", scratch / "hf", "--output", scratch / "checkpoint")
        if problem:
            return print(f"{family:18} import: {problem}")
        torch.manual_seed(3)
        tokens = torch.randint(5, tokenizer.get_vocab_size(), (LENGTH,)).tolist()
        good = True
        for kind in types:
            path = scratch / f"{kind}.gguf"
            problem = run(sherd, "export", scratch / "checkpoint", "--output", path, "--format", "gguf", "--type", kind)
            if problem:
                print(f"{family:18} {kind:5}: {problem}")
                good = good and family in LEFT_OUT
                break
            problems = check_tensors(path, model)
            error, same = compare_logits(family, path, model, tokens, {})
            if error > NEAR[kind]:
                problems.append("logits differ")
            if kind in ("f32", "f16") and not same:
                problems.append("answers differ")
            if kind == types[0]:
                differ, count, around = compare_ids(path, tokenizer)
                if len(differ) > OTHER_IDS.get(TOKENIZER_OF.get(family, "qwen"), 0):
                    problems.append("ids differ")
                if not around:
                    problems.append("the tokens around a text differ")
            print(f"{family:18} {kind:5}: logits within {error:.2g}, answers {'equal' if same else 'differ'}"
                  + (f", ids of {count - len(differ)} of {count} texts" if kind == types[0] else "")
                  + "".join(f"; {problem}" for problem in problems), flush=True)
            if kind == types[0] and os.environ.get("SHOW_TEXTS"):
                for text in differ:
                    print("   ", repr(text[:150]))
            good = good and not problems
        if good and family in LORA and types[0] == "f32":
            problem = check_lora(sherd, family, scratch, model, tokens)
            if problem:
                print(f"{family:18} LoRA : {problem}")
            good = not problem
        return good


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sherd", default=ROOT / "build/sherd")
    parser.add_argument("--type", nargs="+", default=["f32", "f16", "q8_0"], choices=NEAR)
    parser.add_argument("families", nargs="*")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    families = options.families or [family for family in FAMILIES]
    sys.exit(not all([check(options.sherd, family, options.type) for family in families]))


if __name__ == "__main__":
    main()
