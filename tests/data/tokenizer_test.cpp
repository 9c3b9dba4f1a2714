#include "data/tokenizer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <set>
#include <thread>

#include "base/text/utf8.h"
#include "data_test_support.h"
#include "sample_text.h"
#include "support/expect_error.h"

namespace sherd::data {
namespace {

using testing::expect_error;
using testing::read_text;
using testing::TempFolder;
using testing::write_text;

/// Texts that a lossless tokenizer must carry unchanged.
std::vector<std::string> hard_texts() {
  std::vector<std::string> texts{
      "",
      " ",
      "  two  spaces  ",
      "\n",
      "\n\nline\r\nline\t tab \n",
      "<s></s><unk><0x41>",
      "emoji \xf0\x9f\x99\x82 and \xe6\xbc\xa2\xe5\xad\x97, \xef\xac\x81gure, e\xcc\x81t\xc3\xa9",
      "a written space mark \xe2\x96\x81 is no space",
      "no-break\xc2\xa0space, wide\xe3\x80\x80space",
      "invalid \xff\xfe bytes \xc3",
      "\xed\xa0\x80 surrogate",
      "overlong \xc0\xaf",
      "cut \xf0\x9f\x99",
      std::string("zero \0 byte", 11),
      std::string(300, 'x') + " " + std::string(300, ' '),
      "\xef\xbf\xbd replacement \xef\xbb\xbf mark"};
  std::string every;
  for (int byte = 0; byte < 256; ++byte) every.push_back(static_cast<char>(byte));
  texts.push_back(every);
  std::mt19937 random(1);
  for (int i = 0; i < 20; ++i) {
    std::string noise;
    for (int j = 0; j < 200; ++j) noise.push_back(static_cast<char>(random()));
    texts.push_back(noise);
  }
  return texts;
}

void expect_lossless(const Tokenizer& tokenizer) {
  EXPECT_TRUE(tokenizer.lossless());
  for (const std::string& text : hard_texts()) {
    const auto ids = tokenizer.encode(text);
    for (const std::int32_t id : ids) {
      ASSERT_GE(id, 0);
      ASSERT_LT(id, tokenizer.vocab_size());
      ASSERT_NE(id, tokenizer.end_of_document());
    }
    EXPECT_EQ(tokenizer.decode(ids), text);
  }
}

std::string train(const std::string& spec, const std::string& text) {
  TrainTokenizer request;
  EXPECT_TRUE(parse_train_spec(spec, request));
  std::size_t at = 0;
  return train_sentencepiece(request, [&](std::string& line) {
    if (at >= text.size()) return false;
    const std::size_t end = std::min(text.find('\n', at), text.size());
    line = text.substr(at, end - at);
    at = end + 1;
    return true;
  });
}

TEST(Utf8, KnowsEveryForm) {
  const auto length = [](std::string_view text) { return utf8_length(text); };
  EXPECT_EQ(length("a"), 1u);
  EXPECT_EQ(length("\xc2\x80"), 2u);
  EXPECT_EQ(length("\xe0\xa0\x80"), 3u);
  EXPECT_EQ(length("\xed\x9f\xbf"), 3u);
  EXPECT_EQ(length("\xf4\x8f\xbf\xbf"), 4u);
  for (const char* bad : {"\x80", "\xc1\xbf", "\xe0\x9f\xbf", "\xed\xa0\x80", "\xf0\x8f\xbf\xbf",
                          "\xf4\x90\x80\x80", "\xf5\x80\x80\x80", "\xc3", "\xe2\x82", "\xc3(", "\xff"})
    EXPECT_EQ(length(bad), 0u) << bad;
  EXPECT_EQ(invalid_utf8_bytes("a\xff\xc3\xa9\xc3"), 2u);
}

TEST(ByteTokenizer, IsLossless) {
  const auto tokenizer = make_tokenizer("byte");
  EXPECT_EQ(tokenizer->vocab_size(), 257);
  EXPECT_EQ(tokenizer->end_of_document(), 256);
  EXPECT_EQ(tokenizer->spec(), "byte");
  EXPECT_EQ(tokenizer->encode("a\xff"), (std::vector<std::int32_t>{97, 255}));
  EXPECT_EQ(tokenizer->decode(std::vector<std::int32_t>{97, 256, 98}), "ab");
  expect_lossless(*tokenizer);
  expect_error(ErrorKind::usage, "token 257", [&] { tokenizer->decode(std::vector<std::int32_t>{257}); });
}

class SentencePiece : public ::testing::TestWithParam<const char*> {
 protected:
  std::string text_ = sample_text(150000);
  std::string model_ = train(cat("spm-train:500:", GetParam()), text_);
  std::shared_ptr<const Tokenizer> tokenizer_ = make_sentencepiece(model_, "trained.model");
};

TEST_P(SentencePiece, IsLossless) {
  EXPECT_EQ(tokenizer_->vocab_size(), 500);
  EXPECT_EQ(tokenizer_->spec(), "spm:trained.model");
  expect_lossless(*tokenizer_);
  const auto ids = tokenizer_->encode(text_);
  EXPECT_EQ(tokenizer_->decode(ids), text_);
  EXPECT_LT(ids.size(), text_.size() / 2);  // it learnt pieces, not only bytes
}

TEST_P(SentencePiece, TrainsTheSameModelAgain) {
  EXPECT_EQ(train(cat("spm-train:500:", GetParam()), text_), model_);
}

TEST_P(SentencePiece, EncodesTheSameFromManyThreads) {
  std::vector<std::vector<std::int32_t>> results(4);
  std::vector<std::thread> threads;
  const auto fresh = make_sentencepiece(model_, "trained.model");
  for (auto& result : results) threads.emplace_back([&] { fresh->encode(text_, result); });
  for (auto& thread : threads) thread.join();
  for (const auto& result : results) EXPECT_EQ(result, tokenizer_->encode(text_));
}

TEST_P(SentencePiece, DoesNotDependOnWhatCameBefore) {
  const std::string line = text_.substr(0, text_.find('\n'));
  const auto first = make_sentencepiece(model_, "trained.model")->encode(line);
  tokenizer_->encode(text_);
  EXPECT_EQ(tokenizer_->encode(line), first);
  std::vector<std::int32_t> appended{1, 2};
  tokenizer_->encode(line, appended);
  EXPECT_TRUE(std::equal(appended.begin() + 2, appended.end(), first.begin(), first.end()));
}

INSTANTIATE_TEST_SUITE_P(Algorithms, SentencePiece, ::testing::Values("unigram", "bpe"));

TEST(SentencePieceTraining, MakesATokenForMasksWhereAsked) {
  const std::string text = sample_text(20000);
  for (const char* how : {":mask", ":bpe:mask"}) {
    const auto masked = make_sentencepiece(train(cat("spm-train:500", how), text), "x");
    ASSERT_TRUE(masked->token_id("<mask>")) << how;
    EXPECT_TRUE(masked->is_special(*masked->token_id("<mask>")));
    EXPECT_EQ(masked->vocab_size(), 500);
    for (const std::int32_t id : masked->encode("a <mask> b")) EXPECT_NE(id, *masked->token_id("<mask>"));
  }
  EXPECT_FALSE(make_sentencepiece(train("spm-train:500", text), "x")->token_id("<mask>"));
}

TEST(SentencePieceTraining, SaysWhyItCannot) {
  expect_error(ErrorKind::data, "vocabulary of 20000", [] { train("spm-train:20000", sample_text(20000)); });
  expect_error(ErrorKind::data, "no text to train", [] { train("spm-train:500", ""); });
  expect_error(ErrorKind::data, "cannot train a tokenizer", [] { train("spm-train:300", "\n\n"); });
  expect_error(ErrorKind::data, "cannot train a tokenizer", [] { train("spm-train:300:bpe", "\n\n"); });
}

TEST(MakeTokenizer, NamesTheNextStep) {
  TempFolder folder;
  expect_error(ErrorKind::config, "did you mean 'byte'?", [] { make_tokenizer("bytes"); });
  expect_error(ErrorKind::config, "did you mean 'spm:MODEL'?", [] { make_tokenizer("spn:x"); });
  expect_error(ErrorKind::config, "must be trained first", [] { make_tokenizer("spm-train:8000"); });
  expect_error(ErrorKind::config, "names no model file", [] { make_tokenizer("spm:"); });
  expect_error(ErrorKind::io, "no.model", [&] { make_tokenizer("spm:" + (folder / "no.model").string()); });
  expect_error(ErrorKind::io, "cannot read", [&] { make_tokenizer("spm:" + folder.path().string()); });
  for (const char* content : {"", "this is no model", "\x0a\x05"}) {
    write_text(folder / "bad.model", content);
    expect_error(ErrorKind::data, "is no SentencePiece model",
                 [&] { make_tokenizer("spm:" + (folder / "bad.model").string()); });
  }
}

TEST(MakeTokenizer, ParsesTrainingRequests) {
  TrainTokenizer request;
  EXPECT_FALSE(parse_train_spec("spm:x", request));
  EXPECT_TRUE(parse_train_spec("spm-train:8000", request));
  EXPECT_EQ(request.vocab_size, 8000);
  EXPECT_FALSE(request.bpe);
  EXPECT_TRUE(parse_train_spec("spm-train:4096:bpe", request));
  EXPECT_TRUE(request.bpe);
  for (const char* bad : {"spm-train:", "spm-train:8k", "spm-train:-5", "spm-train:8000:",
                          "spm-train:8000:wordpiece", "spm-train:299", "spm-train:99999999999999999999"})
    expect_error(ErrorKind::config, "spm-train", [&] { parse_train_spec(bad, request); });
}

}  // namespace
}  // namespace sherd::data
