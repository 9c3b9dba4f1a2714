#!/usr/bin/env python3
"""Makes tests/data/reference/jinja.json: small templates with names, and what transformers' own environment for chat
templates (jinja2 with its settings, filters and extensions) writes of them, or that it fails.

With --templates FOLDER the cases are templates in that folder instead (*.jinja, and "chat_template" of *.json), each
with a dozen conversations; write them elsewhere and give the file to the test by SHERD_JINJA_CASES:
    make_jinja_reference.py --templates FOLDER --output /tmp/cases.json
    SHERD_JINJA_CASES=/tmp/cases.json build/tests/test_data --gtest_filter='Jinja.*'

Needs transformers and jinja2; nothing that Sherd builds, tests or runs needs this file.
"""
import argparse
import json
import pathlib

from transformers.utils.chat_template_utils import _compile_jinja_template

ROOT = pathlib.Path(__file__).resolve().parents[2] / "tests/data/reference"

# Expressions, each written between marks.
NAMES = {"x": 5, "y": 2.5, "s": " Grüße, Welt \n", "t": "a,b,,c", "l": [3, 1, 2], "d": {"b": 1, "a": [1, {"k": "v"}]},
         "n": None, "yes": True, "no": False, "e": [], "u": "İß ǅ", "m": [{"role": "user", "n": 2}, {"role": "bot", "n": 1}],
         "tab": "a\tb\"c'\\", "big": 2 ** 40, "f": 1e20, "small": 1e-7, "whole": 3.0, "nested": [[1, 2], [3, 4]]}
EXPRESSIONS = """
x + 1 | x - 8 | x * y | x / 2 | x // 2 | -7 // 2 | -7 % 3 | 7 % -3 | 2 ** 10 | 2 ** -1 | x ~ y ~ s ~ n ~ yes | 1 + 2 * 3 - 4 / 2
(1 + 2) * 3 | -x | - x | +x | not x | not no | x and y | no or s | x if no else t | x if no | 'a' 'b' "c" | 1_000 | 1.5e3
x == 5 | x == 5.0 | x != 5 | 1 < 2 < 3 | 1 < 3 < 2 | 'a' < 'b' | x >= 5 | 2 in l | 9 in l | 9 not in l | 'Welt' in s | 'k' in d.a[1]
l[0] | l[-1] | l[9] | d.b | d['a'][1].k | d.c | d.c is defined | n.x | n.x is undefined | s[1:4] | s[::-1] | l[1:] | l[:-1] | l[::2] | l[::-1]
[1, 'a', none, true, 2.5] | (1, 2) | (1,) | () | {'a': 1, 'b': [2]} | {} | [] | 1, 2 | true | False | none | None
l | d | d | tojson | e
s.strip() | s.lstrip() | s.rstrip() | s.upper() | s.lower() | s.title() | s.capitalize() | u.upper() | u.lower() | 'xxaxx'.strip('x') | 'abc'.strip('')
t.split(',') | t.split(',', 1) | t.rsplit(',', 1) | s.split() | ' a b  c '.split(None, 1) | t.replace(',', ';') | t.replace(',', '', 2) | 'aa'.replace('', '-')
t.startswith('a') | t.endswith(('x', 'c')) | t.find('c') | t.find('z') | s.find('W') | t.count(',') | ','.join(['a', 'b']) | 'ab\\ncd\\n'.splitlines()
'{} {x} {}'.format(1, 2, x=3) | '{0}-{1}'.format('a', 2) | 'abc'.isdigit() | '12'.isdigit() | 'ab'.isalpha() | ' '.isspace() | 'prefix-x'.removeprefix('prefix-')
d.keys() | list | d.values() | list | d.items() | list | d.get('b') | d.get('z') | d.get('z', 7) | d | length | l | length | s | length | l | count
s | trim | 'xax' | trim('x') | l | join | l | join('-') | m | join('+', attribute='role') | l | sort | l | sort(reverse=true) | m | sort(attribute='n') | l | first
l | last | e | first | l | reverse | list | 'abc' | reverse | l | max | l | min | l | sum | m | sum(attribute='n') | m | map(attribute='role') | list
m | map(attribute='zz', default='-') | list | ['a', 'b'] | map('upper') | list | m | selectattr('role', 'equalto', 'user') | list | m | rejectattr('role', '==', 'user') | list
m | selectattr('n') | list | [1, none, 2] | select | list | [1, 2, 3] | select('odd') | list | [1, 2, 3] | reject('odd') | list | [1, 0, none] | reject('none') | list
['a', 'A', 'b'] | unique | list | d | dictsort | d | items | list | n | default('x') | zz | default('x') | zz | d('x') | '' | default('x', true) | zz.y | default('x')
d | tojson(indent=2) | d | tojson(sort_keys=true) | d | tojson(separators=(',', ':')) | u | tojson(ensure_ascii=true) | '😀' | tojson(true) | tab | tojson | s | tojson | y | tojson | n | tojson | yes | tojson | e | tojson(indent=4) | {} | tojson | big | tojson | f | tojson | small | tojson | whole | tojson
'a<b>&' | e | 'x' | safe | 'hello world' | title | 'hELLO' | capitalize | 'a\\nb\\n\\nc' | indent | 'a\\nb' | indent(2, true) | 'a\\n\\nb' | indent(width=3, blank=true)
'12' | int | '12.7' | int | 'x' | int | 'x' | int(5) | '1.5' | float | 3.7 | int | x | string | x | float | -3 | abs | 2.567 | round(1) | 2.4 | round | 2.1 | round(0, 'ceil')
x is number | s is string | n is none | l is sequence | d is mapping | s is sequence | l is iterable | x is iterable | x is odd | x is even | x is divisibleby 5
x is defined | zz is defined | zz is not defined | x is eq 5 | x is equalto(5) | x is lt 9 | x is in l | 3 is in l | yes is true | no is false | x is boolean | yes is boolean
yes is integer | yes is number | x is integer | y is float | 'a' is lower | 'A' is upper | range is callable | x is sameas x | n is not none | not x is defined
x is defined and y is defined | zz is defined and zz.a | x is not none and x > 3 | 'a' if x is odd else 'b'
range(3) | list | range(1, 7, 2) | list | range(5, 0, -2) | list | dict(a=1, b=2) | dict({'z': 1}, a=2) | namespace(a=1).a | nested[1] | nested | string
f | y | small | whole | 1.0 | 100000000000000000000.0 | 123456789.125 | 0.1 + 0.2 | 1 / 3 | big | tab | tab | string | [tab] | ['it\\'s', "q\\"q"] | '\\u00fc\\x41\\t|'
zz | zz ~ 'a' | [zz] | n | string | (x, s) | string | {'k': zz} | string
"""
FAILS = ["{{ zz.y }}", "{{ zz.y.z }}", "{{ x.foo() }}", "{{ raise_exception('no') }}", "{{ 1 / 0 }}", "{{ l.append(4) }}", "{{ 'a' + 1 }}",
         "{{ 1 < 'a' }}", "{{ s | nofilter }}", "{{ s is notest }}", "{% if %}{% endif %}", "{% for a in l %}", "{% endif %}",
         "{{ x", "{{ 'x }}", "{% unknown %}", "{{ (1 }}", "{{ [1 }}", "{% set x %}", "{{ x y }}", "{% for a in l %}{% endif %}", "{# open",
         "{% break %}", "{{ }}", "{{ s.nope() }}", "{% for a, b in l %}{% endfor %}", "{{ zz() }}", "{{ x() }}", "{% raw %}x", "{{ 1 in 'abc' }}"]
