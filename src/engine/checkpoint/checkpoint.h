#pragma once

#include <cstddef>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "engine/checkpoint/manifest.h"
#include "nn/weight_source.h"
#include "sharding/sharded_model.h"
#include "tensor/kernels.h"
#include "tensor/slice.h"

// This folder saves and loads runs.
//
//   format.h            what lies on disk: the folder, the names, what a tensor of a file is of
//   manifest.h          everything of a checkpoint but its tensors, as JSON
//   states.h            which states a rank writes and reads
//   frozen/             parameters that do not train: files that checkpoints share by hard links
//                       (frozen_files.h), or weights elsewhere that a checkpoint refers to
//                       (referenced_base.h)
//   checkpoint.h        reading slices out of any checkpoint, whoever wrote it; pieces.h: which file has what
//   checkpoints.h       an engine's saves and loads, on all ranks alike (checkpoints_load.cpp: the latter)
//   writer.h            a rank's file, and one act of saving; background_save.h: the thread that writes it
//                       while training goes on, and the copy that it writes (snapshot.cpp)
//   save_folder.h       the folder of a run: its lock, publishing whole, `latest`, `best`, what is removed
//   weights.h           a checkpoint's weights alone, and checkpoints that no engine writes
//   local/              copies that stay on the ranks' own machines, and what peers keep of each other
//   compare.h           how what training has made differs from a checkpoint, to the bit
//   same_run.h          refuses a checkpoint of another model or tokenizer, and tells what else has changed

namespace sherd::engine {

/// The folder that DIR/latest, or `tag`, names; "best" stands for what DIR/best names. DIR may also be the
/// folder of a checkpoint, or such a file itself: DIR/best. Throws Error{io} when there is none, Error{data}
/// when DIR/latest holds no name.
std::filesystem::path checkpoint_folder(const std::filesystem::path& directory, const std::string& tag = "");

/// Throws Error{config} where `folder`, in which a run that begins anew is to save, holds checkpoints of
/// another, which its own would replace. `advice`: what to do, "go on with --resume".
void require_no_checkpoints(const std::filesystem::path& folder, const std::string& advice);

/// Whether a run with local checkpoints has begun in the folder, though it may have saved nothing there.
bool has_begun(const std::filesystem::path& folder);

class ReferencedBase;

/// One state of one parameter in a checkpoint.
struct CheckpointTensor {
  std::string kind, parameter;  ///< "fp32", "frozen", "exp_avg", …; what it is of
  DType dtype = DType::f32;
  StoredFormat format = StoredFormat::compute;  ///< of one in blocks, which are uint8
};

/// Reads slices of parameters out of a checkpoint's files, however they were cut and by however many ranks.
class CheckpointReader {
 public:
  /// Reads and checks the manifest and the heads of all files, which must be of one act of saving. Throws
  /// Error{data} or Error{io} naming the file.
  explicit CheckpointReader(std::filesystem::path folder);
  ~CheckpointReader();
  CheckpointReader(CheckpointReader&&) noexcept;

  const Manifest& manifest() const;
  const std::filesystem::path& folder() const;
  /// Compares one file's bytes with the manifest's checksum. Throws Error{data}.
  void verify(const std::string& file) const;
  /// verify() for each file, of a base that it refers to, too, or for those that hold what trained: adapters
  /// are there.
  enum class WhatToVerify { all, trained };
  void verify_all(WhatToVerify what = WhatToVerify::all) const;
  /// The same for what `rank` of `ranks` is to verify of the ranks' files, so that together they verify each
  /// of them once.
  void verify_share(int rank, int ranks, WhatToVerify what = WhatToVerify::all) const;
  /// The files that hold local elements [begin, end) of `slice` of KIND.PARAMETER. Throws Error{data} unless
  /// all are there, in `dtype`.
  std::set<std::string> require_state(const std::string& kind, const std::string& parameter,
                                      const tensor::Slice& slice, std::int64_t begin, std::int64_t end,
                                      DType dtype, StoredFormat format = StoredFormat::compute) const;
  /// The type that KIND.PARAMETER is kept in; uint8: in blocks (tensor/formats/stored_format.h). Nothing
  /// where it is not there.
  std::optional<DType> dtype(const std::string& kind, const std::string& parameter) const;
  /// Whether there are elements of KIND.PARAMETER.
  bool holds(const std::string& kind, const std::string& parameter) const;
  /// All that its files hold, each once, by name.
  std::vector<CheckpointTensor> tensors() const;
  /// The memories of optimizers of whole parameters, by name, as ParameterNorms::save() gave it.
  std::map<std::string, std::string> learned() const;
  /// Local elements [begin, begin + to.numel()) of `slice` of KIND.PARAMETER into `to`, memory of the
  /// processor. Of the files, those that hold them are read; of blocks the values, in fp32. Throws
  /// Error{data} when any of them is missing or the dtype differs.
  void read(const std::string& kind, const std::string& parameter, const tensor::Slice& slice,
            std::int64_t begin, const tensor::Tensor& to) const;
  /// The blocks of `count` such elements into `to`, uint8, where the files hold the same blocks of the slice;
  /// else false, and nothing is read.
  bool read_blocks(const std::string& kind, const std::string& parameter, const tensor::Slice& slice,
                   std::int64_t begin, std::int64_t count, const tensor::Tensor& to) const;

 private:
  bool refers(const std::string& kind, const std::string& parameter) const;
  const ReferencedBase& base() const;

  struct Content;
  std::unique_ptr<Content> content_;
};

/// Reads the weights of `source` into a model sharded in any way, over any number of ranks. Throws
/// Error{data} where names or shapes differ. Collective over the model's group.
void load_weights(nn::WeightSource& source, sharding::ShardedModel& model, tensor::Kernels& kernels);

/// Has DIR/best name `tag`, or nothing where there is no such checkpoint (any more). For the run that saves
/// there. Throws Error{io}.
void point_best(const std::filesystem::path& directory, const std::string& tag);

/// Removes all checkpoints called global_stepN but the newest `keep`, of which `newest` is one, and that
/// which DIR/best names. By the order of saving that manifests tell, not by step: after going back to an
/// earlier checkpoint, higher steps are the old ones. (Those that tell none are the oldest, by step.) Each
/// disappears under its name at once. What cannot be removed is a warning. For the run that saves there
/// (Engine::claim_save_folder).
void remove_old_checkpoints(const std::filesystem::path& directory, std::size_t keep,
                            const std::string& newest);

}  // namespace sherd::engine
