#!/usr/bin/env python3
"""Makes tests/data/reference/templates.json: conversations as transformers writes and encodes them by templates of
families' kinds (tests/data/template_reference_test.cpp): apply_chat_template()'s ids, the mask of answers where the
template has {% generation %}, or that it fails.

With --templates FOLDER the cases are templates in that folder instead (*.jinja, and "chat_template" of *.json); where
NAME_training.jinja lies beside NAME.jinja and writes the same text, its mask is that of the plain one, too. Write them
elsewhere and give the file to the test by SHERD_TEMPLATE_CASES:
    make_template_reference.py --templates FOLDER --output /tmp/cases.json
    SHERD_TEMPLATE_CASES=/tmp/cases.json build/tests/test_data --gtest_filter='TemplateReference.*'

Needs transformers; nothing that Sherd builds, tests or runs needs this file.
"""
import argparse
import json
import pathlib
import re

import tokenizers
import transformers

from make_jinja_reference import ANSWER, CALL, CONVERSATIONS, SYSTEM, TOOL, USER

ROOT = pathlib.Path(__file__).resolve().parents[2] / "tests/data"
BASES = [("qwen", "<|endoftext|>"), ("llama3", "<|end_of_text|>"), ("mistral", "</s>"), ("gpt2", "<|endoftext|>"),
         ("llama2", "</s>")]
