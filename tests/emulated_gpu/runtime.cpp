// What Sherd uses of the CUDA runtime, played by the processor: cards whose streams do nothing until somebody
// waits, whose memory is known block by block, and whose kernels are the emulator's. It stands before the
// real runtime when a program is linked, so that all of Sherd's code for GPUs but the libraries' runs as it
// is where no GPU is. It is as strict as CUDA allows a driver to be: what only works by luck on a card should
// not work here.
#include "emulated_gpu/runtime.h"

#include <cstdlib>
#include <cstring>
#include <string_view>
#include <utility>

#include "simt/racecheck.h"

namespace sherd::emulated_gpu {

State& state() {
  static auto& all = *new State;
  return all;
}

Queue* queue_of(cudaStream_t stream) {
  const auto at = state().streams.find(stream);
  return at == state().streams.end() ? nullptr : at->second.get();
}

cudaError_t queue_other(cudaStream_t stream, Work work) {
  Queue* queue = queue_of(stream);
  if (!queue) return told(cudaErrorInvalidResourceHandle);
  if (queue->captured)
    queue->captured->nodes.push_back(std::make_unique<Node>(Node{nullptr, std::move(work)}));
  else
    queue->add(std::move(work));
  return cudaSuccess;
}

}  // namespace sherd::emulated_gpu

namespace {

using namespace sherd;
using namespace sherd::emulated_gpu;

int cards() {
  if (const char* visible = std::getenv("CUDA_VISIBLE_DEVICES"); visible && !*visible) return 0;
  const char* wanted = std::getenv("SHERD_EMULATED_GPUS");
  return wanted ? std::atoi(wanted) : 1;
}

void run_all_of(int card) {
  for (const auto& [handle, queue] : state().streams)
    if (queue->card() == card) queue->run_all();
}

void copy_known(void* to, const void* from, std::size_t bytes) {
  memory().require_known(to, bytes, "a copy");
  memory().require_known(from, bytes, "a copy");
  std::memcpy(to, from, bytes);
}

cudaError_t allocate(void** data, std::size_t bytes, Place place) {
  ++state().counts.blocks;
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

Counts Counts::operator-(const Counts& before) const {
  return {kernels - before.kernels,
          library_calls - before.library_calls,
          graphs - before.graphs,
          copies - before.copies,
          fills - before.fills,
          up - before.up,
          down - before.down,
          within - before.within,
          events - before.events,
          waits - before.waits,
          host_waits - before.host_waits,
          blocks - before.blocks,
          peers - before.peers};
}
Counts sherd::emulated_gpu::counts() {
  const Lock lock(mutex());
  return state().counts;
}

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
  ++state().counts.library_calls;
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
  std::strcpy(out->name, "Emulated GPU");
  out->major = capability() / 10, out->minor = capability() % 10;
  out->totalGlobalMem = capacity();
  out->multiProcessorCount = 2;
  out->sharedMemPerBlockOptin = simt::shared_limit();
  out->uuid.bytes[0] = static_cast<char>(card + 1);
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  if (attribute == cudaDevAttrMemoryPoolsSupported)
    *value = !std::getenv("SHERD_EMULATED_GPU_WITHOUT_POOLS");
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
cudaError_t cudaDeviceCanAccessPeer(int* can, int card, int peer) {
  return *can = card != peer, cudaSuccess;
}
cudaError_t cudaMemPoolSetAccess(cudaMemPool_t, const cudaMemAccessDesc* access, std::size_t count) {
  const Lock lock(mutex());
  for (std::size_t i = 0; i < count; ++i) {
    const bool whole = access[i].flags == cudaMemAccessFlagsProtReadWrite &&
                       access[i].location.type == cudaMemLocationTypeDevice;
    if (!whole || access[i].location.id < 0 || access[i].location.id >= cards())
      return told(cudaErrorInvalidValue);
    ++state().counts.peers;
  }
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
  const Block *to_block = memory().find(to), *from_block = memory().find(from);
  const auto on_card = [](const Block* block) { return block && block->place == Place::device; };
  Counts& counts = state().counts;
  ++counts.copies;
  (on_card(to_block) ? on_card(from_block) ? counts.within : counts.up : counts.down) += bytes;
  const bool to_known = to_block, from_known = from_block;
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
  const Block* block = memory().find(data);
  if (!block) return told(cudaErrorInvalidValue);
  if (block->place != Place::device && queue_of(stream) && queue_of(stream)->captured)
    return told(cudaErrorStreamCaptureUnsupported);
  ++state().counts.fills;
  return queue_other(stream, [=] {
    memory().require_known(data, bytes, "a fill");
    std::memset(data, value, bytes);
  });
}

}  // extern "C"
