// What Sherd uses of cuBLASLt, on emulated GPUs: plain sums in fp64, whatever the compute type, rounded once
// to the result's. An algorithm runs only as it was chosen: with its workspace, and on matrices as aligned as
// the preference said. Operands in FP8 are taken as its documentation has them for Ada and Hopper
// ("cublasLtMatmul", "Narrow Precision Data Types Usage"), on the card that SHERD_EMULATED_GPU_CAPABILITY
// says.
#include <cublasLt.h>

#include <cmath>
#include <cstring>
#include <vector>

#include "base/dtype.h"
#include "emulated_gpu/card.h"

namespace {

using namespace sherd;
using namespace sherd::emulated_gpu;

struct Layout {
  cudaDataType type;
  std::uint64_t rows, cols;
  std::int64_t leading;
};
struct Operation {
  cublasComputeType_t compute;
  cudaDataType scale;
  cublasOperation_t trans_a = CUBLAS_OP_N, trans_b = CUBLAS_OP_N;
  cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_DEFAULT;
  const void* bias = nullptr;
  cudaDataType bias_type = CUDA_R_32F;
  void* aux = nullptr;
  std::int64_t aux_leading = 0;
  const float *scale_a = nullptr, *scale_b = nullptr;
  std::int32_t mode_a = 0, mode_b = 0;
  std::int8_t fast_sums = 0;
};
constexpr std::size_t workspace_bytes = 4096;

struct Preference {
  std::uint64_t most_workspace = 0;
  std::uint32_t alignment_a = 256, alignment_b = 256, alignment_c = 256, alignment_d = 256;  // bytes
};
/// The contents of a cublasLtMatmulAlgo_t.
struct Choice {
  std::uint64_t workspace;
  std::uint32_t alignment_a, alignment_b, alignment_c, alignment_d;
};
static_assert(sizeof(Choice) <= sizeof(cublasLtMatmulAlgo_t));

Layout& layout_of(cublasLtMatrixLayout_t layout) {
  return *reinterpret_cast<Layout*>(layout);
}
Operation& operation_of(cublasLtMatmulDesc_t operation) {
  return *reinterpret_cast<Operation*>(operation);
}
Preference& preference_of(cublasLtMatmulPreference_t preference) {
  return *reinterpret_cast<Preference*>(preference);
}

bool aligned(const void* data, std::uint32_t to) {
  return reinterpret_cast<std::uintptr_t>(data) % to == 0;
}

bool is_fp8(cudaDataType type) {
  return type == CUDA_R_8F_E4M3 || type == CUDA_R_8F_E5M2;
}

std::size_t width_of(cudaDataType type) {
  if (is_fp8(type)) return 1;
  return type == CUDA_R_64F ? 8 : type == CUDA_R_32F ? 4 : 2;
}

/// Sign, exponent and mantissa as the format's paper has them.
double fp8_value(unsigned code, cudaDataType type) {
  const bool e4m3 = type == CUDA_R_8F_E4M3;
  const int mantissa_bits = e4m3 ? 3 : 2, bias = e4m3 ? 7 : 15;
  const int exponent = static_cast<int>((code & 0x7fu) >> mantissa_bits);
  const int mantissa = static_cast<int>(code & ((1u << mantissa_bits) - 1));
  const double sign = code & 0x80u ? -1 : 1;
  if (e4m3 ? (code & 0x7fu) == 0x7f : exponent == 31 && mantissa != 0) return std::nan("");
  if (!e4m3 && exponent == 31) return sign * INFINITY;
  const int whole = exponent == 0 ? mantissa : mantissa + (1 << mantissa_bits);
  return sign * std::ldexp(whole, (exponent == 0 ? 1 : exponent) - bias - mantissa_bits);
}

double load(const void* data, cudaDataType type, std::int64_t at) {
  switch (type) {
    case CUDA_R_8F_E4M3:
    case CUDA_R_8F_E5M2:
      return fp8_value(static_cast<const unsigned char*>(data)[at], type);
    case CUDA_R_64F:
      return static_cast<const double*>(data)[at];
    case CUDA_R_32F:
      return static_cast<const float*>(data)[at];
    case CUDA_R_16BF:
      return static_cast<float>(static_cast<const bf16*>(data)[at]);
    default:
      return static_cast<float>(static_cast<const f16*>(data)[at]);
  }
}

void store(void* data, cudaDataType type, std::int64_t at, double value) {
  const auto narrow = static_cast<float>(value);
  if (type == CUDA_R_64F)
    static_cast<double*>(data)[at] = value;
  else if (type == CUDA_R_32F)
    static_cast<float*>(data)[at] = narrow;
  else if (type == CUDA_R_16BF)
    static_cast<bf16*>(data)[at] = bf16(narrow);
  else
    static_cast<f16*>(data)[at] = f16(narrow);
}

/// op(matrix) by rows.
std::vector<double> widened(const void* data, const Layout& layout, bool transposed) {
  const auto rows = static_cast<std::int64_t>(layout.rows), cols = static_cast<std::int64_t>(layout.cols);
  memory().require_known(data,
                         static_cast<std::size_t>((cols - 1) * layout.leading + rows) * width_of(layout.type),
                         "a product");
  std::vector<double> out(static_cast<std::size_t>(rows * cols));
  std::size_t to = 0;
  for (std::int64_t i = 0; i < (transposed ? cols : rows); ++i)
    for (std::int64_t j = 0; j < (transposed ? rows : cols); ++j)
      out[to++] = load(data, layout.type, transposed ? j + i * layout.leading : i + j * layout.leading);
  return out;
}

/// Scales of a matrix in FP8 of so many columns (of the library's, each of `depth` numbers that are summed).
struct Scales {
  const float* at;
  std::int32_t mode;
  std::int64_t columns, depth;