SPECIAL = re.compile(r"<[|｜][^<>\n'\"{}]{1,40}[|｜]>|<(?:bos|eos|pad|start_of_turn|end_of_turn)>|<\|[a-z_]{2,20}>|<[a-z_]{2,20}\|>|\[/?[A-Z_]{2,20}\]|<[A-Z_]{3,20}>")
END = {"role": "assistant", "content": "Bye — 再见"}
# Beside those of make_jinja_reference.py: answers of which some are not learned, and what ends like its surroundings.
MORE = [
    ("weights", [USER, {**ANSWER, "weight": 0}, USER, {**END, "weight": 1}], {}),
    ("called, answered", [USER, {"role": "assistant", "content": "", "tool_calls": [CALL]},
                          {"role": "tool", "name": "weather", "content": "grey", "tool_call_id": "abcdefghi"}, END], {"tools": [TOOL]}),
    ("twice", [{"role": "user", "content": "assistant"}, {"role": "assistant", "content": "assistant\nassistant"}, USER, END], {}),
    ("empty", [SYSTEM, USER, {"role": "assistant", "content": ""}], {}), ("wide", [USER, {"role": "assistant", "content": "！佑"}], {}),
]
# Of the kinds that families have; written for this test.
KINDS = {
    "zephyr": "{% for m in messages %}{{ '<|' + m.role + '|>\\n' + m.content + eos_token + '\\n' }}{% endfor %}"
              "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}",
    "phi": "{{ bos_token }}{% for m in messages %}{{ '<|' + m['role'] + '|>' + '\\n' + m['content'] + '<|end|>\\n' }}{% endfor %}"
           "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}",
    "gemma": "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('no system here') }}{% endif %}"
             "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('take turns') }}{% endif %}"
             "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' + m.content | trim + '<end_of_turn>\\n' }}"
             "{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}",
    "inst": "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% elif m.role == 'assistant' %}"
            " {{ m.content.strip() }}{{ eos_token }}{% else %}{{ raise_exception('users and assistants alone') }}{% endif %}{% endfor %}",
    "no ends": "{% for m in messages %}{{ '<|' + m.role + '|>\\n' + m.content }}{% endfor %}"
               "{% if add_generation_prompt %}<|assistant|>{% endif %}",
    "headers": "{{ bos_token }}{% set date = date_string if date_string is defined else '26 Jul 2024' %}"
               "<|header|>system<|end_header|>\n\nToday: {{ date }}\n{% if tools is not none %}{% for t in tools %}{{ t | tojson(indent=4) }}\n"
               "{% endfor %}{% endif %}<|eot|>{% for m in messages %}{% if 'tool_calls' in m and m.tool_calls %}"
               "<|header|>assistant<|end_header|>\n\n{% for c in m.tool_calls %}{{ '{\"name\": \"' + c.function.name + '\", \"parameters\": ' }}"
               "{{ c.function.arguments | tojson }}}{% endfor %}<|eot|>{% else %}{{ '<|header|>' + m.role + '<|end_header|>\\n\\n' }}"
               "{{ m.content | trim }}{% if m.name %}{{ ' (' + m.name + ', ' + m.tool_call_id + ')' }}{% endif %}<|eot|>{% endif %}{% endfor %}"
               "{% if add_generation_prompt %}{{ '<|header|>assistant<|end_header|>\\n\\n' }}{% endif %}",
    "thoughts": "{%- set at = namespace(last=-1) %}{%- for m in messages %}{%- if m.role == 'user' %}{%- set at.last = loop.index0 %}{%- endif %}"
                "{%- endfor %}{%- for m in messages %}{%- set c = m.content %}{%- set t = m.reasoning_content or '' %}"
                "{%- if m.role == 'assistant' and '</think>' in c %}{%- set t = c.split('</think>')[0].split('<think>')[-1].strip() %}"
                "{%- set c = c.split('</think>')[-1].lstrip('\\n') %}{%- endif %}{{- '<|im_start|>' + m.role + '\\n' }}"
                "{%- if m.role == 'assistant' and loop.index0 > at.last %}{{- '<think>\\n' + t + '\\n</think>\\n\\n' }}{%- endif %}"
                "{{- c + '<|im_end|>\\n' }}{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"
                "{%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}{%- endif %}",
    "joined": "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '<｜User｜>' + m.content }}{% elif m.role == 'assistant' %}"
              "{{ '<｜Assistant｜>' + m.content.split('</think>')[-1] + '<｜end▁of▁sentence｜>' }}{% elif m.role == 'system' %}{{ m.content }}"
              "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<｜Assistant｜><think>\\n' }}{% endif %}",
}
for kind in ("zephyr", "gemma", "thoughts"):  # the same, with marks
    marked = {"zephyr": ("{{ '<|' + m.role + '|>\\n' + m.content + eos_token + '\\n' }}",
                         "{{ '<|' + m.role + '|>\\n' }}{% if m.role == 'assistant' %}{% generation %}{{ m.content + eos_token }}"
                         "{% endgeneration %}{% else %}{{ m.content + eos_token }}{% endif %}{{ '\\n' }}"),
              "gemma": ("{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' + m.content | trim + '<end_of_turn>\\n' }}",
                        "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' }}{% if m.role == 'assistant' %}"
                        "{% generation %}{{ m.content | trim + '<end_of_turn>' }}{% endgeneration %}{% else %}"
                        "{{ m.content | trim + '<end_of_turn>' }}{% endif %}{{ '\\n' }}"),
              "thoughts": ("{%- if m.role == 'assistant' and loop.index0 > at.last %}{{- '<think>\\n' + t + '\\n</think>\\n\\n' }}{%- endif %}"
                           "{{- c + '<|im_end|>\\n' }}",
                           "{%- if m.role == 'assistant' %}{%- generation %}{%- if loop.index0 > at.last %}"
                           "{{- '<think>\\n' + t + '\\n</think>\\n\\n' }}{%- endif %}{{- c + '<|im_end|>' }}{%- endgeneration %}{{- '\\n' }}"
                           "{%- else %}{{- c + '<|im_end|>\\n' }}{%- endif %}")}[kind]
    assert marked[0] in KINDS[kind], kind
    KINDS[kind + "_training"] = KINDS[kind].replace(*marked)


def tokenizer_for(number, text):
    """One of the small tokenizers with the special tokens that a template writes; of some white space goes along."""
    file, end = BASES[number % len(BASES)]
    raw = tokenizers.Tokenizer.from_file(str(ROOT / f"tokenizers/{file}.json"))
    names = sorted(set(SPECIAL.findall(text)))
    add = [{"content": name, "rstrip": number % 3 == 1, "lstrip": False} for name in names if raw.token_to_id(name) is None]
    raw.add_special_tokens([tokenizers.AddedToken(**one, normalized=False) for one in add])
    begin = "<s>" if raw.token_to_id("<s>") is not None else "<|begin_of_text|>" if raw.token_to_id("<|begin_of_text|>") is not None else None
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=raw, bos_token=begin, eos_token=end)
    return fast, {"file": file, "eod": end, "add": add, "tokens": {"eos_token": end, **({"bos_token": begin} if begin else {})}}


