#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "comm/communicator.h"
#include "config/config.h"
#include "device/stream.h"

namespace sherd::engine {

/// The weight of a micro-batch's mean loss among those of a step, all ranks' together: its share of tokens
/// that are targets (labels but -100), of train_micro_batch_size_per_gpu sequences whole of them. So a step
/// is the mean over all targets of its global batch, however they lie in micro-batches; losses that a model
/// adds to its own, as routers' balance, weigh alike.
///
/// Where preferences are learned the weight is the number of its pairs, or of its texts that are judged by
/// themselves, per sequence.
///
/// The batch says how many there are: "target_tokens", int32 [1] that the processor reads, as
/// data::TokenLoader has it. 1 without that, without a `model` section, and with `training.loss_average:
/// micro_batches`, DeepSpeed's mean of means.
double loss_weight(const config::Config& config, device::Device& device, const tensor::Batch& batch);

/// The same of an evaluation's micro-batch, of which `samples` count: nothing where none of them has a
/// target; its share of samples where targets are not what weighs.
double evaluation_weight(const config::Config& config, device::Device& device, const tensor::Batch& batch,
                         std::int64_t samples);

/// The mean loss of some micro-batches, and what they weigh together: their number where each weighs 1.
struct MeanLoss {
  double value = 0;  ///< 0 where they weigh nothing
  double weight = 0;
  std::int64_t micro_batches = 0;
};

/// The mean of the losses of micro-batches over this rank's and all others', each by its weight
/// (loss_weight()), which the device may still be computing. Ranks add as many. Used from the rank's thread.
class StepLoss {
 public:
  /// `ranks`: those that train on different data. `stages`: those that hold the stages of this one's model,
  /// of which the last one has the losses, in fp32 where they are several. All must outlive it. `label`: of
  /// the collective, so that ranks never mix different means.
  StepLoss(device::Device& device, comm::Communicator& ranks, comm::Communicator& stages,
           const char* label = "loss")
      : device_(device), ranks_(ranks), stages_(stages), label_(label) {}

  /// Takes the loss of a micro-batch down, behind the work that makes it; does not wait. Undefined on stages
  /// but the last, whose weights count.
  void add(const tensor::Tensor& loss, double weight = 1);
  /// The losses so far travel to all ranks; on a GPU that is queued, and between stages it goes on beside
  /// this thread. Collective. Nothing on the second call.
  void share();
  /// Shares and waits for the losses, not for work that the device was given later. They are added in the
  /// global order of micro-batches (all ranks' first, then their second …), so that the bits do not depend on
  /// how many ranks share them. Throws Error{data} for what kernels have found wrong by then. 0 on a
  /// meta device.
  MeanLoss mean();
  /// The next loss is the first of another mean.
  void clear();

 private:
  /// Losses, and their weights in fp64.
  struct GatheredLosses {
    tensor::Tensor losses, weights;
  };
  tensor::Tensor room(std::int64_t losses, DType dtype) const;
  MeanLoss add_up() const;
  bool has_losses() const { return stages_.rank() + 1 == stages_.size(); }
  GatheredLosses gather();
  void bring_here();

  device::Device& device_;
  comm::Communicator& ranks_;
  comm::Communicator& stages_;
  const char* label_;
  tensor::Tensor mine_;          ///< with room for more than the `count_` that are in it
  std::vector<double> weights_;  ///< by loss in `mine_`
  std::int64_t count_ = 0;
  GatheredLosses shared_;  ///< all ranks', one after the other; once `here_` where the processor reads them
  bool here_ = false;
  comm::Work told_, weights_told_;  ///< to the other stages
  device::Event complete_;          ///< from when on they are there
  std::optional<MeanLoss> mean_;
};

}  // namespace sherd::engine
