#include <cublasLt.h>

#include <algorithm>
#include <bit>
#include <compare>
#include <map>

#include "tensor/argument_checks.h"
#include "tensor/cuda/cublas_lt_functions.h"
#include "tensor/cuda/cuda_kernels.h"
#include "tensor/cuda/workspace.h"
#include "tensor/extents.h"

// Products by cuBLASLt. Its matrices are column-major, so it is asked for cᵀ = op(b)ᵀ·op(a)ᵀ: what it takes
// for columns are our rows, and a bias along its rows is one along our columns.
//
// The bias is fused where the library adds it to the sum before that rounds. GELU is not, unless
// options.fused_gelu asks for it: the library applies it to the sum before it rounds, while a block whose
// activations are made again in the backward pass sees the rounded sum; the two would differ in their last
// bits, and training with recompute on from training with it off.
//
// The gradient of a bias is a sum of its own (sum_rows), although the library can make it beside a product
// (CUBLASLT_EPILOGUE_BGRADB): nowhere does it say that this sum has one order, it cannot add to what is
// there, its dtype must be the product's, and users report that large products slow down by more than the
// pass costs.
//
// A shape's algorithm is what the library's heuristic names first, found once. It is asked for by what all
// runs of a shape share (never by where the tensors lie), and among algorithms whose sums have one order:
// those that split the inner extent must add their parts up in a pass of their own, in fp32.
//
// Operands in FP8 are as the library has them on Ada and Hopper: its left one transposed and its right one
// not (both are rows of what is summed), extents in multiples of 16, sums of full accuracy (which it calls
// slow accumulation). Rows that pad a are multiplied too, into memory that has them.

