#include "tensor/cpu/isa/tables.h"
#include "tensor/cpu/isa/vec_math.h"

namespace sherd::tensor::cpu::SHERD_ISA {
namespace {

constexpr Count block = 2048;  // elements that stay in the first-level cache between the two looks at them

template <class S>
struct SoftmaxLoops {
  /// The largest of n >= 1 elements; a NaN anywhere makes the sum NaN later, not the maximum.
  static float block_max(const S* x, Count n) {
    const float first = [x] {
      float lane[lanes];
      store(lane, load_tail(x, 1));
      return lane[0];
    }();
    F best[2] = {all(first), all(first)};
    Count i = 0;
    for (; i + 2 * lanes <= n; i += 2 * lanes) {
      const Pair pair = load_pair<true>(x + i);
      best[0] = max(pair.a, best[0]);
      best[1] = max(pair.b, best[1]);
    }
    for (; i + lanes <= n; i += lanes) best[0] = max(load(x + i), best[0]);
    if (i < n) best[0] = max(load_tail(x + i, n - i, x[0]), best[0]);
    float lane[lanes];
    store(lane, max(best[0], best[1]));
    float result = lane[0];
    for (int k = 1; k < lanes; ++k) result = lane[k] > result ? lane[k] : result;
    return result;
  }

  static float block_sum(const S* x, Count n, float maximum) {
    Sum32<S> sum;
    for_each_32([&](int p, I real, F u) { sum.part[p] += real ? exp_for<S>(u - maximum) : F{}; }, n, x);
    return sum.total();
  }

  static float exp_of(float x) {
    float lane[lanes];
    store(lane, exp_for<S>(all(x)));
    return lane[0];
  }

  // The running sum is rescaled when a block brings a new maximum (Milakov and Gimelshein, "Online normalizer
  // calculation for softmax", 2018).
  static void max_and_sum(const void* row, Count n, float* maximum_out, float* sum_out) {
    const S* x = static_cast<const S*>(row);
    float maximum = -__builtin_inff(), sum = 0;
    for (Count begin = 0; begin < n; begin += block) {
      const Count count = n - begin < block ? n - begin : block;
      const float here = block_max(x + begin, count);
      if (here > maximum) {
        if (begin != 0) sum *= exp_of(maximum - here);
        maximum = here;
      }
      // A row that so far is all -inf sums to 0 rather than to exp(-inf + inf).
      sum += block_sum(x + begin, count, maximum == -__builtin_inff() ? 0.0f : maximum);
    }
    *maximum_out = maximum;
    *sum_out = sum;
  }

  static void gradient(void* row, Count n, float lse, float factor) {
    S* x = static_cast<S*>(row);
    map([=](F u) { return exp_for<S>(u - lse) * factor; }, n, x, static_cast<const S*>(x));
  }
};

template <class S>
constexpr SoftmaxOps table() {
  return {SoftmaxLoops<S>::max_and_sum, SoftmaxLoops<S>::gradient};
}

}  // namespace

const SoftmaxOps softmax[storage_count] = {table<float>(), table<Bf16>(), table<F16>()};

}  // namespace sherd::tensor::cpu::SHERD_ISA
