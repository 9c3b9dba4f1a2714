#pragma once

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <utility>
#include <vector>

#include "device/cuda/target.h"

// The part of cuDNN's graphs that attention needs (NVIDIA's "backend" interface, version 9): tensors,
// operations between them, and the plan that its heuristic finds for the whole. Included by sources of this
// folder only.

struct cudnnContext;  // what cudnnHandle_t points to

namespace sherd::tensor::SHERD_CUDA::cudnn {

/// A value of one of cuDNN's enumerations, which its headers name and ours may not.
using Enum = int;
inline constexpr Enum fp32 = 0;  ///< CUDNN_DATA_FLOAT

/// Throws Error{io}, or Error{memory}, that says what cuDNN could not do and why.
void check(Enum status, const char* what);

/// A descriptor of cuDNN's, set once and then finalized.
class Descriptor {
 public:
  explicit Descriptor(Enum type);
  Descriptor(Descriptor&& other) noexcept : raw_(std::exchange(other.raw_, nullptr)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(raw_, other.raw_);
    return *this;
  }
  ~Descriptor();

  void set(Enum name, Enum type, std::int64_t count, const void* values);
  template <class Value>
  void set(Enum name, Enum type, const Value& value) {
    set(name, type, 1, &value);
  }
  void set(Enum name, const Descriptor& other);
  void finalize();
  void* raw() const { return raw_; }

 private:
  void* raw_ = nullptr;
};

using Extents4 = std::vector<std::int64_t>;  ///< four of them: batch, head, row, column

/// Extents of a dense tensor's strides.
Extents4 dense(const Extents4& extents);

/// A tensor of a graph; what is made between operations is virtual: it has no memory.
struct GraphTensor {
  std::shared_ptr<Descriptor> descriptor;
  Extents4 extents, strides;
};

/// Collects the operations of a graph, in the order in which they are added, and keeps what they refer to.
class OperationGraph {
 public:
  enum class Kind : std::uint8_t { memory, between, by_value };

  GraphTensor tensor(Enum dtype, const Extents4& extents, const Extents4& strides, Kind kind,
                     std::int64_t id = 0);
  /// One number, read from the host when the plan runs.
  GraphTensor number(std::int64_t id) { return tensor(fp32, {1, 1, 1, 1}, {1, 1, 1, 1}, Kind::by_value, id); }
  /// A virtual tensor, dense.
  GraphTensor between(const Extents4& extents, Enum dtype = fp32) {
    return tensor(dtype, extents, dense(extents), Kind::between);
  }

  void matmul(const GraphTensor& a, const GraphTensor& b, const GraphTensor& c);
  /// y = mode(x), mode(x, b), or with `t` a choice between x and b.
  void pointwise_into(const GraphTensor& y, Enum mode, const GraphTensor& x, const GraphTensor* b = nullptr,
                      const GraphTensor* t = nullptr, Enum compute = fp32, std::int64_t axis = -1);
  /// The same into a new virtual tensor of x's extents.
  GraphTensor pointwise(Enum mode, const GraphTensor& x, const GraphTensor& b);
  GraphTensor pointwise(Enum mode, const GraphTensor& x);
  /// x's number along `axis`, as int32.
  GraphTensor index(const GraphTensor& x, std::int64_t axis);
  void reduce(Enum op, const GraphTensor& x, const GraphTensor& y);
  /// x seen with other extents and strides.
  void view(const GraphTensor& x, const GraphTensor& y);

  const std::vector<Descriptor>& operations() const { return operations_; }

 private:
  std::int64_t next_id_ = 1000;
  std::vector<Descriptor> operations_, kinds_;
  std::vector<std::shared_ptr<Descriptor>> tensors_;
};

/// A graph made executable for the current device.
class ExecutionPlan {
 public:
  /// The first configuration that cuDNN proposes and can build; with `deterministic`, among those whose
  /// results repeat. Throws Error{io} where there is none.
  ExecutionPlan(cudnnContext* handle, OperationGraph graph, bool deterministic);
  std::size_t workspace() const { return workspace_; }
  /// Queues it: memory by id.
  void run(cudnnContext* handle, const std::vector<std::int64_t>& ids, const std::vector<void*>& memory,
           void* workspace) const;

 private:
  bool build(cudnnContext* handle, const Descriptor& configuration, bool deterministic);
  OperationGraph parts_;
  Descriptor graph_;
  std::unique_ptr<Descriptor> plan_;
  std::size_t workspace_ = 0;
};

}  // namespace sherd::tensor::SHERD_CUDA::cudnn
