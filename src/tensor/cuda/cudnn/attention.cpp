#include <cuda_runtime_api.h>
#include <cudnn_graph.h>

#include <algorithm>
#include <bit>
#include <compare>
#include <limits>
#include <map>
#include <mutex>

#include "base/log.h"
#include "tensor/cuda/attention_library.h"
#include "tensor/cuda/cudnn/attention_graph.h"
#include "tensor/cuda/cudnn/cudnn_functions.h"
#include "tensor/cuda/workspace.h"

namespace sherd::tensor::SHERD_CUDA {
namespace {

using cudnn::Graph;
using cudnn::Plan;
using cudnn::Slice;
using Count = std::int64_t;

struct PlanKey {
  Slice slice;
  DType dtype;
  bool causal, backward, deterministic;
  auto operator<=>(const PlanKey&) const = default;
};

class CudnnAttention final : public AttentionLibrary, public std::enable_shared_from_this<CudnnAttention> {
 public:
  explicit CudnnAttention(const device::SHERD_CUDA::Target& target) : target_(target) {
    try {
      version_ = cudnnGetVersion();
      cudnn::check(cudnnCreate(&handle_), "start");
    } catch (const Error& error) {
      handle_ = nullptr;
      log_warning("attention: own kernels instead of cuDNN's: ", error.what());
    }
  }
  ~CudnnAttention() override {
    if (handle_) cudnnDestroy(handle_);
  }

  bool forward(const AttentionCall& call) override {
    return takes(call) &&
           run(call, {cudnn::slice_of(call.extents), call.qkv.dtype(), call.extents.causal(), false, true});
  }

  bool backward(const AttentionCall& call, bool deterministic) override {
    // Up to 9.15 the last, partial tile of keys comes out wrong without a mask for padding; 9.11 and 9.12
    // take long heads on Hopper that they get wrong.
    const bool long_heads = call.extents.dim > 128, partial = call.extents.seq % 128 != 0;
    if (!takes(call) || (version_ <= 91500 && partial)) return false;
    if (version_ >= 91100 && version_ < 91300 && long_heads) return false;
    return run(call,
               {cudnn::slice_of(call.extents), call.qkv.dtype(), call.extents.causal(), true, deterministic});
  }

 private:
  /// What is worth asking the library for.
  bool takes(const AttentionCall& call) const {
    const AttentionExtents& e = call.extents;
    const bool known_good = version_ >= 90100 && version_ != 91000 && version_ != 91001;
    if (!handle_ || !known_good || !attention_by_library(e, call.geometry, call.qkv.dtype())) return false;
    for (const Tensor* t : {&call.qkv, &call.out, &call.lse, &call.dout, &call.dqkv})
      if (*t && reinterpret_cast<std::uintptr_t>(t->raw()) % 16 != 0) return false;
    return true;
  }

  /// The plan, or none where the library has no kernel; said once for every shape.
  const Plan* find(const PlanKey& key) {
    const auto [at, is_new] = plans_.try_emplace(key);
    if (!is_new) return at->second.get();
    std::lock_guard lock(mutex_);
    try {
      const cudnnDataType_t type = key.dtype == DType::bf16 ? CUDNN_DATA_BFLOAT16 : CUDNN_DATA_HALF;
      Graph graph = key.backward ? cudnn::backward_graph(key.slice, type, key.causal, key.deterministic)
                                 : cudnn::forward_graph(key.slice, type, key.causal);
      at->second = std::make_unique<Plan>(handle_, std::move(graph), key.deterministic);
    } catch (const Error& error) {
      if (error.kind() == ErrorKind::memory) {  // says nothing about the shape
        plans_.erase(at);
        throw;
      }
      log_info("attention", key.backward ? "'s gradient" : "", " for heads of ", key.slice.dim,
               ", sequences of ", key.slice.seq, " in ", name_of(key.dtype),
               ": own kernels instead of cuDNN's (", error.what(), ")");
    }
    return at->second.get();
  }

  /// The plan for as many of the slice's sequences at once as its workspace allows; `key` then says how many.
  const Plan* find_within_limit(PlanKey& key) {
    const Plan* plan = find(key);
    while (plan && plan->workspace() > most_attention_workspace && key.slice.batch > 1) {
      key.slice.batch = (key.slice.batch + 1) / 2;
      plan = find(key);
    }
    return plan;
  }

