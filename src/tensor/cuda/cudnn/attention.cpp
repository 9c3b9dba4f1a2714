#include <cuda_runtime_api.h>
#include <cudnn_graph.h>
#include <nvrtc.h>

#include <algorithm>
#include <bit>
#include <compare>
#include <limits>
#include <map>
#include <mutex>

#include "base/log.h"
#include "device/cuda/driver.h"
#include "tensor/cuda/attention/attention_library.h"
#include "tensor/cuda/cudnn/attention_graph.h"
#include "tensor/cuda/cudnn/cudnn_functions.h"
#include "tensor/cuda/cudnn/plan_cache.h"
#include "tensor/cuda/workspace.h"

namespace sherd::tensor::SHERD_CUDA {
namespace {

using cudnn::ExecutionPlan;
using cudnn::GraphSlice;
using cudnn::OperationGraph;
using Count = std::int64_t;

/// The library that cuDNN compiles its attention with. It looks for it by name alone, and finds what is
/// loaded.
device::cuda::LazyLibrary nvrtc_library({.title = "NVRTC",
                                         .stem = "nvrtc",
                                         .major = CUDART_VERSION / 1000,
                                         .folder = SHERD_CUBLASLT_FOLDER,
                                         .package = "CUDA's runtime compiler (libnvrtc)"});
SHERD_LAZY_FUNCTION(nvrtc_library, nvrtcVersion);

struct PlanKey {
  GraphSlice slice;
  DType dtype;
  bool causal, backward, deterministic;
  auto operator<=>(const PlanKey&) const = default;
};

/// cuDNN on one GPU, for all ranks and kernels of the process: its handle, and the plans, which take seconds
/// to compile. One that is usable is never destroyed; else it is tried again for whoever comes next.
class CudnnGpu {
 public:
  static std::shared_ptr<CudnnGpu> of(int ordinal) {
    static std::mutex mutex;
    static auto& all = *new std::map<int, std::shared_ptr<CudnnGpu>>;  // guarded by mutex
    std::lock_guard lock(mutex);
    std::shared_ptr<CudnnGpu>& gpu = all[ordinal];
    if (!gpu || !gpu->usable()) gpu.reset(new CudnnGpu(ordinal));
    return gpu;
  }

  bool usable() const { return handle_ != nullptr; }
  std::size_t version() const { return version_; }

  /// The plan, or none where the library has no kernel; said once for every shape.
  const ExecutionPlan* find(const PlanKey& key) {
    const auto make = [&] {
      const device::cuda::OnGpu on(ordinal_);
      const cudnnDataType_t type = key.dtype == DType::bf16 ? CUDNN_DATA_BFLOAT16 : CUDNN_DATA_HALF;
      OperationGraph graph = key.backward
                                 ? cudnn::backward_graph(key.slice, type, key.causal, key.deterministic)
                                 : cudnn::forward_graph(key.slice, type, key.causal);
      std::lock_guard lock(mutex_);
      return std::make_unique<ExecutionPlan>(handle_, std::move(graph), key.deterministic);
    };
    return plans_.find(key, make, [&](const Error& error) {
      log_warning("attention", key.backward ? "'s gradient" : "", " for heads of ", key.slice.dim,
                  ", sequences of ", key.slice.seq, " in ", name_of(key.dtype),
                  ": Sherd's own kernels, which are slower, instead of cuDNN's: ", error.what(),
                  no_compiler_.empty() ? "" : "; ", no_compiler_);
    });
  }

  /// Runs a plan on `stream`, on whichever thread hands work over.
  void run(const ExecutionPlan& plan, const std::vector<Count>& ids, const std::vector<void*>& memory,
           void* workspace, cudaStream_t stream) {
    std::lock_guard lock(mutex_);
    cudnn::check(cudnnSetStream(handle_, stream), "take a stream");
    plan.run(handle_, ids, memory, workspace);
  }

 private:
  explicit CudnnGpu(int ordinal) : ordinal_(ordinal) {
    try {
      int major = 0, minor = 0;
      nvrtcVersion(&major, &minor);
    } catch (const Error& error) {
      no_compiler_ = error.what();  // cuDNN may know where it is
    }
    try {
      version_ = cudnnGetVersion();
      const device::cuda::OnGpu on(ordinal);
      cudnn::check(cudnnCreate(&handle_), "start");
    } catch (const Error& error) {
      handle_ = nullptr;
      log_warning("attention: Sherd's own kernels, which are slower, instead of cuDNN's: ", error.what());
    }
  }