  std::int64_t across() const { return ((depth + 127) / 128 + 3) / 4 * 4; }
  std::int64_t count() const {
    switch (mode) {
      case CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F:
        return columns;
      case CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F:
        return columns * ((depth + 127) / 128);
      case CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F:
        return (columns + 127) / 128 * across();
      default:
        return 1;
    }
  }
  double of(std::int64_t column, std::int64_t p) const {
    switch (mode) {
      case CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F:
        return at[column];
      case CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F:
        return at[p / 128 * columns + column];
      case CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F:
        return at[column / 128 * across() + p / 128];
      default:
        return at[0];
    }
  }
  /// Multiplies numbers that lie column by column.
  void apply(std::vector<double>& values) const {
    memory().require_known(at, static_cast<std::size_t>(count()) * sizeof(float), "scales of a product");
    for (std::int64_t i = 0; i < columns * depth; ++i)
      values[static_cast<std::size_t>(i)] *= of(i / depth, i % depth);
  }
};

/// Whether the library has a product of these, of which one is in FP8, on this card.
bool has_fp8_product(const Operation& asked, const Layout& a, const Layout& b, const Layout& d) {
  const int card = capability();
  const auto in_sixteens = [](const Layout& x) {
    return x.rows % 16 == 0 && x.cols % 16 == 0 && x.leading % 16 == 0;
  };
  const auto blocks = [](std::int32_t mode) {
    return mode == CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F ||
           mode == CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F;
  };
  const bool one_scale = asked.mode_a == 0 && asked.mode_b == 0;
  const bool modes = one_scale ||
                     (asked.mode_a == CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F &&
                      asked.mode_b == CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F) ||
                     (blocks(asked.mode_a) && blocks(asked.mode_b) &&
                      (asked.mode_a == CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F ||
                       asked.mode_b == CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F));
  return is_fp8(a.type) && is_fp8(b.type) && (a.type == CUDA_R_8F_E4M3 || b.type == CUDA_R_8F_E4M3) &&
         (d.type == CUDA_R_16BF || d.type == CUDA_R_32F) && asked.trans_a == CUBLAS_OP_T &&
         asked.trans_b == CUBLAS_OP_N && asked.compute == CUBLAS_COMPUTE_32F && asked.scale == CUDA_R_32F &&
         in_sixteens(a) && in_sixteens(b) && in_sixteens(d) && modes && asked.scale_a && asked.scale_b &&
         asked.fast_sums == 0 && (one_scale ? card >= 89 : card == 90) &&
         (asked.epilogue == CUBLASLT_EPILOGUE_DEFAULT ||
          (asked.epilogue == CUBLASLT_EPILOGUE_BIAS && asked.bias_type == CUDA_R_16BF));
}

double gelu(double x) {
  return 0.5 * x * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
}

struct Product {
  Operation operation;
  Layout a, b, d;
  const void *a_data, *b_data;
  void* d_data;
  double alpha, beta;
  void* workspace;

