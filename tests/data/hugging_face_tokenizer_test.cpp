#include <gtest/gtest.h>

#include <sstream>
#include <thread>

#include "data/hugging_face/segmentation/word_cache.h"
#include "data/hugging_face/steps/pattern.h"
#include "data/hugging_face/steps/unicode.h"
#include "data/indexed_dataset.h"
#include "data/prepare.h"
#include "data/text/example.h"
#include "data/text/segments.h"
#include "data/tokenizer.h"
#include "data_test_support.h"
#include "support/expect_error.h"
#include "support/places.h"

namespace sherd::data {
namespace {

using testing::expect_error;
using testing::read_text;
using testing::TempFolder;
using testing::write_text;

std::string from_hex(const std::string& hex) {
  std::string out;
  for (std::size_t i = 0; i + 1 < hex.size(); i += 2)
    out.push_back(static_cast<char>(std::stoi(hex.substr(i, 2), nullptr, 16)));
  return out;
}

std::vector<std::string> lines_of(const std::string& name) {
  std::istringstream in(read_text(tokenizers_folder + name));
  std::vector<std::string> lines;
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  return lines;
}

/// The tokenizers package's results for a text (scripts/references/make_tokenizer_reference.py).
struct Expected {
  std::string text;
  std::optional<std::string> decoded;  ///< none: they differ knowingly
  std::vector<std::int32_t> ids;
};

std::vector<Expected> expected_of(const std::string& name) {
  std::vector<Expected> out;
  const std::vector<std::string> texts = lines_of("texts.txt"), lines = lines_of(name + ".txt");
  EXPECT_EQ(texts.size(), lines.size());
  for (std::size_t i = 0; i < std::min(texts.size(), lines.size()); ++i) {
    Expected one{from_hex(texts[i] == "-" ? "" : texts[i]), std::nullopt, {}};
    const std::size_t space = lines[i].find(' ');
    const std::string back = lines[i].substr(space + 1);
    std::string storage;
    if (back != "?")
      one.decoded =
          back == "=" ? std::string(valid_utf8(one.text, storage)) : from_hex(back == "-" ? "" : back);
    std::istringstream ids(lines[i].substr(0, space) == "-" ? "" : lines[i].substr(0, space));
    for (std::string id; std::getline(ids, id, ',');) one.ids.push_back(std::stoi(id));
    out.push_back(std::move(one));
  }
  return out;
}

struct Sample {
  const char *name, *end, *begin;
};

class HuggingFaceTokenizer : public ::testing::TestWithParam<Sample> {
 protected:
  const std::string name_ = GetParam().name;
  const std::shared_ptr<const Tokenizer> tokenizer_ =
      make_tokenizer(cat("hf:", tokenizers_folder, name_, ".json?eod=", GetParam().end));
};

TEST_P(HuggingFaceTokenizer, GivesThePackagesIdsAndTexts) {
  const auto expected = expected_of(name_);
  ASSERT_GT(expected.size(), 100u);
  for (const Expected& one : expected) {
    EXPECT_EQ(tokenizer_->encode(one.text), one.ids) << "'" << one.text << "'";
    // The package replaces bytes that are no UTF-8 as it decodes.
    std::string storage;
    if (!one.decoded) continue;
    EXPECT_EQ(valid_utf8(tokenizer_->decode(one.ids), storage), *one.decoded) << "'" << one.text << "'";
  }
}

TEST_P(HuggingFaceTokenizer, GivesThemFromAllThreadsAndAgain) {
  const auto expected = expected_of(name_);
  std::vector<std::thread> threads;
  for (std::size_t thread = 0; thread < 4; ++thread)
    threads.emplace_back([&, thread] {
      for (std::size_t i = 0; i < 2 * expected.size(); ++i) {
        const Expected& one = expected[(i * (thread + 1)) % expected.size()];
        ASSERT_EQ(tokenizer_->encode(one.text), one.ids);
      }
    });
  for (std::thread& thread : threads) thread.join();
}

TEST_P(HuggingFaceTokenizer, KnowsHowDocumentsBeginAndEnd) {
  EXPECT_EQ(tokenizer_->end_of_document(), tokenizer_->token_id(GetParam().end));
  EXPECT_EQ(tokenizer_->begin_of_document(), tokenizer_->token_id(GetParam().begin));
  EXPECT_EQ(tokenizer_->decode(std::vector{tokenizer_->end_of_document()}), "");
  EXPECT_EQ(tokenizer_->token_id("no such token"), std::nullopt);
  EXPECT_FALSE(tokenizer_->lossless());
  EXPECT_EQ(tokenizer_->spec(),
            cat("hf:", tokenizers_folder, name_, ".json?eod=", GetParam().end, "&bos=", GetParam().begin));
  const auto again = make_tokenizer(tokenizer_->spec());
  EXPECT_EQ(again->spec(), tokenizer_->spec());
  expect_error(ErrorKind::usage, "outside the vocabulary",
               [&] { tokenizer_->decode(std::vector{static_cast<std::int32_t>(tokenizer_->vocab_size())}); });
}

INSTANTIATE_TEST_SUITE_P(Families, HuggingFaceTokenizer,
                         ::testing::Values(Sample{"gpt2", "<|endoftext|>", ""},
                                           Sample{"llama3", "<|end_of_text|>", "<|begin_of_text|>"},
                                           Sample{"qwen", "<|endoftext|>", ""},
                                           Sample{"llama2", "</s>", "<s>"}, Sample{"mistral", "</s>", "<s>"},
                                           Sample{"variety", "</s>", ""}, Sample{"bert", "[SEP]", "[CLS]"},
                                           Sample{"bert_cased", "[SEP]", "[CLS]"}, Sample{"t5", "</s>", ""},
                                           Sample{"mt5", "</s>", ""}, Sample{"xlm_roberta", "</s>", "<s>"},
                                           Sample{"albert", "[SEP]", "[CLS]"}),
                         [](const auto& sample) { return std::string(sample.param.name); });

TEST(HuggingFaceSpec, NamesOptionsThatAreNone) {
  expect_error(ErrorKind::config, "there is no option 'eos'; options are eod=TOKEN",
               [] { make_tokenizer("hf:/none/x.json?eos=</s>"); });
  expect_error(ErrorKind::config, "there is no option 'box'",
               [] { make_tokenizer("hf:/none/x.json?box=<s>&eod=</s>"); });
  expect_error(ErrorKind::io, "cannot read", [] { make_tokenizer("hf:/none/what?"); });
}

/// The first texts that go on behind others have no space in front.
TEST(HuggingFaceSpec, TextThatGoesOnHasNoPrefix) {
  const auto tokenizer = make_tokenizer(cat("hf:", tokenizers_folder, "mistral.json?eod=</s>"));
  const auto whole = tokenizer->encode("</s>abc"), begun = tokenizer->encode("abc");
  std::vector<std::int32_t> continued;
  tokenizer->encode("abc", {.behind = EncodeOptions::Behind::token}, continued);
  EXPECT_EQ(continued, std::vector(whole.begin() + 1, whole.end()));
  EXPECT_NE(continued, begun);
}

std::vector<std::int32_t> ids_of(const Tokenizer& tokenizer, const std::vector<TextSegment>& segments) {
  std::vector<std::int32_t> ids;
  std::vector<std::uint8_t> learned;
  encode_segments(tokenizer, segments, SpelledTokens::text, ids, learned);
  EXPECT_EQ(learned.size(), ids.size());
  return ids;
}

/// As transformers encodes what a template wrote: as one text, whose special tokens are found in it.
TEST(HuggingFaceSpec, ConversationsHaveTheIdsOfTheirText) {
  const std::vector<ChatMessage> messages{{"user", " a b?", true}, {"assistant", "c d", true}};
  const auto qwen = make_tokenizer(cat("hf:", tokenizers_folder, "qwen.json?eod=<|im_end|>"));
  const auto chatml = ChatTemplate::by_tokens(*qwen);
  EXPECT_EQ(chatml.spec(), "chatml");
  EXPECT_EQ(ids_of(*qwen, chatml.render({messages})),
            qwen->encode("<|im_start|>user\n a b?<|im_end|>\n<|im_start|>assistant\nc d<|im_end|>\n"));
  for (const char* file : {"mistral.json?eod=</s>", "llama2.json?eod=</s>"}) {
    const auto tokenizer = make_tokenizer(cat("hf:", tokenizers_folder, file));
    EXPECT_EQ(ids_of(*tokenizer, ChatTemplate::named("mistral", *tokenizer).render({messages})),
              tokenizer->encode("<s>[INST]  a b? [/INST] c d</s>"))
        << file;
  }
}

std::vector<std::int32_t> sequence(const IndexedDataset& dataset, std::int64_t index) {
  std::vector<std::int32_t> ids(static_cast<std::size_t>(dataset.length(index)));
  dataset.read(index, 0, ids);
  return ids;
}

TEST(HuggingFaceSpec, DocumentsOfADatasetBeginAndEndWithTheirTokens) {
  TempFolder root;
  const std::string long_text = std::string(TextSource::piece_bytes, 'a') + "\nb";
  write_text(root / "in.txt", "one two\n\n" + long_text);
  write_text(root / "talk.jsonl",
             R"({"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]})"
             "\n"
             R"({"prompt": "p", "completion": " q"})"
             "\n");
  PrepareOptions options;
  options.inputs = {(root / "in.txt").string(), (root / "talk.jsonl").string()};
  options.output = (root / "out").string();
  options.tokenizer = cat("hf:", tokenizers_folder, "mistral.json?eod=</s>");
  options.chat_template = "mistral";
  options.threads = 3;
  const PrepareReport report = prepare(options);
  EXPECT_FALSE(report.lossless);
  EXPECT_EQ(read_text(root / "out.tokenizer.json"), read_text(tokenizers_folder + "mistral.json"));
  const auto info = read_dataset_info(options.output);
  EXPECT_EQ(info->tokenizer, cat("hf:", (root / "out.tokenizer.json").string(), "?eod=</s>&bos=<s>"));
  const auto tokenizer = make_tokenizer(info->tokenizer);
  const auto wrapped = [&](std::vector<std::int32_t> ids, bool begins, bool ends) {
    if (begins) ids.insert(ids.begin(), *tokenizer->token_id("<s>"));
    if (ends) ids.push_back(*tokenizer->token_id("</s>"));
    return ids;
  };
  const auto dataset = IndexedDataset::open(options.output);
  ASSERT_EQ(dataset->sequences(), 5);
  EXPECT_EQ(sequence(*dataset, 0), wrapped(tokenizer->encode("one two"), true, true));
  const std::vector<std::int32_t> first = sequence(*dataset, 1), second = sequence(*dataset, 2);
  EXPECT_EQ(first[0], *tokenizer->token_id("<s>"));
  EXPECT_EQ(tokenizer->decode(first) + tokenizer->decode(second), long_text);
  std::vector<std::int32_t> continued;
  tokenizer->encode(tokenizer->decode(second), {.behind = EncodeOptions::Behind::text}, continued);
  EXPECT_EQ(second, wrapped(continued, false, true));
  EXPECT_EQ(std::count(second.begin(), second.end(), first[0]), 0);
  EXPECT_EQ(sequence(*dataset, 3), tokenizer->encode("<s>[INST] x [/INST] y</s>"));
  EXPECT_EQ(sequence(*dataset, 4), wrapped(tokenizer->encode("p q"), true, true));
  // The question, and the token in front of it, are nothing to learn.
  const std::size_t asked =
      tokenizer->encode("<s>[INST] x [/INST]").size() + 1 + tokenizer->encode("p").size();
  EXPECT_EQ(info->masked_tokens, static_cast<std::int64_t>(asked));
}

