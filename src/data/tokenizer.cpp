#include "data/tokenizer.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <filesystem>
#include <fstream>

#include "base/error.h"
#include "base/files.h"
#include "base/text/excerpt.h"
#include "data/hugging_face/files_beside.h"
#include "data/hugging_face/tokenizer.h"

namespace sherd::data {
namespace {

constexpr std::string_view spm_prefix = "spm:", hf_prefix = "hf:", train_prefix = "spm-train:";

class ByteTokenizer final : public Tokenizer {
 public:
  using Tokenizer::encode;
  void encode(std::string_view text, const EncodeOptions&, std::vector<std::int32_t>& ids) const override {
    ids.reserve(ids.size() + text.size());
    for (const char c : text) ids.push_back(static_cast<unsigned char>(c));
  }

  std::string decode(std::span<const std::int32_t> ids) const override {
    std::string text;
    text.reserve(ids.size());
    for (const std::int32_t id : ids) {
      require(id >= 0 && id < vocab_size(), "token ", id, " is outside the byte tokenizer's vocabulary of ",
              vocab_size());
      if (id < 256) text.push_back(static_cast<char>(id));
    }
    return text;
  }

  std::int64_t vocab_size() const override { return 257; }
  std::int32_t end_of_document() const override { return 256; }
  std::optional<std::int32_t> token_id(std::string_view) const override { return std::nullopt; }
  std::string token(std::int32_t) const override { return {}; }
  bool is_special(std::int32_t id) const override { return id == 256; }
  bool lossless() const override { return true; }
  const std::string& spec() const override { return spec_; }

