"""What check_peft.py and check_adapter_hub.py share: the program, and what a model of transformers makes of a text that
`sherd generate` and `sherd evaluate` read, too."""

import json
import pathlib
import subprocess

import torch

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROMPT = "Sherd shards "


def run(sherd, *arguments):
    done = subprocess.run([sherd, *map(str, arguments)], capture_output=True)
    if done.returncode != 0:
        raise SystemExit(f"sherd {' '.join(map(str, arguments))}:\n{done.stderr.decode()}")
    return done.stdout


def continued(model, tokens):
    """As the program prints it: bytes of the ids, the document's end left out."""
    ids = torch.tensor([list(PROMPT.encode())])
    with torch.no_grad():
        for _ in range(tokens):
            ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    return bytes(i for i in ids[0].tolist() if i < 256)


def says_the_same(sherd, model, checkpoint, *more):
    """Whether both continue the text alike; a character's first bytes are not printed."""
    said = run(sherd, "generate", "--prompt", PROMPT, "--temperature", "0", "--max-tokens", "24", "--checkpoint",
               checkpoint, *more).strip()
    text = continued(model, 24).strip()
    same = text.startswith(said) and len(text) - len(said) < 4
    if not same:
        print(said, text)
    return same


def scores(sherd, model, checkpoint, scratch, *more):
    """The log likelihood of a text given another, by the program and by the model, whose last rows of logits are the
    text's."""
    context, completion = PROMPT.rstrip(), " parameters, gradients"
    (scratch / "tasks.jsonl").write_text(json.dumps({"context": context, "completion": completion}) + "\n")
    run(sherd, "evaluate", "--checkpoint", checkpoint, "--tasks", scratch / "tasks.jsonl", "--output",
        scratch / "scores.jsonl", *more)
    found = json.loads((scratch / "scores.jsonl").read_text())["log_likelihoods"][0]
    ids = list((context + completion).encode())
    with torch.no_grad():
        rows = torch.log_softmax(model(torch.tensor([ids]), use_cache=False).logits[0, -len(ids):].double(), -1)
    return found, sum(rows[i - 1, ids[i]].item() for i in range(len(context.encode()), len(ids)))