/// A tokenizer.json of three tokens, with `more` among its keys.
std::string small_file(const std::string& more, const std::string& model = "") {
  return R"({"model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"])" + model + "}" +
         R"(, "added_tokens": [{"id": 3, "content": "</s>", "special": true}])" + more + "}";
}

TEST(HuggingFaceSpec, EndsAreReadBesideTheFile) {
  TempFolder root;
  write_text(root / "tokenizer.json", small_file(""));
  const std::string spec = "hf:" + root.path().string();
  expect_error(ErrorKind::config, "?eod=TOKEN", [&] { make_tokenizer(spec); });
  write_text(root / "config.json", R"({"eos_token_id": [3, 2]})");
  EXPECT_EQ(make_tokenizer(spec)->end_of_document(), 3);
  write_text(root / "generation_config.json", R"({"eos_token_id": 1})");
  EXPECT_EQ(make_tokenizer(spec)->end_of_document(), 1);
  write_text(root / "tokenizer_config.json", R"({"eos_token": {"content": "ab"}})");
  EXPECT_EQ(make_tokenizer(spec)->end_of_document(), 2);
  EXPECT_EQ(make_tokenizer(spec + "?eod=</s>")->end_of_document(), 3);
  expect_error(ErrorKind::config, "eod=x is no token", [&] { make_tokenizer(spec + "?eod=x"); });
  EXPECT_EQ(make_tokenizer(spec + "?bos=a")->begin_of_document(), 0);
  const auto tokenizer = make_tokenizer(spec + "/tokenizer.json?bos=a&eod=ab");
  EXPECT_EQ(tokenizer->spec(), spec + "/tokenizer.json?eod=ab&bos=a");
  EXPECT_EQ(model_file_of(tokenizer->spec()), (root / "tokenizer.json").string());
  EXPECT_EQ(with_model_file(tokenizer->spec(), "x.json"), "hf:x.json?eod=ab&bos=a");
  write_text(root / "tokenizer_config.json", "{");
  expect_error(ErrorKind::data, "tokenizer_config.json' is no JSON", [&] { make_tokenizer(spec); });
}

