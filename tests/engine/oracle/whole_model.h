#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "engine/setup/process_grid.h"
#include "models/gpt.h"
#include "support/hugging_face/hugging_face_dict.h"
#include "support/logical_states.h"
#include "support/places.h"
#include "support/reference_file.h"

/// Runs of a few steps of the models that scripts/references/make_reference.py made, whose weights, tokens
/// and labels tests/models/reference holds, for comparison with PyTorch's.
namespace sherd::test {

using ModelReference = std::map<std::string, ReferenceTensor>;

inline constexpr int whole_model_steps = 4;
inline constexpr std::size_t each_of = 37;  ///< files have one of so many of the weights' elements

inline models::GptConfig whole_model_options(bool llama, std::int64_t padding) {
  models::GptConfig o = llama ? models::GptConfig::of_family("llama") : models::GptConfig();
  o.vocab_size = llama ? 101 : 97, o.pad_vocab_to_multiple_of = padding, o.seq_length = llama ? 32 : 24;
  o.hidden_size = 48, o.num_layers = 2, o.num_heads = llama ? 6 : 4, o.norm_epsilon = llama ? 1e-6 : 1e-5;
  if (llama) o.num_kv_heads = 2, o.ffn_hidden_size = 80;
  return o;
}

/// The weights that the models begin with.
class GivenWeights : public nn::WeightSource {
 public:
  GivenWeights(const ModelReference& file, const models::HuggingFaceLayout& layout)
      : file_(file), layout_(layout) {}
  void check(const std::vector<nn::ParameterPtr>&) const override {}
  void read(const std::string& name, const tensor::Slice& slice, std::int64_t begin,
            const tensor::Tensor& to) override {
    using models::HostTensor;
    const HostTensor host =
        models::from_dict(layout_, name, [&](const std::string& published) -> std::optional<HostTensor> {
          const ReferenceTensor& found = file_.at(published);
          return HostTensor{found.shape, found.dtype, found.bytes};
        });
    slice.for_each_run(begin, begin + to.numel(),
                       [&](std::int64_t local, std::int64_t logical, std::int64_t n) {
                         std::memcpy(to.data<float>() + (local - begin), host.bytes.data() + logical * 4,
                                     static_cast<std::size_t>(n) * 4);
                       });
  }

 private:
  const ModelReference& file_;
  const models::HuggingFaceLayout& layout_;
};

/// The rows of this rank, of as many as there are.
inline tensor::Batch rows_of(const ModelReference& file, Engine& engine) {
  tensor::Batch out;
  const std::int64_t ranks = engine.data_ranks().size(), rank = engine.data_ranks().rank();
  for (const char* name : {"tokens", "labels"}) {
    const ReferenceTensor& both = file.at(name);
    const std::int64_t rows = both.shape[0] / ranks;
    const std::vector<std::int32_t> ids = both.values<std::int32_t>();
    const auto count = static_cast<std::size_t>(rows * both.shape[1]);
    out[name] = tensor::Tensor::of<std::int32_t>(
        engine.device(), {rows, both.shape[1]},
        std::span(ids).subspan(count * static_cast<std::size_t>(rank), count));
  }
  return out;
}

struct WholeModelRun {
  bool llama = false;
  int ranks = 1;
  std::int64_t padding = 1;  ///< of the vocabulary, to multiples
  std::vector<std::string> keys;
};

struct WholeModelOutcome {
  std::vector<double> losses, norms;
  std::vector<float> weights;  ///< each_of, in the order of published names
};

/// Trains on the file's two rows, which data ranks share out, in fp32.
inline WholeModelOutcome train_whole_model(const WholeModelRun& run) {
  const models::GptConfig options = whole_model_options(run.llama, run.padding);
  const models::HuggingFaceLayout layout(options);
  const ModelReference file = read_reference(
      cat(SHERD_SOURCE_DIR "/tests/models/reference/", run.llama ? "llama" : "gpt2", ".safetensors"));
  const config::Config config = config::parse_text("{}", "the run", run.keys);
  WholeModelOutcome out;
  LogicalStateCollector collector;
  launch_ranks(run.ranks, [&](DistributedPtr dist) {
    const auto groups = make_groups(dist, config);
    Engine engine(dist, std::make_shared<models::Gpt>(options, layout_of(*groups, config)), config, nullptr,
                  nullptr, groups);
    GivenWeights given(file, layout);
    engine.load_weights(given);
    WholeModelOutcome mine;
    for (int step = 0; step < whole_model_steps; ++step) {
      const engine::StepReport& report = engine.train_batch([&] { return rows_of(file, engine); });
      mine.losses.push_back(report.loss), mine.norms.push_back(report.grad_norm);
    }
    engine.synchronize();
    collector.add(engine);
    if (dist->rank() == 0) out = std::move(mine);
  });
  std::map<std::string, models::HostTensor> published;
  for (const auto& [name, bytes] : collector.take()) {
    if (!name.starts_with("fp32.")) continue;
    for (auto& [tensor, value] : models::to_dict(layout, name.substr(5), {{}, DType::f32, bytes}))
      published.emplace(tensor, std::move(value));
  }
  for (const auto& [name, value] : published)
    for (std::size_t i = 0; i < value.bytes.size() / sizeof(float); i += each_of)
      std::memcpy(&out.weights.emplace_back(), value.bytes.data() + i * sizeof(float), sizeof(float));
  return out;
}

/// The largest difference; infinite where there are more of one than of the other.
inline double farthest(const std::vector<float>& a, const std::vector<float>& b) {
  if (a.size() != b.size()) return std::numeric_limits<double>::infinity();
  double most = 0;
  for (std::size_t i = 0; i < a.size(); ++i)
    most = std::max(most, std::abs(static_cast<double>(a[i]) - b[i]));
  return most;
}

}  // namespace sherd::test