def outcome(fast, text, messages, names):
    def apply(**more):
        return fast.apply_chat_template(messages, chat_template=text, **names, **more)
    try:
        whole, marks = apply(tokenize=False), "{% generation" in text.replace("{%-", "{%")
        out = apply(tokenize=True, return_dict=True, **({"return_assistant_tokens_mask": True} if marks else {}))
        return {"text": whole, "ids": list(out["input_ids"]), **({"mask": list(out["assistant_masks"])} if marks else {})}
    except Exception as error:  # whatever it is, ours is to fail, too
        return {"error": f"{type(error).__name__}: {error}"[:200]}


def cases_of(templates):
    talks, written, cases = {}, {}, []
    for number, (name, text) in enumerate(sorted(templates.items())):
        number = sorted(n for n in templates).index(name.removesuffix("_training")) if name.removesuffix("_training") in templates else number
        beside = templates.get(name + "_training", text)
        fast, of_tokenizer = tokenizer_for(number, text + beside)
        drops = "MARK" not in outcome(fast, text, [{"role": "user", "content": "MARK"}], {}).get("text", "MARK")
        for which, messages, names in CONVERSATIONS + MORE:
            if drops:  # texts alone, which such a template does not write
                messages = [{**m, "content": [{"type": "text", "text": m["content"]}]} if isinstance(m["content"], str) else m
                            for m in messages]
                which += ", in parts"
            found = outcome(fast, text, messages, names)
            if beside != text and "ids" in found and not names.get("add_generation_prompt"):
                other = outcome(fast, beside, messages, names)
                if other.get("ids") == found["ids"] and sum(other["mask"]):
                    found["mask"] = other["mask"]
            kwargs = {k: v for k, v in names.items() if k not in ("tools", "add_generation_prompt")}
            line = {"messages": messages, **({"tools": names["tools"]} if "tools" in names else {}),
                    **({"chat_template_kwargs": kwargs} if kwargs else {})}
            if which.startswith("weights") or names.get("add_generation_prompt"):
                found.pop("mask", None)  # transformers knows no weights; nothing of a question is learned
            said = found.pop("text", "")
            if which.startswith("parts") and ("error" in found or "'type'" in said or '"type"' in said or "Hello" not in said):
                continue  # written as a list is shown, or not at all; here parts are joined
            talks[which] = {"line": line, "asks": bool(names.get("add_generation_prompt"))}
            written[name] = {**of_tokenizer, "jinja": text}
            cases.append({"template": name, "talk": which, **found})
    return talks, written, cases


def published(folder):
    out = {}
    for path in sorted(pathlib.Path(folder).rglob("*")):
        if path.suffix == ".json":
            found = json.loads(path.read_text()).get("chat_template")
            for name, text in ({"": found} if isinstance(found, str) else {one["name"]: one["template"] for one in found or []}).items():
                out[f"{path.stem} {name}"] = text
        elif path.suffix in (".jinja", ".jinja2"):
            out[f"{path.parent.name}/{path.stem}"] = path.read_text()
    return out


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--templates")
    parser.add_argument("--output", default=ROOT / "reference/templates.json")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    talks, written, cases = cases_of(published(options.templates) if options.templates else KINDS)

    def lines(of):
        if isinstance(of, list):
            return "[\n" + ",\n".join(json.dumps(one, ensure_ascii=False, separators=(",", ":")) for one in of) + "\n]"
        return "{\n" + ",\n".join(f"{json.dumps(k)}: {json.dumps(v, ensure_ascii=False)}" for k, v in of.items()) + "\n}"

    text = f'{{"talks": {lines(talks)},\n"templates": {lines(written)},\n"cases": {lines(cases)}}}\n'
    pathlib.Path(options.output).write_text(text)
    print(len(cases), "cases,", sum("error" in c for c in cases), "of them errors,", sum("mask" in c for c in cases), "with a mask")


if __name__ == "__main__":
    main()
