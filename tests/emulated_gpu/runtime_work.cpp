// The emulated runtime's streams, events, kernels and graphs (see runtime.cpp).
#include <cstring>
#include <utility>

#include "emulated_gpu/runtime.h"

namespace {

using namespace sherd;
using namespace sherd::emulated_gpu;

/// Dynamic shared memory by kernel: what all have, or what was asked for last.
int shared_allowed(const void* entry) {
  const auto at = state().shared_allowed.find(entry);
  return at == state().shared_allowed.end() ? 48 << 10 : at->second;
}

struct EventState {
  int card = 0;
  std::shared_ptr<Queue> queue;  ///< null: never recorded
  std::size_t position = 0;
  int looks = 0;  ///< since it was recorded
};
EventState* state_of(cudaEvent_t event) {
  return reinterpret_cast<EventState*>(event);
}

simt::Dim3 extent(dim3 from) {
  return {from.x, from.y, from.z};
}

struct Ready {
  std::vector<std::pair<const Node*, Node>> nodes;  ///< as captured, and as they run
};
Graph* graph_of(cudaGraph_t graph) {
  return reinterpret_cast<Graph*>(graph);
}
Ready* ready_of(cudaGraphExec_t graph) {
  return reinterpret_cast<Ready*>(graph);
}

}  // namespace

extern "C" {

// ---- streams and events ----

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
  const Lock lock(mutex());
  if (broken()) return told(cudaErrorIllegalAddress);
  begin_context(current_card);
  auto queue = std::make_shared<Queue>(current_card);
  *stream = reinterpret_cast<cudaStream_t>(queue.get());
  state().streams[*stream] = std::move(queue);
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  const Lock lock(mutex());
  if (broken()) return told(cudaErrorIllegalAddress);
  Queue* queue = queue_of(stream);
  if (!queue) return told(cudaErrorInvalidResourceHandle);
  queue->run_all();
  state().streams.erase(stream);
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  const Lock lock(mutex());
  if (broken()) return told(cudaErrorIllegalAddress);
  Queue* queue = queue_of(stream);
  if (!queue || queue->captured) return told(cudaErrorInvalidResourceHandle);
  queue->run_all();
  return broken() ? told(cudaErrorIllegalAddress) : cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  const Lock lock(mutex());
  if (broken()) return told(cudaErrorIllegalAddress);
  Queue* queue = queue_of(stream);
  if (!queue || queue->captured) return told(cudaErrorInvalidResourceHandle);
  const EventState& seen = *state_of(event);
  ++state().counts.waits;
  if (seen.queue) queue->add([other = seen.queue, position = seen.position] { other->run_to(position); });
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  const Lock lock(mutex());
  if (broken()) return told(cudaErrorIllegalAddress);
  begin_context(current_card);
  *event = reinterpret_cast<cudaEvent_t>(new EventState{current_card, nullptr, 0, 0});
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  const Lock lock(mutex());
  if (broken()) return told(cudaErrorIllegalAddress);
  delete state_of(event);
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  const Lock lock(mutex());
  if (broken()) return told(cudaErrorIllegalAddress);
  Queue* queue = queue_of(stream);
  if (!queue || queue->captured || queue->card() != state_of(event)->card)
    return told(cudaErrorInvalidResourceHandle);
  ++state().counts.events;
  *state_of(event) = {queue->card(), queue->shared_from_this(), queue->size(), 0};
  return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  const Lock lock(mutex());
  if (broken()) return told(cudaErrorIllegalAddress);
  EventState& seen = *state_of(event);
  if (!seen.queue) return cudaSuccess;
  // Never on the first look: whoever asks must cope with "not yet".
  if (seen.looks == 1) ++state().counts.host_waits;
  if (seen.looks++ > 0) seen.queue->run_to(seen.position);
  if (broken()) return told(cudaErrorIllegalAddress);
  return seen.queue->done() >= seen.position ? cudaSuccess : told(cudaErrorNotReady);
}

// ---- kernels ----

cudaError_t cudaFuncSetAttribute(const void* entry, cudaFuncAttribute attribute, int value) {
  const Lock lock(mutex());
  if (broken()) return told(cudaErrorIllegalAddress);
  if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) return told(cudaErrorInvalidValue);
  if (value < 0 || static_cast<std::size_t>(value) > simt::shared_limit()) return told(cudaErrorInvalidValue);
  state().shared_allowed[entry] = value;
  return cudaSuccess;
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* out, const void* entry) {
  const Lock lock(mutex());
  if (broken()) return told(cudaErrorIllegalAddress);
  *out = {};
  out->maxDynamicSharedSizeBytes = shared_allowed(entry);
  return cudaSuccess;
}

