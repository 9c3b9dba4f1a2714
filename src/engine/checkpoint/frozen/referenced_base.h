#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>

#include "base/choices.h"
#include "device/device.h"
#include "nn/weight_source.h"

namespace sherd::engine {

class CheckpointReader;

/// The weights that a checkpoint refers to (Manifest::base), opened.
struct OpenedBase {
  std::shared_ptr<device::Device> processor;         ///< a CPU device, whose memory values go through
  std::shared_ptr<nn::WeightSource> weights;         ///< as the run began with them
  std::map<std::string, StoredFormat> formats = {};  ///< of the parameters that the run keeps in few bits
};

/// The function by which this process opens such weights: given the checkpoint, whose configuration says how
/// the run made its parameters of their files. Each reader that is asked for parameters that do not train
/// calls it once, on its thread. It must be set before there are readers; without one such checkpoints are an
/// Error{config}.
using BaseOpener = std::function<OpenedBase(const CheckpointReader&)>;
void set_base_opener(BaseOpener opener);

/// Compares the size of a file of the base with what it was, and with `contents` its bytes. Throws Error{io}
/// or Error{data}.
void check_base_file(const CheckpointReader& reader, const std::string& name, bool contents);

/// The parameters that a checkpoint refers to, with the values that it would hold.
class ReferencedBase {
 public:
  /// Throws Error{io} or Error{data} where a file is not there, or has another size than when it was
  /// referred to.
  explicit ReferencedBase(const CheckpointReader& reader);
  StoredFormat format_of(const std::string& parameter) const;
  /// Local elements [begin, begin + to.numel()) of a slice into `to`, memory of the processor: as the run
  /// keeps them, of those in few bits the values.
  void read(const std::string& parameter, const tensor::Slice& slice, std::int64_t begin,
            const tensor::Tensor& to) const;
  /// The blocks of `count` such elements, from the first of a block on, into `to`, uint8.
  void read_blocks(const std::string& parameter, const tensor::Slice& slice, std::int64_t begin,
                   std::int64_t count, const tensor::Tensor& to) const;

 private:
  OpenedBase opened_;
};

}  // namespace sherd::engine
