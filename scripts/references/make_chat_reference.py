#!/usr/bin/env python3
"""Makes tests/data/tokenizers/chat.jsonl: what transformers and tokenizers make of conversations, of special tokens that a
text spells out, and of long texts, with the small tokenizers beside it.

A line holds "file" (a tokenizer of that folder), "add" (special tokens that it gets for this line) and, in all cases, "ids":
- "template", "jinja" and "messages": apply_chat_template() with add_generation_prompt of the text that `sherd export`
  writes; "jinja" is taken from the file as it is (tests/data/chat_test.cpp prints what it should say). Where "family" is
  true, a template of the family gives the same ids: Qwen2.5's without its own system message, Llama 3's, and what
  mistral-common makes of Mistral's (v1, v3, v3 with Tekken, v7), as jinja.
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

FOLDER = pathlib.Path(__file__).resolve().parents[2] / "tests/data/tokenizers"
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
{%- if loop.first and system is defined %}{{- '[INST] ' + system + '\n\n' + m.content + ' [/INST]' }}
{%- else %}{{- '[INST] ' + m.content + ' [/INST]' }}{%- endif %}
{%- else %}{{- ' ' + m.content + eos_token }}{%- endif %}{%- endfor %}""",
}
TEMPLATES["mistral v3"] = TEMPLATES["mistral"].replace("' [/INST]'", "'[/INST]'").replace("loop.first", "loop.last")
TEMPLATES["mistral v3 tekken"] = TEMPLATES["mistral v3"].replace("[INST] ", "[INST]").replace("' ' + m", "m")
TEMPLATES["mistral v7"] = TEMPLATES["mistral v3"].replace("{{- bos_token }}", """{{- bos_token }}
{%- if system is defined %}{{- '[SYSTEM_PROMPT] ' + system + '[/SYSTEM_PROMPT]' }}{%- endif %}""").replace(
    "loop.last and system is defined", "false")
INST = ["[INST]", "[/INST]"]
# Tokenizer, template, added tokens, what begins and ends a text, the family's template.
PAIRS = [("qwen", "chatml", [], None, "<|im_end|>", "chatml"),
         ("llama3", "llama3", LLAMA3, "<|begin_of_text|>", "<|end_of_text|>", "llama3"),
         ("mistral", "mistral", [], "<s>", "</s>", "mistral"), ("mistral", "mistral", INST, "<s>", "</s>", "mistral v3"),
         ("mistral", "mistral", [*INST, "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"], "<s>", "</s>", "mistral v7"),
         ("llama2", "mistral", [], "<s>", "</s>", "mistral"),
         ("gpt2", "mistral", [*INST, "<s>"], "<s>", "<|endoftext|>", "mistral v3 tekken"),
         ("llama3", "mistral", [], "<|begin_of_text|>", "<|end_of_text|>", "mistral"),
         ("mistral", "chatml", [], None, None, None), ("llama2", "chatml", [], None, None, None),
         ("qwen", "llama3", [], None, None, None), ("gpt2", "plain", [], None, None, None),
         ("llama3", "plain", [], None, None, None), ("mistral", "plain", [], None, None, None),
         ("llama2", "plain", [], None, None, None)]
TALKS = [
    [("user", "Hi")],
    [("system", "Be brief."), ("user", " What is 2 + 2?\n")],
    [("system", "Du bist höflich — immer."), ("user", "敏捷的棕色狐狸"), ("assistant", "Yes.\n\nNo"), ("user", "  and  then? ")],
    [("user", "a"), ("assistant", " b "), ("user", "c\n"), ("assistant", "d"), ("user", "[x] <y> word naïve")],
    [("user", "\u3000wide\u00a0\u001c"), ("assistant", "\u2028x\u180e"), ("user", "\x85y\u200b")],
]
SPELLED = ["say <|im_end|> now", "<|im_start|>system\nobey<|im_end|>\n", "a<s>b</s> <unk>", "<|endoftext|>", "naïve <|x|> word",
           "<|begin_of_text|><|begin_of_text|> <mask> x", "<|im_end|", "[INST] a [/INST]"]
LONG = [("The quick brown fox, doesn't it?\n  Two lines  more.\n", 9000)]


def added(name, tokens):
    """The tokenizer of a file with more special tokens."""
    tok = tokenizers.Tokenizer.from_file(str(FOLDER / f"{name}.json"))
    tok.add_special_tokens(tokens)
    return tok


def chat_ids(tok, template, messages, begin=None, end=None):
    with tempfile.TemporaryDirectory() as folder:
        tok.save(f"{folder}/tokenizer.json")
        fast = transformers.PreTrainedTokenizerFast(tokenizer_file=f"{folder}/tokenizer.json", bos_token=begin, eos_token=end)
    out = fast.apply_chat_template(messages, chat_template=template, add_generation_prompt=True, tokenize=True)
    return list(out["input_ids"] if hasattr(out, "keys") else out)


def exported():
    """The text that `sherd export` writes, by file, template and added tokens."""
    lines = [json.loads(line) for line in open(FOLDER / "chat.jsonl")]
    return {(line["file"], line["template"], tuple(line["add"])): line.get("jinja", "") for line in lines if "template" in line}


def lines():
    texts = exported()
    for name, template, tokens, begin, end, family in PAIRS:
        jinja = texts.get((name, template, tuple(tokens)), "")
        for talk in TALKS:
            messages = [{"role": role, "content": content} for role, content in talk]
            ids = chat_ids(added(name, tokens), jinja, messages)
            if family and ids != chat_ids(added(name, tokens), TEMPLATES[family], messages, begin, end):
                print(f"{name} {template} {tokens}: {jinja}\n  is not the family's, of {talk}")
            yield {"file": name, "add": tokens, "template": template, "jinja": jinja, "family": bool(family),
                   "messages": messages, "ids": ids}
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
    text = "".join(json.dumps(line, ensure_ascii=False, separators=(",", ":")) + "\n" for line in lines())
    (FOLDER / "chat.jsonl").write_text(text)


if __name__ == "__main__":
    main()
