#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "data/text/input_stream.h"

namespace sherd::data {

/// Where one document of a text file ends and the next begins.
enum class DocumentRule {
  blank,  ///< at blank lines (empty, or spaces and tabs only)
  line,   ///< at every line end; empty lines are skipped
  file    ///< one document per file
};

/// "blank", "line" or "file". Throws Error{config} for anything else.
DocumentRule parse_document_rule(const std::string& name);

/// A file to read documents from. A name that ends in .jsonl (or .jsonl.gz, .jsonl.zst) holds one JSON object
/// per line and one document in each.
struct InputFile {
  std::filesystem::path path;
  std::uint64_t bytes = 0;  ///< 0 for a pipe
  bool regular = true;      ///< can be read twice
  bool json_lines = false;
};

/// The bytes of all files; 0 where one is a pipe.
std::uint64_t total_bytes(const std::vector<InputFile>& files);

/// The files that `inputs` name, in that order; a folder stands for all files below it whose names do not
/// begin with a dot, sorted by path. Throws Error{io} for one that is missing or cannot be read, Error{usage}
/// for none.
std::vector<InputFile> find_inputs(const std::vector<std::string>& inputs);

/// A document or, where it is long, a part of one.
struct TextPiece {
  std::string text;  ///< from a JSON lines file: the whole line, to be read with read_examples()
  bool last = true;  ///< ends its document
  bool json = false;
  std::size_t file = 0;   ///< index into the inputs
  std::int64_t line = 0;  ///< 1-based line on which it begins
  bool first = true;      ///< begins its document
};

/// Streams the documents of some files in order. Holds one piece and one block in memory, whatever the file's
/// size: a document longer than `piece_bytes` comes in several pieces, cut by cut_before(). Files that gzip
/// or zstd packed are unpacked. Line ends become "\n", a UTF-8 byte order mark is dropped, nothing else is
/// changed. One thread.
class TextSource {
 public:
  static constexpr std::size_t piece_bytes = std::size_t{256} << 10;

  TextSource(std::vector<InputFile> files, DocumentRule rule);
  ~TextSource();
  TextSource(const TextSource&) = delete;
  TextSource& operator=(const TextSource&) = delete;

  /// False at the end. Throws Error{io} when a file cannot be read, Error{data} for one whose beginning is no
  /// text (check_input).
  bool next(TextPiece& piece);

  /// Looks at the beginning of every file that can be read twice, so that a long run does not end at the last
  /// of them. Throws as next() does.
  static void check(std::vector<InputFile> files);

  /// Bytes of the files, as they lie on disk, that were read so far.
  std::uint64_t bytes_read() const { return closed_bytes_ + (in_ ? in_->bytes_read() : 0); }
  const std::vector<InputFile>& files() const { return files_; }

 private:
  bool open_next();
  void close_file();
  bool fill();
  bool read_line();
  bool accept_line(TextPiece& piece);
  bool accept_text(TextPiece& piece);
  bool emit(TextPiece& piece, bool last);

  std::vector<InputFile> files_;
  DocumentRule rule_;
  std::size_t next_file_ = 0;        // the open one is next_file_ - 1
  std::unique_ptr<InputStream> in_;  // null between two files
  std::vector<char> block_;          // [at_, end_) is read and not yet split into lines
  std::size_t at_ = 0, end_ = 0;
  std::uint64_t closed_bytes_ = 0;  // bytes of the files before
  std::int64_t line_number_ = 0;

  std::string line_;             // a line without its end, or a part of a long one
  std::string carry_;            // the rest of a long line that was cut
  bool line_ready_ = false;      // line_ is read and not yet accepted
  bool line_continues_ = false;  // line_ goes on from the previous part
  bool line_complete_ = false;   // nothing of the line follows
  bool line_newline_ = false;    // it ended in "\n", not with the file

  std::string document_;  // the part of the open document that was not handed out yet
  bool document_open_ = false;
  bool document_continues_ = false;  // a piece of it was handed out
  std::int64_t document_line_ = 0;
};

/// Throws Error{data} saying what the file is and what to do, unless it is text or JSON lines as far as
/// `head`, its first block (`whole`: all of it), tells. Refused are
///   - archives, binary formats, and packed files but gzip's and zstd's, by their first bytes; UTF-16;
///     anything with a NUL in the first 8000 bytes;
///   - one JSON array or object that fills the block, and JSON objects one after the other, unless each is a
///     line of a .jsonl file.
/// Text that only begins like JSON ("[1] Smith", "{sic} he wrote") passes: the block must parse.
void check_input(const InputFile& file, std::string_view head, bool whole);

}  // namespace sherd::data
