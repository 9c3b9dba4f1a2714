#include <dlfcn.h>
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <oneapi/dnnl/dnnl.hpp>
#include <vector>

#include "base/error.h"
#include "tensor/cpu/gemm_blocks.h"

namespace sherd::tensor::cpu {
namespace {

/// oneDNN's OpenMP runtime, found at run time because a build of oneDNN on TBB or on threads brings none.
struct OpenMp {
  int (*threads)() = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "omp_get_max_threads"));
  void (*set_threads)(int) = reinterpret_cast<void (*)(int)>(dlsym(RTLD_DEFAULT, "omp_set_num_threads"));
};

/// Holds the calling thread's OpenMP loops to one thread and gives the application its own setting back.
class OneOpenMpThread {
 public:
  OneOpenMpThread() {
    if (runtime().threads && runtime().set_threads) before_ = runtime().threads();
    if (before_ > 1) runtime().set_threads(1);
  }
  ~OneOpenMpThread() {
    if (before_ > 1) runtime().set_threads(before_);
  }
  OneOpenMpThread(const OneOpenMpThread&) = delete;
  OneOpenMpThread& operator=(const OneOpenMpThread&) = delete;

 private:
  static const OpenMp& runtime() {
    static const OpenMp found;
    return found;
  }
  int before_ = 0;
};

using dnnl::memory;
using Key = std::array<std::int64_t, 5>;
constexpr std::size_t max_cached = 256;

/// Rows that a product has at least: with fewer oneDNN 2.6 does without AMX and rounds otherwise, so that a
/// row would have other sums beside others than alone.
constexpr std::int64_t least_rows = 16;

struct Product {
  memory::desc a, b, c;
  dnnl::matmul primitive;
};

struct PackedOperand {
  memory::desc from, to;
  dnnl::reorder primitive;
};

