#include <cuda_runtime_api.h>

#include <vector>

#include "base/log.h"
#include "device/cuda/driver.h"

namespace sherd::device::cuda {
namespace {

/// Arguments of one kernel of a graph, set by being queued.
class ArgumentSetter final : public StreamQueue {
 public:
  ArgumentSetter(cudaGraphExec_t graph, cudaGraphNode_t node) : graph_(graph), node_(node) {}
  void launch(const KernelLaunch& kernel) override {
    allow_shared(kernel.entry, kernel.shared_bytes);
    cudaKernelNodeParams params{};
    params.func = const_cast<void*>(kernel.entry);
    params.gridDim = dim3_of(kernel.grid), params.blockDim = dim3_of(kernel.block);
    params.sharedMemBytes = static_cast<unsigned>(kernel.shared_bytes);
    params.kernelParams = const_cast<void**>(kernel.arguments.data());
    check_call(cudaGraphExecKernelNodeSetParams(graph_, node_, &params), "cudaGraphExecKernelNodeSetParams");
  }
  std::shared_ptr<const StreamEvent> record() override { return nullptr; }
  void follow(const StreamEvent&) override {}
  void* native() override { return nullptr; }

 private:
  cudaGraphExec_t graph_;
  cudaGraphNode_t node_;
};

class CudaGraph final : public Graph {
 public:
  /// Owns both graphs; `nodes` by work, null where it is no kernel.
  CudaGraph(int ordinal, cudaStream_t stream, cudaGraph_t captured, cudaGraphExec_t ready,
            std::vector<cudaGraphNode_t> nodes)
      : ordinal_(ordinal), stream_(stream), captured_(captured), ready_(ready), nodes_(std::move(nodes)) {}
  ~CudaGraph() override {
    quietly_on(ordinal_, [this] { cudaGraphExecDestroy(ready_), cudaGraphDestroy(captured_); });
  }
  void set(std::size_t work, const KernelSequence& sequence) override {
    const OnGpu on(ordinal_);
    ArgumentSetter setter(ready_, nodes_[work]);
    sequence.run(work, setter);
  }
  void launch() override {
    const OnGpu on(ordinal_);
    check_call(cudaGraphLaunch(ready_, stream_), "cudaGraphLaunch");
  }

 private:
  const int ordinal_;
  const cudaStream_t stream_;
  const cudaGraph_t captured_;  ///< the graph whose nodes name those of ready_
  const cudaGraphExec_t ready_;
  const std::vector<cudaGraphNode_t> nodes_;
};

/// Captures on a stream of its own, so that the events of other threads on the compute stream never meet a
/// capture.
class CudaGraphMaker final : public GraphMaker {
 public:
  CudaGraphMaker(int ordinal, void* stream)
      : ordinal_(ordinal), stream_(static_cast<cudaStream_t>(stream)), aside_(make_queue(ordinal, false)) {}

  std::unique_ptr<Graph> make(const KernelSequence& sequence) override {
    const OnGpu on(ordinal_);
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t ready = nullptr;
    std::vector<cudaGraphNode_t> nodes(sequence.size());
    try {
      // Relaxed: libraries may do in a capture what they do outside.
      check_call(cudaStreamBeginCapture(aside(), cudaStreamCaptureModeRelaxed), "cudaStreamBeginCapture");
      capture(sequence, nodes);
      check_call(cudaStreamEndCapture(aside(), &graph), "cudaStreamEndCapture");
      check_call(cudaGraphInstantiate(&ready, graph, 0), "cudaGraphInstantiate");
      // It takes memory of the GPU now, when there is a way without it, rather than as it is launched.
      check_call(cudaGraphUpload(ready, stream_), "cudaGraphUpload");
      return std::make_unique<CudaGraph>(ordinal_, stream_, graph, ready, std::move(nodes));
    } catch (const Error& error) {
      if (ready) cudaGraphExecDestroy(ready);
      abort_capture(graph);
      if (!told_) log_warning("device.cuda_graphs: some work runs without a graph: ", error.what());
      told_ = true;
      return nullptr;
    }
  }

 private:
  cudaStream_t aside() { return static_cast<cudaStream_t>(aside_->native()); }

  void capture(const KernelSequence& sequence, std::vector<cudaGraphNode_t>& nodes) {
    for (std::size_t i = 0; i < sequence.size(); ++i) {
      sequence.run(i, *aside_);
      if (sequence.is_kernel(i)) nodes[i] = last_node();
    }
  }

  /// The node that was captured last.
  cudaGraphNode_t last_node() {
    cudaStreamCaptureStatus status{};
    const cudaGraphNode_t* last = nullptr;
    const cudaGraphEdgeData* edges = nullptr;
    std::size_t count = 0;
#if CUDART_VERSION >= 13000
    check_call(cudaStreamGetCaptureInfo(aside(), &status, nullptr, nullptr, &last, &edges, &count),
               "cudaStreamGetCaptureInfo");
#else
    check_call(cudaStreamGetCaptureInfo_v3(aside(), &status, nullptr, nullptr, &last, &edges, &count),
               "cudaStreamGetCaptureInfo");
#endif
    require(status == cudaStreamCaptureStatusActive && count == 1,
            "a kernel that was captured is not the one thing to wait for");
    return *last;
  }

  /// Leaves no capture under way and no error behind.
  void abort_capture(cudaGraph_t graph) {
    cudaStreamCaptureStatus status{};
    if (cudaStreamIsCapturing(aside(), &status) == cudaSuccess && status != cudaStreamCaptureStatusNone)
      cudaStreamEndCapture(aside(), &graph);
    if (graph) cudaGraphDestroy(graph);
    cudaGetLastError();
  }

  const int ordinal_;
  const cudaStream_t stream_;
  std::unique_ptr<StreamQueue> aside_;
  bool told_ = false;
};

}  // namespace

std::unique_ptr<GraphMaker> make_graph_maker(int ordinal, void* stream) {
  return std::make_unique<CudaGraphMaker>(ordinal, stream);
}

}  // namespace sherd::device::cuda
