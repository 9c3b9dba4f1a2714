// Sums that the backend may make its own way: against sums in double, to rounding.
#include <cmath>

#include "tests/comm/conformance.h"

namespace sherd::comm::conformance {
namespace {

using ::testing::HasSubstr;

/// The relative precision of one rounding.
double precision(DType dtype) {
  return dtype == DType::bf16  ? 0x1p-8
         : dtype == DType::f16 ? 0x1p-11
         : dtype == DType::f32 ? 0x1p-24
                               : 0x1p-53;
}

struct Sum {
  double exact = 0;
  double magnitude = 0;  ///< the sum of what was added without its signs, which bounds the rounding errors
};
template <class In>
Sum exact_sum(int ranks, std::int64_t i, double onto = 0) {
  Sum sum{onto, std::abs(onto)};
  for (int r = 0; r < ranks; ++r) {
    const auto value = static_cast<double>(static_cast<Wide<In>>(element<In>(r, i)));
    sum.exact += value, sum.magnitude += std::abs(value);
  }
  return sum;
}

/// Every part and every partial sum may have been rounded once, and the result.
void expect_near(double got, const Sum& want, int ranks, DType communication, DType out,
                 const std::string& what) {
  const double allowed = want.magnitude * ((ranks + 1) * precision(communication) + 2 * precision(out) +
                                           ranks * precision(DType::f32));
  ASSERT_NEAR(got, want.exact, allowed) << what;
}

template <class T>
void expect_near(const Tensor& x, const std::function<Sum(std::int64_t)>& want, int ranks,
                 DType communication, const std::string& what) {
  for (std::int64_t i = 0; i < x.numel(); ++i)
    expect_near(static_cast<double>(static_cast<Wide<T>>(x.data<T>()[i])), want(i), ranks, communication,
                x.dtype(), cat(what, ", element ", i));
}

constexpr double begun_at(std::int64_t i) {
  return static_cast<double>(i % 100) * 0.25;
}

TEST_P(Conformance, NativeReduceScattersAgreeToRounding) {
  run([&](Communicator& comm) {
    Tensors tensors(comm, device(comm));
    const CallOptions native{.label = "native", .reduction = Reduction::native};
    for (const DType dtype : {DType::f32, DType::bf16, DType::f16, DType::f64})
      for (const DType communication : {dtype, DType::bf16, DType::f32})
        for (const std::int64_t n : {std::int64_t{1}, std::int64_t{4099}})
          with_type(dtype, [&]<class T>() {
            const Tensor full = tensors.make(n * comm.size(), dtype, false),
                         plain = tensors.make(n, dtype, false);
            const Tensor onto = tensors.make(n, DType::f32, true),
                         narrow = tensors.make(n, DType::bf16, false);
            const std::int64_t from = n / 3, base = comm.rank() * n;
            tensors.fill<T>(full, comm.rank());
            tensors.zero(narrow);
            tensors.set<float>(onto, [](std::int64_t i) { return static_cast<float>(begun_at(i)); });
            comm.reduce_scatter({{full, plain, 0, n}}, communication, native).wait();
            comm.reduce_scatter({{full, narrow, from, n, onto}, {full, onto, 0, n, onto}}, communication,
                                native)
                .wait();
            const std::string what = cat(name_of(dtype), " in ", name_of(communication), " on ", comm.size());
            expect_near<T>(
                tensors.read(plain), [&](std::int64_t i) { return exact_sum<T>(comm.size(), base + i); },
                comm.size(), communication, what);
            const auto folded = [&](std::int64_t i) {
              return exact_sum<T>(comm.size(), base + i, begun_at(i));
            };
            expect_near<float>(tensors.read(onto), folded, comm.size(), communication, what + " onto");
            expect_near<bf16>(
                tensors.read(narrow), [&](std::int64_t i) { return i < from ? Sum{} : folded(i); },
                comm.size(), communication, what + " of a range");
          });
  });
}

TEST_P(Conformance, NativeReduceScattersWorkInPlace) {
  run([&](Communicator& comm) {
    Tensors tensors(comm, device(comm));
    const std::int64_t n = 1001, base = comm.rank() * n;
    for (const std::int64_t from : {std::int64_t{0}, std::int64_t{17}}) {
      const Tensor full = tensors.make(n * comm.size(), DType::f32, false);
      tensors.fill<float>(full, comm.rank());
      comm.reduce_scatter({{full, full.range(base, base + n), from, n}}, DType::f32,
                          {.reduction = Reduction::native})
          .wait();
      const Tensor got = tensors.read(full);
      for (std::int64_t i = 0; i < got.numel(); ++i)
        if (i >= base + from && i < base + n)
          expect_near(got.data<float>()[i], exact_sum<float>(comm.size(), i), comm.size(), DType::f32,
                      DType::f32, cat("element ", i));
        else
          ASSERT_EQ(got.data<float>()[i], element<float>(comm.rank(), i)) << i;
    }
  });
}

TEST_P(Conformance, NativeAllReducesAgreeToRounding) {
  run([&](Communicator& comm) {
    Tensors tensors(comm, device(comm));
    for (const DType dtype : {DType::f32, DType::bf16, DType::f16, DType::f64})
      for (const double factor : {1.0, 0.25})
        for (const std::int64_t n : {std::int64_t{0}, std::int64_t{1}, std::int64_t{5003}})
          with_type(dtype, [&]<class T>() {
            const Tensor x = tensors.make(n, dtype, false);
            tensors.fill<T>(x, comm.rank());
            comm.all_reduce(x, ReduceOp::sum, factor, {.reduction = Reduction::native}).wait();
            expect_near<T>(
                tensors.read(x),
                [&](std::int64_t i) {
                  const Sum sum = exact_sum<T>(comm.size(), i);
                  return Sum{sum.exact * factor, sum.magnitude * factor};
                },
                comm.size(), dtype, cat(name_of(dtype), " × ", factor));
          });
  });
}

/// Results that no order of sums can change have the bits of every other reduction.
TEST_P(Conformance, NativeExtremesAndIntegersAreTheSame) {
  run([&](Communicator& comm) {
    Tensors tensors(comm, device(comm));
    const CallOptions native{.reduction = Reduction::native};
    const Tensor x = tensors.make(1003, DType::i32, false), y = tensors.make(1003, DType::f32, false);
    tensors.fill<std::int32_t>(x, comm.rank());
    comm.all_reduce(x, ReduceOp::sum, 1, native).wait();
    tensors.expect_bits<std::int32_t>(
        x, [&](std::int64_t i) { return reference_sum<std::int32_t>(comm.size(), i); }, "integers");
    tensors.set<float>(y, [&](std::int64_t i) {
      return i == 7 && comm.rank() == 0 ? std::nanf("") : element<float>(comm.rank(), i);
    });
    comm.all_reduce(y, ReduceOp::max, 1, native).wait();
    const Tensor got = tensors.read(y);
    for (std::int64_t i = 0; i < got.numel(); ++i) {
      float most = element<float>(0, i);
      for (int r = 1; r < comm.size(); ++r) most = std::max(most, element<float>(r, i));
      if (i == 7)
        EXPECT_TRUE(std::isnan(got.data<float>()[i]));
      else
        ASSERT_EQ(got.data<float>()[i], most);
    }
    const Tensor full = tensors.make(50 * comm.size(), DType::i64, false),
                 shard = tensors.make(50, DType::i64, false);
    tensors.fill<std::int64_t>(full, comm.rank());
    comm.reduce_scatter({{full, shard, 0, 50}}, DType::i64, native).wait();
    tensors.expect_bits<std::int64_t>(
        shard, [&](std::int64_t i) { return reference_sum<std::int64_t>(comm.size(), comm.rank() * 50 + i); },
        "scattered integers");
  });
}

TEST_P(Conformance, RanksThatReduceInDifferentWaysAreTold) {
  if (ranks() == 1) GTEST_SKIP() << "needs a second rank";
  run([&](Communicator& comm) {
    Tensors tensors(comm, device(comm));
    const Tensor x = tensors.make(100, DType::f32, false);
    tensors.zero(x);
    const CallOptions options{.reduction = comm.rank() == 1 ? Reduction::native : Reduction::ordered};
    const std::string told = error_of(ErrorKind::comm, [&] {
      comm.barrier();  // all have left earlier calls, which a failure would end as well
      comm.all_reduce(x, ReduceOp::sum, 1, options);
      tensors.finish();
      comm.barrier();
      comm.barrier();
    });
    EXPECT_THAT(told, ::testing::AllOf(HasSubstr("mismatched calls"),
                                       HasSubstr("rank 1 called all_reduce (native sum)"),
                                       HasSubstr("all_reduce (sum)")));
  });
}

}  // namespace
}  // namespace sherd::comm::conformance