  void run() const {
    if (workspace) {
      memory().require_known(workspace, workspace_bytes, "a product");
      std::memset(workspace, 0xff, workspace_bytes);
    }
    std::vector<double> left = widened(a_data, a, operation.trans_a == CUBLAS_OP_T);
    // By columns: the transposed of op(b) by rows.
    std::vector<double> right = widened(b_data, b, operation.trans_b != CUBLAS_OP_T);
    const auto m = static_cast<std::int64_t>(d.rows), n = static_cast<std::int64_t>(d.cols);
    const auto k = static_cast<std::int64_t>(left.size()) / m;
    if (is_fp8(a.type)) {
      Scales{operation.scale_a, operation.mode_a, m, k}.apply(left);
      Scales{operation.scale_b, operation.mode_b, n, k}.apply(right);
    }
    memory().require_known(d_data, static_cast<std::size_t>((n - 1) * d.leading + m) * width_of(d.type),
                           "a product");
    for (std::int64_t j = 0; j < n; ++j)
      for (std::int64_t i = 0; i < m; ++i) {
        double sum = 0;
        for (std::int64_t p = 0; p < k; ++p)
          sum += left[static_cast<std::size_t>(i * k + p)] * right[static_cast<std::size_t>(j * k + p)];
        const std::int64_t at = i + j * d.leading;
        sum = alpha * sum + (beta != 0 ? beta * load(d_data, d.type, at) : 0);
        store(d_data, d.type, at, finish(sum, i, j));
      }
  }

  double finish(double sum, std::int64_t row, std::int64_t col) const {
    if (operation.epilogue & CUBLASLT_EPILOGUE_BIAS) sum += load(operation.bias, operation.bias_type, row);
    if (!(operation.epilogue & CUBLASLT_EPILOGUE_GELU)) return sum;
    if (operation.aux) store(operation.aux, d.type, row + col * operation.aux_leading, sum);
    return gelu(sum);
  }
};

template <class Value>
cublasStatus_t take(Value& to, const void* from, std::size_t bytes) {
  if (bytes != sizeof to) return CUBLAS_STATUS_INVALID_VALUE;
  std::memcpy(&to, from, bytes);
  return CUBLAS_STATUS_SUCCESS;
}

double number(const void* data, cudaDataType type) {
  return load(data, type, 0);
}

}  // namespace

