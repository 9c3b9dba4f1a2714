#pragma once

#include <cstdint>

// Inner loops that are compiled once per instruction set: plain declarations only, see
// tensor/cpu/isa/tables.h.

namespace sherd {
enum class CpuIsa;
}

namespace sherd::optim {

enum StorageIndex { storage_f32, storage_bf16, storage_f16, storage_count };
enum SgdMode { sgd_plain, sgd_momentum, sgd_nesterov, sgd_mode_count };

/// A chunk of a span. `param` is null where no 16-bit copy is kept.
struct Chunk {
  float* master;
  const void* grad;
  float* first;   ///< exp_avg or momentum_buffer
  float* second;  ///< exp_avg_sq
  void* param;
  std::int64_t n;
  bool stream;  ///< write the 16-bit copy past the caches (it is 64-byte aligned and will not be read soon)
};

struct AdamScalars {
  float factor, beta1, one_minus_beta1, beta2, one_minus_beta2, root_scale, eps;
  float decay;      ///< lr·wd decoupled, or wd for L2
  float step_size;  ///< lr/c1
};

struct SgdScalars {
  float factor, momentum, decay, lr;
};

/// The largest magnitudes written, as bit patterns: what the caller compares with the limits of the formats.
struct Extremes {
  std::uint32_t weight = 0, moment = 0;
};

struct UpdateTable {
  Extremes (*adam[storage_count][storage_count][2])(const Chunk&,
                                                    const AdamScalars&);  ///< [gradient][parameter][L2]
  Extremes (*sgd[storage_count][storage_count][sgd_mode_count])(const Chunk&, const SgdScalars&);
};

namespace portable {
extern const UpdateTable update_table;
}
namespace avx2 {
extern const UpdateTable update_table;
}
namespace avx512 {
extern const UpdateTable update_table;
}

}  // namespace sherd::optim