  bool run(const AttentionCall& call, PlanKey key) {
    const Count batch = key.slice.batch;
    const Plan* whole = find_within_limit(key);
    PlanKey last = key;
    last.slice.batch = (batch - 1) % key.slice.batch + 1;
    const Plan* rest = last == key ? whole : find(last);
    if (!whole || !rest) return false;
    if (!cudnn::stays_aligned(call.extents, key.slice)) return false;
    // Parts run one after the other on the stream, so they share what they work in.
    const Slice& s = key.slice;
    const Work work{scratch(static_cast<Count>(std::max(whole->workspace(), rest->workspace()))),
                    scratch(key.backward ? s.batch * s.heads * s.seq * 4 : 0),
                    scratch(key.backward && !key.deterministic ? s.batch * s.heads * s.seq * s.dim * 4 : 0)};
    const AttentionExtents& e = call.extents;
    for (Count slice = 0; slice < e.batch * e.heads / (batch * s.heads); ++slice)
      for (Count first = 0; first < batch; first += s.batch) {
        const Offsets at{slice * e.seq * e.width() + first * s.batch_stride,
                         slice * e.seq * e.heads * e.dim + first * s.out_batch_stride,
                         (slice * e.heads + first * s.heads) * e.seq};
        if (work.sums && version_ < 90600) zero(work.sums);
        run_part(call, key, batch - first < s.batch ? *rest : *whole, at, work);
      }
    return true;
  }

  /// Memory of one call beside its tensors: cuDNN's own, row sums of dout·out, and dq in fp32.
  struct Work {
    Tensor workspace, delta, sums;
  };
  /// Elements from the beginning of the packed projections, the result and lse.
  struct Offsets {
    Count packed, result, lse;
  };

  Tensor scratch(Count bytes) const {
    return bytes ? Tensor::empty(target_.device, {bytes}, DType::u8, Category::workspace) : Tensor();
  }

  void zero(const Tensor& t) { target_.device.zero(t.raw(), t.bytes()); }

  /// What one run of a plan is given: memory by id, and numbers that the library reads from the host as it is
  /// called.
  struct Arguments {
    std::vector<Count> ids;
    std::vector<void*> memory;
    void* workspace = nullptr;
    float scale = 1, masked = 0;
  };

  void run_part(const AttentionCall& call, const PlanKey& key, const Plan& plan, const Offsets& from,
                const Work& work) {
    const AttentionExtents& e = call.extents;
    constexpr Count element = 2;
    const Count columns[3] = {e.query_col(0, 0), e.key_col(0), e.value_col(0)};
    Arguments arguments;
    arguments.scale = static_cast<float>(e.scale);
    arguments.workspace = work.workspace ? work.workspace.raw() : nullptr;
    // Older versions prefer a finite mask.
    arguments.masked =
        version_ < 91000 ? std::numeric_limits<float>::lowest() : -std::numeric_limits<float>::infinity();
    const auto give = [&](int id, void* at) { arguments.ids.push_back(id), arguments.memory.push_back(at); };
    for (int part = 0; part < 3; ++part)
      give(cudnn::q_id + part, call.qkv.raw() + (from.packed + columns[part]) * element);
    give(cudnn::out_id, call.out.raw() + from.result * element);
    give(cudnn::lse_id, call.lse.raw() + from.lse * 4);
    if (key.backward) {
      give(cudnn::dout_id, call.dout.raw() + from.result * element);
      for (int part = 0; part < 3; ++part)
        give(cudnn::dq_id + part, call.dqkv.raw() + (from.packed + columns[part]) * element);
      give(cudnn::delta_id, work.delta.raw());
      if (work.sums) give(cudnn::dq_sums_id, work.sums.raw());
    }
    std::vector<void*> at = arguments.memory;
    at.push_back(arguments.workspace);
    at.push_back(reinterpret_cast<void*>(std::uintptr_t{std::bit_cast<std::uint32_t>(arguments.scale)}));
    target_.stream->call({&plan, std::as_bytes(std::span(at)),
                          [self = shared_from_this(), &plan, arguments = std::move(arguments),
                           causal = key.causal, backward = key.backward](void* stream) {
                            self->queue(plan, arguments, causal, backward, static_cast<cudaStream_t>(stream));
                          }});
  }

  /// On whichever thread hands work over.
  void queue(const Plan& plan, const Arguments& given, bool causal, bool backward, cudaStream_t stream) {
    float scale = given.scale, masked = given.masked, one = 1;
    std::vector<Count> ids = given.ids;
    std::vector<void*> memory = given.memory;
    const auto give = [&](int id, float& value) { ids.push_back(id), memory.push_back(&value); };
    give(cudnn::scale_id, scale);
    if (causal) give(cudnn::masked_id, masked);
    if (backward) give(cudnn::one_id, one);
    std::lock_guard lock(mutex_);
    cudnn::check(cudnnSetStream(handle_, stream), "take a stream");
    plan.run(handle_, ids, memory, given.workspace);
  }

  device::SHERD_CUDA::Target target_;
  std::size_t version_ = 0;
  std::mutex mutex_;                // the handle serves one thread at a time
  cudnnHandle_t handle_ = nullptr;  // guarded by mutex_
  std::map<PlanKey, std::unique_ptr<Plan>> plans_;
};

}  // namespace

std::shared_ptr<AttentionLibrary> make_attention_library(const device::SHERD_CUDA::Target& target) {
  return std::make_shared<CudnnAttention>(target);
}

}  // namespace sherd::tensor::SHERD_CUDA