TEST(HuggingFaceSpec, ATemplateIsNotAppliedWhereTheConfigurationSaysSo) {
  TempFolder root;
  write_text(root / "tokenizer.json",
             small_file(R"(, "post_processor": {"type": "TemplateProcessing", "single": [{"SpecialToken":
             {"id": "a", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
             "special_tokens": {"a": {"id": "a", "ids": [0], "tokens": ["a"]}}})"));
  const std::string spec = "hf:" + root.path().string();
  EXPECT_EQ(make_tokenizer(spec + "?eod=</s>")->begin_of_document(), 0);
  EXPECT_EQ(make_tokenizer(spec + "?eod=</s>&bos=")->begin_of_document(), std::nullopt);
  write_text(root / "tokenizer_config.json", R"({"add_bos_token": false})");
  EXPECT_EQ(make_tokenizer(spec + "?eod=</s>")->begin_of_document(), std::nullopt);
}

struct Refused {
  const char *what, *more, *model;
};

TEST(HuggingFaceRefusals, NameWhatIsNotSupported) {
  const std::string spec = "hf:x/tokenizer.json?eod=</s>";
  EXPECT_EQ(make_tokenizer(spec, small_file(""))->encode("abxa"), (std::vector<std::int32_t>{2, 0}));
  const Refused cases[] = {
      {"key 'colour'", R"(, "colour": 1)", ""},
      {"normalizer is of the type 'Uppercase'", R"(, "normalizer": {"type": "Uppercase"})", ""},
      {"pre_tokenizer.pretokenizers[0] is of the type 'UnicodeScripts'",
       R"(, "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "UnicodeScripts"}]})", ""},
      {"pretokenizers[1] comes behind ByteLevel",
       R"(, "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "ByteLevel"}, {"type": "Digits"}]})",
       ""},
      {"decoder is of the type 'CTC'", R"(, "decoder": {"type": "CTC"})", ""},
      {"post_processor has no 'cls'", R"(, "post_processor": {"type": "BertProcessing"})", ""},
      {"behavior is 'Sideways'",
       R"(, "pre_tokenizer": {"type": "Split", "pattern": {"String": "a"}, "behavior": "Sideways"})", ""},
      {"prepend_scheme is 'last'",
       R"(, "pre_tokenizer": {"type": "Metaspace", "replacement": "_", "prepend_scheme": "last"})", ""},
      {"version '2.0'", R"(, "version": "2.0")", ""},
      {"model.dropout", "", R"(, "dropout": 0.1)"},
      {"model.end_of_word_suffix", "", R"(, "end_of_word_suffix": "</w>")"},
      {"'<unk>' is not in the vocabulary", "", R"(, "unk_token": "<unk>")"},
      {"key 'colour'", "", R"(, "colour": 1)"}};
  for (const Refused& one : cases)
    expect_error(ErrorKind::data, one.what, [&] { make_tokenizer(spec, small_file(one.more, one.model)); });
  const auto refuse = [&](const char* what, const std::string& bytes) {
    expect_error(ErrorKind::data, what, [&] { make_tokenizer(spec, bytes); });
  };
  refuse("is no JSON", "{");
  refuse("'WordLevel', which is not supported; known are BPE, WordPiece and Unigram",
         R"({"model": {"type": "WordLevel", "vocab": {}}})");
  refuse("'ac' is not in", R"({"model": {"vocab": {"a": 0, "c": 1}, "merges": ["a c"]}})");
  refuse("no pair of tokens", R"({"model": {"vocab": {"a": 0}, "merges": ["a a a"]}})");
  refuse("the id 5, and the tokenizers package gives it 1",
         R"({"model": {"vocab": {"a": 0}, "merges": []}, "added_tokens": [{"id": 5, "content": "</s>"}]})");
  refuse("two tokens have the id 0", R"({"model": {"vocab": {"a": 0, "b": 0}, "merges": []}})");
  expect_error(ErrorKind::io, "cannot read", [] { make_tokenizer("hf:/none/tokenizer.json?eod=a"); });
  expect_error(ErrorKind::config, "names no model file", [] { make_tokenizer("hf:"); });
  expect_error(ErrorKind::config, "did you mean 'hf:PATH'", [] { make_tokenizer("hg:x"); });
}

