#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "config/config.h"
#include "nn/layered_model.h"
#include "sharding/instruction.h"
#include "tensor/tensor.h"

namespace sherd::engine {

/// The form of a tensor, which a rank has to know before it can receive it.
struct ValueForm {
  tensor::Shape shape;
  DType dtype = DType::f32;
  bool operator==(const ValueForm&) const = default;
};

/// Room for a form where the processor reads and writes it, as it travels: dtype, number of dimensions,
/// extents, as int64.
tensor::Tensor make_header(device::Device& device);
void write_header(const tensor::Tensor& header, const tensor::Tensor& value);
/// Throws Error{comm} for what is no form.
ValueForm read_header(const tensor::Tensor& header);

/// How a model's parts lie on the ranks of a pipeline, and which of these is this one.
struct StageLayout {
  int stages = 1, stage = 0;
  /// Chunks of all stages, in the order of the model: number n is chunk n / stages of stage n % stages.
  /// Together they are the model's parts; of a model without parts, its only chunk.
  std::vector<sharding::Chunk> chunks = {sharding::Chunk{}};
  /// The form of each part's output, on a meta device, where no other stage is there to tell; else empty.
  std::vector<ValueForm> given;

  /// This rank's chunks.
  int own_chunks() const { return static_cast<int>(chunks.size()) / stages; }
  const sharding::Chunk& own(int chunk) const {
    return chunks.at(static_cast<std::size_t>(chunk * stages + stage));
  }
  std::vector<sharding::Chunk> all_own() const;
  /// Chunk `chunk` of this rank has the first part of the model, or the last.
  bool has_first(int chunk) const { return chunk == 0 && stage == 0; }
  bool has_last(int chunk) const { return chunk + 1 == own_chunks() && stage + 1 == stages; }
  /// This rank needs batches.
  bool reads_batches() const { return stage == 0 || stage + 1 == stages; }
  /// The stage that has part `part`.
  int stage_of(std::size_t part) const;
  bool operator==(const StageLayout&) const = default;
};

/// The weights of a model's parts where it is cut by `method`, a value of `parallel.partition_method`:
/// "best": the elements of all parameters that a part computes with, which leaves out tables of which it only
/// looks rows up, and counts a tied one in every part with a product; "parameters": of all that are trained,
/// as DeepSpeed counts them, a tied one in each of its parts; "uniform": 1; "type:REGEX": 1 of parts of which
/// a module's class or path matches, case ignored, else 0. Sizes are those of the logical tensors. Throws
/// Error{config} where no part matches, naming the classes of all.
std::vector<std::int64_t> part_weights(nn::LayeredModel& model, const std::string& method);

/// The cut that a configuration asks for, and stage `stage` of it. Of a model that is not cut, which then may
/// be of any kind: one stage of one chunk. Throws Error{config} for a model that offers no parts, or fewer
/// than its stages need.
StageLayout make_stage_layout(nn::Model& model, const config::Parallel& parallel, int stage);

/// The first parameter that no part of the model has, so that it belongs to none of a model that is cut;
/// null: parts have all.
const autograd::Parameter* outside_of_parts(const nn::LayeredModel& model);

/// The stages that compute with each parameter, in ascending order, by parameter. Throws Error{config} for a
/// parameter of a model that is cut which no part has.
std::map<const autograd::Parameter*, std::vector<int>> stages_of_parameters(nn::Model& model,
                                                                            const StageLayout& layout);

}  // namespace sherd::engine
