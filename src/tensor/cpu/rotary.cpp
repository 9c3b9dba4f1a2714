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

template <class T>
void write_angles(Device& device, const Tensor& cosine, const Tensor& sine, const Rotary& rotary) {
  const Count seq = cosine.shape()[0], half = cosine.shape()[1];
  const double scale = attention_scale(rotary);
  in_chunks(device, seq, row_grain(16 * half), [&](Count begin, Count count) {
    for (Count i = begin * half; i < (begin + count) * half; ++i) {
      const double angle = static_cast<double>(i / half) * rotary_frequency(rotary, i % half, half);
      cosine.data<T>()[i] = static_cast<T>(std::cos(angle) * scale);
      sine.data<T>()[i] = static_cast<T>(std::sin(angle) * scale);
    }
  });
}

}  // namespace

const RotaryAngles& CpuKernels::rotary_angles(std::int64_t seq, std::int64_t half, const Rotary& rotary,
                                              DType compute) {
  if (angles_.cosine && angles_.half == half && angles_.rotary == rotary &&
      angles_.cosine.dtype() == compute) {
    if (angles_.seq >= seq) return angles_;
    seq = grown_angles(angles_.seq, seq);
  }
  angles_ = {};
  RotaryAngles made{seq, half, rotary, Tensor::empty(device_, {seq, half}, compute, Category::workspace),
                    Tensor::empty(device_, {seq, half}, compute, Category::workspace)};
  with_compute_type(
      compute, [&](auto type) { write_angles<decltype(type)>(device_, made.cosine, made.sine, rotary); });
  return angles_ = std::move(made);
}

void CpuKernels::rotary(const Tensor& qkv, const Attention& geometry, const Rotary& rotary, bool transposed,
                        const Tensor& out) {
  const auto [rows, seq, head] = check_rotary(qkv, geometry, rotary, out);
  if (qkv.numel() == 0) return;
  const Count heads = geometry.heads, groups = geometry.kv_heads, width = qkv.shape().back();
  const Count half = head / 2, per_group = heads / groups + 2;
  const double direction = transposed ? -1 : 1;
  const RotaryAngles& angles =
      rotary_angles(geometry.positions.end(seq), half, rotary, compute_type(qkv.dtype()));
  in_chunks(device_, rows, row_grain(width), [&](Count begin, Count count) {
    for (Count h = begin * (heads + 2 * groups); h < (begin + count) * (heads + 2 * groups); ++h) {
      const Count row = h / (heads + 2 * groups), from = h * head;
      const Count angle = geometry.positions.at(row % seq) * half;
      if (h % (heads + 2 * groups) % per_group == per_group - 1) {  // the value head
        if (out.raw() != qkv.raw())
          std::memcpy(at(out, from), at(qkv, from), static_cast<std::size_t>(head) * size_of(qkv.dtype()));
      } else if (qkv.dtype() == DType::f64) {
        rotate_f64(qkv.data<double>() + from, angles.cosine.data<double>() + angle,
                   angles.sine.data<double>() + angle, direction, out.data<double>() + from, half);
      } else {
        isa_.elementwise[storage_index(qkv)].rotate(at(qkv, from), angles.cosine.data<float>() + angle,
                                                    angles.sine.data<float>() + angle,
                                                    static_cast<float>(direction), at(out, from), half);
      }
    }
  });
}

}  // namespace sherd::tensor::cpu
