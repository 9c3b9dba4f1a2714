#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "engine/engine.h"

/// All states of a model by name and logical index, put together from what its ranks hold in memory.
namespace sherd::test {

/// The bytes of whole tensors by KIND.PARAMETER: "fp32.w", "exp_avg.w", …
using LogicalStates = std::map<std::string, std::vector<std::byte>>;

/// Ranks on threads of this process add what they hold, of which replicas must be equal.
class LogicalStateCollector {
 public:
  void add(Engine& engine) {
    for (const auto& unit : engine.sharded().units())
      for (const auto& segment : unit->segments()) add(engine, *segment);
  }
  /// Fails where elements are missing.
  LogicalStates take() {
    for (const auto& [name, seen] : seen_)
      for (const bool there : seen) {
        if (there) continue;
        ADD_FAILURE() << "no rank has all of " << name;
        break;
      }
    seen_.clear();
    return std::move(states_);
  }

 private:
  void add(Engine& engine, sharding::Segment& segment) {
    const auto in_host = [&](std::int64_t begin, std::int64_t end, DType dtype) {
      return tensor::Tensor::empty(engine.device(), {end - begin}, dtype, device::Category::activations,
                                   engine.device().processor_tier());
    };
    const auto add_buffer = [&](const std::string& kind, const sharding::StateBuffer& buffer) {
      const tensor::Tensor values = in_host(buffer.begin(), buffer.end(), buffer.dtype());
      buffer.read(buffer.begin(), values).wait();
      add(segment, kind, buffer.begin(), values);
    };
    add_buffer("parameters", segment.parameters());
    if (!segment.key().trainable) return;
    const tensor::Tensor masters = in_host(segment.update_begin(), segment.update_end(), DType::f32);
    segment.read_masters(segment.update_begin(), masters);
    add(segment, "fp32", segment.update_begin(), masters);
    for (std::size_t i = 0; i < segment.moments().size(); ++i)
      add_buffer(segment.states()[i].name, segment.moments()[i]);
  }
  void add(const sharding::Segment& segment, const std::string& kind, std::int64_t begin,
           const tensor::Tensor& values) {
    const std::size_t size = size_of(values.dtype());
    const std::lock_guard lock(mutex_);
    for (const sharding::Piece& piece : segment.layout().pieces(begin, begin + values.numel())) {
      const autograd::Parameter& parameter = *segment.layout().parameters()[piece.slot];
      const std::string name = kind + "." + parameter.name;
      const tensor::Slice slice = parameter.logical_slice();
      const auto numel = static_cast<std::size_t>(slice.logical().numel());
      states_[name].resize(numel * size);
      std::vector<bool>& seen = seen_[name];
      seen.resize(numel);
      for (std::int64_t i = 0; i < piece.count;
           ++i) {  // by element, not by run: whoever tests Slice needs another way
        const auto at = static_cast<std::size_t>(logical_index(slice, piece.parameter_begin + i));
        const std::byte* from = values.raw() + static_cast<std::size_t>(piece.flat_begin - begin + i) * size;
        if (seen[at]) {
          EXPECT_EQ(std::memcmp(&states_[name][at * size], from, size), 0)
              << "replicas of " << name << " differ";
        }
        std::memcpy(&states_[name][at * size], from, size);
        seen[at] = true;
      }
    }
  }
  static std::int64_t logical_index(const tensor::Slice& slice, std::int64_t local) {
    std::int64_t logical = 0, stride = 1;
    for (int axis = slice.logical().rank() - 1; axis >= 0; --axis) {
      std::vector<std::int64_t> indices;
      for (const tensor::Range& range : slice.blocks()[static_cast<std::size_t>(axis)])
        for (std::int64_t i = range.begin; i < range.end; ++i) indices.push_back(i);
      const auto extent = static_cast<std::int64_t>(indices.size());
      logical += indices[static_cast<std::size_t>(local % extent)] * stride;
      local /= extent;
      stride *= slice.logical()[axis];
    }
    return logical;
  }

  std::mutex mutex_;
  LogicalStates states_;
  std::map<std::string, std::vector<bool>> seen_;
};

}  // namespace sherd::test
