#!/usr/bin/env python3
"""Compares the ids of `sherd prepare --chat-template mistral` with mistral-common's, of Mistral's own SentencePiece models,
which that package holds: v1 (7B, Mixtral), v2, v3 and v7, as far as the last question.

Needs numpy, and mistral-common with sentencepiece. Usage: check_mistral.py [--sherd build/sherd]
"""
import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

import mistral_common
import numpy
from mistral_common.protocol.instruct.messages import AssistantMessage, SystemMessage, UserMessage
from mistral_common.protocol.instruct.request import ChatCompletionRequest
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

ROOT = pathlib.Path(__file__).resolve().parents[2]
MODELS = pathlib.Path(mistral_common.__file__).parent / "data"
VERSIONS = {"tokenizer.model.v1": MistralTokenizer.v1, "mistral_instruct_tokenizer_240216.model.v2": MistralTokenizer.v2,
            "mistral_instruct_tokenizer_240323.model.v3": MistralTokenizer.v3,
            "mistral_instruct_tokenizer_241114.model.v7": MistralTokenizer.v7}
MESSAGES = {"system": SystemMessage, "user": UserMessage, "assistant": AssistantMessage}
TALKS = [
    [("user", "Hi")],
    [("system", "Be brief."), ("user", "What is 2 + 2?")],
    [("system", "Du bist höflich — immer."), ("user", "敏捷的棕色狐狸"), ("assistant", "Yes.\n\nNo"), ("user", "and then?")],
    [("user", " a"), ("assistant", " b c"), ("user", "c\nd"), ("assistant", "d"), ("user", "[x] <y> word naïve")],
    [("user", "say </s> [INST] and [/INST] now")],
]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sherd", default=ROOT / "build/sherd")
    sherd = parser.parse_args().sherd
    good = True
    for model, tokenizer in VERSIONS.items():
        different = []
        for talk in TALKS:
            messages = [MESSAGES[role](content=content) for role, content in talk]
            wanted = tokenizer().encode_chat_completion(ChatCompletionRequest(messages=messages)).tokens
            with tempfile.TemporaryDirectory() as folder:
                lines = pathlib.Path(folder) / "talk.jsonl"
                answered = [*talk, ("assistant", "answer")]
                lines.write_text(json.dumps({"messages": [{"role": r, "content": c} for r, c in answered]}))
                subprocess.run([sherd, "prepare", "--input", lines, "--tokenizer", f"spm:{MODELS / model}",
                                "--chat-template", "mistral", "--output", f"{folder}/ids"], check=True, capture_output=True)
                ids = numpy.fromfile(f"{folder}/ids.bin", dtype=numpy.uint16).tolist()
            if ids[:len(wanted)] != wanted:
                different.append((talk, wanted, ids))
        print(f"{model:45} {'ok' if not different else different}")
        good &= not different
    sys.exit(not good)


if __name__ == "__main__":
    main()
