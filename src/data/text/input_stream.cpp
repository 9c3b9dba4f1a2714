#include "data/text/input_stream.h"

#include <fcntl.h>
#include <unistd.h>
#include <zlib.h>
#include <zstd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string_view>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/files.h"

namespace sherd::data {
namespace {

constexpr std::size_t read_buffer_bytes = std::size_t{256} << 10;
constexpr std::string_view gzip_magic = "\x1f\x8b", zstd_magic = "\x28\xb5\x2f\xfd";

}  // namespace

/// The file itself, some of it read ahead.
class InputStream::Source {
 public:
  explicit Source(std::filesystem::path path)
      : path_(std::move(path)),
        buffer_(read_buffer_bytes),
        file_(::open(path_.c_str(), O_RDONLY | O_CLOEXEC)) {
    if (!file_) fail(ErrorKind::io, "cannot open '", name(), "': ", std::strerror(errno), "; check the path");
    ::posix_fadvise(file_.get(), 0, 0, POSIX_FADV_SEQUENTIAL);
  }

  std::string name() const { return path_.string(); }
  std::uint64_t bytes_read() const { return bytes_read_; }

  /// Bytes that are read and not yet taken: at least `least` bytes, unless the file ends before.
  std::string_view peek(std::size_t least) {
    if (end_ - begin_ < least) {
      std::memmove(buffer_.data(), buffer_.data() + begin_, end_ - begin_);
      end_ -= std::exchange(begin_, 0);
      end_ += read_file(buffer_.data() + end_, least - end_, buffer_.size() - end_);
    }
    return {buffer_.data() + begin_, end_ - begin_};
  }
  void take(std::size_t bytes) { begin_ += bytes; }

  std::size_t read(char* to, std::size_t bytes) {
    const std::string_view ready = peek(0);
    const std::size_t count = std::min(bytes, ready.size());
    std::memcpy(to, ready.data(), count);
    take(count);
    return count + read_file(to + count, bytes - count, bytes - count);
  }

 private:
  /// Reads until there are `least` bytes, and `most` at most.
  std::size_t read_file(char* to, std::size_t least, std::size_t most) {
    std::size_t done = 0;
    while (done < least) {
      const ssize_t got = ::read(file_.get(), to + done, most - done);
      if (got < 0 && errno == EINTR) continue;
      if (got < 0) fail(ErrorKind::io, "cannot read '", name(), "': ", std::strerror(errno));
      if (got == 0) break;
      done += static_cast<std::size_t>(got);
    }
    bytes_read_ += done;
    return done;
  }

  std::filesystem::path path_;
  std::vector<char> buffer_;
  FileDescriptor file_;
  std::size_t begin_ = 0, end_ = 0;
  std::uint64_t bytes_read_ = 0;
};

class InputStream::Decoder {
 public:
  virtual ~Decoder() = default;
  /// Turns some of `source` into up to `bytes` bytes; 0 at its end alone.
  virtual std::size_t read(Source& source, char* to, std::size_t bytes) = 0;

 protected:
  /// Packed bytes that are not yet taken; throws where the file ends here.
  static std::string_view more(Source& source, const char* format) {
    const std::string_view packed = source.peek(1);
    if (packed.empty())
      fail(ErrorKind::data, "'", source.name(), "' ends in the middle of its ", format,
           " data: it was cut off; copy or download it again");
    return packed;
  }
  [[noreturn]] static void fail_damaged(const Source& source, const char* format, const char* why) {
    fail(ErrorKind::data, "the ", format, " data of '", source.name(), "' are damaged (", why,
         "); copy or download the file again");
  }
};

class InputStream::Gzip final : public Decoder {
 public:
  Gzip() { require(::inflateInit2(&stream_, 15 + 16) == Z_OK, "zlib cannot begin to unpack"); }
  ~Gzip() override { ::inflateEnd(&stream_); }

  std::size_t read(Source& source, char* to, std::size_t bytes) override {
    stream_.next_out = reinterpret_cast<Bytef*>(to);
    stream_.avail_out = static_cast<uInt>(bytes);
    while (stream_.avail_out == bytes) {
      if (!in_member_ && source.peek(1).empty()) return 0;
      in_member_ = true;
      const std::string_view packed = more(source, "gzip");
      stream_.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(packed.data()));
      stream_.avail_in = static_cast<uInt>(packed.size());
      const int result = ::inflate(&stream_, Z_NO_FLUSH);
      source.take(packed.size() - stream_.avail_in);
      if (result == Z_STREAM_END) {
        ::inflateReset(&stream_);
        in_member_ = false;
      } else if (result != Z_OK) {
        fail_damaged(source, "gzip", stream_.msg ? stream_.msg : "they make no sense");
      }
    }
    return bytes - stream_.avail_out;
  }

 private:
  z_stream stream_{};
  bool in_member_ = false;
};

class InputStream::Zstd final : public Decoder {
 public:
  Zstd() : stream_(::ZSTD_createDStream()) {
    require(stream_ != nullptr, "zstd cannot begin to unpack");
    ::ZSTD_DCtx_setParameter(stream_, ZSTD_d_windowLogMax, 31);  // as `zstd --long=31` packs
  }
  ~Zstd() override { ::ZSTD_freeDStream(stream_); }

  std::size_t read(Source& source, char* to, std::size_t bytes) override {
    ZSTD_outBuffer out{to, bytes, 0};
    while (out.pos == 0) {
      if (!in_frame_ && source.peek(1).empty()) return 0;
      // Text that the window still holds comes without new input.
      const std::string_view packed = pending_ ? source.peek(0) : more(source, "zstd");
      ZSTD_inBuffer in{packed.data(), packed.size(), 0};
      const std::size_t left = ::ZSTD_decompressStream(stream_, &out, &in);
      if (::ZSTD_isError(left)) fail_damaged(source, "zstd", ::ZSTD_getErrorName(left));
      source.take(in.pos);
      in_frame_ = left != 0;
      pending_ = in_frame_ && out.pos == out.size;
    }
    return out.pos;
  }

 private:
  ZSTD_DStream* stream_;
  bool in_frame_ = false, pending_ = false;
};

InputStream::InputStream(std::filesystem::path path) : source_(std::make_unique<Source>(std::move(path))) {
  const std::string_view head = source_->peek(zstd_magic.size());
  if (head.starts_with(gzip_magic)) decoder_ = std::make_unique<Gzip>();
  if (head.starts_with(zstd_magic)) decoder_ = std::make_unique<Zstd>();
}

InputStream::~InputStream() = default;

std::size_t InputStream::read(char* to, std::size_t bytes) {
  if (!decoder_) return source_->read(to, bytes);
  std::size_t done = 0;
  while (done < bytes) {
    const std::size_t got = decoder_->read(*source_, to + done, bytes - done);
    if (got == 0) break;
    done += got;
  }
  return done;
}

std::uint64_t InputStream::bytes_read() const {
  return source_->bytes_read();
}

}  // namespace sherd::data