  const int ordinal_;
  std::size_t version_ = 0;
  std::string no_compiler_;  ///< why NVRTC is not loaded
  std::mutex mutex_;         // the handle serves one thread at a time
  cudnnHandle_t handle_ = nullptr;
  cudnn::PlanCache<PlanKey, ExecutionPlan> plans_;
};

class CudnnAttention final : public AttentionLibrary {
 public:
  explicit CudnnAttention(const device::SHERD_CUDA::Target& target)
      : target_(target), gpu_(CudnnGpu::of(target.ordinal)) {}

  bool forward(const AttentionCall& call) override { return takes(call) && run(call, false, true); }

  bool backward(const AttentionCall& call, bool deterministic) override {
    // Up to 9.15 the last, partial tile of keys comes out wrong without a mask for padding; 9.11 and 9.12
    // take long heads on Hopper that they get wrong.
    const bool long_heads = call.extents.dim > 128, partial = call.extents.seq % 128 != 0;
    const std::size_t version = gpu_->version();
    if (!takes(call) || (version <= 91500 && partial)) return false;
    if (version >= 91100 && version < 91300 && long_heads) return false;
    return run(call, true, deterministic);
  }

 private:
  /// Whether a call is worth asking the library for.
  bool takes(const AttentionCall& call) const {
    const AttentionExtents& e = call.extents;
    const std::size_t version = gpu_->version();
    const bool known_good = version >= 90100 && version != 91000 && version != 91001;
    if (!gpu_->usable() || !known_good || !attention_by_library(e, call.geometry, call.qkv.dtype()))
      return false;
    for (const Tensor* t : {&call.qkv, &call.out, &call.lse, &call.dout, &call.dqkv})
      if (*t && reinterpret_cast<std::uintptr_t>(t->raw()) % 16 != 0) return false;
    return true;
  }

  /// How a call is cut: `key` says what one run of the library takes.
  struct BatchCut {
    const ExecutionPlan* whole = nullptr;  ///< none: the library has no kernel
    PlanKey key{};
    Count batch = 0;  ///< sequences of the whole slice
    bool regrouped = false;
  };

  /// Cuts a call as its workspace allows (workspace.h counts alike).
  BatchCut cut(const AttentionCall& call, bool backward, bool deterministic) {
    const AttentionExtents& e = call.extents;
    const auto with = [&](bool regrouped) {
      const PlanKey key{cudnn::slice_of(e, regrouped), call.qkv.dtype(), e.causal(), backward, deterministic};
      BatchCut cut{nullptr, key, key.slice.batch, regrouped};
      const auto bytes = [&] {
        cut.whole = gpu_->find(cut.key);
        const std::size_t beside = regrouped ? regrouped_bytes(e, cut.key.slice.batch, backward) : 0;
        return cut.whole ? cut.whole->workspace() + beside : 0;
      };
      while (bytes() > most_attention_workspace && cut.key.slice.batch > 1)
        cut.key.slice.batch = (cut.key.slice.batch + 1) / 2;
      return cut;
    };
    if (regroups(e) && e.batch > 1)
      if (const BatchCut several = with(true); several.whole && several.key.slice.batch > 1) return several;
    return with(false);
  }

  bool run(const AttentionCall& call, bool backward, bool deterministic) {
    const AttentionExtents& e = call.extents;
    const BatchCut cut = this->cut(call, backward, deterministic);
    const GraphSlice& s = cut.key.slice;
    PlanKey last = cut.key;
    last.slice.batch = (cut.batch - 1) % s.batch + 1;
    const ExecutionPlan* rest = last == cut.key ? cut.whole : gpu_->find(last);
    if (!cut.whole || !rest || !cudnn::stays_aligned(e, s)) return false;
    // Parts run one after the other on the stream, so they share what they work in.
    const Count regrouped = cut.regrouped ? s.batch * e.seq * e.width() * 2 : 0;
    const RunMemory work{scratch(static_cast<Count>(std::max(cut.whole->workspace(), rest->workspace()))),
                         scratch(backward ? s.batch * s.heads * s.seq * 4 : 0),
                         scratch(backward && !deterministic ? s.batch * s.heads * s.seq * s.dim * 4 : 0),
                         scratch(regrouped), scratch(backward ? regrouped : 0)};
    for (Count slice = 0; slice < e.batch * e.heads / (cut.batch * s.heads); ++slice)
      for (Count first = 0; first < cut.batch; first += s.batch) {
        const Offsets at{slice * e.seq * e.width() + first * s.batch_stride,
                         slice * e.seq * e.heads * e.dim + first * s.out_batch_stride,
                         (slice * e.heads + first * s.heads) * e.seq};
        if (work.sums && gpu_->version() < 90600) zero(work.sums);
        const Count count = std::min(s.batch, cut.batch - first);
        run_part(call, cut, count < s.batch ? *rest : *cut.whole, at, work, count);
      }
    return true;
  }

