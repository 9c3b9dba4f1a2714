// Which of our templates a published one is, by what it writes; and what conversations may not hold.
#include "data/templates/published_template.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "data/prepare.h"
#include "data/text/example.h"
#include "data_test_support.h"
#include "support/expect_error.h"
#include "support/places.h"

namespace sherd::data {
namespace {

using testing::expect_error, testing::TempFolder, testing::write_text, testing::read_text;

std::shared_ptr<const Tokenizer> tokenizer_of(const std::string& name, const std::string& end) {
  return make_tokenizer(cat("hf:", tokenizers_folder, name, ".json?eod=", end));
}
const auto qwen = tokenizer_of("qwen", "<|endoftext|>"), llama = tokenizer_of("llama3", "<|end_of_text|>"),
           mistral = tokenizer_of("mistral", "</s>");

// Written as the families write theirs: by concatenation, by names set on the way, with white space that
// jinja takes away, with roles that are refused.
const std::string chatml =
    "{%- for message in messages %}\n    {{- '<|im_start|>' + message.role + '\\n' + message.content + "
    "'<|im_end|>' + \"\\n\" }}\n{%- endfor %}\n{%- if add_generation_prompt %}\n    {{- "
    "'<|im_start|>assistant\\n' }}\n{%- endif %}\n";
const std::string llama3 =
    "{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = "
    "'<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + "
    "'<|eot_id|>' %}{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}"
    "{% endif %}";
const std::string inst =
    "{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) "
    "%}{{ raise_exception('Roles (user, assistant) must alternate') }}{% endif %}{% if message['role'] == "
    "'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}{% elif message['role'] == 'assistant' %}"
    "{{ ' ' + message['content'] + eos_token }}{% endif %}{% endfor %}";

/// None where it is refused.
std::optional<ChatTemplate> match_template(const std::string& jinja, const Tokenizer& tokenizer) {
  try {
    return require_template(jinja, tokenizer, "the model");
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::config);
    return std::nullopt;
  }
}

std::string replaced(std::string text, const std::string& what, const std::string& by) {
  const std::size_t at = text.find(what);
  EXPECT_NE(at, std::string::npos) << what;
  return text.replace(at, what.size(), by);
}

TEST(PublishedTemplate, IsOneOfOursWhereItWritesTheSame) {
  EXPECT_EQ(match_template(chatml, *qwen), ChatTemplate::chatml);
  EXPECT_EQ(match_template(llama3, *llama), ChatTemplate::llama3);
  EXPECT_EQ(match_template(inst, *mistral), ChatTemplate::mistral);
  // A branch for each role, text between tags, and comments.
  EXPECT_EQ(match_template("{# of {{ ours }} #}\n{% for m in messages %}\n{% if m['role'] == 'user' %}\n"
                           "<|im_start|>user\n{{ m['content'] }}<|im_end|>\n{% elif m.role == 'assistant' %}"
                           "<|im_start|>assistant\n{% generation %}{{ m['content'] }}<|im_end|>\n"
                           "{% endgeneration %}{% else %}{{ raise_exception('no ' ~ m.role) }}{% endif %}"
                           "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
                           *qwen),
            ChatTemplate::chatml);
  EXPECT_EQ(
      match_template("{% for m in messages %}{% if m.role == 'system' %}{{ m.content + '\\n\\n' }}{% elif "
                     "m.role == 'user' %}{{ '### User:\\n' ~ m.content ~ '\\n\\n' }}{% else %}"
                     "### Assistant:\n{{ m.content + eos_token }}{% endif %}{% endfor %}"
                     "{% if add_generation_prompt %}{{ '### Assistant:\\n' }}{% endif %}",
                     *qwen),
      ChatTemplate::plain);
  for (const auto& tokenizer : {qwen, llama, mistral})
    for (const ChatTemplate which :
         {ChatTemplate::chatml, ChatTemplate::llama3, ChatTemplate::mistral, ChatTemplate::plain})
      EXPECT_EQ(match_template(jinja_of(which, *tokenizer), *tokenizer), which) << "that export wrote";
}

/// What stands under conditions that conversations here do not meet is not written.
TEST(PublishedTemplate, IsRunNotRead) {
  for (const std::string& more :
       {std::string("{%- for tool in tools or [] %}{{ tool | tojson }}{%- endfor %}{%- for"),
        std::string("{% macro f(x) %}{{ x }}{% endmacro %}{%- for"),
        std::string("{%- if documents %}{{ documents }}{% endif %}{%- for")})
    EXPECT_EQ(match_template(replaced(chatml, "{%- for", more), *qwen), ChatTemplate::chatml) << more;
  EXPECT_EQ(
      match_template(replaced(replaced(chatml, "'\\n'", "a"), "{%- for",
                              "{%- if x %}{% set a = 'X' %}{% else %}{% set a = '\\n' %}{% endif %}{%- for"),
                     *qwen),
      ChatTemplate::chatml);
  // A header that is there without being asked for; a system's text that is left out.
  EXPECT_EQ(
      match_template(
          replaced(replaced(chatml, "{%- if add_generation_prompt %}\n", ""), "{%- endif %}\n", ""), *qwen),
      std::nullopt);
  EXPECT_EQ(match_template(replaced(chatml, "in messages", "in messages if message.role != 'system'"), *qwen),
            std::nullopt);
}

/// Each differs in one place, which no substring tells.
TEST(PublishedTemplate, IsNoneOfOursWhereItWritesAnything) {
  const auto none = [](const std::string& jinja, const std::shared_ptr<const Tokenizer>& tokenizer) {
    EXPECT_EQ(match_template(jinja, *tokenizer), std::nullopt) << jinja;
  };
  none(replaced(chatml, "'\\n'", "'<|im_sep|>'"), qwen);                     // Phi-4
  none(replaced(chatml, "<|im_start|>assistant", "<|im_start|>bot"), qwen);  // its answers are another's
  none(replaced(chatml, "+ \"\\n\"", ""), qwen);                             // no line end behind turns
  none(replaced(chatml, "message.content", "message.content | trim"), qwen);
  none(replaced(chatml, "message.content", "message.content | upper"), qwen);
  none(replaced(chatml, "message.content", "message.content.split('</think>')[-1]"), qwen);
  none(replaced(chatml, "assistant\\n", "assistant\\n<think>\\n\\n</think>\\n\\n"), qwen);  // Qwen3
  none(replaced(chatml, "{%- for", "{{- '<|im_start|>system\\nYou help.<|im_end|>\\n' }}{%- for"), qwen);
  none(replaced(chatml, "message.role", "('bot' if message.role == 'assistant' else message.role)"), qwen);
  none(chatml.substr(0, chatml.find("{%- if")), qwen);  // would leave the header to the model
  none(replaced(llama3, " | trim", ""), llama);
  none(replaced(llama3, "'<|start_header_id|>' + message['role']", "'<|start_header_id|>' + 'x'"), llama);
  none(replaced(inst, "' [/INST]'", "'[/INST]'"), mistral);
  none(replaced(inst, "message['content'] + ' [", "'<<SYS>>' + message['content'] + ' ["), mistral);
  none(replaced(inst, "' ' + message['content']", "message['content']"), mistral);
  none("{{ '<|im_start|>' }}", qwen);
  none("{% for m in messages %}{{ '<|' + m.role + '|>\\n' + m.content + eos_token }}{% endfor %}",
       qwen);  // Zephyr
  none("", qwen);
  none("{{", qwen);
  // One line end at a template's end is none of what it writes, and spaces within a line are.
  none(
      "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor "
      "%}<|im_start|>assistant\n",
      qwen);
  none(replaced(chatml, "\"\\n\" }}\n{%- endfor", "\"\\n\" }} {% endfor"), qwen);
  // Spaces that it writes itself around a content that is trimmed.
  none(replaced(replaced(chatml, "+ '\\n' +", "+ '\\n ' +"), "message.content + '",
                "message.content | trim + ' "),
       qwen);
  none(replaced(llama3, "| trim", "| trim('\\n')"), llama);
  // A beginning of each turn.
  none(replaced(replaced(inst, "{{ bos_token }}", ""), "'[INST] '", "bos_token + '[INST] '"), mistral);
  none(replaced(replaced(inst, "{{ bos_token }}", ""), "'[INST] '", "'<s>[INST] '"), mistral);
  // A name that a loop finds set the second time.
  none(replaced(replaced(chatml, "{{- '<|im_start|>' +", "{{- a.b + '<|im_start|>' +"), "{%- endfor",
                "{% set a.b = 'X' %}{%- endfor"),
       qwen);
  none("{{ " + std::string(100000, '('), qwen);
  // Two texts in the branches of a condition: the one that the eye skips counts as well.
  none(replaced(
           chatml, "{%- for",
           "{% if not system %}{% set a = 'You help.' %}{% else %}{% set a = '' %}{% endif %}{{ a }}{%- for"),
       qwen);
}

TEST(PublishedTemplate, RefusalsNameThePlaceAndTheWayOn) {
  const auto refused = [](const std::string& jinja, const std::string& part) {
    expect_error(ErrorKind::config, part, [&] { require_template(jinja, *qwen, "the model"); });
  };
  const std::string phi = replaced(chatml, "'\\n'", "'<|im_sep|>'");
  refused(phi, "closest to chatml, but behind '<|im_start|>user' writes '<|im_sep|> Who's");
  refused(phi, "give --chat-template chatml (or another)");
  refused(replaced(chatml, "{%- if", "{{ 'Now!' }}{%- if"), "<|im_end|>\\n' writes 'Now!'");
  refused(replaced(chatml, "message.content", "message.content | trim"),
          "behind '<|im_start|>user\\n' writes 'Who's </think> there?<|im_end|>");
  EXPECT_EQ(require_template(chatml, *qwen, "the model"), ChatTemplate::chatml);
}

TEST(PublishedTemplate, IsFoundInFiles) {
  EXPECT_EQ(published_template("a", R"({"chat_template": "b"})"), "a");
  EXPECT_EQ(published_template("", R"({"chat_template": "b"})"), "b");
  EXPECT_EQ(published_template("", R"({"chat_template": [{"name": "tool_use", "template": "t"},
                                                         {"name": "default", "template": "d"}]})"),
            "d");
  for (const char* none : {"", "{", "[]", "{}", R"({"chat_template": null})",
                           R"({"chat_template": [{"name": "default", "template": null}, {"name": null}]})"})
    EXPECT_EQ(published_template("", none), "") << none;
}

