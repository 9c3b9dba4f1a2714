// What Sherd uses of the CUDA runtime, played by the processor: cards whose streams do nothing until somebody
// waits, whose memory is known block by block, and whose kernels are the emulator's. It stands before the
// real runtime when a program is linked, so that all of Sherd's code for GPUs but the libraries' runs as it
// is where no GPU is. It is as strict as CUDA allows a driver to be: what only works by luck on a card should
// not work here.
#include <cuda_runtime_api.h>

#include <cstdlib>
#include <cstring>
#include <set>
#include <string_view>
#include <utility>

#include "emulated_gpu/card.h"
#include "simt/racecheck.h"

namespace {

using namespace sherd;
using namespace sherd::emulated_gpu;
using Lock = std::lock_guard<std::recursive_mutex>;

thread_local cudaError_t last_error = cudaSuccess;
thread_local int current_card = 0;

cudaError_t told(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}

int cards() {
  if (const char* visible = std::getenv("CUDA_VISIBLE_DEVICES"); visible && !*visible) return 0;
  const char* wanted = std::getenv("SHERD_SOFTWARE_CARDS");
  return wanted ? std::atoi(wanted) : 1;
}

/// With mutex() locked, as all that follows.
struct State {
  std::map<cudaStream_t, std::shared_ptr<Queue>> streams;
  std::set<int> contexts;                     ///< cards on which this process has begun to work
  std::map<const void*, int> shared_allowed;  ///< bytes that kernels' launches were allowed
};
State& state() {
  static auto& all = *new State;
  return all;
}

void begin_context(int card) {
  state().contexts.insert(card);
}

/// Of dynamic shared memory, by kernel: what all have, or what was asked for last.
int shared_allowed(const void* entry) {
  const auto at = state().shared_allowed.find(entry);
  return at == state().shared_allowed.end() ? 48 << 10 : at->second;
}

Queue* queue_of(cudaStream_t stream) {
  const auto at = state().streams.find(stream);
  return at == state().streams.end() ? nullptr : at->second.get();
}

void run_all_of(int card) {
  for (const auto& [handle, queue] : state().streams)
    if (queue->card() == card) queue->run_all();
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

/// A work that is no kernel: queued, or captured.
cudaError_t queue_other(cudaStream_t stream, Work work) {
  Queue* queue = queue_of(stream);
  if (!queue) return told(cudaErrorInvalidResourceHandle);
  if (queue->captured)
    queue->captured->nodes.push_back(std::make_unique<Node>(Node{nullptr, std::move(work)}));
  else
    queue->add(std::move(work));
  return cudaSuccess;
}

void copy_known(void* to, const void* from, std::size_t bytes) {
  memory().require_known(to, bytes, "a copy");
  memory().require_known(from, bytes, "a copy");
  std::memcpy(to, from, bytes);
}

cudaError_t allocate(void** data, std::size_t bytes, Place place) {
  begin_context(current_card);
  *data = memory().allocate(bytes, place, current_card);
  if (!*data) {  // what streams have yet to free counts
    run_all_of(current_card);
    *data = memory().allocate(bytes, place, current_card);
  }
  return *data ? cudaSuccess : told(cudaErrorMemoryAllocation);
}

/// Frees at once, after all work of the card, as cudaFree() does.
cudaError_t free_now(void* data, Place place) {
  const Block* block = memory().find(data);
  if (!block || block->place != place) return told(cudaErrorInvalidValue);
  for (int card = 0; card < cards(); ++card) run_all_of(card);
  memory().free(data);
  return cudaSuccess;
}

simt::Dim3 extent(dim3 from) {
  return {from.x, from.y, from.z};
}

// ---- graphs ----

struct Ready {
  std::vector<std::pair<const Node*, Node>> nodes;  ///< as captured, and as they run
};
Graph* graph_of(cudaGraph_t graph) {
  return reinterpret_cast<Graph*>(graph);
}
Ready* ready_of(cudaGraphExec_t graph) {
  return reinterpret_cast<Ready*>(graph);
}

/// cuDevicePrimaryCtxGetState of the driver's interface.
int context_state(int card, unsigned* flags, int* active) {
  const Lock lock(mutex());
  *flags = 0;
  *active = state().contexts.count(card) > 0;
  return 0;
}

bool is_reachable(const void* data) {
  const Lock lock(mutex());
  return memory().find(data) != nullptr;
}
[[maybe_unused]] const bool told_the_emulator = [] {
  simt::memory_lookup() = {is_reachable};
  simt::find_races(false);
  return true;
}();

}  // namespace

bool sherd::emulated_gpu::has_context(int card) {
  const Lock lock(mutex());
  return state().contexts.count(card) > 0;
}

void sherd::emulated_gpu::mend() {
  const Lock lock(mutex());
  break_after(SIZE_MAX - works_run());
  for (const auto& [handle, queue] : state().streams) queue->drop();
  memory().strike_all();
}

bool sherd::emulated_gpu::queue_on(void* stream, Work work) {
  const Lock lock(mutex());
  return queue_other(static_cast<cudaStream_t>(stream), std::move(work)) == cudaSuccess;
}

extern "C" {

// ---- errors and versions ----

cudaError_t cudaGetLastError() {
  return std::exchange(last_error, cudaSuccess);
}

const char* cudaGetErrorName(cudaError_t error) {
  switch (error) {
    case cudaSuccess:
      return "cudaSuccess";
    case cudaErrorMemoryAllocation:
      return "cudaErrorMemoryAllocation";
    case cudaErrorNoDevice:
      return "cudaErrorNoDevice";
    case cudaErrorInvalidDevice:
      return "cudaErrorInvalidDevice";
    case cudaErrorInvalidResourceHandle:
      return "cudaErrorInvalidResourceHandle";
    case cudaErrorInvalidValue:
      return "cudaErrorInvalidValue";
    case cudaErrorIllegalAddress:
      return "cudaErrorIllegalAddress";
    case cudaErrorNotReady:
      return "cudaErrorNotReady";
    default:
      return "an error of the emulated GPU";
  }
}
const char* cudaGetErrorString(cudaError_t error) {
  return cudaGetErrorName(error);
}

cudaError_t cudaRuntimeGetVersion(int* version) {
  return *version = CUDART_VERSION, cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* version) {
  return *version = CUDART_VERSION, cudaSuccess;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** entry, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* found) {
  const bool known = std::string_view(symbol) == "cuDevicePrimaryCtxGetState";
  *entry = known ? reinterpret_cast<void*>(context_state) : nullptr;
  *found = known ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}

// ---- cards ----

cudaError_t cudaGetDeviceCount(int* count) {
  *count = cards();
  return *count ? cudaSuccess : told(cudaErrorNoDevice);
}
cudaError_t cudaGetDevice(int* card) {
  return *card = current_card, cudaSuccess;
}
cudaError_t cudaSetDevice(int card) {
  const Lock lock(mutex());
  if (card < 0 || card >= cards()) return told(cudaErrorInvalidDevice);
  current_card = card;
  begin_context(card);
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* out, int card) {
  if (card < 0 || card >= cards()) return told(cudaErrorInvalidDevice);
  *out = {};
  std::strcpy(out->name, "Software card");
  out->major = 9;
  out->totalGlobalMem = capacity();
  out->multiProcessorCount = 2;
  out->sharedMemPerBlockOptin = simt::shared_limit();
  out->uuid.bytes[0] = static_cast<char>(card + 1);
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  if (attribute == cudaDevAttrMemoryPoolsSupported)
    *value = !std::getenv("SHERD_SOFTWARE_CARD_WITHOUT_POOLS");
  else if (attribute == cudaDevAttrClockRate)
    *value = 1'000'000;
  else
    return told(cudaErrorInvalidValue);
  return cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0, *greatest = -5;
  return cudaSuccess;
}
cudaError_t cudaMemGetInfo(std::size_t* free, std::size_t* total) {
  const Lock lock(mutex());
  if (broken()) return told(cudaErrorIllegalAddress);
  run_all_of(current_card);
  *total = capacity();
  *free = *total - memory().used(current_card);
  return cudaSuccess;
}

// ---- memory ----

cudaError_t cudaMemPoolCreate(cudaMemPool_t* pool, const cudaMemPoolProps*) {
  *pool = reinterpret_cast<cudaMemPool_t>(new int(0));
  return cudaSuccess;
}
cudaError_t cudaMemPoolDestroy(cudaMemPool_t pool) {
  delete reinterpret_cast<int*>(pool);
  return cudaSuccess;
}
cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t, cudaMemPoolAttr, void*) {
  return cudaSuccess;
}
cudaError_t cudaMemPoolTrimTo(cudaMemPool_t, std::size_t) {
  return cudaSuccess;
}

cudaError_t cudaMallocFromPoolAsync(void** data, std::size_t bytes, cudaMemPool_t, cudaStream_t stream) {
  const Lock lock(mutex());
  if (broken()) return told(cudaErrorIllegalAddress);
  if (!queue_of(stream) || queue_of(stream)->captured) return told(cudaErrorInvalidResourceHandle);
  return allocate(data, bytes, Place::device);
}
cudaError_t cudaFreeAsync(void* data, cudaStream_t stream) {
  const Lock lock(mutex());
  if (broken()) return told(cudaErrorIllegalAddress);
  return queue_other(stream, [data] { memory().free(data); });
}
cudaError_t cudaMalloc(void** data, std::size_t bytes) {
  const Lock lock(mutex());
  if (broken()) return told(cudaErrorIllegalAddress);
  return allocate(data, bytes, Place::device);
}
cudaError_t cudaFree(void* data) {
  const Lock lock(mutex());
  if (broken()) return told(cudaErrorIllegalAddress);
  return free_now(data, Place::device);
}
cudaError_t cudaHostAlloc(void** data, std::size_t bytes, unsigned) {
  const Lock lock(mutex());
  if (broken()) return told(cudaErrorIllegalAddress);
  return allocate(data, bytes, Place::host);
}
cudaError_t cudaFreeHost(void* data) {
  const Lock lock(mutex());
  if (broken()) return told(cudaErrorIllegalAddress);
  return free_now(data, Place::host);
}
cudaError_t cudaHostRegister(void* data, std::size_t bytes, unsigned) {
  const Lock lock(mutex());
  if (broken()) return told(cudaErrorIllegalAddress);
  return memory().enlist(data, bytes, current_card) ? cudaSuccess
                                                    : told(cudaErrorHostMemoryAlreadyRegistered);
}
cudaError_t cudaHostUnregister(void* data) {
  const Lock lock(mutex());
  if (broken()) return told(cudaErrorIllegalAddress);
  return memory().strike(data) ? cudaSuccess : told(cudaErrorHostMemoryNotRegistered);
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* out, const void* data) {
  const Lock lock(mutex());
  const Block* block = memory().find(data);
  *out = {};
  out->type = !block                          ? cudaMemoryTypeUnregistered
              : block->place == Place::device ? cudaMemoryTypeDevice
                                              : cudaMemoryTypeHost;
  if (block) out->device = block->card, out->devicePointer = const_cast<void*>(data);
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind,
                            cudaStream_t stream) {
  const Lock lock(mutex());
  if (broken()) return told(cudaErrorIllegalAddress);
  Queue* queue = queue_of(stream);
  if (!queue) return told(cudaErrorInvalidResourceHandle);
  const bool to_known = memory().find(to), from_known = memory().find(from);
  if (to_known && from_known) return queue_other(stream, [=] { copy_known(to, from, bytes); });
  if (queue->captured) return told(cudaErrorStreamCaptureUnsupported);
  queue->run_all();
  if (broken()) return told(cudaErrorIllegalAddress);
  if (to_known) memory().require_known(to, bytes, "a copy");
  if (from_known) memory().require_known(from, bytes, "a copy");
  std::memcpy(to, from, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* data, int value, std::size_t bytes, cudaStream_t stream) {
  const Lock lock(mutex());
  if (broken()) return told(cudaErrorIllegalAddress);
  if (!memory().find(data)) return told(cudaErrorInvalidValue);
  return queue_other(stream, [=] {
    memory().require_known(data, bytes, "a fill");
    std::memset(data, value, bytes);
  });
}

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
  *state_of(event) = {queue->card(), queue->shared_from_this(), queue->size(), 0};
  return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  const Lock lock(mutex());
  if (broken()) return told(cudaErrorIllegalAddress);
  EventState& seen = *state_of(event);
  if (!seen.queue) return cudaSuccess;
  // Never on the first look: whoever asks must cope with "not yet".
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
    queue->add([kernel = std::move(kernel)] { kernel->run(); });
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
  if (std::getenv("SHERD_SOFTWARE_CARD_WITHOUT_GRAPHS")) return told(cudaErrorNotSupported);
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