/// A merge that joins what lies before a space and the space: words are not read one by one then.
TEST(HuggingFaceBpe, MergesAcrossSpacesWhereTheFileHasThem) {
  const auto encode = [](const std::string& merges, const std::string& text) {
    const std::string file =
        R"({"model": {"vocab": {"\u2581": 0, "a": 1, "b": 2, "a\u2581": 3, "\u2581b": 4, "</s>": 5},)"
        R"("merges": [)" +
        merges +
        R"(]}, "pre_tokenizer": {"type": "Metaspace", "replacement": "\u2581",)"
        R"("prepend_scheme": "never", "split": false}})";
    return make_tokenizer("hf:x?eod=</s>", file)->encode(text);
  };
  using Ids = std::vector<std::int32_t>;
  const std::string before = R"(["a", "\u2581"])", behind = R"(["\u2581", "b"])";
  EXPECT_EQ(encode(before, "a b a"), (Ids{3, 2, 0, 1}));
  EXPECT_EQ(encode(before + "," + behind, "a b a"), (Ids{3, 2, 0, 1}));
  EXPECT_EQ(encode(behind + "," + before, "a b a"), (Ids{1, 4, 0, 1}));
  EXPECT_EQ(encode(behind, "a b  b"), (Ids{1, 4, 0, 4}));
}