  /// Memory of one call beside its tensors: cuDNN's own, row sums of dout·out, dq in fp32, and projections
  /// and their gradient by kind of head.
  struct RunMemory {
    Tensor workspace, delta, sums, regrouped, gradient;
  };
  /// Elements from the beginning of the packed projections, the result and lse.
  struct Offsets {
    Count packed, result, lse;
  };

  Tensor scratch(Count bytes) const {
    return bytes ? Tensor::empty(target_.device, {bytes}, DType::u8, Category::workspace) : Tensor();
  }

  void zero(const Tensor& t) { target_.device.zero(t.raw(), t.bytes()); }

  /// The arguments of one run of a plan: memory by id, and numbers that the library reads from the host as it
  /// is called.
  struct Arguments {
    std::vector<Count> ids;
    std::vector<void*> memory;
    void* workspace = nullptr;
    float scale = 1, masked = 0;
  };

  /// `count` sequences, or groups, of the call.
  void run_part(const AttentionCall& call, const BatchCut& cut, const ExecutionPlan& plan,
                const Offsets& from, const RunMemory& work, Count count) {
    const AttentionExtents& e = call.extents;
    const bool backward = cut.key.backward;
    constexpr Count element = 2;
    std::byte* const packed = call.qkv.raw() + from.packed * element;
    std::byte* const gradient = backward ? call.dqkv.raw() + from.packed * element : nullptr;
    const Count heads = e.heads * e.dim;
    const Count columns[3] = {0, cut.regrouped ? heads : e.key_col(0),
                              cut.regrouped ? heads + e.kv_heads * e.dim : e.value_col(0)};
    if (cut.regrouped) regroup_heads(target_, e, packed, work.regrouped.raw(), count * e.seq, false);
    Arguments arguments;
    arguments.scale = static_cast<float>(e.scale);
    arguments.workspace = work.workspace ? work.workspace.raw() : nullptr;
    // Older versions prefer a finite mask.
    arguments.masked = gpu_->version() < 91000 ? std::numeric_limits<float>::lowest()
                                               : -std::numeric_limits<float>::infinity();
    const auto give = [&](int id, void* at) { arguments.ids.push_back(id), arguments.memory.push_back(at); };
    const auto give_heads = [&](int id, std::byte* at) {
      for (int part = 0; part < 3; ++part) give(id + part, at + columns[part] * element);
    };
    give_heads(cudnn::q_id, cut.regrouped ? work.regrouped.raw() : packed);
    give(cudnn::out_id, call.out.raw() + from.result * element);
    give(cudnn::lse_id, call.lse.raw() + from.lse * 4);
    if (backward) {
      give(cudnn::dout_id, call.dout.raw() + from.result * element);
      give_heads(cudnn::dq_id, cut.regrouped ? work.gradient.raw() : gradient);
      give(cudnn::delta_id, work.delta.raw());
      if (work.sums) give(cudnn::dq_sums_id, work.sums.raw());
    }
    queue(plan, std::move(arguments), cut.key.causal, backward);
    if (cut.regrouped && backward)
      regroup_heads(target_, e, work.gradient.raw(), gradient, count * e.seq, true);
  }

  void queue(const ExecutionPlan& plan, Arguments arguments, bool causal, bool backward) {
    std::vector<void*> at = arguments.memory;
    at.push_back(arguments.workspace);
    at.push_back(reinterpret_cast<void*>(std::uintptr_t{std::bit_cast<std::uint32_t>(arguments.scale)}));
    target_.stream->call({&plan, std::as_bytes(std::span(at)),
                          [gpu = gpu_, &plan, given = std::move(arguments), causal, backward](void* stream) {
                            float scale = given.scale, masked = given.masked, one = 1;
                            std::vector<Count> ids = given.ids;
                            std::vector<void*> memory = given.memory;
                            const auto give = [&](int id, float& value) {
                              ids.push_back(id), memory.push_back(&value);
                            };
                            give(cudnn::scale_id, scale);
                            if (causal) give(cudnn::masked_id, masked);
                            if (backward) give(cudnn::one_id, one);
                            gpu->run(plan, ids, memory, given.workspace, static_cast<cudaStream_t>(stream));
                          }});
  }

  device::SHERD_CUDA::Target target_;
  std::shared_ptr<CudnnGpu> gpu_;
};

}  // namespace

std::shared_ptr<AttentionLibrary> make_attention_library(const device::SHERD_CUDA::Target& target) {
  return std::make_shared<CudnnAttention>(target);
}

}  // namespace sherd::tensor::SHERD_CUDA
