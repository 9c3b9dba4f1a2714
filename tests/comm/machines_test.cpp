// Sums between machines of uneven numbers of ranks: the ways of a sum that the suite's few ranks never take.
#include "comm/exchange/sum_across.h"
#include "tests/comm/conformance.h"
#include "tests/comm/tcp_ranks.h"

namespace sherd::comm {
namespace {

using namespace conformance;

struct Layout {
  const char* name;
  std::vector<int> machines;  ///< by rank
};

class Machines : public ::testing::TestWithParam<Layout> {
 protected:
  static int ranks() { return static_cast<int>(GetParam().machines.size()); }
  static void run(const std::function<void(Communicator&, Tensors&)>& body) {
    on_tcp_ranks(
        ranks(), {.timeout_seconds = 60},
        [&](Communicator& comm) {
          Tensors tensors(comm, device::make_cpu_device(1));
          body(comm, tensors);
        },
        GetParam().machines);
  }
};

/// More than a chunk of six ranks' parts.
constexpr std::int64_t many = 90001;
static_assert(many * 6 * 4 > static_cast<std::int64_t>(BoardLayout::spanning_stage));

TEST_P(Machines, ReduceScattersFoldRoundedPartsInRankOrder) {
  run([](Communicator& comm, Tensors& tensors) {
    const std::int64_t n = many, base = comm.rank() * n;
    for (const DType dtype : {DType::f32, DType::bf16, DType::f64})
      with_type(dtype, [&]<class T>() {
        const Tensor full = tensors.make(n * comm.size(), dtype, true);
        const Tensor plain = tensors.make(n, dtype, false), wide = tensors.make(n, DType::f32, false),
                     narrow = tensors.make(n, DType::bf16, false);
        tensors.fill<T>(full, comm.rank());
        tensors.fill<float>(wide, 97), tensors.fill<bf16>(narrow, 98);
        comm.reduce_scatter({{full, plain, 0, n}, {full, wide, 0, n, wide}, {full, narrow, 0, n, narrow}},
                            DType::bf16)
            .wait();
        const auto fold = [&](std::int64_t i, const Wide<T>* onto) {
          return reference_fold<T>(comm.size(), base + i, DType::bf16, onto);
        };
        tensors.expect_bits<T>(
            plain, [&](std::int64_t i) { return T(fold(i, nullptr)); }, cat(name_of(dtype), " alone"));
        tensors.expect_bits<float>(
            wide,
            [&](std::int64_t i) {
              const auto onto = static_cast<Wide<T>>(element<float>(97, i));
              return static_cast<float>(fold(i, &onto));
            },
            cat(name_of(dtype), " onto fp32"));
        tensors.expect_bits<bf16>(
            narrow,
            [&](std::int64_t i) {
              const auto onto = static_cast<Wide<T>>(static_cast<float>(element<bf16>(98, i)));
              return bf16(static_cast<float>(fold(i, &onto)));
            },
            cat(name_of(dtype), " onto bf16"));
      });
  });
}

TEST_P(Machines, AllReducesSumInRankOrder) {
  run([](Communicator& comm, Tensors& tensors) {
    for (const DType dtype : {DType::f32, DType::bf16})
      with_type(dtype, [&]<class T>() {
        const Tensor x = tensors.make(6 * many, dtype, true);
        tensors.fill<T>(x, comm.rank());
        comm.all_reduce(x, ReduceOp::sum, 1.0 / 3).wait();
        tensors.expect_bits<T>(
            x, [&](std::int64_t i) { return T(reference_sum<T>(comm.size(), i, 1.0 / 3)); },
            cat("sum of ", name_of(dtype)));
        const Tensor y = tensors.make(5001, dtype, false);
        tensors.fill<T>(y, comm.rank());
        comm.all_reduce(y, ReduceOp::max).wait();
        tensors.expect_bits<T>(
            y,
            [&](std::int64_t i) {
              T most = element<T>(0, i);
              for (int r = 1; r < comm.size(); ++r)
                if (Wide<T>(element<T>(r, i)) > Wide<T>(most)) most = element<T>(r, i);
              return most;
            },
            cat("maximum of ", name_of(dtype)));
      });
  });
}

INSTANTIATE_TEST_SUITE_P(Tcp, Machines,
                         ::testing::Values(Layout{"oneAndFive", {0, 1, 1, 1, 1, 1}},
                                           Layout{"fiveAndOne", {0, 0, 0, 0, 0, 1}},
                                           Layout{"threePairs", {0, 0, 1, 1, 2, 2}},
                                           Layout{"around", {0, 1, 1, 1, 1, 0}}),
                         [](const auto& test) { return std::string(test.param.name); });

}  // namespace
}  // namespace sherd::comm
