#include "engine/checkpoint/pieces.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "tensor/formats/stored_format.h"

namespace sherd::engine {

using tensor::Range;
using tensor::Slice;

namespace {

// The bytes between two runs are read with them where a call of its own would cost more than its bytes.
constexpr std::int64_t most_between = 64 << 10, most_per_read = 4 << 20;

/// Logical elements from the first to the last of local elements [begin, end).
Range span_of(const Slice& slice, std::int64_t begin, std::int64_t end) {
  if (begin >= end) return {};
  return {slice.run_at(begin, end).logical, slice.run_at(end - 1, end).logical + 1};
}

/// Local elements of a slice that were not found yet.
using Missing = std::vector<Range>;

/// Moves what `record` holds of `missing` to `runs`.
void take(const Slice& slice, const PieceRecord& record, Missing& missing, std::vector<FileRun>& runs) {
  Missing left;
  for (const Range& gap : missing) {
    std::int64_t at = gap.begin;
    for_each_common_run(
        slice, gap.begin, gap.end, record.slice, record.elements.begin, record.elements.end,
        [&](std::int64_t local, std::int64_t in_slice, std::int64_t count) {
          if (at < local) left.push_back({at, local});
          runs.push_back({local, in_slice - record.elements.begin, count, record.elements.size()});
          at = local + count;
        });
    if (at < gap.end) left.push_back({at, gap.end});
  }
  missing = std::move(left);
}

/// How many of the first runs are read at once, from element `first` of the file's tensor on; an element
/// takes so many bytes.
std::size_t read_together(std::span<const FileRun> runs, std::int64_t first, std::int64_t bytes) {
  std::int64_t end = runs[0].in_file + runs[0].count;
  std::size_t count = 1;
  for (; count < runs.size(); ++count) {
    const std::int64_t begin = runs[count].in_file, next_end = begin + runs[count].count;
    if ((begin - end) * bytes > most_between || (next_end - first) * bytes > most_per_read) break;
    end = next_end;
  }
  return count;
}

}  // namespace

void PieceIndex::add(const std::string& name, std::size_t file, PieceRecord record) {
  const Range logical = span_of(record.slice, record.elements.begin, record.elements.end);
  if (logical.size() == 0) return;
  std::vector<IndexedPiece>& parts = parts_[name];
  const auto after = std::upper_bound(
      parts.begin(), parts.end(), logical.begin,
      [](std::int64_t first, const IndexedPiece& part) { return first < part.logical.begin; });
  parts.insert(after, {file, std::move(record), logical});
}

std::int64_t PieceIndex::for_each_part(
    const std::string& name, const Slice& slice, std::int64_t begin, std::int64_t end,
    const std::function<void(std::size_t, std::span<const FileRun>)>& visit) const {
  const auto found = parts_.find(name);
  if (begin >= end || found == parts_.end()) return begin;
  const Range wanted = span_of(slice, begin, end);
  Missing missing{{begin, end}};
  std::vector<FileRun> runs;
  for (const IndexedPiece& part : found->second) {
    if (missing.empty() || part.logical.begin >= wanted.end) break;
    if (part.logical.end <= wanted.begin) continue;
    runs.clear();
    take(slice, part.record, missing, runs);
    if (!runs.empty()) visit(part.file, runs);
  }
  return missing.empty() ? end : missing.front().begin;
}

bool are_blocks(StoredFormat format, std::span<const FileRun> runs, std::int64_t begin, std::int64_t end) {
  const std::int64_t block = tensor::block_size(format).elements;
  return std::all_of(runs.begin(), runs.end(), [&](const FileRun& run) {
    return (run.local - begin) % block == 0 && run.in_file % block == 0 &&
           (run.count % block == 0 ||
            (run.local + run.count == end && run.in_file + run.count == run.tensor));
  });
}

void read_blocks(const SafetensorsFile& file, const std::string& name, StoredFormat format,
                 std::span<const FileRun> runs, std::int64_t begin, const tensor::Tensor& to) {
  const auto bytes = [&](std::int64_t elements) {
    return static_cast<std::size_t>(tensor::stored_bytes(format, elements));
  };
  for (const FileRun& run : runs)
    file.read_bytes(file.at(name), bytes(run.in_file),
                    std::span(to.raw() + bytes(run.local - begin), bytes(run.count)));
}

void read_stored_runs(const SafetensorsFile& file, const std::string& name, StoredFormat format,
                      std::span<const FileRun> runs, std::int64_t begin, const tensor::Tensor& to) {
  const std::int64_t block = tensor::block_size(format).elements;
  const auto bytes = [&](std::int64_t elements) { return tensor::stored_bytes(format, elements); };
  std::vector<std::byte> blocks;
  while (!runs.empty()) {
    const std::int64_t first = runs[0].in_file / block * block;
    const std::size_t together = read_together(runs, first, 1);
    const std::int64_t end = runs[together - 1].in_file + runs[together - 1].count;
    blocks.resize(static_cast<std::size_t>(bytes(end - first)));
    file.read_bytes(file.at(name), static_cast<std::uint64_t>(bytes(first)), blocks);
    for (const FileRun& run : runs.first(together))
      tensor::dequantize(format, blocks.data(), run.in_file - first,
                         {to.data<float>() + (run.local - begin), static_cast<std::size_t>(run.count)});
    runs = runs.subspan(together);
  }
}

void read_runs(const SafetensorsFile& file, const std::string& name, std::span<const FileRun> runs,
               std::int64_t begin, const tensor::Tensor& to) {
  const auto bytes_of = [&](std::int64_t elements) {
    return elements * static_cast<std::int64_t>(size_of(to.dtype()));
  };
  std::vector<std::byte> buffer;
  while (!runs.empty()) {
    const std::size_t together = read_together(runs, runs[0].in_file, bytes_of(1));
    const std::int64_t end = runs[together - 1].in_file + runs[together - 1].count;
    if (together == 1) {
      const std::int64_t at = runs[0].local - begin;
      file.read(name, runs[0].in_file, to.range(at, at + runs[0].count));
    } else {
      buffer.resize(static_cast<std::size_t>(bytes_of(end - runs[0].in_file)));
      file.read_bytes(file.at(name), static_cast<std::uint64_t>(bytes_of(runs[0].in_file)), buffer);
      for (const FileRun& run : runs.first(together))
        std::memcpy(to.raw() + bytes_of(run.local - begin),
                    buffer.data() + bytes_of(run.in_file - runs[0].in_file),
                    static_cast<std::size_t>(bytes_of(run.count)));
    }
    runs = runs.subspan(together);
  }
}

}  // namespace sherd::engine
