#include <algorithm>
#include <cstring>
#include <mutex>
#include <nlohmann/json.hpp>
#include <unordered_map>
#include <utility>

#include "base/crc32c.h"
#include "base/error.h"
#include "base/files.h"
#include "tensor/safetensors/safetensors.h"

namespace sherd::tensor {
namespace fs = std::filesystem;
namespace {

std::size_t type_rank(const SafetensorsSpec& spec) {
  const auto type =
      std::find_if(safetensors_types.begin(), safetensors_types.end(), [&](const SafetensorsType& known) {
        return spec.type_name.empty() ? known.dtype == spec.dtype : known.name == spec.type_name;
      });
  require(type != safetensors_types.end() && type->bits == 8 * size_of(spec.dtype),
          "safetensors has no type for ", spec.type_name.empty() ? name_of(spec.dtype) : spec.type_name);
  return static_cast<std::size_t>(type - safetensors_types.begin());
}

/// Which positions of one tensor have been written, as disjoint ranges begin → end; neighbours are merged, so
/// that writing in order keeps one range.
class Coverage {
 public:
  /// False when part of [begin, end) is there already.
  bool insert(std::int64_t begin, std::int64_t end) {
    auto next = ranges_.lower_bound(begin);
    if (next != ranges_.end() && next->first < end) return false;
    if (next != ranges_.begin()) {
      auto previous = std::prev(next);
      if (previous->second > begin) return false;
      if (previous->second == begin) begin = previous->first, ranges_.erase(previous);
    }
    if (next != ranges_.end() && next->first == end) end = next->second, ranges_.erase(next);
    ranges_.emplace(begin, end);
    return true;
  }
  bool covers(std::int64_t count) const {
    return count == 0 ||
           (ranges_.size() == 1 && ranges_.begin()->first == 0 && ranges_.begin()->second == count);
  }
  /// The first position in [0, count) that is not there.
  std::int64_t first_missing() const {
    return ranges_.empty() || ranges_.begin()->first > 0 ? 0 : ranges_.begin()->second;
  }

 private:
  std::map<std::int64_t, std::int64_t> ranges_;
};

struct WrittenTensor {
  SafetensorsSpec spec;
  std::int64_t numel = 1;
  std::uint64_t offset = 0;
  Coverage written;
};

std::vector<WrittenTensor> lay_out(std::vector<SafetensorsSpec> specs) {
  std::sort(specs.begin(), specs.end(), [](const SafetensorsSpec& a, const SafetensorsSpec& b) {
    return std::make_pair(type_rank(b), std::string_view(a.name)) <
           std::make_pair(type_rank(a), std::string_view(b.name));
  });
  std::vector<WrittenTensor> slots;
  std::uint64_t offset = 0;
  for (SafetensorsSpec& spec : specs) {
    require(spec.name != "__metadata__", "no tensor can be named __metadata__ in a safetensors file");
    WrittenTensor slot;
    for (const std::int64_t extent : spec.shape) {
      require(extent >= 0, "tensor '", spec.name, "' has the negative extent ", extent);
      slot.numel *= extent;
    }
    slot.offset = offset;
    offset += static_cast<std::uint64_t>(slot.numel) * size_of(spec.dtype);
    slot.spec = std::move(spec);
    slots.push_back(std::move(slot));
  }
  return slots;
}

std::string header_of(const std::vector<WrittenTensor>& slots,
                      const std::map<std::string, std::string>& metadata) {
  using Json = nlohmann::ordered_json;  // of small objects only: it takes quadratic time to fill
  std::string text;
  const auto add = [&](const std::string& name, const Json& value) {
    text += cat(text.empty() ? '{' : ',', Json(name).dump(), ':', value.dump());
  };
  try {
    if (!metadata.empty()) add("__metadata__", metadata);
    for (const WrittenTensor& slot : slots) {
      const std::uint64_t end =
          slot.offset + static_cast<std::uint64_t>(slot.numel) * size_of(slot.spec.dtype);
      add(slot.spec.name, {{"dtype", safetensors_types[type_rank(slot.spec)].name},
                           {"shape", slot.spec.shape},
                           {"data_offsets", {slot.offset, end}}});
    }
    text += text.empty() ? "{}" : "}";
  } catch (const nlohmann::json::exception&) {
    fail(ErrorKind::usage, "a tensor name or metadata string for a safetensors file is not UTF-8");
  }
  text.resize((text.size() + 7) / 8 * 8, ' ');
  require(text.size() <= safetensors_header_limit, "the header of a safetensors file would have ",
          text.size(), " bytes, over the format's limit of ", safetensors_header_limit,
          "; write several files");
  return text;
}

}  // namespace

struct SafetensorsWriter::State {
  explicit State(fs::path path) : file(std::move(path)) {}
  WrittenTensor& slot(std::string_view name);
  void write(WrittenTensor& slot, std::int64_t first, std::int64_t count, const void* data);
  void put(std::uint64_t offset, const void* data, std::size_t bytes);
  FileChecksum checksum() const;

