#pragma once

#include <cudnn_graph.h>

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <utility>
#include <vector>

#include "device/cuda/target.h"

// What attention needs of cuDNN's graphs (NVIDIA's "backend" interface, version 9): tensors, operations
// between them, and the plan that its heuristic finds for the whole. Included by sources of this folder only.

namespace sherd::tensor::SHERD_CUDA::cudnn {

/// Throws Error{io}, or Error{memory}, that says what cuDNN could not do and why.
void check(cudnnStatus_t status, const char* what);

/// A descriptor of cuDNN's, set once and then finalized.
class Descriptor {
 public:
  explicit Descriptor(cudnnBackendDescriptorType_t type);
  Descriptor(Descriptor&& other) noexcept : raw_(std::exchange(other.raw_, nullptr)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(raw_, other.raw_);
    return *this;
  }
  ~Descriptor() {
    if (raw_) cudnnBackendDestroyDescriptor(raw_);
  }

  void set(cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type, std::int64_t count,
           const void* values);
  template <class Value>
  void set(cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type, const Value& value) {
    set(name, type, 1, &value);
  }
  void set(cudnnBackendAttributeName_t name, const Descriptor& other) {
    set(name, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &other.raw_);
  }
  void finalize();
  cudnnBackendDescriptor_t raw() const { return raw_; }

 private:
  cudnnBackendDescriptor_t raw_ = nullptr;
};

using Extents4 = std::vector<std::int64_t>;  ///< four of them: batch, head, row, column

/// Extents of a dense tensor's strides.
Extents4 dense(const Extents4& extents);

/// A tensor of a graph; what is made between operations is virtual: it has no memory.
struct Node {
  std::shared_ptr<Descriptor> descriptor;
  Extents4 extents, strides;
};

/// Collects the operations of a graph, in the order in which they are added, and keeps what they refer to.
class Graph {
 public:
  enum class Kind : std::uint8_t { memory, between, by_value };

  Node tensor(cudnnDataType_t dtype, const Extents4& extents, const Extents4& strides, Kind kind,
              std::int64_t id = 0);
  /// One number, read from the host when the plan runs.
  Node number(std::int64_t id) {
    return tensor(CUDNN_DATA_FLOAT, {1, 1, 1, 1}, {1, 1, 1, 1}, Kind::by_value, id);
  }
  /// A virtual tensor, dense.
  Node between(const Extents4& extents, cudnnDataType_t dtype = CUDNN_DATA_FLOAT) {
    return tensor(dtype, extents, dense(extents), Kind::between);
  }

  void matmul(const Node& a, const Node& b, const Node& c);
  /// y = mode(x), mode(x, b), or with `t` a choice between x and b.
  void pointwise_into(const Node& y, cudnnPointwiseMode_t mode, const Node& x, const Node* b = nullptr,
                      const Node* t = nullptr, cudnnDataType_t compute = CUDNN_DATA_FLOAT,
                      std::int64_t axis = -1);
  /// The same into a new virtual tensor of x's extents.
  Node pointwise(cudnnPointwiseMode_t mode, const Node& x, const Node& b);
  Node pointwise(cudnnPointwiseMode_t mode, const Node& x);
  /// x's number along `axis`, as int32.
  Node index(const Node& x, std::int64_t axis);
  void reduce(cudnnReduceTensorOp_t op, const Node& x, const Node& y);
  /// x seen with other extents and strides.
  void view(const Node& x, const Node& y);

  const std::vector<Descriptor>& operations() const { return operations_; }

 private:
  std::int64_t next_id_ = 1000;
  std::vector<Descriptor> operations_, kinds_;
  std::vector<std::shared_ptr<Descriptor>> tensors_;
};

/// A graph made executable for the current device.
class Plan {
 public:
  /// The first configuration that cuDNN proposes and can build; with `deterministic`, among those whose
  /// results repeat. Throws Error{io} where there is none.
  Plan(cudnnHandle_t handle, Graph graph, bool deterministic);
  std::size_t workspace() const { return workspace_; }
  /// Queues it: memory by id.
  void run(cudnnHandle_t handle, const std::vector<std::int64_t>& ids, const std::vector<void*>& memory,
           void* workspace) const;

 private:
  bool build(cudnnHandle_t handle, const Descriptor& configuration, bool deterministic);
  Graph parts_;
  Descriptor graph_;
  std::unique_ptr<Descriptor> plan_;
  std::size_t workspace_ = 0;
};

}  // namespace sherd::tensor::SHERD_CUDA::cudnn