 private:
  std::string spec_ = "byte";
};

}  // namespace

std::vector<std::int32_t> Tokenizer::encode(std::string_view text) const {
  std::vector<std::int32_t> ids;
  encode(text, ids);
  return ids;
}

std::size_t cut_before(std::string_view text, std::size_t most) {
  const auto is_white = [](char c) {
    return std::string_view(" \t\r\n\v\f").find(c) != std::string_view::npos;
  };
  most = std::min(most, text.size());
  const std::size_t least = most / 2;
  for (std::size_t at = text.rfind(' ', most); at != std::string_view::npos && at > least;
       at = text.rfind(' ', at - 1))
    if (at < text.size() && !is_white(text[at - 1])) return at;
  const std::size_t line = most > 0 ? text.rfind('\n', most - 1) : std::string_view::npos;
  if (line != std::string_view::npos && line > least) return line + 1;
  std::size_t cut = most;
  for (int back = 0;
       back < 3 && cut > 0 && cut < text.size() && (static_cast<unsigned char>(text[cut]) & 0xC0) == 0x80;
       ++back)
    --cut;
  return cut;
}

std::shared_ptr<const Tokenizer> make_byte_tokenizer() {
  return std::make_shared<ByteTokenizer>();
}

std::shared_ptr<const Tokenizer> make_tokenizer(const std::string& spec) {
  if (spec == "byte") return make_byte_tokenizer();
  if (const std::string file = model_file_of(spec); !file.empty())
    return make_tokenizer(spec, read_model_file(file));
  if (spec.starts_with(train_prefix))
    fail(ErrorKind::config, "tokenizer '", excerpt(spec),
         "' must be trained first; 'sherd prepare' does so and stores it as ",
         "PREFIX.model, to be named here as spm:PREFIX.model");
  const std::string close = nearest(kind_of_tokenizer(spec), std::array<std::string, 3>{"byte", "spm", "hf"});
  const char* path = close == "spm" ? ":MODEL" : close == "hf" ? ":PATH" : "";
  fail(ErrorKind::config, "there is no tokenizer '", excerpt(spec),
       "'; give byte, spm:MODEL or hf:PATH (`sherd prepare` also takes spm-train:VOCAB)",
       close.empty() ? std::string() : cat(" (did you mean '", close, path, "'?)"));
}

std::shared_ptr<const Tokenizer> make_tokenizer(const std::string& spec, const std::string& bytes) {
  const std::string file = model_file_of(spec);
  require(!file.empty(), "tokenizer '", spec, "' has no file");
  if (spec.starts_with(spm_prefix)) return make_sentencepiece(bytes, file);
  HuggingFaceSpec parts = HuggingFaceSpec::parse(spec);
  parts.path = file;
  return make_hugging_face(bytes, std::move(parts));
}

std::string read_model_file(const std::string& model_path) {
  std::ifstream in(model_path, std::ios::binary);
  std::string of_sentencepiece;
  if (const auto beside = std::filesystem::path(model_path).replace_filename("tokenizer.model");
      !in && std::filesystem::exists(beside))
    of_sentencepiece = cat(", or take 'spm:", beside.string(), "', which is there");
  if (!in || std::filesystem::is_directory(model_path))
    fail(ErrorKind::io, "cannot read the tokenizer '", model_path, "', which ",
         std::filesystem::is_directory(model_path) ? "is a folder"
         : !std::filesystem::exists(model_path)    ? "is not there"
                                                   : "may not be read",
         "; check the path behind 'spm:' or 'hf:'", of_sentencepiece);
  std::string bytes(std::istreambuf_iterator<char>(in), {});
  if (!model_path.ends_with(".json")) return bytes;
  return with_tokens_beside(std::move(bytes), [&](const std::string& name) {
    const auto path = std::filesystem::path(model_path).parent_path() / name;
    std::error_code none;
    return std::filesystem::is_regular_file(path, none) ? read_file(path) : std::string();
  });
}

std::string model_file_of(const std::string& spec) {
  const bool hugging_face = spec.starts_with(hf_prefix);
  if (!hugging_face && !spec.starts_with(spm_prefix)) return {};
  const std::string path = hugging_face ? HuggingFaceSpec::parse(spec).path : spec.substr(spm_prefix.size());
  if (path.empty())
    fail(ErrorKind::config, "tokenizer '", spec, "' names no model file; give ",
         hugging_face ? "hf:PATH" : "spm:MODEL");
  std::error_code none;
  if (!std::filesystem::is_directory(path, none)) return path;
  const std::filesystem::path folder = path;
  if (hugging_face) return (folder / "tokenizer.json").string();
  for (const char* name : sentencepiece_files)
    if (std::filesystem::exists(folder / name, none)) return (folder / name).string();
  return path;
}

std::string with_model_file(const std::string& spec, const std::string& path) {
  if (!spec.starts_with(hf_prefix)) return cat(spm_prefix, path);
  HuggingFaceSpec parts = HuggingFaceSpec::parse(spec);
  parts.path = path;
  return parts.text();
}

std::string kind_of_tokenizer(const std::string& spec) {
  return spec.substr(0, spec.find(':'));
}

bool parse_train_spec(const std::string& spec, TrainTokenizer& request) {
  if (!spec.starts_with(train_prefix)) return false;
  const std::string rest = spec.substr(train_prefix.size());
  const std::string number = rest.substr(0, rest.find(':'));
  std::int64_t vocab = 0;
  const auto [end, error] = std::from_chars(number.data(), number.data() + number.size(), vocab);
  if (error != std::errc() || end != number.data() + number.size())
    fail(ErrorKind::config, "tokenizer '", excerpt(spec), "': '", excerpt(number),
         "' is no vocabulary size; give spm-train:8000, say");
  if (vocab < 300 || vocab > 1'000'000)
    fail(ErrorKind::config, "tokenizer '", excerpt(spec),
         "': the vocabulary must have 300 to 1000000 ids (256 of them are ", "bytes)");
  request = {.vocab_size = vocab};
  for (std::size_t at = number.size(); at < rest.size();) {
    const std::size_t next = std::min(rest.find(':', at + 1), rest.size());
    const std::string word = rest.substr(at + 1, next - at - 1);
    if (word != "unigram" && word != "bpe" && word != "mask")
      fail(ErrorKind::config, "tokenizer '", excerpt(spec), "': there is no algorithm '", excerpt(word),
           "'; give unigram or bpe, and mask for a token <mask>");
    if (word == "mask")
      request.mask = true;
    else
      request.bpe = word == "bpe";
    at = next;
  }
  return true;
}

}  // namespace sherd::data