/// A folder as models are published, and what `prepare` makes of conversations and of texts with it.
class PrepareByTemplate : public ::testing::Test {
 protected:
  void SetUp() override {
    std::filesystem::create_directory(root_ / "model");
    write_text(root_ / "model/tokenizer.json", read_text(tokenizers_folder + "qwen.json"));
    write_text(root_ / "talk.jsonl",
               R"({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]})");
    write_text(root_ / "text.txt", "a text\n");
  }
  PrepareReport prepared(const std::string& input, const std::string& jinja, const std::string& asked = "") {
    write_text(root_ / "model/tokenizer_config.json",
               nlohmann::json{{"eos_token", "<|endoftext|>"}, {"chat_template", jinja}}.dump());
    PrepareOptions options;
    options.inputs = {(root_ / input).string()};
    options.output = (root_ / "out").string();
    options.tokenizer = cat("hf:", (root_ / "model").string());
    options.chat_template = asked;
    return prepare(options);
  }
  TempFolder root_;
};

TEST_F(PrepareByTemplate, TakesTheFoldersOwnOrRefuses) {
  EXPECT_EQ(prepared("talk.jsonl", chatml).info.chat_template, "chatml");
  // The tokens are ChatML's, and the template is another's.
  const std::string phi = replaced(chatml, "'\\n'", "'<|im_sep|>'");
  expect_error(ErrorKind::config, "line 1, is a conversation: the chat template that the tokenizer came with",
               [&] { prepared("talk.jsonl", phi); });
  EXPECT_EQ(prepared("talk.jsonl", phi, "plain").info.chat_template, "plain");
  EXPECT_EQ(prepared("text.txt", phi).info.documents, 1) << "texts need none";
  EXPECT_EQ(prepared("talk.jsonl", "").info.chat_template, "chatml") << "by its tokens";
  EXPECT_FALSE(prepared("talk.jsonl", "").template_by_default);
  write_text(root_ / "model/tokenizer.json", read_text(tokenizers_folder + "gpt2.json"));
  EXPECT_TRUE(prepared("talk.jsonl", "").template_by_default) << "nobody says how";
  EXPECT_FALSE(prepared("talk.jsonl", "", "plain").template_by_default);
  EXPECT_FALSE(prepared("text.txt", "").template_by_default);
}

