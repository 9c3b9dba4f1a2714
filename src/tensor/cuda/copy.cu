#include "tensor/cuda/families.cuh"

namespace sherd::tensor::SHERD_CUDA {
namespace {

using device::SHERD_CUDA::reachable;

/// Types whose conversions move by packs: those of weights, gradients and activations.
template <class T>
constexpr bool is_common = is_small_float<T> || std::is_same_v<T, float>;

template <class To, class From>
__global__ void convert_kernel(const From* from, To* to, Count n) {
  for (Count i = grid_thread(); i < n; i += grid_threads()) to[i] = convert_one<To>(from[i]);
}

struct Same {
  __device__ float operator()(float x) const { return x; }
};

/// Whether some values of From are none of To.
template <class To, class From>
constexpr bool narrows = sizeof(To) < sizeof(From) ||
                         (sizeof(To) == sizeof(From) && !std::is_same_v<To, From>) ||
                         (std::is_signed_v<From> && !std::is_signed_v<To>);

template <class T>
__device__ inline bool is_negative(T x) {
  if constexpr (std::is_signed_v<T>)
    return x < 0;
  else
    return false;
}

template <class To, class From>
__global__ void narrow_kernel(const From* from, To* to, Count n, unsigned long long* first_wrong) {
  for (Count i = grid_thread(); i < n; i += grid_threads()) {
    const auto cut = static_cast<To>(from[i]);
    if (static_cast<From>(cut) != from[i] || is_negative(cut) != is_negative(from[i]))
      atomicMin(first_wrong, static_cast<unsigned long long>(i));
    to[i] = cut;
  }
}

template <class To, class From>
void convert(const Target& target, const From* from, To* to, Count n) {
  if constexpr (is_common<To> && is_common<From>)
    map(target, Same{}, n, to, from);
  else
    launch(convert_kernel<To, From>, blocks_for(n, element_threads, target.processors), element_threads, 0,
           target.stream, from, to, n);
}

template <class Bits>
__global__ void fill_kernel(Bits value, Bits* to, Count n) {
  constexpr int width = pack_width<Bits>;
  const bool packs = reinterpret_cast<std::uintptr_t>(to) % 16 == 0;
  const Count whole = packs ? n / width : 0;
  Pack<Bits, width> pack;
  for (int k = 0; k < width; ++k) pack.at[k] = value;
  for (Count i = grid_thread(); i < whole; i += grid_threads()) store_pack(to + i * width, pack);
  for (Count i = whole * width + grid_thread(); i < n; i += grid_threads()) to[i] = value;
}

/// The bits of `value` in `dtype`: what the CPU's fill() writes.
std::uint64_t bits_of(double value, DType dtype) {
  const auto nearest_odd = [value] {
    const auto near = static_cast<float>(value);
    if (static_cast<double>(near) == value || std::isnan(value)) return near;
    auto bits = std::bit_cast<std::uint32_t>(near);
    if (std::fabs(static_cast<double>(near)) > std::fabs(value)) --bits;
    return std::bit_cast<float>(bits | 1u);
  };
  switch (dtype) {
    case DType::f64:
      return std::bit_cast<std::uint64_t>(value);
    case DType::f32:
      return std::bit_cast<std::uint32_t>(static_cast<float>(value));
    case DType::bf16:
      return bf16(nearest_odd()).bits;
    case DType::f16:
      return f16(nearest_odd()).bits;
    default:
      return static_cast<std::uint64_t>(require_integer(value, dtype));
  }
}

template <class Bits>
void fill_with(const Target& target, std::uint64_t bits, const Tensor& x) {
  launch(fill_kernel<Bits>, blocks_for(x.numel(), element_threads * pack_width<Bits>, target.processors, 32),
         element_threads, 0, target.stream, static_cast<Bits>(bits), out<Bits>(x), x.numel());
}

}  // namespace

void CudaKernels::fill(const Tensor& x, double value) {
  require(x.defined(), "fill: x is not defined");
  const std::uint64_t bits = bits_of(value, x.dtype());
  if (x.numel() == 0) return;
  if (bits == 0) return target_.device.zero(x.raw(), x.bytes());
  const bool here = reachable(x.raw());
  const Tensor to = here ? x : scratch(x.numel(), x.dtype());
  with_bits(x.dtype(), [&](auto zero) { fill_with<decltype(zero)>(target_, bits, to); });
  if (!here) target_.device.copy(x.raw(), to.raw(), x.bytes());
}

void CudaKernels::copy(const Tensor& from, const Tensor& to) {
  require_copyable(from, to);
  if (from.numel() == 0) return;
  if (from.dtype() == to.dtype()) return target_.device.copy(to.raw(), from.raw(), from.bytes());
  // Pageable memory of the host is out of a kernel's reach and comes and goes through the device's.
  Tensor source = from, result = to;
  if (!reachable(from.raw())) {
    source = scratch(from.numel(), from.dtype());
    target_.device.copy(source.raw(), from.raw(), from.bytes());
  }
  if (!reachable(to.raw())) result = scratch(to.numel(), to.dtype());
  with_type(from.dtype(), [&](auto source_type) {
    with_type(to.dtype(), [&](auto target_type) {
      using From = decltype(source_type);
      using To = decltype(target_type);
      if constexpr (std::is_integral_v<From> && std::is_integral_v<To>) {
        if constexpr (narrows<To, From>)
          return copy_narrowing<To, From>(source, result);
        else if constexpr (!std::is_same_v<To, From>)
          return convert(target_, in<From>(source), out<To>(result), from.numel());
      } else if constexpr (!std::is_integral_v<To> && !std::is_same_v<To, From>) {
        convert(target_, in<From>(source), out<To>(result), from.numel());
      }
    });
  });
  if (result.raw() != to.raw()) target_.device.copy(to.raw(), result.raw(), to.bytes());
}

template <class To, class From>
void CudaKernels::copy_narrowing(const Tensor& from, const Tensor& to) {
  const Tensor wrong = scratch(1, DType::i64, device::Tier::host);
  auto* first = out<unsigned long long>(wrong);
  *first = none_wrong;
  launch(narrow_kernel<To, From>, blocks_for(from.numel(), element_threads, target_.processors),
         element_threads, 0, target_.stream, in<From>(from), out<To>(to), from.numel(), first);
  target_.device.synchronize();
  if (*first == none_wrong) return;
  const auto at = static_cast<Count>(*first);
  From value{};
  target_.device.copy(&value, in<From>(from) + at, sizeof value);
  target_.device.synchronize();
  fail(ErrorKind::data, "copy: value ", value, " at position ", at, " does not fit ", name_of(dtype_of<To>()),
       "; keep it in ", name_of(dtype_of<From>()));
}

}  // namespace sherd::tensor::SHERD_CUDA
