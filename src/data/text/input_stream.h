#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>

namespace sherd::data {

/// The bytes of a file or pipe from its beginning, unpacked where its first bytes say that it is gzip or
/// zstd; several members or frames behind each other are one text. One thread.
class InputStream {
 public:
  /// Throws Error{io} when it cannot be opened.
  explicit InputStream(std::filesystem::path path);
  ~InputStream();
  InputStream(const InputStream&) = delete;
  InputStream& operator=(const InputStream&) = delete;

  /// Reads `bytes`; fewer only at the end. Throws Error{io} when the file cannot be read, Error{data} when
  /// packed data are damaged or cut off; both name it.
  std::size_t read(char* to, std::size_t bytes);

  /// Bytes of the file itself, as it lies on disk, that were read so far.
  std::uint64_t bytes_read() const;

 private:
  class Source;
  class Decoder;
  class Gzip;
  class Zstd;
  std::unique_ptr<Source> source_;
  std::unique_ptr<Decoder> decoder_;  // null: the bytes are the text
};

}  // namespace sherd::data