  AtomicFile file;
  std::vector<WrittenTensor> slots;
  std::unordered_map<std::string_view, std::size_t> index;  // keys point into `slots`
  std::uint64_t payload = 0;                                // where the elements begin
  std::map<std::uint64_t, FileChecksum> sums;               // of what was written, by offset in the file
  std::mutex mutex;                                         // guards each slot's `written`, and `sums`
};

SafetensorsWriter::SafetensorsWriter(fs::path path, std::vector<SafetensorsSpec> specs,
                                     const std::map<std::string, std::string>& metadata) {
  std::vector<WrittenTensor> slots = lay_out(std::move(specs));
  state_ = std::make_unique<State>(std::move(path));
  state_->slots = std::move(slots);
  for (std::size_t i = 0; i < state_->slots.size(); ++i)
    require(state_->index.emplace(state_->slots[i].spec.name, i).second, "tensor '",
            state_->slots[i].spec.name, "' is declared twice for '", state_->file.path().string(), "'");
  const std::string header = header_of(state_->slots, metadata);
  const std::uint64_t length = header.size();
  state_->payload = sizeof length + length;
  std::uint64_t total = state_->payload;
  for (const WrittenTensor& slot : state_->slots)
    total += static_cast<std::uint64_t>(slot.numel) * size_of(slot.spec.dtype);
  state_->file.reserve(total);
  state_->put(0, &length, sizeof length);
  state_->put(sizeof length, header.data(), header.size());
}

SafetensorsWriter::~SafetensorsWriter() = default;
SafetensorsWriter::SafetensorsWriter(SafetensorsWriter&&) noexcept = default;

WrittenTensor& SafetensorsWriter::State::slot(std::string_view name) {
  const auto found = index.find(name);
  require(found != index.end(), "tensor '", name, "' was not declared for '", file.path().string(), "'");
  return slots[found->second];
}

void SafetensorsWriter::State::write(WrittenTensor& slot, std::int64_t first, std::int64_t count,
                                     const void* data) {
  require(first >= 0 && count >= 0 && first <= slot.numel - count, "tensor '", slot.spec.name, "' has ",
          slot.numel, " elements; [", first, ", ", first + count, ") reaches outside");
  if (count == 0) return;
  {
    std::lock_guard lock(mutex);
    require(slot.written.insert(first, first + count), "elements in [", first, ", ", first + count,
            ") of tensor '", slot.spec.name, "' were written before");
  }
  const std::uint64_t width = size_of(slot.spec.dtype);
  put(payload + slot.offset + static_cast<std::uint64_t>(first) * width, data,
      static_cast<std::size_t>(count) * width);
}

/// Sums while the bytes are in the cache: nobody has to read the file again.
void SafetensorsWriter::State::put(std::uint64_t offset, const void* data, std::size_t bytes) {
  file.write_at(offset, data, bytes);
  const FileChecksum sum{bytes, crc32c(data, bytes)};
  std::lock_guard lock(mutex);
  sums[offset] = sum;
}

FileChecksum SafetensorsWriter::State::checksum() const {
  FileChecksum whole;
  for (const auto& [offset, sum] : sums)
    whole = {whole.bytes + sum.bytes, crc32c_joined(whole.crc32c, sum.crc32c, sum.bytes)};
  return whole;
}

void SafetensorsWriter::write(std::string_view name, std::int64_t first, const Tensor& from) {
  WrittenTensor& slot = state_->slot(name);
  require(slot.spec.dtype == from.dtype(), "tensor '", name, "' was declared as ", name_of(slot.spec.dtype),
          " and is written as ", name_of(from.dtype()));
  state_->write(slot, first, from.numel(), from.numel() ? from.raw() : nullptr);
}

void SafetensorsWriter::write(std::string_view name, std::int64_t first, std::span<const std::byte> data) {
  WrittenTensor& slot = state_->slot(name);
  const std::size_t width = size_of(slot.spec.dtype);
  require(data.size() % width == 0, data.size(), " bytes are no whole number of ", name_of(slot.spec.dtype),
          " elements of tensor '", name, "'");
  state_->write(slot, first, static_cast<std::int64_t>(data.size() / width), data.data());
}

FileChecksum SafetensorsWriter::finish() {
  for (const WrittenTensor& slot : state_->slots)
    require(slot.written.covers(slot.numel), "tensor '", slot.spec.name, "' is not complete in '",
            state_->file.path().string(), "': the element at ", slot.written.first_missing(), " of ",
            slot.numel, " was never written");
  state_->file.commit();
  return state_->checksum();
}

}  // namespace sherd::tensor
