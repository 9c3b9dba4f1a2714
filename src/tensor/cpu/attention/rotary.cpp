#include <cmath>
#include <cstring>

#include "tensor/cpu/loops.h"
#include "tensor/extents.h"

namespace sherd::tensor::cpu {
namespace {

void rotate_f64(const double* x, const double* cosine, const double* sine, double direction, double* out,
                Count half) {
  for (Count i = 0; i < half; ++i) {
    const double u = x[i], v = x[half + i], s = sine[i] * direction;
    out[i] = u * cosine[i] - v * s;
    out[half + i] = v * cosine[i] + u * s;
  }
}

void write_angles(Device& device, const RotaryAngles& to) {
  const double scale = attention_scale(to.rotary);
  const std::vector<double> frequencies = rotary_frequencies(to.rotary, to.half);
  with_compute_type(to.cosine.dtype(), [&](auto type) {
    using T = decltype(type);
    in_chunks(device, to.seq, row_grain(16 * to.half), [&](Count begin, Count count) {
      for (Count p = begin; p < begin + count; ++p) {
        const double factor = scale * query_scale(to.rotary.query_beta, to.rotary.query_positions, p);
        for (Count i = 0; i < to.half; ++i) {
          const double angle = static_cast<double>(p) * frequencies[static_cast<std::size_t>(i)];
          to.cosine.data<T>()[p * to.half + i] = static_cast<T>(std::cos(angle) * factor);
          to.sine.data<T>()[p * to.half + i] = static_cast<T>(std::sin(angle) * factor);
        }
      }
    });
  });
}

}  // namespace

void CpuKernels::rotary(const Tensor& qkv, const Attention& geometry, const Rotary& rotary, bool transposed,
                        const Tensor& out) {
  const auto [rows, seq, head, turned] = check_rotary(qkv, geometry, rotary, out);
  if (qkv.numel() == 0) return;
  const Count heads = geometry.heads, groups = geometry.kv_heads, width = qkv.shape().back();
  const Count half = turned / 2, per_group = heads / groups + 2;
  const double direction = transposed ? -1 : 1;
  const auto tables =
      angles_.of_both(device_, geometry.positions.end(seq), half, rotary, compute_type(qkv.dtype()),
                      [&](const RotaryAngles& made) { write_angles(device_, made); });
  const auto pass = [&](Count from, Count count) {
    if (count > 0 && out.raw() != qkv.raw())
      std::memcpy(at(out, from), at(qkv, from), static_cast<std::size_t>(count) * size_of(qkv.dtype()));
  };
  const auto turn = [&](const RotaryAngles& angles, Count angle, Count from) {
    if (qkv.dtype() == DType::f64)
      return rotate_f64(qkv.data<double>() + from, angles.cosine.data<double>() + angle,
                        angles.sine.data<double>() + angle, direction, out.data<double>() + from, half);
    isa_.elementwise[storage_index(qkv)].rotate(at(qkv, from), angles.cosine.data<float>() + angle,
                                                angles.sine.data<float>() + angle,
                                                static_cast<float>(direction), at(out, from), half);
  };
  const std::int32_t* of_rows =
      geometry.row_positions ? geometry.row_positions.data<std::int32_t>() : nullptr;
  in_chunks(device_, rows, row_grain(width),
            [&, seq = seq, head = head, turned = turned](Count begin, Count count) {
              for (Count h = begin * (heads + 2 * groups); h < (begin + count) * (heads + 2 * groups); ++h) {
                const Count row = h / (heads + 2 * groups), in_group = h % (heads + 2 * groups) % per_group;
                if (in_group == per_group - 1) {  // the value head
                  pass(h * head, head);
                  continue;
                }
                pass(h * head + turned, head - turned);
                turn(in_group == per_group - 2 ? tables.second : tables.first,
                     (of_rows ? of_rows[row] : geometry.positions.at(row % seq)) * half, h * head);
              }
            });
}

}  // namespace sherd::tensor::cpu
