#include "engine/report/log_files.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <chrono>
#include <fstream>
#include <iterator>
#include <string_view>

#include "base/crc32c.h"
#include "base/error.h"
#include "base/files.h"

namespace sherd::engine {
namespace fs = std::filesystem;
namespace {

// Field numbers of tensorflow/core/util/event.proto and framework/summary.proto.
enum EventField : std::uint32_t {
  wall_time = 1,
  event_step = 2,
  file_version = 3,
  summary = 5,
  session_log = 7
};
enum SummaryField : std::uint32_t { summary_value = 1 };
enum ValueField : std::uint32_t { tag = 1, simple_value = 2 };
enum SessionLogField : std::uint32_t { status = 1 };
constexpr std::uint64_t session_start = 1;
// Wire types of protobuf.
enum Wire : std::uint32_t { varint = 0, fixed64 = 1, bytes = 2, fixed32 = 5 };

constexpr const char* event_prefix = "events.out.tfevents.";

template <class T>
void put_fixed(std::string& out, T value) {
  for (std::size_t i = 0; i < sizeof(T); ++i) out += static_cast<char>(value >> (8 * i) & 0xff);
}

void put_varint(std::string& out, std::uint64_t value) {
  for (; value >= 0x80; value >>= 7) out += static_cast<char>((value & 0x7f) | 0x80);
  out += static_cast<char>(value);
}

void put_key(std::string& out, std::uint32_t field, Wire wire) {
  put_varint(out, field << 3 | wire);
}

void put_varint(std::string& out, std::uint32_t field, std::uint64_t value) {
  put_key(out, field, varint);
  put_varint(out, value);
}

void put_bytes(std::string& out, std::uint32_t field, std::string_view value) {
  put_key(out, field, bytes);
  put_varint(out, value.size());
  out += value;
}

std::string event_at(std::int64_t step, std::uint32_t field, std::string_view what) {
  const std::chrono::duration<double> now = std::chrono::system_clock::now().time_since_epoch();
  std::string out;
  put_key(out, wall_time, fixed64);
  put_fixed(out, std::bit_cast<std::uint64_t>(now.count()));
  put_varint(out, event_step, static_cast<std::uint64_t>(step));
  put_bytes(out, field, what);
  return out;
}

std::uint32_t masked_crc(std::string_view data) {
  const std::uint32_t crc = crc32c(data.data(), data.size());
  return std::rotr(crc, 15) + 0xa282ead8u;
}

std::string record_of(std::string_view event) {
  std::string out;
  put_fixed(out, static_cast<std::uint64_t>(event.size()));
  put_fixed(out, masked_crc(out));
  out += event;
  put_fixed(out, masked_crc(event));
  return out;
}

template <class T>
T fixed_at(std::string_view data) {
  T value = 0;
  for (std::size_t i = 0; i < sizeof(T); ++i)
    value |= static_cast<T>(static_cast<unsigned char>(data[i])) << (8 * i);
  return value;
}

/// The event of the first record, which is taken off `data`; nothing at the end, and where a record is cut
/// off or damaged, as behind a crash of the machine.
std::optional<std::string_view> next_event(std::string_view& data) {
  constexpr std::size_t head = 12, tail = 4;
  if (data.size() < head + tail) return {};
  const auto size = fixed_at<std::uint64_t>(data);
  if (fixed_at<std::uint32_t>(data.substr(8)) != masked_crc(data.substr(0, 8)) ||
      size > data.size() - head - tail)
    return {};
  const std::string_view event = data.substr(head, size);
  if (fixed_at<std::uint32_t>(data.substr(head + size)) != masked_crc(event)) return {};
  data.remove_prefix(head + size + tail);
  return event;
}

std::optional<std::uint64_t> take_varint(std::string_view& data) {
  std::uint64_t value = 0;
  for (int shift = 0; shift < 64 && !data.empty(); shift += 7) {
    const auto byte = static_cast<unsigned char>(data.front());
    data.remove_prefix(1);
    value |= static_cast<std::uint64_t>(byte & 0x7f) << shift;
    if (byte < 0x80) return value;
  }
  return {};
}

/// The parts of an event that trimming asks for.
struct Outline {
  std::int64_t step = 0;
  bool is_summary = false, starts_session = false;
};

Outline outline_of(std::string_view event) {
  Outline out;
  while (const auto key = take_varint(event)) {
    const auto wire = static_cast<std::uint32_t>(*key & 7), field = static_cast<std::uint32_t>(*key >> 3);
    if (field == summary) out.is_summary = true;
    if (field == session_log) out.starts_session = true;
    std::optional<std::uint64_t> skip = wire == fixed64 ? 8 : wire == fixed32 ? 4 : take_varint(event);
    if (!skip) break;
    if (field == event_step) out.step = static_cast<std::int64_t>(*skip);
    if (wire == varint) skip = 0;
    if (*skip > event.size()) break;
    event.remove_prefix(*skip);
  }
  return out;
}

std::string read_all(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  if (!in)
    fail(ErrorKind::io, "tensorboard: cannot read '", path.string(),
         "', which the run goes on from: check its permissions, or give tensorboard.job_name another name");
  return {std::istreambuf_iterator<char>(in), {}};
}

/// Drops summaries beyond a step. Returns whether the file itself went on from another.
bool trim_events(const fs::path& path, std::int64_t last_step) {
  const std::string whole = read_all(path);
  std::string kept;
  bool resumed = false;
  std::string_view rest = whole;
  for (const char* begin = rest.data(); const auto event = next_event(rest); begin = rest.data()) {
    const Outline outline = outline_of(*event);
    resumed |= outline.starts_session;
    if (!outline.is_summary || outline.step <= last_step) kept.append(begin, rest.data());
  }
  if (kept.size() != whole.size()) write_file_atomically(path, kept);
  return resumed;
}

std::string file_name() {
  using namespace std::chrono;
  const auto seconds = duration_cast<std::chrono::seconds>(system_clock::now().time_since_epoch()).count();
  std::array<char, 256> host{};
  if (::gethostname(host.data(), host.size() - 1) != 0) host[0] = '?';
  return cat(event_prefix, seconds, ".", host.data(), ".", ::getpid(), ".0");
}

}  // namespace

std::vector<fs::path> event_files(const fs::path& folder) {
  std::vector<fs::path> out;
  std::error_code absent;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder, absent))
    if (entry.path().filename().string().starts_with(event_prefix) && entry.path().extension() != ".partial")
      out.push_back(entry.path());
  std::sort(out.begin(), out.end());  // the time is in the name
  return out;
}