STATEMENTS = [
    "a\n  {% if x > 3 %}\n  yes\n  {% else %}\n  no\n  {% endif %}\nb\n", "  {{ x }}\n  {{ x }}\n", "{%- if x -%}  a  {%- endif -%}\n\n b",
    "a {%- if x %} b {% endif -%} c", "x {#- c -#} y", "a\n{# comment #}\nb", "a\n   {#- c #}\nb", "{% raw %}{{ x }}{% if %}{% endraw %} b",
    "{%+ if x %}a{% endif %}", "  {%+ if x %}a{% endif +%}\nb", "a{{- x -}} b", "{{ x }}\n\n", "a\r\nb\r\n",
    "{% for a in l %}{{ loop.index }}{{ loop.index0 }}{{ loop.revindex }}{{ loop.first }}{{ loop.last }}{{ loop.length }}:{{ a }};{% endfor %}",
    "{% for a in l %}{{ loop.previtem }}-{{ loop.nextitem }},{{ loop.cycle('x', 'y') }} {% endfor %}", "{% for a in e %}a{% else %}none{% endfor %}",
    "{% for a in l if a > 1 %}{{ loop.index }}{{ a }}{{ loop.last }} {% endfor %}", "{% for a in l %}{% if a == 1 %}{% continue %}{% endif %}{{ a }}{% endfor %}",
    "{% for a in l %}{% if a == 1 %}{% break %}{% endif %}{{ a }}{% endfor %}|", "{% for k, v in d.items() %}{{ k }}={{ v }};{% endfor %}",
    "{% for k, v in d | items %}{{ k }}={{ v }};{% endfor %}", "{% for (k, v) in [(1, 2), (3, 4)] %}{{ k }}{{ v }}{% endfor %}", "{% for c in 'äb' %}{{ c }}.{% endfor %}",
    "{% for k in d %}{{ k }}{% endfor %}", "{% for a in [1, 2] %}{% for b in [3, 4] %}{{ loop.index }}{{ a }}{{ b }} {% endfor %}{{ loop.index }}{% endfor %}",
    "{% set q = 1 %}{% for a in l %}{% set q = q + 1 %}{{ q }}{% endfor %}{{ q }}", "{% set q = namespace(v=1) %}{% for a in l %}{% set q.v = q.v + a %}{% endfor %}{{ q.v }}",
    "{% if x %}{% set w = 4 %}{% endif %}{{ w }}", "{% set a, b = 1, 2 %}{{ a }}{{ b }}", "{% set z %}text {{ x }}{% endset %}[{{ z }}]", "{% set z | upper | trim %} text {% endset %}[{{ z }}]",
    "{% set ns = namespace() %}{% set ns.a = 'b' %}{{ ns.a }}{{ ns.c is defined }}",
    "{% macro hi(a, b='B') %}<{{ a }}{{ b }}>{% endmacro %}{{ hi(1) }}{{ hi(1, 2) }}{{ hi(b=3, a=4) }}", "{% macro f(n) %}{% if n > 0 %}{{ n }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(4) }}",
    "{%- macro f(a) -%}\n  {%- for k in a -%}\n    {{ k }}\n  {%- endfor -%}\n{%- endmacro -%}\n{{ f(l) }}", "{% macro f() %}[{{ caller() }}]{% endmacro %}{% call f() %}in{{ x }}{% endcall %}",
    "{% macro f(a) %}{{ caller(a + 1) }}{% endmacro %}{% call(v) f(1) %}v={{ v }}{% endcall %}", "{% macro f(a) %}{% endmacro %}{{ f() }}{{ f(zz) }}x", "{% macro f(a) %}{{ a is defined }}{% endmacro %}{{ f() }}",
    "{% for a in l %}{% macro g() %}{{ a }}{% endmacro %}{{ g() }}{% endfor %}", "{% filter upper %}ab{{ t }}{% endfilter %}", "{% filter replace('a', 'b') | upper %}aca{% endfilter %}",
    "{% with a = 1, b = 2 %}{{ a }}{{ b }}{% endwith %}{{ a is defined }}", "{% generation %}answer {{ x }}{% endgeneration %} rest", "{% if x == 1 %}1{% elif x == 5 %}5{% elif x %}x{% endif %}",
    "{% for a in l %}\n  {{ a }}\n{% endfor %}\nend", "{%- for a in l %}\n  {{- a }}\n{%- endfor %}\nend", "{{ {'a': {'b': 1}}.a.b }}{{ {'a': 1}['a'] }}", "{{ '}}' }}{{ \"{%\" }}{{ {'a': '}'} }}",
    "{{ l | map('string') | join(', ') }}", "{{ m | map(attribute='role') | join(', ') | upper }}", "{% for g in m | groupby('role') %}{{ g.grouper }}{{ g.list | length }}{{ g[0] }};{% endfor %}",
    "{% for a in range(3) %}{{ a }}{% endfor %}", "{{ (l + [9])[-1] }}{{ [0] * 0 }}", "{{ 'ab' * 3 }}", "{% set x = x + 1 %}{{ x }}", "{% if m[0].role == 'user' and m[-1]['role'] != 'user' %}ok{% endif %}",
    "{% if not loop is defined %}no loop{% endif %}", "{{ d.a[1]['k'] if d.a is defined and d.a | length > 1 else 'none' }}", "{{ (m | selectattr('role', 'equalto', 'bot') | list | first).n }}",
    "{{ m[0] | tojson(indent=4) }}", "{{ {'ü': 'é\u2028'} | tojson }}", "{{ '%s' }}{{ '\\\\n' }}{{ 'a\\\nb' }}", "{%- set q = ['a'] -%}\n{{ q[0] -}}\n x", "{% do 1 %}x", "{{ 'a' ~ 1 ~ none ~ true ~ [1] }}",
    "{{ x if x is defined else 'n' }}{{ zz if zz is defined else 'n' }}", "{{ not no and yes }}{{ not (no and yes) }}{{ 1 == 1 and 2 == 2 }}", "{{ l[x - 4] }}{{ l[1:x - 2] }}", "a{% if no %}b{% endif %}\n\nc",
    "{% set a = 'x' if no else 'y' %}{{ a }}", "{{- 'a' -}}\n  \n{{- 'b' }}", "{% for a in l -%}\n {{ a }}\n{%- endfor %}", "{% for a in l %}{{ a }}{{ ', ' if not loop.last }}{% endfor %}", "{{ x|string + 'a' }}{{ -x|abs }}{{ (x + 1)|string }}",
]

CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Köln", "days": 2}}}
TOOL = {"type": "function", "function": {"name": "weather", "description": "Tells the weather.", "parameters": {
    "type": "object", "properties": {"city": {"type": "string", "description": "Which <city>"}, "days": {"type": "integer"}},
    "required": ["city"]}}}
SYSTEM, USER = {"role": "system", "content": "Be brief. "}, {"role": "user", "content": " What's 1+1?\n"}
ANSWER = {"role": "assistant", "content": "2, of course.\n"}
CONVERSATIONS = [
    ("user", [USER], {}), ("ask", [USER], {"add_generation_prompt": True}), ("answered", [USER, ANSWER], {}),
    ("system", [SYSTEM, USER], {"add_generation_prompt": True}), ("turns", [SYSTEM, USER, ANSWER, USER, ANSWER], {}),
    ("turns, asked", [USER, ANSWER, USER], {"add_generation_prompt": True}),
    ("thought", [USER, {"role": "assistant", "content": "<think>\nEasy.\n</think>\n\n2"}, USER, {"role": "assistant", "content": "2", "reasoning_content": "So."}], {}),
    ("tools", [SYSTEM, USER], {"tools": [TOOL], "add_generation_prompt": True}),
    ("called", [USER, {"role": "assistant", "content": "", "tool_calls": [CALL]}, {"role": "tool", "name": "weather", "content": "{\"sky\": \"grey\"}", "tool_call_id": "abcdefghi"}],
     {"tools": [TOOL], "add_generation_prompt": True}),
    ("parts", [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}], {"add_generation_prompt": True}),
    ("out of turn", [USER, USER], {}), ("no thinking", [USER], {"add_generation_prompt": True, "enable_thinking": False}),
]


