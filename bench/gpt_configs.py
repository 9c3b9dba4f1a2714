"""Sherd's configuration files as the comparing scripts need them: with overrides applied, for both sides."""
import json


def load(path):
    """A configuration as a dictionary; lines of comments are left out."""
    with open(path, encoding="utf-8") as file:
        return json.loads("".join(line for line in file if not line.lstrip().startswith("//")))


def override(config, assignments):
    """Applies "a.b.c=V" as `--set` does; values that are no JSON are text."""
    for assignment in assignments:
        path, _, text = assignment.partition("=")
        *sections, key = path.split(".")
        section = config
        for name in sections:
            section = section.setdefault(name, {})
        try:
            section[key] = json.loads(text)
        except json.JSONDecodeError:
            section[key] = text
    return config


def as_options(assignments):
    return [word for assignment in assignments for word in ("--set", assignment)]


def padded_vocabulary(model):
    multiple = model.get("pad_vocab_to_multiple_of", 128)
    return (model["vocab_size"] + multiple - 1) // multiple * multiple


def pytorch_options(config):
    """The same model and batch for bench/gpt2_pytorch.py. Its vocabulary is padded as ours is, which is its best."""
    model = config["model"]
    if model.get("type", "gpt2") != "gpt2" or model.get("dropout", 0.1) != 0:
        raise SystemExit("the peers know GPT-2 without dropout: set model.type=gpt2 and model.dropout=0")
    return ["--layers", model["num_layers"], "--hidden", model["hidden_size"], "--heads", model["num_heads"],
            "--seq", model["seq_length"], "--vocab", padded_vocabulary(model),
            "--batch", config["train_micro_batch_size_per_gpu"],
            "--accumulation", config.get("gradient_accumulation_steps", 1)]