namespace sherd::tensor::SHERD_CUDA {
namespace {

void check(cublasStatus_t status, const char* what) {
  if (status == CUBLAS_STATUS_SUCCESS) [[likely]]
    return;
  fail(status == CUBLAS_STATUS_ALLOC_FAILED ? ErrorKind::memory : ErrorKind::io,
       "matmul: cuBLASLt could not ", what, ": ", cublasLtGetStatusString(status), " (",
       cublasLtGetStatusName(status), ")");
}

/// Owns what a create function of cuBLASLt made.
template <class Handle, auto& destroy>
class LtHandle {
 public:
  LtHandle() = default;
  LtHandle(LtHandle&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  LtHandle& operator=(LtHandle&&) = delete;
  ~LtHandle() {
    if (handle_) destroy(handle_);
  }
  Handle* fresh() { return &handle_; }
  operator Handle() const { return handle_; }

 private:
  Handle handle_ = nullptr;
};
using LibraryHandle = LtHandle<cublasLtHandle_t, cublasLtDestroy>;
using Layout = LtHandle<cublasLtMatrixLayout_t, cublasLtMatrixLayoutDestroy>;
using Operation = LtHandle<cublasLtMatmulDesc_t, cublasLtMatmulDescDestroy>;
using Preference = LtHandle<cublasLtMatmulPreference_t, cublasLtMatmulPreferenceDestroy>;

cudaDataType data_type(DType dtype) {
  switch (dtype) {
    case DType::bf16:
      return CUDA_R_16BF;
    case DType::f16:
      return CUDA_R_16F;
    case DType::f64:
      return CUDA_R_64F;
    default:
      return CUDA_R_32F;
  }
}

/// The operands of a product in FP8. `on`: they are.
struct Fp8Operands {
  bool on = false;
  Fp8Format a = Fp8Format::e4m3, b = Fp8Format::e4m3;
  Fp8Scaling a_scaling = Fp8Scaling::tensor, b_scaling = Fp8Scaling::tensor;
  auto operator<=>(const Fp8Operands&) const = default;
};

/// All that the choice of an algorithm depends on. `from`: what the values of operands in FP8 stand for,
/// bf16.
struct ProductKey {
  std::int64_t m, n, k;
  DType from, to;
  bool trans_a, trans_b, accumulate, tf32;
  std::uint32_t alignment;  ///< bytes that all matrices are aligned to; 16 but for tensors at odd places
  cublasLtEpilogue_t epilogue;
  Fp8Operands fp8;
  auto operator<=>(const ProductKey&) const = default;
};

template <class Value>
void set(cublasLtMatmulDesc_t operation, cublasLtMatmulDescAttributes_t attribute, const Value& value) {
  check(cublasLtMatmulDescSetAttribute(operation, attribute, &value, sizeof value), "describe a product");
}
template <class Value>
void set(cublasLtMatmulPreference_t preference, cublasLtMatmulPreferenceAttributes_t attribute,
         const Value& value) {
  check(cublasLtMatmulPreferenceSetAttribute(preference, attribute, &value, sizeof value),
        "describe a choice");
}

/// One shape's product, ready to run.
struct ProductPlan {
  Operation operation;
  Layout left, right, result;  // the library's left is our b
  cublasLtMatmulAlgo_t algorithm{};
  std::size_t workspace = 0;
};

/// The types of a and b.
std::pair<cudaDataType, cudaDataType> operand_types(const ProductKey& key) {
  const auto type = [&](Fp8Format format) {
    if (!key.fp8.on) return data_type(key.from);
    return format == Fp8Format::e4m3 ? CUDA_R_8F_E4M3 : CUDA_R_8F_E5M2;
  };
  return {type(key.fp8.a), type(key.fp8.b)};
}

void lay_out(Layout& layout, cudaDataType type, std::int64_t rows, std::int64_t cols) {
  // Rows of the library are the contiguous ones.
  check(cublasLtMatrixLayoutCreate(layout.fresh(), type, static_cast<std::uint64_t>(rows),
                                   static_cast<std::uint64_t>(cols), rows),
        "describe a matrix");
}

/// Says how operands in FP8 are scaled; the scales come with each call.
void describe_scales(cublasLtMatmulDesc_t operation, const Fp8Operands& fp8, const void* somewhere) {
  set(operation, CUBLASLT_MATMUL_DESC_FAST_ACCUM, std::int8_t{0});
  set(operation, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, somewhere);
  set(operation, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, somewhere);
  if (fp8.a_scaling == Fp8Scaling::tensor) return;  // as it is without saying so
  // By number, for headers before 12.9 have no names for them: CUBLASLT_MATMUL_DESC_A_SCALE_MODE and B's;
  // CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F, _VEC128_32F, _BLK128x128_32F.
  constexpr auto left_mode = static_cast<cublasLtMatmulDescAttributes_t>(31),
                 right_mode = static_cast<cublasLtMatmulDescAttributes_t>(32);
  constexpr std::size_t first_version = 120900;
  if (cublasLtGetVersion() < first_version)
    fail(ErrorKind::config, "matmul: products in FP8 with more than one scale a tensor need cuBLASLt 12.9; ",
         "this one is ", cublasLtGetVersion() / 10000, ".", cublasLtGetVersion() / 100 % 100,
         ". Install a newer one, or set \"fp8.recipe\" to \"current\"");
  const auto mode = [](Fp8Scaling scaling) {
    return std::int32_t{scaling == Fp8Scaling::rows ? 3 : scaling == Fp8Scaling::blocks_1x128 ? 4 : 5};
  };
  set(operation, left_mode, mode(fp8.b_scaling));
  set(operation, right_mode, mode(fp8.a_scaling));
}

Operation describe(const ProductKey& key) {
  const cublasComputeType_t compute = key.from == DType::f64               ? CUBLAS_COMPUTE_64F
                                      : key.from == DType::f32 && key.tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32
                                                                           : CUBLAS_COMPUTE_32F;
  Operation operation;
  check(cublasLtMatmulDescCreate(operation.fresh(), compute, data_type(compute_type(key.from))),
        "describe a product");
  set(operation, CUBLASLT_MATMUL_DESC_TRANSA, key.trans_b ? CUBLAS_OP_T : CUBLAS_OP_N);
  set(operation, CUBLASLT_MATMUL_DESC_TRANSB, key.trans_a ? CUBLAS_OP_T : CUBLAS_OP_N);
  set(operation, CUBLASLT_MATMUL_DESC_EPILOGUE, key.epilogue);
  // The heuristic wants to see pointers, of which it takes the alignment; the real ones come with each call.
  const void* somewhere = reinterpret_cast<const void*>(std::uintptr_t{4096} + key.alignment);
  if (key.epilogue & CUBLASLT_EPILOGUE_BIAS) {
    set(operation, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, data_type(key.from));
    set(operation, CUBLASLT_MATMUL_DESC_BIAS_POINTER, somewhere);
  }
  if (key.epilogue & CUBLASLT_EPILOGUE_GELU_AUX & ~CUBLASLT_EPILOGUE_GELU) {
    set(operation, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, key.n);
    set(operation, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, somewhere);
  }
  if (key.fp8.on) describe_scales(operation, key.fp8, somewhere);
  return operation;
}

Preference preference_for(const ProductKey& key, std::size_t most_workspace) {
  Preference preference;
  check(cublasLtMatmulPreferenceCreate(preference.fresh()), "describe a choice");
  set(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, most_workspace);
  const std::uint32_t reductions = CUBLASLT_REDUCTION_SCHEME_NONE | CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
  set(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, reductions);
  for (const auto attribute :
       {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES})
    set(preference, attribute, key.alignment);
  return preference;
}

std::string name_of_product(const ProductKey& key) {
  const auto name = [](Fp8Format format) { return format == Fp8Format::e4m3 ? "E4M3" : "E5M2"; };
  return cat(key.fp8.on ? cat(name(key.fp8.a), " by ", name(key.fp8.b)) : std::string(name_of(key.from)),
             " [", key.m, ", ", key.k, "]", key.trans_a ? "ᵀ" : "", " times [", key.k, ", ", key.n, "]",
             key.trans_b ? "ᵀ" : "", " into ", name_of(key.to));
}

}  // namespace

void load_matmul_library() {
  cublasLtGetVersion();
}

/// The library's handle and the plans of the shapes met so far. Products are queued by one thread at a time,
/// which may be another than the one that finds plans.
class MatmulLibrary {
 public:
  MatmulLibrary() { check(cublasLtCreate(handle_.fresh()), "start"); }