extern "C" {

std::size_t cublasLtGetVersion() {
  return CUBLAS_VERSION;
}
cublasStatus_t cublasLtCreate(cublasLtHandle_t* handle) {
  *handle = reinterpret_cast<cublasLtHandle_t>(new int(0));
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle) {
  delete reinterpret_cast<int*>(handle);
  return CUBLAS_STATUS_SUCCESS;
}
const char* cublasLtGetStatusName(cublasStatus_t) {
  return "a status of the emulated GPU";
}
const char* cublasLtGetStatusString(cublasStatus_t status) {
  return cublasLtGetStatusName(status);
}

cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* out, cudaDataType type, std::uint64_t rows,
                                          std::uint64_t cols, std::int64_t leading) {
  *out = reinterpret_cast<cublasLtMatrixLayout_t>(new Layout{type, rows, cols, leading});
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatrixLayoutDestroy(const cublasLtMatrixLayout_t layout) {
  delete reinterpret_cast<Layout*>(layout);
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* out, cublasComputeType_t compute,
                                        cudaDataType_t scale) {
  *out = reinterpret_cast<cublasLtMatmulDesc_t>(new Operation{compute, scale});
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulDescDestroy(const cublasLtMatmulDesc_t operation) {
  delete reinterpret_cast<Operation*>(operation);
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t operation,
                                              cublasLtMatmulDescAttributes_t which, const void* value,
                                              std::size_t bytes) {
  Operation& to = operation_of(operation);
  switch (which) {
    case CUBLASLT_MATMUL_DESC_TRANSA:
      return take(to.trans_a, value, bytes);
    case CUBLASLT_MATMUL_DESC_TRANSB:
      return take(to.trans_b, value, bytes);
    case CUBLASLT_MATMUL_DESC_EPILOGUE:
      return take(to.epilogue, value, bytes);
    case CUBLASLT_MATMUL_DESC_BIAS_POINTER:
      return take(to.bias, value, bytes);
    case CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE:
      return take(to.bias_type, value, bytes);
    case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER:
      return take(to.aux, value, bytes);
    case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD:
      return take(to.aux_leading, value, bytes);
    case CUBLASLT_MATMUL_DESC_A_SCALE_POINTER:
      return take(to.scale_a, value, bytes);
    case CUBLASLT_MATMUL_DESC_B_SCALE_POINTER:
      return take(to.scale_b, value, bytes);
    case CUBLASLT_MATMUL_DESC_A_SCALE_MODE:
      return take(to.mode_a, value, bytes);
    case CUBLASLT_MATMUL_DESC_B_SCALE_MODE:
      return take(to.mode_b, value, bytes);
    case CUBLASLT_MATMUL_DESC_FAST_ACCUM:
      return take(to.fast_sums, value, bytes);
    default:
      return CUBLAS_STATUS_INVALID_VALUE;
  }
}

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* out) {
  *out = reinterpret_cast<cublasLtMatmulPreference_t>(new Preference);
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceDestroy(const cublasLtMatmulPreference_t preference) {
  delete &preference_of(preference);
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t preference,
                                                    cublasLtMatmulPreferenceAttributes_t which,
                                                    const void* value, std::size_t bytes) {
  Preference& to = preference_of(preference);
  std::uint32_t reductions = 0;  // there is one way to sum here
  switch (which) {
    case CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES:
      return take(to.most_workspace, value, bytes);
    case CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK:
      return take(reductions, value, bytes);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES:
      return take(to.alignment_a, value, bytes);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES:
      return take(to.alignment_b, value, bytes);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES:
      return take(to.alignment_c, value, bytes);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES:
      return take(to.alignment_d, value, bytes);
    default:
      return CUBLAS_STATUS_INVALID_VALUE;
  }
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, const cublasLtMatmulDesc_t operation,
                                              const cublasLtMatrixLayout_t a, const cublasLtMatrixLayout_t b,
                                              const cublasLtMatrixLayout_t, const cublasLtMatrixLayout_t d,
                                              const cublasLtMatmulPreference_t preference, int,
                                              cublasLtMatmulHeuristicResult_t found[], int* count) {
  const Operation& asked = operation_of(operation);
  const auto extent = [](const Layout& layout, cublasOperation_t op, bool first) {
    return (op == CUBLAS_OP_T) == first ? layout.cols : layout.rows;
  };
  const Layout &left = layout_of(a), &right = layout_of(b), &result = layout_of(d);
  if (extent(left, asked.trans_a, true) != result.rows ||
      extent(right, asked.trans_b, false) != result.cols ||
      extent(left, asked.trans_a, false) != extent(right, asked.trans_b, true))
    return CUBLAS_STATUS_INVALID_VALUE;
  if (asked.epilogue != CUBLASLT_EPILOGUE_DEFAULT && left.type == CUDA_R_64F)
    return CUBLAS_STATUS_NOT_SUPPORTED;
  found[0] = {};
  const Preference& wanted = preference_of(preference);
  if (is_fp8(left.type) || is_fp8(right.type)) {
    for (const std::uint32_t alignment :
         {wanted.alignment_a, wanted.alignment_b, wanted.alignment_c, wanted.alignment_d})
      if (alignment < 16) return CUBLAS_STATUS_NOT_SUPPORTED;
    if (!has_fp8_product(asked, left, right, result)) return CUBLAS_STATUS_NOT_SUPPORTED;
  } else if (asked.scale_a || asked.scale_b) {
    return CUBLAS_STATUS_INVALID_VALUE;
  }
  const Choice choice{wanted.most_workspace < workspace_bytes ? 0 : workspace_bytes, wanted.alignment_a,
                      wanted.alignment_b, wanted.alignment_c, wanted.alignment_d};
  std::memcpy(&found[0].algo, &choice, sizeof choice);
  found[0].workspaceSize = choice.workspace;
  found[0].state = CUBLAS_STATUS_SUCCESS;
  *count = 1;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t, cublasLtMatmulDesc_t operation, const void* alpha,
                              const void* a, cublasLtMatrixLayout_t a_layout, const void* b,
                              cublasLtMatrixLayout_t b_layout, const void* beta, const void* c,
                              cublasLtMatrixLayout_t, void* d, cublasLtMatrixLayout_t d_layout,
                              const cublasLtMatmulAlgo_t* algorithm, void* workspace, std::size_t bytes,
                              cudaStream_t stream) {
  Choice choice{};
  std::memcpy(&choice, algorithm, sizeof choice);
  if (c != d || (choice.workspace && (!workspace || bytes < choice.workspace)))
    return CUBLAS_STATUS_INVALID_VALUE;
  if (!aligned(a, choice.alignment_a) || !aligned(b, choice.alignment_b) || !aligned(c, choice.alignment_c) ||
      !aligned(d, choice.alignment_d))
    return CUBLAS_STATUS_INVALID_VALUE;
  const Operation& op = operation_of(operation);
  if (is_fp8(layout_of(a_layout).type) &&
      (!aligned(op.scale_a, 16) || !aligned(op.scale_b, 16) || !aligned(op.bias, 16)))
    return CUBLAS_STATUS_INVALID_VALUE;
  const Product product{op,
                        layout_of(a_layout),
                        layout_of(b_layout),
                        layout_of(d_layout),
                        a,
                        b,
                        d,
                        number(alpha, op.scale),
                        number(beta, op.scale),
                        choice.workspace ? workspace : nullptr};
  return queue_on(stream, [product] { product.run(); }) ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_INVALID_VALUE;
}

}  // extern "C"