def rendered(template, names):
    try:
        text = _compile_jinja_template(template).render(**names)
        return {"text": text}
    except Exception as error:  # whatever it is, ours is to fail, too
        return {"error": f"{type(error).__name__}: {error}"[:200]}


def small_cases():
    cases = []
    for line in EXPRESSIONS.strip().splitlines():
        parts, whole = line.split(" | "), []
        # A part that is a filter's name, or a call of one, belongs to the part before it.
        filters = {"tojson", "list", "length", "count", "trim", "join", "sort", "first", "last", "reverse", "max", "min", "sum", "map", "selectattr", "rejectattr", "select",
                   "reject", "unique", "dictsort", "items", "default", "d", "e", "safe", "title", "capitalize", "indent", "int", "float", "string", "abs", "round"}
        for part in parts:
            name = part.split("(")[0]
            if whole and name in filters and not (part in ("d", "e") and whole[-1] in ("l", "d", "d | tojson")):
                whole[-1] += " | " + part
            else:
                whole.append(part)
        cases += ["[{{ " + one + " }}]" for one in whole]
    return [{"template": t, "names": NAMES, **rendered(t, NAMES)} for t in cases + STATEMENTS + FAILS]


def published_cases(folder):
    cases = []
    for path in sorted(pathlib.Path(folder).rglob("*")):
        if path.suffix == ".json":
            found = json.loads(path.read_text()).get("chat_template")
            texts = {"": found} if isinstance(found, str) else {one["name"]: one["template"] for one in found or []}
        elif path.suffix in (".jinja", ".jinja2"):
            texts = {"": path.read_text()}
        else:
            continue
        for which, text in texts.items():
            for name, messages, more in CONVERSATIONS:
                names = {"messages": messages, "tools": None, "documents": None, "add_generation_prompt": False,
                         "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>", **more}
                cases.append({"name": f"{path.name} {which} {name}", "template": text, "names": names, **rendered(text, names)})
    return cases


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--templates")
    parser.add_argument("--output", default=ROOT / "jinja.json")
    options = parser.parse_args()
    cases = published_cases(options.templates) if options.templates else small_cases()
    path = pathlib.Path(options.output)
    path.parent.mkdir(parents=True, exist_ok=True)
    if options.templates:
        path.write_text(json.dumps(cases))
    else:  # the names once
        for case in cases:
            del case["names"]
        lines = ",\n".join(json.dumps(case, ensure_ascii=False) for case in cases)
        path.write_text(f'{{"names": {json.dumps(NAMES, ensure_ascii=False)},\n"cases": [\n{lines}\n]}}\n')
    print(len(cases), "cases,", sum("error" in case for case in cases), "of them errors")


if __name__ == "__main__":
    main()
