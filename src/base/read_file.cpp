#include "base/read_file.h"

#include <fstream>
#include <sstream>

#include "base/error.h"

namespace sherd {

std::string read_file(const std::filesystem::path& path, std::uintmax_t most) {
  std::error_code error;
  const std::uintmax_t bytes = std::filesystem::file_size(path, error);
  if (error) fail(ErrorKind::io, "cannot read '", path.string(), "': ", error.message());
  if (bytes > most)
    fail(ErrorKind::data, "'", path.string(), "' has ", bytes, " bytes, more than any file of its kind");
  std::ifstream in(path, std::ios::binary);
  std::ostringstream text;
  if (!in || (bytes > 0 && !(text << in.rdbuf()))) fail(ErrorKind::io, "cannot read '", path.string(), "'");
  return std::move(text).str();
}

}  // namespace sherd
