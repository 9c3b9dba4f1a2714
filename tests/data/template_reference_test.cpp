// Conversations as transformers writes and encodes them by other people's templates, and which of their
// tokens are answers; scripts/references/make_template_reference.py made the reference and says how to give
// it others.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <iostream>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "data/templates/chat_template.h"
#include "data/text/example.h"
#include "data/text/segments.h"
#include "data_test_support.h"
#include "support/places.h"

namespace sherd::data {
namespace {

using TalkJson = nlohmann::ordered_json;

/// One of the small tokenizers with further special tokens.
std::shared_ptr<const Tokenizer> tokenizer_of_template(const TalkJson& of) {
  const std::string spec = cat("hf:x?eod=", of.at("eod").get<std::string>());
  const std::string file =
      testing::read_text(cat(tokenizers_folder, of.at("file").get<std::string>(), ".json"));
  std::int64_t id = make_tokenizer(spec, file)->vocab_size();
  TalkJson json = TalkJson::parse(file);
  for (TalkJson token : of.at("add")) {
    token["id"] = id++, token["special"] = true, token["normalized"] = false;
    json["added_tokens"].push_back(token);
  }
  return make_tokenizer(spec, json.dump());
}

struct Encoded {
  std::vector<std::int32_t> ids;
  std::vector<std::uint8_t> learned;
};
Encoded encoded(const ChatTemplate& by, const TalkJson& talk) {
  const Conversation conversation = read_conversation(talk.at("line").dump(), "talks", 1);
  Encoded out;
  encode_segments(by.tokenizer(),
                  talk.at("asks").get<bool>() ? by.render_question(conversation) : by.render(conversation),
                  SpelledTokens::text, out.ids, out.learned);
  return out;
}

/// Where somebody marks more: white space behind what ends an answer, or what stands in front of one in the
/// text that asks for it, which the model is given.
bool is_taste(const Tokenizer& tokenizer, const Encoded& got, const std::vector<std::uint8_t>& mask) {
  for (std::size_t i = 0; i < mask.size(); ++i) {
    if (got.learned[i] == mask[i]) continue;
    std::size_t end = i;
    while (end < mask.size() && got.learned[end] == 0 && mask[end] == 1) ++end;
    const std::string text = tokenizer.decode(std::span(got.ids).subspan(i, end - i));
    const bool space = text.find_first_not_of(" \n") == std::string::npos,
               asked = end < mask.size() && got.learned[end] == 1;
    if (end == i || !(space || asked)) return false;
    i = end;
  }
  return true;
}

/// How many were compared, and how many were refused that transformers takes.
struct Seen {
  int cases = 0, masks = 0, refused = 0, other_answers = 0;
};

void expect_cases(const TalkJson& all, bool to_taste, Seen& seen) {
  std::string before;
  std::shared_ptr<const Tokenizer> tokenizer;
  std::optional<ChatTemplate> by;
  for (const TalkJson& one : all.at("cases")) {
    const std::string name = one.at("template"), talk = one.at("talk");
    SCOPED_TRACE(cat(name, ", ", talk));
    if (name != before) {
      const TalkJson& of = all.at("templates").at(name);
      tokenizer = tokenizer_of_template(of);
      jinja::Dict tokens;
      for (const auto& [key, token] : of.at("tokens").items())
        tokens.emplace_back(key, token.get<std::string>());
      by = ChatTemplate::of_text(of.at("jinja"), tokens, *tokenizer);
      before = name;
    }
    ++seen.cases;
    Encoded got;
    try {
      got = encoded(*by, all.at("talks").at(talk));
    } catch (const Error& error) {
      if (one.contains("error")) continue;
      // A conversation of which something would be dropped is refused.
      EXPECT_THAT(error.what(),
                  ::testing::AnyOf(::testing::HasSubstr("which the template does not write"),
                                   ::testing::HasSubstr("which it does not name"),
                                   ::testing::HasSubstr("writes nothing of message"),
                                   ::testing::HasSubstr("so that nobody knows which"),
                                   ::testing::HasSubstr("ends with a message of the assistant")));
      ++seen.refused;
      if (to_taste) std::cout << name << ", " << talk << ": " << error.what() << "\n";
      continue;
    }
    EXPECT_FALSE(one.contains("error")) << one.at("error");
    if (!one.contains("ids")) continue;
    auto ids = one.at("ids").get<std::vector<std::int32_t>>();
    // An answer that no token of the template ends learns the end of the document.
    if (got.ids.size() == ids.size() + 1 && got.learned.back() == 1)
      got.ids.pop_back(), got.learned.pop_back();
    EXPECT_EQ(got.ids, ids) << tokenizer->decode(got.ids);
    if (!one.contains("mask") || got.ids != ids) continue;
    ++seen.masks;
    auto mask = one.at("mask").get<std::vector<std::uint8_t>>();
    if (to_taste) {
      const bool same = got.learned == mask || is_taste(*tokenizer, got, mask);
      if (!same) std::cout << name << ", " << talk << ": other answers\n";
      seen.other_answers += !same;
      continue;
    }
    EXPECT_EQ(got.learned, mask) << [&] {
      std::string text;
      for (std::size_t i = 0; i < ids.size(); ++i)
        text += cat(tokenizer->token(ids[i]), got.learned[i] ? "+" : "", mask[i] ? "*" : "", " ");
      return text;
    }();
  }
}

TEST(TemplateReference, IdsAndAnswersAreThoseOfTransformers) {
  Seen seen;
  expect_cases(TalkJson::parse(testing::read_text(std::filesystem::path(SHERD_SOURCE_DIR) /
                                                  "tests/data/reference/templates.json")),
               false, seen);
  EXPECT_GT(seen.cases - seen.refused, 100);
  EXPECT_GT(seen.masks, 30);
  if (const char* more = std::getenv("SHERD_TEMPLATE_CASES")) {
    Seen others;
    expect_cases(TalkJson::parse(testing::read_text(more)), true, others);
    EXPECT_LE(others.other_answers, others.masks / 100);
    std::cout << others.cases << " cases, " << others.masks << " masks, " << others.refused << " refused\n";
  }
}

}  // namespace
}  // namespace sherd::data
