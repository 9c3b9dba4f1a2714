#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <optional>
#include <sstream>

#include "base/error.h"
#include "data/text/text_source.h"

namespace sherd::data {
namespace {

using namespace std::string_view_literals;

/// Bytes in which a NUL tells binary files from text, as for git and diff.
constexpr std::size_t binary_head = 8000;

/// A kind of file that begins with `bytes` at `at`. One that text could begin with counts only in a file that
/// is binary.
struct Signature {
  std::size_t at;
  std::string_view bytes, what, next;
  bool could_be_text = false;
};

constexpr std::array signatures{
    Signature{0, "\xfd\x37zXZ\0"sv, "an xz file", "unpack it: unxz -k"},
    Signature{0, "\x04\x22\x4d\x18"sv, "an lz4 file", "unpack it: unlz4"},
    Signature{4, "\x31\x41\x59\x26\x53\x59"sv, "a bzip2 file", "unpack it: bunzip2 -k"},
    Signature{0, "PK\3\4"sv, "a zip archive, or a document that is one",
              "unpack it or convert it to text: unzip"},
    Signature{257, "ustar"sv, "a tar archive", "unpack it: tar -xf", true},
    Signature{0, "PAR1"sv, "a Parquet file", "convert it to JSON lines", true},
    Signature{0, "ARROW1"sv, "an Arrow file", "convert it to JSON lines", true},
    Signature{0, "MMIDIDX"sv, "the index of a dataset", "it is prepared already: leave out", true},
};

/// "%PDF-1.4" alone in the first line.
bool is_pdf(std::string_view head) {
  const std::string_view line = head.substr(0, head.find_first_of("\r\n"));
  return line.starts_with("%PDF-") && line.size() >= 8 && line.size() <= 10 && line.size() < head.size() &&
         line.find_first_not_of("0123456789. ", 5) == std::string_view::npos;
}

[[noreturn]] void refuse(const InputFile& file, std::string_view what, std::string_view next) {
  fail(ErrorKind::data, "'", file.path.string(), "' is ", what,
       ", and what is read here is UTF-8 text and JSON lines; ", next, " '", file.path.string(), "'");
}

void check_binary(const InputFile& file, std::string_view head) {
  if (head.starts_with("\xff\xfe") || head.starts_with("\xfe\xff"))
    fail(ErrorKind::data, "'", file.path.string(),
         "' is UTF-16; convert it with 'iconv -f UTF-16 -t UTF-8' and prepare that");
  const bool binary = head.substr(0, binary_head).find('\0') != std::string_view::npos;
  for (const Signature& signature : signatures)
    if (head.size() > signature.at && head.substr(signature.at).starts_with(signature.bytes) &&
        (binary || !signature.could_be_text))
      refuse(file, signature.what, signature.next);
  if (is_pdf(head)) refuse(file, "a PDF document", "convert it to text: pdftotext");
  if (binary) refuse(file, "binary, as it has NUL bytes", "leave out or convert");
}

/// The JSON array or object that a text begins with, and the first character behind it that is no space, or
/// 0.
struct LeadingJson {
  std::string_view text;
  char next = 0;
};

/// The JSON with which `head` begins: a whole array or object or, where the file goes on behind `head`, the
/// beginning of one. Nothing where it is neither.
std::optional<LeadingJson> leading_json(std::string_view head, bool whole) {
  constexpr std::string_view space = " \t\r\n";
  head.remove_prefix(std::min(head.find_first_not_of(space), head.size()));
  if (!head.starts_with('[') && !head.starts_with('{')) return std::nullopt;
  std::istringstream in{std::string(head)};
  try {
    nlohmann::json value;
    in >> value;
  } catch (const nlohmann::json::parse_error& error) {
    if (whole || error.byte < head.size()) return std::nullopt;
    return LeadingJson{head};
  } catch (const nlohmann::json::exception&) {  // a number that no double holds
    return std::nullopt;
  }
  const std::streamoff at = in.tellg();
  const std::size_t end = at < 0 ? head.size() : static_cast<std::size_t>(at);
  const std::size_t next = head.find_first_not_of(space, end);
  return LeadingJson{head.substr(0, end), next == std::string_view::npos ? '\0' : head[next]};
}

void check_json(const InputFile& file, std::string_view head, bool whole) {
  const std::optional<LeadingJson> json = leading_json(head, whole);
  if (!json) return;
  const std::string name = file.path.string();
  const bool array = json->text.starts_with('['), alone = json->next == 0;
  const bool several_lines = json->text.find('\n') != std::string_view::npos;
  if (array && alone)
    fail(ErrorKind::data, "'", name,
         "' is a JSON array, and what is read here is JSON lines, one object in each; ",
         "make such a file: jq -c '.[]' '", name, "' > NAME.jsonl");
  if (array || !(file.json_lines || alone || json->next == '{')) return;
  if (several_lines)
    fail(ErrorKind::data, "'", name,
         "' is JSON whose objects go over several lines, and what is read here is JSON lines, ",
         "one object in each; make such a file: jq -c . '", name, "' > NAME.jsonl");
  if (!file.json_lines)
    fail(ErrorKind::data, "'", name,
         "' holds JSON lines, which are read as such only from a file whose name ends in ",
         ".jsonl; rename it");
}

}  // namespace

void check_input(const InputFile& file, std::string_view head, bool whole) {
  check_binary(file, head);
  if (head.starts_with("\xef\xbb\xbf")) head.remove_prefix(3);
  check_json(file, head, whole);
}

}  // namespace sherd::data
