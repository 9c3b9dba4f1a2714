#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "engine/checkpoint/format.h"
#include "tensor/safetensors/safetensors.h"
#include "tensor/slice.h"

namespace sherd::engine {

/// `count` elements that follow each other in what is asked for, from local element `local` on, and in a
/// file's tensor, from its element `in_file` on.
struct FileRun {
  std::int64_t local, in_file, count;
  std::int64_t tensor = 0;  ///< elements that the file's tensor has
};

/// Which file of a checkpoint holds which elements of each tensor KIND.PARAMETER. Pieces may be of any slices
/// of the parameter, and overlap.
class PieceIndex {
 public:
  void add(const std::string& name, std::size_t file, PieceRecord record);

  bool holds(const std::string& name) const { return parts_.contains(name); }
  /// Finds local elements [begin, end) of `slice` of tensor `name`: calls visit(file, runs) for each file
  /// that is needed, with runs in ascending order; together they are all that is there, each element once.
  /// Returns the first local element that is in no file; `end` where all are there.
  std::int64_t for_each_part(const std::string& name, const tensor::Slice& slice, std::int64_t begin,
                             std::int64_t end,
                             const std::function<void(std::size_t, std::span<const FileRun>)>& visit) const;

 private:
  struct IndexedPiece {
    std::size_t file;
    PieceRecord record;
    tensor::Range logical;  ///< from its first to its last element
  };
  std::map<std::string, std::vector<IndexedPiece>> parts_;  ///< by name, ascending by first element
};

/// Reads `runs` of tensor `name` in `file` to where they belong in `to`, whose first element is local element
/// `begin`. Runs that lie close together in the file are read together. Throws as SafetensorsFile does.
void read_runs(const SafetensorsFile& file, const std::string& name, std::span<const FileRun> runs,
               std::int64_t begin, const tensor::Tensor& to);
/// The same of a tensor of blocks, whose values go to `to`, fp32.
void read_stored_runs(const SafetensorsFile& file, const std::string& name, StoredFormat format,
                      std::span<const FileRun> runs, std::int64_t begin, const tensor::Tensor& to);
/// Whether runs are whole blocks of the files' tensors, and of the elements from `begin` to `end`, the last
/// of which may be shorter in both: then read_blocks() brings their bytes to `to`.
bool are_blocks(StoredFormat format, std::span<const FileRun> runs, std::int64_t begin, std::int64_t end);
void read_blocks(const SafetensorsFile& file, const std::string& name, StoredFormat format,
                 std::span<const FileRun> runs, std::int64_t begin, const tensor::Tensor& to);

}  // namespace sherd::engine
