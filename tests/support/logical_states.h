#pragma once

#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "nn/step_state.h"

/// All states of a model by name and logical index, put together from what its ranks hold in memory.
namespace sherd::test {

/// The bytes of whole tensors by KIND.PARAMETER: "fp32.w", "exp_avg.w", …
using LogicalStates = std::map<std::string, std::vector<std::byte>>;

/// Ranks on threads of this process add what they hold, of which replicas must be equal, and so all but what
/// each replica has of its own.
class LogicalStateCollector {
 public:
  void add(Engine& engine) {
    engine.synchronize();
    for (const auto& unit : engine.sharded().units())
      for (const auto& segment : unit->segments()) add(engine, *segment);
    engine.module().for_each([&](nn::Module& module) {
      if (const auto* state = dynamic_cast<nn::StepState*>(&module)) add(module.path(), state->saved());
    });
  }
  /// Throws where elements are missing.
  LogicalStates take();

 private:
  void add(Engine& engine, sharding::Segment& segment) {
    const auto in_host = [&](std::int64_t begin, std::int64_t end, DType dtype) {
      return tensor::Tensor::empty(engine.device(), {end - begin}, dtype, device::Category::activations,
                                   engine.device().processor_tier());
    };
    if (const sharding::StateBuffer& buffer = segment.parameters(); !segment.key().in_blocks()) {
      const tensor::Tensor values = in_host(buffer.begin(), buffer.end(), buffer.dtype());
      buffer.read(buffer.begin(), values).wait();
      add(segment, "parameters", buffer.begin(), values);
    }
    if (!segment.key().trainable) return;
    const tensor::Tensor masters = in_host(segment.update_begin(), segment.update_end(), DType::f32);
    segment.read_masters(segment.update_begin(), masters);
    add(segment, "fp32", segment.update_begin(), masters);
    for (std::size_t i = 0; i < segment.moments().size(); ++i) {
      if (segment.states()[i].over_replicas != optim::OverReplicas::same) continue;
      const sharding::StateBuffer& buffer = segment.moments()[i];
      const bool in_codes = segment.states()[i].code != optim::Code::none;
      const tensor::Tensor values =
          in_host(buffer.begin(), buffer.end(), in_codes ? DType::f32 : buffer.dtype());
      segment.read_state(i, buffer.begin(), values);
      add(segment, segment.states()[i].name, buffer.begin(), values);
    }
  }
  void add(const std::string& path, const std::vector<float>& values) {
    if (values.empty()) return;
    const auto* begin = reinterpret_cast<const std::byte*>(values.data());
    const std::vector<std::byte> bytes(begin, begin + values.size() * sizeof(float));
    const std::lock_guard lock(mutex_);
    const auto [place, fresh] = states_.try_emplace("step_state." + path, bytes);
    require(fresh || place->second == bytes, "ranks have other states of ", path);
  }
  void add(const sharding::Segment& segment, const std::string& kind, std::int64_t begin,
           const tensor::Tensor& values);

  std::mutex mutex_;
  LogicalStates states_;
  std::map<std::string, std::vector<char>> seen_;  ///< by element
};

}  // namespace sherd::test