/// Two space marks meet where what lies between them vanishes.
TEST(HuggingFaceBpe, NeighboursOfWhatVanishesMerge) {
  const auto encode = [](const std::string& unknown, const std::string& text) {
    const std::string file =
        R"({"model": {"vocab": {"\u2581": 0, "a": 1, "\u2581\u2581": 2, "<unk>": 3, "</s>": 4},)"
        R"("merges": [["\u2581", "\u2581"]])" +
        unknown +
        R"(}, "pre_tokenizer": {"type": "Metaspace", "replacement": "\u2581",)"
        R"("prepend_scheme": "never", "split": false}})";
    return make_tokenizer("hf:x?eod=</s>", file)->encode(text);
  };
  using Ids = std::vector<std::int32_t>;
  EXPECT_EQ(encode("", "a x a"), (Ids{1, 2, 1}));
  EXPECT_EQ(encode(R"(, "unk_token": "<unk>")", "a x a"), (Ids{1, 0, 3, 0, 1}));
}

TEST(HuggingFaceBpe, KeysOfTheModelAreHeeded) {
  const auto encode = [](const std::string& more, const std::string& text) {
    const std::string file =
        R"({"model": {"vocab": {"<unk>": 0, "a": 1, "b": 2, "c": 3, "bc": 4, "abc": 5, "<0xC3>": 6, "<0xA9>": 7},)"
        R"("merges": ["b c"])" +
        more + "}}";
    return make_tokenizer("hf:x?eod=<unk>", file)->encode(text);
  };
  using Ids = std::vector<std::int32_t>;
  const std::string unknown = R"(, "unk_token": "<unk>")", fused = R"(, "fuse_unk": true)",
                    bytes = R"(, "byte_fallback": true)", whole = R"(, "ignore_merges": true)";
  EXPECT_EQ(encode("", "abc"), (Ids{1, 4}));
  EXPECT_EQ(encode(whole, "abc"), (Ids{5}));
  EXPECT_EQ(encode("", "axyb"), (Ids{1, 2}));
  EXPECT_EQ(encode(unknown, "axybz"), (Ids{1, 0, 0, 2, 0}));
  EXPECT_EQ(encode(unknown + fused, "axybz"), (Ids{1, 0, 2, 0}));
  EXPECT_EQ(encode(unknown + bytes, "a\xc3\xa9x"), (Ids{1, 6, 7, 0}));
  // The package keeps an unknown character until the next one that is a token, past bytes.
  EXPECT_EQ(encode(unknown + bytes,
                   "x\xc3\xa9"
                   "a"),
            (Ids{6, 7, 0, 1}));
}

