#include "tensor/formats/fp8.h"

#include <atomic>
#include <bit>
#include <cstring>

#include "tensor/cpu/gemm_blocks.h"
#include "tensor/cpu/loops.h"

namespace sherd::tensor::cpu {
namespace {

/// A part of a matrix that becomes FP8, of up to 128 rows and columns.
struct Fp8Tile {
  Count row, col, rows, cols;
  const std::byte* first;
  Count stride;  ///< bytes from row to row
  const ConvertOps* ops;
  const std::byte* at(Count r) const { return first + r * stride; }
};

/// Where the scale of row `row` in the block of columns `block` lies.
Count scale_place(const Fp8Matrix& m, Count row, Count block) {
  switch (m.rule.scaling) {
    case Fp8Scaling::rows:
      return row;
    case Fp8Scaling::blocks_1x128:
      return block * fp8_padded(m.rows) + row;
    case Fp8Scaling::blocks_128x128:
      return row / fp8_block * m.scales.shape()[1] + block;
    default:
      return 0;
  }
}

float inverse_of(float scale) {
  return std::bit_cast<float>(fp8_inverse_bits(std::bit_cast<std::uint32_t>(scale)));
}
float scale_of(Fp8Format format, std::uint32_t largest) {
  return std::bit_cast<float>(fp8_scale_bits(format, largest));
}

/// `at` = the larger of itself and `bits`, from any thread.
void raise_to(float& at, std::uint32_t bits) {
  std::atomic_ref<float> place(at);
  float before = place.load(std::memory_order_relaxed);
  const auto value = std::bit_cast<float>(bits);
  while (before < value && !place.compare_exchange_weak(before, value, std::memory_order_relaxed)) {
  }
}

/// Makes a matrix in FP8 from x, or from its transpose, tile by tile.
class Fp8Maker {
 public:
  Fp8Maker(Device& device, const IsaTable& isa, const Tensor& x, bool transposed, const Fp8Matrix& to)
      : device_(device),
        isa_(isa),
        x_(x),
        transposed_(transposed),
        to_(to),
        scales_(to.scales.data<float>()) {}

  void run(const Tensor& lost) {
    const Fp8Scaling scaling = to_.rule.scaling;
    const bool apart = scaling == Fp8Scaling::tensor || scaling == Fp8Scaling::rows;
    std::fill_n(scales_, to_.scales.numel(), apart ? 0 : scale_of(to_.rule.format, 0));
    if (apart) {
      for_tiles([&](const Fp8Tile& tile) { measure_rows(tile); });
      for (Count i = 0; i < to_.scales.numel(); ++i)
        scales_[i] = scale_of(to_.rule.format, std::bit_cast<std::uint32_t>(scales_[i]));
    }
    for_tiles([&](const Fp8Tile& tile) {
      if (!apart) scale_blocks(tile);
      encode(tile, lost);
    });
  }

 private:
  template <class Body>
  void for_tiles(const Body& body) const {
    const Count down = fp8_blocks(to_.rows), across = fp8_blocks(to_.cols);
    in_chunks(device_, down * across, 2, [&](Count begin, Count count) {
      alignas(64) float turned[fp8_block * fp8_block];
      for (Count i = begin; i < begin + count; ++i)
        body(tile(i / across * fp8_block, i % across * fp8_block, turned));
    });
  }

  Fp8Tile tile(Count row, Count col, float* turned) const {
    const Count rows = std::min(fp8_block, to_.rows - row), cols = std::min(fp8_block, to_.cols - col);
    const auto width = static_cast<Count>(size_of(x_.dtype()));
    if (!transposed_)
      return {row,
              col,
              rows,
              cols,
              at(x_, row * to_.cols + col),
              to_.cols * width,
              &isa_.convert[storage_index(x_)]};
    float line[fp8_block];
    for (Count c = 0; c < cols; ++c) {
      isa_.convert[storage_index(x_)].load(at(x_, (col + c) * to_.rows + row), line, rows);
      for (Count r = 0; r < rows; ++r) turned[r * fp8_block + c] = line[r];
    }
    return {row,
            col,
            rows,
            cols,
            reinterpret_cast<const std::byte*>(turned),
            fp8_block * Count{sizeof(float)},
            &isa_.convert[storage_f32]};
  }

  void measure_rows(const Fp8Tile& tile) const {
    for (Count r = 0; r < tile.rows; ++r)
      raise_to(scales_[scale_place(to_, tile.row + r, 0)], tile.ops->largest(tile.at(r), tile.cols));
  }

  void scale_blocks(const Fp8Tile& tile) const {
    std::uint32_t all = 0;
    const Count block = tile.col / fp8_block;
    for (Count r = 0; r < tile.rows; ++r) {
      const std::uint32_t largest = tile.ops->largest(tile.at(r), tile.cols);
      all = std::max(all, largest);
      if (to_.rule.scaling == Fp8Scaling::blocks_1x128)
        scales_[scale_place(to_, tile.row + r, block)] = scale_of(to_.rule.format, largest);
    }
    if (to_.rule.scaling == Fp8Scaling::blocks_128x128)
      scales_[scale_place(to_, tile.row, block)] = scale_of(to_.rule.format, all);
  }

