#include "data/text/text_source.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "base/text/excerpt.h"
#include "data/tokenizer.h"

namespace sherd::data {
namespace fs = std::filesystem;
namespace {

constexpr std::size_t block_bytes = std::size_t{1} << 20;

bool only_space(std::string_view text) {
  return text.find_first_not_of(" \t\r\n\v\f") == std::string_view::npos;
}

InputFile describe(const fs::path& path) {
  struct stat status {};
  if (::stat(path.c_str(), &status) != 0)
    fail(ErrorKind::io, "input '", path.string(), "': ", std::strerror(errno), "; check the path");
  if (::access(path.c_str(), R_OK) != 0)
    fail(ErrorKind::io, "input '", path.string(), "': ", std::strerror(errno), "; make it readable");
  const bool regular = S_ISREG(status.st_mode);
  const bool packed = path.extension() == ".gz" || path.extension() == ".zst";
  return {path, regular ? static_cast<std::uint64_t>(status.st_size) : 0, regular,
          (packed ? path.stem() : path).extension() == ".jsonl"};
}

void find_in_folder(const fs::path& folder, std::vector<InputFile>& files) {
  std::vector<fs::path> found;
  std::error_code error;
  fs::recursive_directory_iterator at(folder, error), end;
  for (; !error && at != end; at.increment(error)) {
    if (at->path().filename().string().starts_with('.')) {
      if (at->is_directory()) at.disable_recursion_pending();
    } else if (at->is_regular_file()) {
      found.push_back(at->path());
    }
  }
  if (error) fail(ErrorKind::io, "cannot list the folder '", folder.string(), "': ", error.message());
  if (found.empty())
    fail(ErrorKind::io, "the folder '", folder.string(),
         "' holds no files; give text files or a folder of them");
  std::sort(found.begin(), found.end());
  for (const fs::path& path : found) files.push_back(describe(path));
}

}  // namespace

DocumentRule parse_document_rule(const std::string& name) {
  const std::array<std::string, 3> names{"blank", "line", "file"};
  for (std::size_t i = 0; i < names.size(); ++i)
    if (name == names[i]) return static_cast<DocumentRule>(i);
  const std::string close = nearest(name, names);
  fail(ErrorKind::config, "there is no document rule '", excerpt(name), "'; give blank, line or file",
       close.empty() ? std::string() : cat(" (did you mean '", close, "'?)"));
}

std::uint64_t total_bytes(const std::vector<InputFile>& files) {
  std::uint64_t total = 0;
  for (const InputFile& file : files) {
    if (!file.regular) return 0;
    total += file.bytes;
  }
  return total;
}

std::vector<InputFile> find_inputs(const std::vector<std::string>& inputs) {
  require(!inputs.empty(), "no input files; give at least one text file, folder or .jsonl file");
  std::vector<InputFile> files;
  for (const std::string& input : inputs) {
    std::error_code ignored;
    if (fs::is_directory(input, ignored))
      find_in_folder(input, files);
    else
      files.push_back(describe(input));
  }
  return files;
}

TextSource::TextSource(std::vector<InputFile> files, DocumentRule rule)
    : files_(std::move(files)), rule_(rule), block_(block_bytes) {}

TextSource::~TextSource() = default;

void TextSource::check(std::vector<InputFile> files) {
  std::erase_if(files, [](const InputFile& file) { return !file.regular; });
  TextSource source(std::move(files), DocumentRule::file);
  while (source.open_next()) source.close_file();
}

void TextSource::close_file() {
  closed_bytes_ = bytes_read();
  in_.reset();
}

bool TextSource::open_next() {
  if (next_file_ == files_.size()) return false;
  in_ = std::make_unique<InputStream>(files_[next_file_++].path);
  line_number_ = 0;
  fill();
  const std::string_view head(block_.data(), end_);
  check_input(files_[next_file_ - 1], head, end_ < block_.size());
  if (head.starts_with("\xef\xbb\xbf")) at_ = 3;
  return true;
}

/// Reads the next block, which is shorter than block_ only at the end of the file. False when there is none.
bool TextSource::fill() {
  at_ = 0;
  end_ = in_->read(block_.data(), block_.size());
  return end_ > 0;
}

/// Reads a line, or a part of one that is longer than a piece, into line_. False at the end of the file.
bool TextSource::read_line() {
  const bool whole = files_[next_file_ - 1].json_lines;
  line_continues_ = !carry_.empty();
  line_ = std::exchange(carry_, {});
  line_complete_ = line_newline_ = false;
  while (!line_complete_) {
    if (at_ == end_ && !fill()) {
      if (line_.empty()) return false;
      line_complete_ = true;
      break;
    }
    const std::size_t room = whole ? end_ - at_ : std::min(end_ - at_, piece_bytes + 1 - line_.size());
    const char* begin = block_.data() + at_;
    const char* newline = static_cast<const char*>(std::memchr(begin, '\n', room));
    const std::size_t taken = newline ? static_cast<std::size_t>(newline - begin) : room;
    line_.append(begin, taken);
    at_ += taken + (newline != nullptr);
    line_complete_ = line_newline_ = newline != nullptr;
    if (!newline && !whole && line_.size() > piece_bytes) {
      const std::size_t cut = cut_before(line_, piece_bytes);
      carry_ = line_.substr(cut);
      line_.resize(cut);
      break;
    }
  }
  if (line_complete_ && line_.ends_with('\r')) line_.pop_back();
  if (!line_continues_) ++line_number_;
  return true;
}

/// Hands out what the open document has; false when a whole file is nothing but space.
bool TextSource::emit(TextPiece& piece, bool last) {
  document_open_ = !last;
  const bool continues = std::exchange(document_continues_, !last);
  const std::size_t cut = last ? document_.size() : cut_before(document_, document_.size());
  std::string rest = document_.substr(cut);
  document_.resize(cut);
  piece = {
      std::exchange(document_, std::move(rest)), last, false, next_file_ - 1, document_line_, !continues};
  return continues || !last || !only_space(piece.text);
}

/// Takes line_ into the open document; true when that completed a piece (line_ may then still be to accept).
bool TextSource::accept_text(TextPiece& piece) {
  const bool blank = line_complete_ && !line_continues_ && only_space(line_);
  if (blank && rule_ != DocumentRule::file) {
    line_ready_ = false;
    if (!document_open_) return false;
    if (document_.ends_with('\n')) document_.pop_back();
    return emit(piece, true);
  }
  if (document_.size() >= piece_bytes) return emit(piece, false);
  if (!document_open_) document_line_ = line_number_;
  document_open_ = true;
  line_ready_ = false;
  document_ += line_;
  if (rule_ == DocumentRule::line && (line_complete_ || document_.size() >= piece_bytes))
    return emit(piece, line_complete_);
  if (line_newline_) document_ += '\n';
  return false;
}

bool TextSource::accept_line(TextPiece& piece) {
  if (!files_[next_file_ - 1].json_lines) return accept_text(piece);
  line_ready_ = false;
  if (only_space(line_)) return false;
  piece = {std::exchange(line_, {}), true, true, next_file_ - 1, line_number_};
  return true;
}

bool TextSource::next(TextPiece& piece) {
  for (;;) {
    if (!in_ && !open_next()) return false;
    if (!line_ready_ && !read_line()) {
      close_file();
      if (!document_open_) continue;
      if (rule_ == DocumentRule::blank && document_.ends_with('\n')) document_.pop_back();
      if (emit(piece, true)) return true;
      continue;
    }
    line_ready_ = true;
    if (accept_line(piece)) return true;
  }
}

}  // namespace sherd::data