cudaError_t cudaLaunchKernel(const void* entry, dim3 grid, dim3 block, void** arguments,
                             std::size_t shared_bytes, cudaStream_t stream) {
  const Lock lock(mutex());
  if (broken()) return told(cudaErrorIllegalAddress);
  Queue* queue = queue_of(stream);
  if (!queue || queue->card() != current_card) return told(cudaErrorInvalidResourceHandle);
  if (shared_bytes > static_cast<std::size_t>(shared_allowed(entry))) return told(cudaErrorInvalidValue);
  auto kernel =
      std::make_shared<Kernel>(Kernel::of(entry, extent(grid), extent(block), shared_bytes, arguments));
  if (queue->captured)
    queue->captured->nodes.push_back(std::make_unique<Node>(Node{std::move(kernel), nullptr}));
  else
    ++state().counts.kernels, queue->add([kernel = std::move(kernel)] { kernel->run(); });
  return cudaSuccess;
}

// ---- graphs ----

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
  const Lock lock(mutex());
  if (broken()) return told(cudaErrorIllegalAddress);
  Queue* queue = queue_of(stream);
  if (!queue || queue->captured) return told(cudaErrorIllegalState);
  queue->captured = std::make_unique<Graph>();
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  const Lock lock(mutex());
  if (broken()) return told(cudaErrorIllegalAddress);
  Queue* queue = queue_of(stream);
  if (!queue || !queue->captured) return told(cudaErrorIllegalState);
  *graph = reinterpret_cast<cudaGraph_t>(queue->captured.release());
  return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  const Lock lock(mutex());
  Queue* queue = queue_of(stream);
  if (!queue) return told(cudaErrorInvalidResourceHandle);
  *status = queue->captured ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status,
                                     unsigned long long*, cudaGraph_t*, const cudaGraphNode_t** last,
                                     const cudaGraphEdgeData** edges, std::size_t* count) {
  thread_local cudaGraphNode_t node;
  const Lock lock(mutex());
  const cudaError_t error = cudaStreamIsCapturing(stream, status);
  if (error != cudaSuccess || *status != cudaStreamCaptureStatusActive) return error;
  const Graph& graph = *queue_of(stream)->captured;
  *count = graph.nodes.empty() ? 0 : 1;
  if (*count) node = reinterpret_cast<cudaGraphNode_t>(graph.nodes.back().get());
  *last = &node, *edges = nullptr;
  return cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* out, cudaGraph_t graph, unsigned long long) {
  const Lock lock(mutex());
  if (broken()) return told(cudaErrorIllegalAddress);
  if (std::getenv("SHERD_EMULATED_GPU_WITHOUT_GRAPHS")) return told(cudaErrorNotSupported);
  auto* ready = new Ready;
  for (const auto& node : graph_of(graph)->nodes) ready->nodes.emplace_back(node.get(), *node);
  *out = reinterpret_cast<cudaGraphExec_t>(ready);
  return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  return delete graph_of(graph), cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) {
  return delete ready_of(graph), cudaSuccess;
}

cudaError_t cudaGraphExecKernelNodeSetParams(cudaGraphExec_t graph, cudaGraphNode_t node,
                                             const cudaKernelNodeParams* params) {
  const Lock lock(mutex());
  if (broken()) return told(cudaErrorIllegalAddress);
  if (params->sharedMemBytes > static_cast<unsigned>(shared_allowed(params->func)))
    return told(cudaErrorInvalidValue);
  for (auto& [captured, runs] : ready_of(graph)->nodes) {
    if (reinterpret_cast<cudaGraphNode_t>(const_cast<Node*>(captured)) != node) continue;
    if (!runs.kernel) return told(cudaErrorInvalidValue);
    // Anew, for launches under way keep what they have.
    runs.kernel =
        std::make_shared<Kernel>(Kernel::of(params->func, extent(params->gridDim), extent(params->blockDim),
                                            params->sharedMemBytes, params->kernelParams));
    return cudaSuccess;
  }
  return told(cudaErrorInvalidValue);
}
cudaError_t cudaGraphUpload(cudaGraphExec_t, cudaStream_t stream) {
  const Lock lock(mutex());
  if (broken()) return told(cudaErrorIllegalAddress);
  Queue* queue = queue_of(stream);
  return queue && !queue->captured ? cudaSuccess : told(cudaErrorInvalidResourceHandle);
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t stream) {
  const Lock lock(mutex());
  if (broken()) return told(cudaErrorIllegalAddress);
  ++state().counts.graphs;
  std::vector<Node> nodes;
  for (const auto& [captured, runs] : ready_of(graph)->nodes) nodes.push_back(runs);
  return queue_other(stream, [nodes = std::move(nodes)] {
    for (const Node& node : nodes) {
      if (node.kernel)
        node.kernel->run();
      else
        node.other();
    }
  });
}

}  // extern "C"
