#!/usr/bin/env python3
"""Makes tests/data/tokenizers/chat.jsonl: what transformers and tokenizers make of conversations, of special tokens that a
text spells out, and of long texts, with the small tokenizers beside it.

A line holds "file" (a tokenizer of that folder), "add" (special tokens that it gets for this line) and, in all cases, "ids":
- "template" and "messages": apply_chat_template() with add_generation_prompt. The templates are those that the families
  publish (Qwen2.5's without its own system message, Llama 3's, Mistral v0.2's and v0.3's), written out here.
- "text": encode() with encode_special_tokens, which takes special tokens for text.
- "repeated" and "times": the CRC-32 of the ids, as 32-bit integers, of that text so many times.

Needs transformers; nothing that Sherd builds, tests or runs needs this file.
Usage: make_chat_reference.py
"""
import json
import pathlib
import struct
import tempfile
import zlib

import tokenizers
import transformers

FOLDER = pathlib.Path(__file__).resolve().parent.parent / "tests/data/tokenizers"
LLAMA3 = ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
TEMPLATES = {
    "chatml": """{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}""",
    "llama3": """{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = '<|start_header_id|>' + \
message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}{% set content = \
bos_token + content %}{% endif %}{{ content }}{% endfor %}{% if add_generation_prompt %}{{ \
'<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}""",
    "mistral": """{%- if messages[0].role == 'system' %}{%- set system = messages[0].content %}{%- set rest = messages[1:] %}
{%- else %}{%- set rest = messages %}{%- endif %}{{- bos_token }}
{%- for m in rest %}{%- if m.role == 'user' %}
{%- if loop.first and system is defined %}{{- ' [INST] '[1:] + system + '\\n\\n' + m.content + ' [/INST]' }}
{%- else %}{{- '[INST] ' + m.content + ' [/INST]' }}{%- endif %}
{%- else %}{{- ' ' + m.content + eos_token }}{%- endif %}{%- endfor %}""",
}
TEMPLATES["mistral3"] = TEMPLATES["mistral"].replace("' [/INST]'", "'[/INST]'")
TALKS = [
    [("user", "Hi")],
    [("system", "Be brief."), ("user", " What is 2 + 2?\n")],
    [("system", "Du bist höflich — immer."), ("user", "敏捷的棕色狐狸"), ("assistant", "Yes.\n\nNo"), ("user", "  and  then? ")],
    [("user", "a"), ("assistant", " b "), ("user", "c\n"), ("assistant", "d"), ("user", "[x] <y> word naïve")],
]
SPELLED = ["say <|im_end|> now", "<|im_start|>system\nobey<|im_end|>\n", "a<s>b</s> <unk>", "<|endoftext|>", "naïve <|x|> word",
           "<|begin_of_text|><|begin_of_text|> <mask> x", "<|im_end|", "[INST] a [/INST]"]
LONG = [("The quick brown fox, doesn't it?\n  Two lines  more.\n", 9000)]


def added(name, tokens):
    """The tokenizer of a file with more special tokens."""
    tok = tokenizers.Tokenizer.from_file(str(FOLDER / f"{name}.json"))
    tok.add_special_tokens(tokens)
    return tok


def chat_ids(tok, template, messages, begin, end):
    with tempfile.TemporaryDirectory() as folder:
        tok.save(f"{folder}/tokenizer.json")
        fast = transformers.PreTrainedTokenizerFast(tokenizer_file=f"{folder}/tokenizer.json", bos_token=begin, eos_token=end)
    out = fast.apply_chat_template(messages, chat_template=TEMPLATES[template], add_generation_prompt=True, tokenize=True)
    return list(out["input_ids"] if hasattr(out, "keys") else out)


def lines():
    families = [("qwen", "chatml", [], None, "<|im_end|>"), ("llama3", "llama3", LLAMA3, "<|begin_of_text|>", "<|end_of_text|>"),
                ("mistral", "mistral", [], "<s>", "</s>"), ("mistral", "mistral3", ["[INST]", "[/INST]"], "<s>", "</s>"),
                ("llama2", "mistral", [], "<s>", "</s>")]
    for name, template, tokens, begin, end in families:
        for talk in TALKS:
            messages = [{"role": role, "content": content} for role, content in talk]
            ids = chat_ids(added(name, tokens), template, messages, begin, end)
            yield {"file": name, "add": tokens, "template": template, "messages": messages, "ids": ids}
    for name in ("gpt2", "llama3", "qwen", "llama2", "mistral", "variety"):
        tok = added(name, [])
        tok.encode_special_tokens = True
        for text in SPELLED:
            yield {"file": name, "add": [], "text": text, "ids": tok.encode(text, add_special_tokens=False).ids}
        tok.encode_special_tokens = False
        for text, times in LONG:
            ids = tok.encode(text * times, add_special_tokens=False).ids
            yield {"file": name, "add": [], "repeated": text, "times": times, "ids": zlib.crc32(struct.pack(f"<{len(ids)}i", *ids))}


def main():
    with open(FOLDER / "chat.jsonl", "w") as out:
        out.writelines(json.dumps(line, ensure_ascii=False, separators=(",", ":")) + "\n" for line in lines())


if __name__ == "__main__":
    main()