/// make(), one thread at a time, once it is sure that the system gives what oneDNN takes to generate some
/// code: oneDNN writes it without asking whether it got the memory. Throws Error{memory} where it does not.
template <class Make>
auto with_room_for_code(const Make& make) {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  constexpr std::size_t room = std::size_t{64} << 20;  // more than it takes: others take memory meanwhile
  void* probe =
      ::mmap(nullptr, room, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (probe == MAP_FAILED)
    fail(ErrorKind::memory, "matmul: the system has no ", room >> 20,
         " MiB left for the code of a product: raise this process's limit (ulimit -v)");
  ::munmap(probe, room);
  return make();
}

/// Descriptors are the plainest there are (contiguous, no post-operation): for others oneDNN 2.6 falls back
/// without a word to reference loops, a hundred times slower.
///
/// One thread's engine, stream and primitives. oneDNN's own cache spares the code generation when another
/// thread has made the same primitive, not the lookup by descriptor, which costs more than a small product.
class Primitives {
 public:
  dnnl::engine engine{dnnl::engine::kind::cpu, 0};
  dnnl::stream stream{engine};

  const memory::desc& packed_layout(const GemmBlock& block) {
    const std::int64_t rows = std::max(least_rows, block.full_rows);
    const Key key{rows, block.cols, block.depth};
    return find(layouts_, key, [&] {
      const memory::desc a({rows, block.depth}, type_, {block.depth, 1});
      const memory::desc b({block.depth, block.cols}, type_, memory::format_tag::any);
      const memory::desc c({rows, block.cols}, memory::data_type::f32, {block.cols, 1});
      return with_room_for_code([&] {
        return dnnl::matmul::primitive_desc({a, b, c}, engine).weights_desc();
      });
    });
  }

  const Product& product(const GemmBlock& block) {
    const std::int64_t rows = std::max(least_rows, block.rows);
    const Key key{rows, block.cols, block.depth, std::max(least_rows, block.full_rows)};
    return find(products_, key, [&] {
      Product out;
      out.a = memory::desc({rows, block.depth}, type_, {block.depth, 1});
      out.b = packed_layout(block);
      out.c = memory::desc({rows, block.cols}, memory::data_type::f32, {block.cols, 1});
      out.primitive = with_room_for_code([&] {
        return dnnl::matmul(dnnl::matmul::primitive_desc({out.a, out.b, out.c}, engine));
      });
      return out;
    });
  }

  const PackedOperand& packing(const GemmBlock& block, std::int64_t depth_stride, std::int64_t col_stride) {
    const Key key{block.full_rows, block.cols, block.depth, depth_stride, col_stride};
    return find(packings_, key, [&] {
      PackedOperand out;
      out.from = memory::desc({block.depth, block.cols}, type_, {depth_stride, col_stride});
      out.to = packed_layout(block);
      out.primitive = with_room_for_code(
          [&] { return dnnl::reorder(dnnl::reorder::primitive_desc(engine, out.from, engine, out.to)); });
      return out;
    });
  }

 private:
  template <class Value, class Make>
  static const Value& find(std::map<Key, Value>& cache, const Key& key, Make make) {
    const auto found = cache.find(key);
    if (found != cache.end()) return found->second;
    Value made = make();
    if (cache.size() >= max_cached) cache.clear();
    return cache.emplace(key, std::move(made)).first->second;
  }

  static constexpr memory::data_type type_ = memory::data_type::bf16;
  std::map<Key, memory::desc> layouts_;
  std::map<Key, Product> products_;
  std::map<Key, PackedOperand> packings_;
};

class DnnlBlocks final : public BlockProduct {
  // First, because the functions below need its deduced result.
  /// body(this thread's primitives), with oneDNN's failures turned into Sherd's.
  template <class Body>
  auto run(const GemmBlock& block, Body body) const {
    const OneOpenMpThread one_thread;
    thread_local std::unique_ptr<Primitives> primitives;
    try {
      if (!primitives) primitives = std::make_unique<Primitives>();
      return body(*primitives);
    } catch (const dnnl::error& error) {
      fail(ErrorKind::usage, "matmul: oneDNN refused a bf16 product of ", block.rows, "x", block.depth,
           " by ", block.depth, "x", block.cols, ": ", error.what(),
           "; unset DNNL_* variables or use another oneDNN build");
    }
  }

 public:
  DType dtype() const override { return DType::bf16; }
  std::int64_t rows() const override { return 128; }
  std::int64_t a_stride(std::int64_t depth, std::int64_t) const override { return depth; }
  std::int64_t b_stride(std::int64_t depth, std::int64_t stride) const override {
    return stride ? stride : depth;
  }
  std::int64_t c_stride(std::int64_t cols) const override { return cols; }
  std::int64_t depth_step() const override { return 0; }

  std::int64_t packed_bytes(const GemmBlock& block) const override {
    return run(block, [&](Primitives& primitives) {
      return static_cast<std::int64_t>(primitives.packed_layout(block).get_size());
    });
  }

  std::int64_t pack_step(bool) const override { return 0; }

  void pack(const GemmBlock& block, const GemmPackPart&, const void* b, std::int64_t depth_stride,
            std::int64_t col_stride, void* packed) const override {
    run(block, [&](Primitives& primitives) {
      const PackedOperand& packing = primitives.packing(block, depth_stride, col_stride);
      memory from(packing.from, primitives.engine, const_cast<void*>(b));
      memory to(packing.to, primitives.engine, packed);
      packing.primitive.execute(primitives.stream, from, to);
      primitives.stream.wait();
    });
  }

  std::int64_t packed_left_bytes(const GemmBlock&) const override { return 0; }
  void pack_left(const GemmBlock&, const void*, std::int64_t, void*) const override {}

  void multiply(const GemmBlock& block, const void* a, const void* packed, float* c,
                const GemmFinish*) const override {
    if (block.rows >= least_rows) return multiply_rows(block, a, packed, c);
    thread_local std::vector<std::uint16_t> rows;
    thread_local std::vector<float> sums;
    rows.assign(static_cast<std::size_t>(least_rows * block.depth), 0);
    sums.resize(static_cast<std::size_t>(least_rows * block.cols));
    std::memcpy(rows.data(), a, static_cast<std::size_t>(block.rows * block.depth) * sizeof rows[0]);
    multiply_rows(block, rows.data(), packed, sums.data());
    std::copy_n(sums.data(), block.rows * block.cols, c);
  }

 private:
  void multiply_rows(const GemmBlock& block, const void* a, const void* packed, float* c) const {
    run(block, [&](Primitives& primitives) {
      const Product& product = primitives.product(block);
      product.primitive.execute(
          primitives.stream,
          {{DNNL_ARG_SRC, memory(product.a, primitives.engine, const_cast<void*>(a))},
           {DNNL_ARG_WEIGHTS, memory(product.b, primitives.engine, const_cast<void*>(packed))},
           {DNNL_ARG_DST, memory(product.c, primitives.engine, c)}});
      primitives.stream.wait();
    });
  }
};

}  // namespace

bool dnnl_has_amx() {
  return dnnl::get_effective_cpu_isa() == dnnl::cpu_isa::avx512_core_amx;
}

std::unique_ptr<BlockProduct> make_dnnl_blocks() {
  return std::make_unique<DnnlBlocks>();
}

}  // namespace sherd::tensor::cpu