/// More words than it holds: it forgets, and never mixes them up.
TEST(HuggingFaceBpe, ACacheThatIsFullBeginsAnew) {
  WordCache cache;
  std::vector<std::int32_t> ids;
  int found = 0;
  for (std::int32_t round = 0; round < 2; ++round)
    for (std::int32_t i = 0; i < 100000; ++i) {
      const std::string word = cat("word", i);
      ids.clear();
      if (cache.find(word, ids)) {
        ++found;
        ASSERT_EQ(ids, (std::vector<std::int32_t>{i, -i}));
      } else {
        cache.insert(word, std::vector<std::int32_t>{i, -i});
      }
      ids.clear();
      ASSERT_TRUE(cache.find(word, ids)) << "what was met last";
    }
  EXPECT_LT(found, 100000);
  cache.insert(std::string(65, 'x'), std::vector<std::int32_t>{1});
  EXPECT_FALSE(cache.find(std::string(65, 'x'), ids)) << "long words are not kept";
}

std::vector<std::string> matches(const std::string& expression, const std::string& text) {
  MatchSpace space;
  std::vector<std::string> out;
  Pattern::expression(expression)->for_each(text, space, [&](std::size_t begin, std::size_t end) {
    out.push_back(text.substr(begin, end - begin));
  });
  return out;
}