  /// The plan for `key`, or none where the library has no kernel for it.
  ProductPlan* find(const ProductKey& key) {
    const auto known = plans_.find(key);
    if (known != plans_.end()) return known->second.get();
    return plans_.emplace(key, make(key)).first->second.get();
  }

  /// Where one product finds its operands.
  struct ProductMemory {
    const void *left, *right;
    const void *left_scale, *right_scale;  ///< null: not in FP8
    void* result;
    const void* bias;  ///< null: none that the library adds
    void* pre_activation;
    bool accumulate, wide;  ///< wide: fp64
  };

  /// Queues the product; the caller holds the library until it is queued.
  void run(ProductPlan& plan, const ProductMemory& places, void* workspace, cudaStream_t stream) {
    if (places.bias) set(plan.operation, CUBLASLT_MATMUL_DESC_BIAS_POINTER, places.bias);
    if (places.pre_activation)
      set(plan.operation, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, places.pre_activation);
    if (places.left_scale) {
      set(plan.operation, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, places.left_scale);
      set(plan.operation, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, places.right_scale);
    }
    const double one = 1, zero = 0;
    const float one_f = 1, zero_f = 0;
    const void* alpha = places.wide ? static_cast<const void*>(&one) : &one_f;
    const void* beta = places.wide         ? static_cast<const void*>(places.accumulate ? &one : &zero)
                       : places.accumulate ? &one_f
                                           : &zero_f;
    check(cublasLtMatmul(handle_, plan.operation, alpha, places.left, plan.left, places.right, plan.right,
                         beta, places.result, plan.result, places.result, plan.result, &plan.algorithm,
                         workspace, plan.workspace, stream),
          "multiply");
  }

 private:
  std::unique_ptr<ProductPlan> make(const ProductKey& key) {
    auto plan = std::make_unique<ProductPlan>(ProductPlan{describe(key), {}, {}, {}});
    const auto [a, b] = operand_types(key);
    lay_out(plan->left, b, key.trans_b ? key.k : key.n, key.trans_b ? key.n : key.k);
    lay_out(plan->right, a, key.trans_a ? key.m : key.k, key.trans_a ? key.k : key.m);
    lay_out(plan->result, data_type(key.to), key.n, key.m);
    const Preference preference = preference_for(key, most_matmul_workspace);
    cublasLtMatmulHeuristicResult_t found{};
    int count = 0;
    const cublasStatus_t status =
        cublasLtMatmulAlgoGetHeuristic(handle_, plan->operation, plan->left, plan->right, plan->result,
                                       plan->result, preference, 1, &found, &count);
    if (status == CUBLAS_STATUS_NOT_SUPPORTED) return nullptr;
    check(status, "choose an algorithm");
    if (count == 0 || found.state != CUBLAS_STATUS_SUCCESS) return nullptr;
    plan->algorithm = found.algo, plan->workspace = found.workspaceSize;
    return plan;
  }

