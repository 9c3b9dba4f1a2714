// The four templates that are here, as texts.
#include <algorithm>
#include <array>

#include "base/error.h"
#include "data/templates/chat_template.h"

namespace sherd::data {
namespace {

constexpr const char *mistral_begin = "[INST]", *mistral_end = "[/INST]", *mistral_system = "[SYSTEM_PROMPT]",
                     *mistral_system_end = "[/SYSTEM_PROMPT]", *llama3_document = "<|begin_of_text|>",
                     *mistral_document = "<s>";

/// Mistral's ways, by the tokenizer's tokens (mistral-common): without [INST] (v1) a question's ends are
/// text, with spaces around, and the system's text lies in the first question; with it (v2, v3) no space is
/// in front of the second, and it lies in the last; with [SYSTEM_PROMPT] (v7) it lies between tokens of its
/// own. A space begins each text where the tokenizer begins words with one; byte-level ones (Tekken) do not.
struct MistralForm {
  bool tokens, system_tokens, space = true;

  explicit MistralForm(const Tokenizer& tokenizer)
      : tokens(tokenizer.token_id(mistral_begin) && tokenizer.token_id(mistral_end)),
        system_tokens(tokens && tokenizer.token_id(mistral_system) &&
                      tokenizer.token_id(mistral_system_end)) {
    if (!tokens) return;
    std::vector<std::int32_t> alone, behind;
    tokenizer.encode("a", {}, alone);
    tokenizer.encode(" a", {.behind = EncodeOptions::Behind::text}, behind);
    space = alone == behind;
  }
  const char* front() const { return space ? " " : ""; }
  const char* back() const { return tokens ? "" : " "; }
};

/// A text as jinja writes it: what `{{ … }}` holds.
std::string jinja_string(std::string_view text) {
  std::string out = "'";
  for (const char c : text)
    out += c == '\n' ? "\\n" : c == '\'' || c == '\\' ? cat('\\', c) : std::string(1, c);
  return out + "'";
}

/// Each message and its `content`, of which there may be a list of parts.
constexpr const char* jinja_each =
    "{% for message in messages %}{% set content = message['content'] if message['content'] is string else "
    "message['content'] | map(attribute='text') | join %}";

/// The orders of messages that Mistral's own templates refuse.
constexpr const char* mistral_order =
    "{% set at = namespace(asks=true) %}{% for message in messages %}{% if message['role'] == 'system' %}"
    "{% if not loop.first %}{{ raise_exception('a system message that is not the first has no place in the "
    "template mistral') }}{% endif %}{% elif (message['role'] == 'user') != at.asks %}{{ raise_exception("
    "'user and assistant are to take turns in the template mistral, the user first') }}{% else %}"
    "{% set at.asks = not at.asks %}{% endif %}{% endfor %}";

std::string mistral_jinja(const Tokenizer& tokenizer, const std::string& begin, const std::string& close) {
  const MistralForm form(tokenizer);
  const std::string each = jinja_each, last = "{% endfor %}", content = " + content + ",
                    question = jinja_string(cat(mistral_begin, form.front())) +
                               (form.system_tokens ? "" : " + system") + content +
                               jinja_string(cat(form.back(), mistral_end)),
                    answer = jinja_string(form.front()) + content + close;
  if (form.system_tokens)
    return mistral_order + begin + each + "{% if message['role'] == 'system' %}{{ " +
           jinja_string(cat(mistral_system, form.front())) + content + jinja_string(mistral_system_end) +
           " }}{% elif message['role'] == 'user' %}{{ " + question + " }}{% else %}{{ " + answer +
           " }}{% endif %}" + last;
  return mistral_order + std::string("{% set at = namespace(system='', turn=0) %}") + each +
         "{% if message['role'] == 'system' %}{% set at.system = content + '\\n\\n' %}"
         "{% elif message['role'] == 'user'" +
         (form.tokens ? "" : " and at.turn == 0") + " %}{% set at.turn = loop.index %}{% endif %}" + last +
         begin + each +
         "{% if message['role'] == 'user' %}{% set system = at.system if loop.index == at.turn else '' "
         "%}{{ " +
         question + " }}{% elif message['role'] == 'assistant' %}{{ " + answer + " }}{% endif %}" + last;
}

}  // namespace

std::string name_of_spec(const std::string& spec) {
  return spec.starts_with('{') ? "a template of its own" : spec;
}

const std::vector<std::string>& builtin_templates() {
  static const std::vector<std::string> names{"chatml", "llama3", "mistral", "plain"};
  return names;
}

std::vector<std::string> controls_of(const std::string& name) {
  if (name == "chatml") return {"<|im_start|>", "<|im_end|>"};
  if (name == "llama3") return {llama3_document, "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"};
  if (name == "mistral")
    return {mistral_document, mistral_begin, mistral_end, mistral_system, mistral_system_end};
  return {};
}

std::string jinja_of(const std::string& name, const Tokenizer& tokenizer, bool end_by_name) {
  const std::string each = jinja_each, last = "{% endfor %}", question = "{% if add_generation_prompt %}",
                    end = tokenizer.token(tokenizer.end_of_document()),
                    close = end_by_name || end.empty() ? "eos_token" : jinja_string(end);
  const auto begin = [&](const char* otherwise) {
    const auto id = tokenizer.begin_of_document();
    const std::string token = id ? tokenizer.token(*id) : otherwise;
    return token.empty() ? token : "{{ " + jinja_string(token) + " }}";
  };
  if (name == "chatml")
    return begin("") + each + "{{ '<|im_start|>' + message['role'] + '\\n' + content + '<|im_end|>\\n' }}" +
           last + question + "{{ '<|im_start|>assistant\\n' }}{% endif %}";
  if (name == "llama3")
    return begin(llama3_document) + each +
           "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}"
           "{{ content | trim }}{{ '<|eot_id|>' }}" +
           last + question + "{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}";
  if (name == "mistral") return mistral_jinja(tokenizer, begin(mistral_document), close);
  return begin("") + each +
         "{% if message['role'] == 'system' %}{{ content + '\\n\\n' }}"
         "{% elif message['role'] == 'user' %}{{ '### User:\\n' + content + '\\n\\n' }}"
         "{% else %}{{ '### Assistant:\\n' + content + " +
         close + " }}{% endif %}" + last + question + "{{ '### Assistant:\\n' }}{% endif %}";
}

}  // namespace sherd::data