/// By the rules of Oniguruma's Ruby syntax, where PCRE2 would take them otherwise.
TEST(HuggingFacePattern, SpeaksOnigurumasDialect) {
  using Strings = std::vector<std::string>;
  EXPECT_EQ(matches("\\s+", "a\xe1\xa0\x8e\xc2\x85 b"), (Strings{"\xc2\x85 "}));  // U+180E is none, U+0085 is
  EXPECT_EQ(matches("[^\\S\\n]+", " \t\n\xe1\xa0\x8e"), (Strings{" \t"}));
  EXPECT_EQ(matches("a{1,2}+b", "aaaab"), (Strings{"aaaab"}));
  EXPECT_EQ(matches("a{,2}b", "aaab"), (Strings{"aab"}));
  EXPECT_EQ(matches("a{x}", "a{x}"), (Strings{"a{x}"}));
  EXPECT_EQ(matches("\\v\\h",
                    "\x0b"
                    "F\n1"),
            (Strings{"\x0b"
                     "F"}));
  EXPECT_EQ(matches("[a[b-c]\\-\\]]+", "xabc-]y"), (Strings{"abc-]"}));
  EXPECT_EQ(matches("[]a-]+", "]a-b"), (Strings{"]a-"}));
  EXPECT_EQ(matches("(?i:'s)|x?+", "'S'\xc5\xbf"), (Strings{"'S", "'\xc5\xbf"}));
  EXPECT_EQ(matches("^a.$", "ab\na\n"), (Strings{"ab"}));
  EXPECT_EQ(matches("\\w+", "e\xcc\x81_1\xe2\x85\xa3-"),
            (Strings{"e\xcc\x81_1\xe2\x85\xa3"}));                                        // marks, U+2163
  EXPECT_EQ(matches("\\p{Han}", "\xe3\x80\x85\xe3\x80\x81"), (Strings{"\xe3\x80\x85"}));  // U+3001 is Common
  EXPECT_EQ(matches("\\p{^L}", "a1"), (Strings{"1"}));
  EXPECT_EQ(matches("x*", "axxb"), (Strings{"", "xx", ""}));
  for (const char* bad : {"(a)\\1", "\\bx", "[a&&b]", "[[:alpha:]]", "(?m)a", "[a[^b]]", "\\p{Emoji}", "a**",
                          "(?<n>a)", "a)", "(a", "[a", "a{2}?", "*a", "\\x{110000}", "[a-\\d]", "a\\"})
    expect_error(ErrorKind::data, "not translated", [&] { Pattern::expression(bad); });
}

/// Every single byte, and what of sequences is cut or out of range, as Python's errors="replace" has it.
TEST(HuggingFaceUnicode, ReplacesWhatIsNoUtf8) {
  const auto fixed = [](std::string text) {
    std::string storage;
    return std::string(valid_utf8(text, storage));
  };
  const std::string bad = "\xef\xbf\xbd";
  EXPECT_EQ(fixed("plain ascii, \xc3\xa9"), "plain ascii, \xc3\xa9");
  EXPECT_EQ(fixed("\xf0\x9f\x99"), bad);
  EXPECT_EQ(fixed("\xf0\x9f\x99(\xe2\x82x"), bad + "(" + bad + "x");
  EXPECT_EQ(fixed("\xed\xa0\x80"), bad + bad + bad);
  EXPECT_EQ(fixed("\xc0\xaf\xe0\x9f\xbf"), bad + bad + bad + bad + bad);
  EXPECT_EQ(fixed("\xf4\x90\x80\x80\xf5"), bad + bad + bad + bad + bad);
}

}  // namespace
}  // namespace sherd::data
