#pragma once

#include <filesystem>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "engine/checkpoint/checkpoint.h"
#include "nn/weight_source.h"

namespace sherd::engine {

/// The weights that a checkpoint holds, whatever ranks and layout saved it, and no optimizer states.
class CheckpointWeights : public nn::WeightSource {
 public:
  /// Which of a checkpoint's parameters are meant, by name.
  using NameFilter = std::function<bool(const std::string&)>;
  /// Both must outlive it. `device`: through whose memory values go that have another type here than there.
  /// `part`: what of the checkpoint is to be had, so that check() asks for no more; null: all.
  CheckpointWeights(const CheckpointReader& reader, device::Device& device, NameFilter part = nullptr)
      : reader_(reader), device_(device), part_(std::move(part)) {}

  void check(const std::vector<nn::ParameterPtr>& parameters) const override;
  void read(const std::string& name, const tensor::Slice& slice, std::int64_t begin,
            const tensor::Tensor& to) override;
  std::map<std::string, std::vector<float>> step_states() const override;

 private:
  const CheckpointReader& reader_;
  device::Device& device_;
  NameFilter part_;
};

/// Writes a checkpoint of weights alone, DIR/TAG, whole or not at all, and moves DIR/latest. Offline, in one
/// file: `parameters` are all of a model's, in their logical shapes, and read from `weights` a part at a time
/// through memory of `device`; those that it does not have get their initial values. Of `manifest` the caller
/// fills in the configuration, the computing type and the data. A run begins from it by training.init_from,
/// not by --resume, as it has no optimizer states.
void write_weights(const std::filesystem::path& directory, const std::string& tag, Manifest manifest,
                   const std::vector<nn::ParameterPtr>& parameters, nn::WeightSource& weights,
                   const ExtraFiles& files, device::Device& device);

/// Writes what a checkpoint holds again, as DIR/TAG, as if `ranks` data-parallel ranks had saved it: every
/// state, or the weights alone. Offline; a part at a time.
void copy_checkpoint(const CheckpointReader& reader, const std::filesystem::path& directory,
                     const std::string& tag, int ranks, bool weights_only, device::Device& device);

}  // namespace sherd::engine