  LibraryHandle handle_;
  std::map<ProductKey, std::unique_ptr<ProductPlan>> plans_;
};

namespace {

/// 16, or less where one of the tensors begins at an odd place; those that are not there begin at none.
std::uint32_t alignment_of(std::initializer_list<const Tensor*> tensors) {
  std::uintptr_t all = 16;
  for (const Tensor* t : tensors)
    if (*t) all |= reinterpret_cast<std::uintptr_t>(t->raw());
  return 1u << std::countr_zero(all);
}

/// Which steps of one call the library takes, and where the product goes.
class Steps {
 public:
  Steps(const Matmul& args, const MatmulExtents& e, const CudaOptions& options)
      : args_(args), e_(e), tf32_(options.tf32) {
    const DType from = operands();
    // The library's bias has the dtype of its result, and with operands in FP8 is bf16; in fp64 it has none.
    fused_bias = args.bias &&
                 (fp8() ? alignment_of({&args.bias}) == 16 : from == args.c.dtype() && from != DType::f64);
    fused_gelu = !fp8() && options.fused_gelu && args.activation == Activation::gelu_tanh &&
                 size_of(from) == 2 && args.c.dtype() == from && (!args.bias || fused_bias) &&
                 (!args.pre_activation || e.n % 8 == 0);
    const bool apart = args.pre_activation && args.activation != Activation::none && !fused_gelu;
    result = apart ? args.pre_activation : args.c;
  }

  Tensor result;  ///< pre_activation where it is asked for and comes first
  /// The sums in fp32, before they round: where a bias is added that the library does not fuse, and where the
  /// result lacks the rows that pad a, or lies at an odd place.
  Tensor wide;
  bool fused_bias = false, fused_gelu = false;

  bool fp8() const { return static_cast<bool>(args_.fp8_a); }
  const Tensor& left() const { return fp8() ? args_.fp8_b.codes : args_.b; }
  const Tensor& right() const { return fp8() ? args_.fp8_a.codes : args_.a; }
  const Tensor& sums() const { return wide ? wide : result; }
  /// Whether a product in FP8 that goes to `wide` is added to c by a kernel of its own.
  bool adds_apart() const { return fp8() && wide && args_.accumulate; }

  /// The plan of the product: what the library does not do beside it is done apart. scratch(n): n fp32
  /// numbers.
  template <class Scratch>
  ProductPlan* choose(MatmulLibrary& library, const Scratch& scratch) {
    const auto widen = [&] {
      const std::int64_t rows = fp8() ? fp8_padded(e_.m) : e_.m;
      wide = scratch(rows * e_.n).reshape({rows, e_.n}).rows(0, e_.m);
    };
    if (fp8()) {
      require(e_.n % fp8_alignment == 0, "matmul: a product in FP8 has ", e_.n,
              " columns; a GPU needs a multiple of ", fp8_alignment);
      const bool bias_apart = args_.bias && !fused_bias && size_of(result.dtype()) == 2;
      if (e_.m % fp8_alignment != 0 || alignment_of({&result}) < 16 || bias_apart) widen();
    }
    ProductPlan* plan = library.find(key());
    if (!plan && fused_gelu) {
      fused_gelu = false;
      if (args_.pre_activation) result = args_.pre_activation;
      plan = library.find(key());
    }
    if (!plan && fused_bias) {
      fused_bias = false;
      if (!wide && size_of(result.dtype()) == 2) widen();
      plan = library.find(key());
    }
    require(plan, "matmul: cuBLASLt has no kernel for ", name_of_product(key()), ", aligned to ",
            key().alignment, " bytes");
    return plan;
  }

 private:
  DType operands() const { return fp8() ? DType::bf16 : args_.a.dtype(); }