  void encode(const Fp8Tile& tile, const Tensor& lost) const {
    const Count stride = fp8_padded(to_.cols), block = tile.col / fp8_block;
    const bool last = tile.col + tile.cols == to_.cols;
    const Count filled = (last ? stride : tile.col + tile.cols) - tile.col;
    auto* codes = to_.codes.data<std::uint8_t>() + tile.row * stride + tile.col;
    Fp8Lost mine;
    for (Count r = 0; r < tile.rows; ++r) {
      const float inverse = inverse_of(scales_[scale_place(to_, tile.row + r, block)]);
      tile.ops->to_fp8[static_cast<int>(to_.rule.format)](tile.at(r), inverse, codes + r * stride, tile.cols,
                                                          mine);
      std::memset(codes + r * stride + tile.cols, 0, static_cast<std::size_t>(filled - tile.cols));
    }
    if (tile.row + tile.rows == to_.rows)
      for (Count r = tile.rows; r < fp8_padded(to_.rows) - tile.row; ++r)
        std::memset(codes + r * stride, 0, static_cast<std::size_t>(filled));
    if (!lost) return;
    const auto add = [&](std::size_t place, Count count) {
      if (count > 0)
        std::atomic_ref(lost.data<std::int64_t>()[place]).fetch_add(count, std::memory_order_relaxed);
    };
    add(0, mine.not_finite), add(1, mine.to_zero);
  }

  Device& device_;
  const IsaTable& isa_;
  const Tensor& x_;
  bool transposed_;
  const Fp8Matrix& to_;
  float* scales_;
};

/// body(first of the range's elements, how many, place of their scale) for its runs that share a scale.
template <class Body>
void for_runs(Device& device, const Fp8Range& range, Fp8Rule rule, const Body& body) {
  const Count stride = fp8_scales_shape(Fp8Scaling::blocks_128x128, range.rows, range.cols)[1];
  in_chunks(device, range.end - range.begin, element_grain, [&](Count begin, Count count) {
    if (rule.scaling == Fp8Scaling::tensor) return body(begin, count, Count{0});
    for (Count i = begin; i < begin + count;) {
      const Count element = range.begin + i, row = element / range.cols, col = element % range.cols,
                  end = std::min((col / fp8_block + 1) * fp8_block, range.cols),
                  n = std::min(end - col, begin + count - i);
      body(i, n, row / fp8_block * stride + col / fp8_block);
      i += n;
    }
  });
}

}  // namespace

Tensor decode_fp8(Device& device, const IsaTable& isa, const Fp8Matrix& m) {
  Tensor out = Tensor::empty(device, {m.rows, m.cols}, DType::bf16, Category::workspace);
  const auto decode = isa.convert[storage_bf16].from_fp8[static_cast<int>(m.rule.format)];
  for_items(device, m.rows, row_grain(m.cols), [&](Count row) {
    for (Count col = 0; col < m.cols; col += fp8_block)
      decode(m.codes.data<std::uint8_t>() + row * fp8_padded(m.cols) + col,
             m.scales.data<float>()[scale_place(m, row, col / fp8_block)], at(out, row * m.cols + col),
             std::min(fp8_block, m.cols - col));
  });
  return out;
}

void CpuKernels::to_fp8(const Tensor& x, bool transposed, const Fp8Matrix& to, const Tensor& lost) {
  check_to_fp8(x, transposed, to, lost);
  Fp8Maker(device_, isa_, x, transposed, to).run(lost);
}

void CpuKernels::fp8_largest(const Tensor& values, const Fp8Range& range, Fp8Rule rule,
                             const Tensor& scales) {
  check_fp8_range("fp8_largest", values, range, rule, scales);
  const auto largest = isa_.convert[storage_index(values)].largest;
  for_runs(device_, range, rule, [&](Count first, Count count, Count place) {
    raise_to(scales.data<float>()[place], largest(at(values, first), count));
  });
}

void CpuKernels::fp8_scales(Fp8Format format, const Tensor& scales) {
  float* all = scales.data<float>();
  for (Count i = 0; i < scales.numel(); ++i) all[i] = scale_of(format, std::bit_cast<std::uint32_t>(all[i]));
}

void CpuKernels::fp8_encode(const Tensor& values, const Fp8Range& range, Fp8Rule rule, const Tensor& scales,
                            const Tensor& codes) {
  check_fp8_range("fp8_encode", values, range, rule, scales);
  require_vector("fp8_encode", "codes", codes, values.numel(), DType::u8);
  const auto encode = isa_.convert[storage_index(values)].to_fp8[static_cast<int>(rule.format)];
  for_runs(device_, range, rule, [&](Count first, Count count, Count place) {
    Fp8Lost lost;
    encode(at(values, first), inverse_of(scales.data<float>()[place]), codes.data<std::uint8_t>() + first,
           count, lost);
  });
}

void CpuKernels::fp8_decode(const Tensor& codes, const Fp8Range& range, Fp8Rule rule, const Tensor& scales,
                            const Tensor& values) {
  check_fp8_range("fp8_decode", values, range, rule, scales);
  require_vector("fp8_decode", "codes", codes, values.numel(), DType::u8);
  const auto decode = isa_.convert[storage_index(values)].from_fp8[static_cast<int>(rule.format)];
  for_runs(device_, range, rule, [&](Count first, Count count, Count place) {
    decode(codes.data<std::uint8_t>() + first, scales.data<float>()[place], at(values, first), count);
  });
}

}  // namespace sherd::tensor::cpu