EventFile::EventFile(const fs::path& folder, std::optional<std::int64_t> resumed_at) {
  if (resumed_at) {
    const std::vector<fs::path> files = event_files(folder);
    for (auto file = files.rbegin(); file != files.rend(); ++file)
      if (!trim_events(*file, *resumed_at)) break;  // the first of this run
  }
  // A run that is resumed within a second of its start, in the same process, takes the next number.
  std::string path = (folder / file_name()).string();
  for (int number = 1; fs::exists(path); ++number)
    path = path.substr(0, path.rfind('.') + 1) + std::to_string(number);
  file_ = std::make_unique<AppendFile>(path, true, "TensorBoard's event file");
  std::string head = record_of(event_at(0, file_version, "brain.Event:2"));
  if (resumed_at) {
    std::string start;
    put_varint(start, status, session_start);
    head += record_of(event_at(*resumed_at + 1, session_log, start));
  }
  file_->write(head);
}

void EventFile::write(std::int64_t step, const std::vector<Scalar>& scalars) {
  std::string values;
  for (const Scalar& scalar : scalars) {
    std::string value;
    put_bytes(value, tag, scalar.tag);
    put_key(value, simple_value, fixed32);
    put_fixed(value, std::bit_cast<std::uint32_t>(static_cast<float>(scalar.value)));
    put_bytes(values, summary_value, value);
  }
  file_->write(record_of(event_at(step, summary, values)));
}

}  // namespace sherd::engine
