#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace sherd::data {

/// How a text is encoded.
struct EncodeOptions {
  /// The text stands behind nothing, another token, or more of the same text, which was cut here. Some
  /// tokenizers put a space in front of the first text, some also behind tokens; none within a text. Where a
  /// text may be cut without a trace: cut_before().
  enum class Behind { nothing, token, text };
  Behind behind = Behind::nothing;
  /// A special token that the text spells out ("<|im_end|>") is that token; else it is text like any other.
  /// SentencePiece's control pieces never are in a text.
  bool special_tokens = true;
};

/// Text to token ids and back. Immutable; every member may be called from any thread.
class Tokenizer {
 public:
  virtual ~Tokenizer() = default;

  /// Appends the ids of `text` to `ids`, without an end-of-document id. Any bytes may come, valid UTF-8 or
  /// not.
  virtual void encode(std::string_view text, const EncodeOptions& how,
                      std::vector<std::int32_t>& ids) const = 0;
  /// The same of a whole text.
  void encode(std::string_view text, std::vector<std::int32_t>& ids) const { encode(text, {}, ids); }
  std::vector<std::int32_t> encode(std::string_view text) const;

  /// The text of `ids`; control ids such as end-of-document stand for nothing. Where lossless(),
  /// decode(encode(x)) == x for any bytes x. Throws Error{usage} for an id outside the vocabulary.
  virtual std::string decode(std::span<const std::int32_t> ids) const = 0;

  /// Ids are in [0, vocab_size()).
  virtual std::int64_t vocab_size() const = 0;
  virtual std::int32_t end_of_document() const = 0;
  /// The token that models expect in front of every document, "<s>"; nullopt: none.
  virtual std::optional<std::int32_t> begin_of_document() const { return std::nullopt; }
  /// The id of the token that is written `token` in the vocabulary, "<|im_end|>"; nullopt where it has none.
  virtual std::optional<std::int32_t> token_id(std::string_view token) const = 0;
  /// How the vocabulary writes a token; empty where it does not, or has no such id.
  virtual std::string token(std::int32_t id) const = 0;
  /// Whether a token stands for nothing in decoded text: the end of a document, a control token.
  virtual bool is_special(std::int32_t id) const = 0;
  /// A special token that a text spells out: bytes [begin, end) of it, with the white space that it takes
  /// along.
  struct Spelled {
    std::int32_t id;
    std::size_t begin, end;
  };
  /// All of them, from left to right, as transformers finds them in a text, those of SentencePiece's control
  /// pieces, too.
  virtual std::vector<Spelled> special_tokens_in(std::string_view /*text*/) const { return {}; }

  /// True when every byte of a text survives encoding. SentencePiece models that normalise text or lack byte
  /// pieces are not lossless.
  virtual bool lossless() const = 0;

  /// The text from which make_tokenizer() makes this one again, wherever the file then lies: "byte",
  /// "spm:MODEL" or "hf:FILE?eod=TOKEN&bos=TOKEN".
  virtual const std::string& spec() const = 0;
};

/// Where to cut a text of at least `most` bytes, at `most` at the latest, so that its parts have the ids of
/// the whole: in front of the last space that follows no white space, where tokenizers cut words themselves.
/// A text without one in its second half is cut behind a line end, else between two characters.
std::size_t cut_before(std::string_view text, std::size_t most);

/// One id per byte, and 256 for the end of a document.
std::shared_ptr<const Tokenizer> make_byte_tokenizer();

/// A SentencePiece model. The end of a document is the model's `</s>`; a model without one gets an id of
/// its own behind the last piece. Bytes that are no UTF-8 become byte pieces where the model has them, else
/// U+FFFD. `bytes` are the file's, `model_path` is what spec() will name. Throws Error{data} for bytes that
/// are no SentencePiece model.
std::shared_ptr<const Tokenizer> make_sentencepiece(const std::string& bytes, const std::string& model_path);

/// The bytes of a model file; of a tokenizer.json with the tokens that only the files beside it name
/// (with_tokens_beside()). Throws Error{io}.
std::string read_model_file(const std::string& model_path);

/// The tokenizer that a spec names: "byte", "spm:MODEL" or "hf:PATH", a tokenizer.json or its folder. Files
/// of BPE, WordPiece and unigram models are read; ids are those of the tokenizers package with
/// bytes that are no UTF-8 replaced by U+FFFD. The end of a document is the eos_token of the files beside it,
/// or "hf:PATH?eod=TOKEN"; a document begins as its post-processor says, or with "bos=TOKEN" ("bos=": with
/// nothing). Throws Error{config} for any other text, and where nobody says how a document ends; Error{io}
/// for a file that cannot be read; Error{data} naming what of it is not supported.
std::shared_ptr<const Tokenizer> make_tokenizer(const std::string& spec);

/// The same of the bytes of its file.
std::shared_ptr<const Tokenizer> make_tokenizer(const std::string& spec, const std::string& bytes);

/// The names of a SentencePiece model's file in published folders.
inline constexpr const char* sentencepiece_files[] = {"tokenizer.model", "spiece.model"};

/// The file that a spec names, of a folder the one that it is called by there; empty: none.
std::string model_file_of(const std::string& spec);
/// The same spec of a file that lies elsewhere.
std::string with_model_file(const std::string& spec, const std::string& path);
/// "byte", "spm" or "hf".
std::string kind_of_tokenizer(const std::string& spec);

/// A request to train a SentencePiece model: "spm-train:VOCAB", behind which ":unigram" or ":bpe", and
/// ":mask" may stand.
struct TrainTokenizer {
  std::int64_t vocab_size = 8000;
  bool bpe = false;   ///< else unigram
  bool mask = false;  ///< one of the ids is `<mask>`, a token that no text has
};

/// Parses "spm-train:…"; false when `spec` is of another kind. Throws Error{config} for a bad number or
/// algorithm.
bool parse_train_spec(const std::string& spec, TrainTokenizer& request);

/// Gives the next line of training text, false at the end.
using LineSource = std::function<bool(std::string&)>;

/// Trains a lossless model (no normalisation, byte pieces for what the vocabulary lacks) and returns its
/// file's bytes. The same lines give the same bytes, on any machine: the algorithm's number of threads is
/// fixed. Throws Error{data} when the text is too small for the vocabulary, naming the largest that would do.
std::string train_sentencepiece(const TrainTokenizer& request, const LineSource& lines);

}  // namespace sherd::data
