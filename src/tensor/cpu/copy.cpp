#include <algorithm>
#include <cstring>
#include <type_traits>

#include "tensor/cpu/conversions.h"

namespace sherd::tensor::cpu {
namespace {

template <class To, class From>
void convert_integers(const From* from, To* to, Count first, Count n) {
  for (Count i = first; i < first + n; ++i) {
    if constexpr (sizeof(To) <= sizeof(From) || (std::is_signed_v<From> && !std::is_signed_v<To>))
      if (!std::in_range<To>(from[i]))
        fail(ErrorKind::data, "copy: value ", from[i], " at position ", i, " does not fit ",
             name_of(dtype_of<To>()), "; keep it in ", name_of(dtype_of<From>()));
    to[i] = static_cast<To>(from[i]);
  }
}

/// Elements [first, first + n), one by one: pairs with fp64 or an integer.
void convert_plain(const Tensor& from, const Tensor& to, Count first, Count n) {
  with_type(from.dtype(), [&](auto source) {
    with_type(to.dtype(), [&](auto target) {
      using From = decltype(source);
      using To = decltype(target);
      if constexpr (std::is_integral_v<From> && std::is_integral_v<To>) {
        convert_integers(from.data<From>(), to.data<To>(), first, n);
      } else if constexpr (!std::is_integral_v<To>) {
        for (Count i = first; i < first + n; ++i) to.data<To>()[i] = convert_one<To>(from.data<From>()[i]);
      }
    });
  });
}

template <class T>
T checked_fill_value(double value) {
  if constexpr (std::is_integral_v<T>)
    return static_cast<T>(require_integer(value, dtype_of<T>()));
  else
    return convert_one<T>(value);
}

}  // namespace

void CpuKernels::fill(const Tensor& x, double value) {
  require(x.defined(), "fill: x is not defined");
  with_type(x.dtype(), [&](auto zero) {
    using T = decltype(zero);
    // As unsigned integers, which the compiler turns into wide stores.
    using Bits = std::conditional_t<
        sizeof(T) == 8, std::uint64_t,
        std::conditional_t<sizeof(T) == 4, std::uint32_t,
                           std::conditional_t<sizeof(T) == 2, std::uint16_t, std::uint8_t>>>;
    const T element = checked_fill_value<T>(value);
    Bits bits;
    std::memcpy(&bits, &element, sizeof bits);
    in_chunks(device_, x.numel(), element_grain, [&](Count begin, Count count) {
      std::fill_n(reinterpret_cast<Bits*>(at(x, begin)), count, bits);
    });
  });
}

void CpuKernels::copy(const Tensor& from, const Tensor& to) {
  require_copyable(from, to);
  const bool vector = is_floating(from.dtype()) && from.dtype() != DType::f64 && is_floating(to.dtype()) &&
                      to.dtype() != DType::f64;
  in_chunks(device_, from.numel(), element_grain, [&](Count begin, Count count) {
    if (from.dtype() == to.dtype()) {
      std::memmove(at(to, begin), at(from, begin), static_cast<std::size_t>(count) * size_of(from.dtype()));
    } else if (!vector) {
      convert_plain(from, to, begin, count);
    } else {
      convert_floats(isa_, from, begin, to, begin, count);
    }
  });
}

}  // namespace sherd::tensor::cpu