Example read_qwen_example(const std::string& line) {
  return read_example(line, {"", ChatTemplate::plain, *qwen}, "in.jsonl", 7);
}
std::string talk_with(const std::string& more, const std::string& beside = "") {
  return R"({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b")" + more +
         "}]" + beside + "}";
}

/// OpenAI's, transformers' and other trainers' fields, of which none is written here.
TEST(ConversationFields, ThatNoTemplateWritesAreRefused) {
  const auto refused = [](const std::string& line, const std::string& part) {
    expect_error(ErrorKind::data, part, [&] { read_qwen_example(line); });
    if (!line.starts_with(R"({"prompt)"))
      expect_error(ErrorKind::data, part, [&] { read_messages(line, "in.jsonl", 7); });
  };
  for (const char* key : {"function_call", "reasoning_content", "thinking", "tool_calls", "name", "refusal"})
    refused(talk_with(cat(", \"", key, "\": \"x\"")),
            cat("a message has '", key, "', which no template here writes"));
  refused(talk_with(R"(, "tool_calls": [{"id": 1}])"), "a message has 'tool_calls'");
  refused(talk_with("", R"(, "tools": [{"type": "function"}])"), "has 'tools' beside its messages");
  refused(talk_with("", R"(, "functions": [{"name": "f"}])"), "has 'functions' beside its messages");
  refused(R"({"prompt": [{"role": "user", "content": "a"}], "completion": [{"role": "assistant",
              "content": "b"}], "tools": [{}]})",
          "has 'tools' beside its messages");
  refused(R"({"messages": [{"role": "assistant", "content": [{"type": "thinking", "text": "x"}]}]})",
          "a part that is no text");
  refused(R"({"messages": [{"role": "assistant", "content": [{"type": "text", "text": "x", "y": 1}]}]})",
          "a part of a message's 'content' has 'y'");
  refused(talk_with(R"(, "train": 1)"), "a message's 'train' is true or false, not 1");
  // Keys without a value may stand there: a table of columns writes all keys in each line.
  EXPECT_NO_THROW(read_qwen_example(talk_with(R"(, "tool_calls": null, "name": null, "function_call": {})",
                                              R"(, "tools": [], "id": 7, "source": "x")")));
}

TEST(ConversationFields, SayWhatIsLearned) {
  const auto learns = [](const std::string& more) { return read_qwen_example(talk_with(more)).teaches(); };
  EXPECT_TRUE(learns(""));
  EXPECT_TRUE(learns(R"(, "weight": 1, "train": true, "loss": null)"));
  EXPECT_FALSE(learns(R"(, "weight": 0)"));
  EXPECT_FALSE(learns(R"(, "train": false)"));
  EXPECT_FALSE(learns(R"(, "loss": false)"));
}

}  // namespace
}  // namespace sherd::data