  ProductKey key() const {
    const std::uint32_t alignment =
        fp8() ? alignment_of({&left(), &right(), &sums(), &args_.fp8_a.scales, &args_.fp8_b.scales})
              : alignment_of({&left(), &right(), &sums(), &args_.bias, &args_.pre_activation});
    ProductKey key{e_.m,          e_.n,  e_.k,  operands(), sums().dtype(), args_.trans_a,
                   args_.trans_b, false, tf32_, alignment,  epilogue(),     {}};
    key.accumulate = args_.accumulate && !adds_apart();
    if (!fp8()) return key;
    key.m = fp8_padded(e_.m), key.k = fp8_padded(e_.k), key.trans_b = true, key.tf32 = false;
    const Fp8Rule &a = args_.fp8_a.rule, &b = args_.fp8_b.rule;
    key.fp8 = {true, a.format, b.format, a.scaling, b.scaling};
    return key;
  }

  cublasLtEpilogue_t epilogue() const {
    if (!fused_gelu) return fused_bias ? CUBLASLT_EPILOGUE_BIAS : CUBLASLT_EPILOGUE_DEFAULT;
    if (args_.pre_activation)
      return args_.bias ? CUBLASLT_EPILOGUE_GELU_AUX_BIAS : CUBLASLT_EPILOGUE_GELU_AUX;
    return args_.bias ? CUBLASLT_EPILOGUE_GELU_BIAS : CUBLASLT_EPILOGUE_GELU;
  }

  const Matmul& args_;
  const MatmulExtents& e_;
  bool tf32_;
};

}  // namespace

void CudaKernels::matmul(const Matmul& args) {
  require(!args.fold, "matmul: a GPU folds no products");
  const MatmulExtents e = check_matmul(args);
  for (const Fp8Matrix* x : {&args.fp8_a, &args.fp8_b})
    if (*x) require_fp8_scaling("matmul: this product in FP8", x->rule.scaling);
  if (e.m == 0 || e.n == 0) return;
  Steps steps(args, e, options);
  if (e.k == 0) {
    if (!args.accumulate) fill(steps.result, 0);
    steps.fused_bias = steps.fused_gelu = false;
  } else {
    if (!matmul_library_) matmul_library_ = std::make_shared<MatmulLibrary>();
    ProductPlan* const plan =
        steps.choose(*matmul_library_, [&](std::int64_t n) { return scratch(n, DType::f32); });
    if (steps.wide && args.accumulate && !steps.adds_apart()) copy(steps.result, steps.wide);
    const MatmulLibrary::ProductMemory places{
        steps.left().raw(),
        steps.right().raw(),
        steps.fp8() ? args.fp8_b.scales.raw() : nullptr,
        steps.fp8() ? args.fp8_a.scales.raw() : nullptr,
        steps.sums().raw(),
        steps.fused_bias ? args.bias.raw() : nullptr,
        steps.fused_gelu && args.pre_activation ? args.pre_activation.raw() : nullptr,
        args.accumulate && !steps.adds_apart(),
        !steps.fp8() && compute_type(args.a.dtype()) == DType::f64};
    Tensor workspace;  // stream order lets it go before the product has run
    if (plan->workspace)
      workspace = Tensor::empty(target_.device, {static_cast<std::int64_t>(plan->workspace)}, DType::u8,
                                Category::workspace);
    void* const at = workspace ? workspace.raw() : nullptr;
    const auto key = device::bytes_of(places.left, places.right, places.left_scale, places.right_scale,
                                      places.result, places.bias, places.pre_activation, at);
    target_.stream->call({plan, key, [library = matmul_library_, plan, places, at](void* stream) {
                            library->run(*plan, places, at, static_cast<cudaStream_t>(stream));
                          }});
  }
  if (args.bias && !steps.fused_bias) add_row(target_, steps.sums(), args.bias, steps.sums());
  if (steps.adds_apart())
    copy_rows({steps.wide}, {steps.result}, 1, steps.result.numel(), true);
  else if (steps.wide)
    copy(steps.wide, steps.result);
  if (steps.fused_gelu) return;
  if (args.activation != Activation::none)
    activation(args.activation, steps.result, args.c);
  else if (args.pre_activation)
    copy(args.c, args.pre_activation);
}

}  // namespace sherd::tensor::SHERD_CUDA
