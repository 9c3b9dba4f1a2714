#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "tests/comm/conformance.h"

namespace sherd::comm::conformance {
namespace {

// Empty, single, odd, within and beyond a notice's payload, and beyond a staging chunk.
constexpr std::int64_t longest = 270007;
const std::vector<std::int64_t> counts{0, 1, 2, 7, 17, 1000, 4099, longest};

/// Long tensors of a few types only, and with few ranks: making and checking the data takes longer than the
/// calls.
bool skip(std::int64_t n, DType dtype, int ranks) {
  return n == longest && (ranks > 4 || (dtype != DType::f32 && dtype != DType::bf16));
}

/// Calls body<T>(n, dtype, shared) for tensors of these types and all sizes, in memory that peers see and in
/// other.
template <class Body>
void for_every_tensor(const std::vector<DType>& dtypes, int ranks, const Body& body) {
  for (const DType dtype : dtypes)
    for (const std::int64_t n : counts)
      for (const bool shared : {false, true})
        if (!skip(n, dtype, ranks))
          with_type(dtype, [&]<class T>() { body.template operator()<T>(n, dtype, shared); });
}

TEST_P(Conformance, AllReduceSumsInRankOrder) {
  run([&](Communicator& comm) {
    Tensors tensors(comm, device(comm));
    for_every_tensor(dtypes(), comm.size(), [&]<class T>(std::int64_t n, DType dtype, bool shared) {
      const Tensor x = tensors.make(n, dtype, shared);
      tensors.fill<T>(x, comm.rank());
      comm.all_reduce(x, ReduceOp::sum, 1, {.label = "sum"}).wait();
      tensors.expect_bits<T>(
          x, [&](std::int64_t i) { return T(reference_sum<T>(comm.size(), i)); },
          cat("all_reduce ", name_of(dtype), " ", n, shared ? " shared" : ""));
    });
  });
}

TEST_P(Conformance, AllReduceAppliesTheFactorBeforeTheOneRounding) {
  run([&](Communicator& comm) {
    Tensors tensors(comm, device(comm));
    for (const DType dtype : {DType::f32, DType::bf16, DType::f16, DType::f64})
      with_type(dtype, [&]<class T>() {
        const Tensor x = tensors.make(5003, dtype, true);
        tensors.fill<T>(x, comm.rank());
        comm.all_reduce(x, ReduceOp::sum, 1.0 / 3).wait();
        tensors.expect_bits<T>(
            x, [&](std::int64_t i) { return T(reference_sum<T>(comm.size(), i, 1.0 / 3)); }, "factor");
      });
  });
}

TEST_P(Conformance, AllReduceTakesExtremes) {
  run([&](Communicator& comm) {
    Tensors tensors(comm, device(comm));
    for (const DType dtype : dtypes())
      for (const ReduceOp op : {ReduceOp::max, ReduceOp::min})
        for (const std::int64_t n : {std::int64_t{3}, std::int64_t{5001}})
          with_type(dtype, [&]<class T>() {
            const Tensor x = tensors.make(n, dtype, false);
            tensors.fill<T>(x, comm.rank());
            comm.all_reduce(x, op).wait();
            tensors.expect_bits<T>(
                x,
                [&](std::int64_t i) {
                  T best = element<T>(0, i);
                  for (int r = 1; r < comm.size(); ++r) {
                    const T next = element<T>(r, i);
                    const bool take =
                        op == ReduceOp::max ? Wide<T>(next) > Wide<T>(best) : Wide<T>(next) < Wide<T>(best);
                    if (take) best = next;
                  }
                  return best;
                },
                "extreme");
          });
  });
}

TEST_P(Conformance, AllGatherOfManyPieces) {
  run([&](Communicator& comm) {
    Tensors tensors(comm, device(comm));
    // More pieces than one round takes; every other one in place; every third in shared memory.
    std::vector<GatherPiece> pieces;
    std::vector<std::int64_t> sizes;
    for (int k = 0; k < 300; ++k) sizes.push_back(k == 5 ? 200003 : k == 7 ? 0 : (k * 37) % 101);
    for (int k = 0; k < 300; ++k) {
      const std::int64_t n = sizes[static_cast<std::size_t>(k)];
      const Tensor full = tensors.make(n * comm.size(), DType::f32, k % 3 == 0);
      tensors.set<float>(full, [](std::int64_t) { return -7.0f; });
      const Tensor shard = k % 2 ? full.range(comm.rank() * n, (comm.rank() + 1) * n)
                                 : tensors.make(n, DType::f32, k % 3 == 0);
      tensors.fill<float>(shard, comm.rank(), k);
      pieces.push_back({shard, full});
    }
    comm.all_gather(pieces, {.label = "many"}).wait();
    for (int k = 0; k < 300; ++k) {
      const std::int64_t n = std::max<std::int64_t>(1, sizes[static_cast<std::size_t>(k)]);
      tensors.expect_bits<float>(
          pieces[static_cast<std::size_t>(k)].full,
          [&](std::int64_t i) { return element<float>(static_cast<int>(i / n), i % n, k); },
          cat("piece ", k));
    }
    comm.all_gather({}, {.label = "nothing"}).wait();
  });
}

TEST_P(Conformance, AllGatherOfEveryType) {
  run([&](Communicator& comm) {
    Tensors tensors(comm, device(comm));
    for_every_tensor(dtypes(), comm.size(), [&]<class T>(std::int64_t n, DType dtype, bool shared) {
      const Tensor shard = tensors.make(n, dtype, shared), full = tensors.make(n * comm.size(), dtype, false);
      tensors.fill<T>(shard, comm.rank());
      comm.all_gather({{shard, full}}).wait();
      tensors.expect_bits<T>(
          full, [&](std::int64_t i) { return element<T>(static_cast<int>(i / n), i % n); }, "all_gather");
    });
  });
}

TEST_P(Conformance, ReduceScatterOfEveryType) {
  run([&](Communicator& comm) {
    Tensors tensors(comm, device(comm));
    for_every_tensor(dtypes(), comm.size(), [&]<class T>(std::int64_t n, DType dtype, bool shared) {
      const Tensor full = tensors.make(n * comm.size(), dtype, shared), shard = tensors.make(n, dtype, false);
      tensors.fill<T>(full, comm.rank());
      comm.reduce_scatter({{full, shard, 0, n}}, dtype).wait();
      const std::int64_t base = comm.rank() * n;
      tensors.expect_bits<T>(
          shard, [&](std::int64_t i) { return T(reference_sum<T>(comm.size(), base + i)); },
          "reduce_scatter");
    });
  });
}

/// Ranges that travel apart, in place, give what the whole gives at once; everything outside the range is
/// left alone.
TEST_P(Conformance, ReduceScatterOfRangesInPlace) {
  run([&](Communicator& comm) {
    Tensors tensors(comm, device(comm));
    for (const bool shared : {false, true}) {
      const std::int64_t n = 70001, cut = 12345;
      const Tensor full = tensors.make(n * comm.size(), DType::bf16, shared);
      tensors.fill<bf16>(full, comm.rank());
      const std::int64_t base = comm.rank() * n;
      const Tensor shard = full.range(base, base + n);
      comm.reduce_scatter({{full, shard, cut, n}}, DType::bf16).wait();
      tensors.expect_bits<bf16>(
          full,
          [&](std::int64_t i) {
            const bool reduced = i >= base + cut && i < base + n;
            return reduced ? bf16(reference_sum<bf16>(comm.size(), i)) : element<bf16>(comm.rank(), i);
          },
          "second part");
      comm.reduce_scatter({{full, shard, 0, cut}}, DType::bf16).wait();
      tensors.expect_bits<bf16>(
          shard, [&](std::int64_t i) { return bf16(reference_sum<bf16>(comm.size(), base + i)); }, "both");
    }
  });
}

/// Each rank's part is rounded alone; the sum begins with `onto`, and is rounded once more, to the shard's
/// type.
TEST_P(Conformance, ReduceScatterFoldsRoundedPartsOntoASum) {
  run([&](Communicator& comm) {
    Tensors tensors(comm, device(comm));
    const auto begun = [](std::int64_t i) { return static_cast<float>(i) * 0.37f; };
    for (const auto& [dtype, n] :
         {std::pair{DType::f32, std::int64_t{3001}}, {DType::bf16, 70001}, {DType::f16, 33}})
      for (const DType rounding : {DType::f32, DType::bf16, DType::f16})
        for (const bool shared : {false, true})
          with_type(dtype, [&]<class T>() {
            const Tensor full = tensors.make(n * comm.size(), dtype, shared);
            const Tensor in_place = tensors.make(n, DType::f32, shared),
                         apart = tensors.make(n, DType::f32, false);
            const Tensor wide = tensors.make(n, DType::f32, false),
                         narrow = tensors.make(n, DType::bf16, shared);
            tensors.fill<T>(full, comm.rank());
            for (const Tensor& x : {in_place, wide}) tensors.set<float>(x, begun);
            for (const Tensor& x : {apart, narrow}) tensors.zero(x);
            comm.reduce_scatter(
                    {{full, in_place, 0, n, in_place}, {full, apart, 5, n, wide}, {full, narrow, 0, n, wide}},
                    rounding)
                .wait();
            const auto folded = [&](std::int64_t i) {
              const Wide<T> onto = static_cast<Wide<T>>(begun(i));
              return static_cast<float>(reference_fold<T>(comm.size(), comm.rank() * n + i, rounding, &onto));
            };
            const std::string what = cat(name_of(dtype), " by ", name_of(rounding), shared ? " shared" : "");
            tensors.expect_bits<float>(in_place, folded, what + " in place");
            tensors.expect_bits<float>(
                apart, [&](std::int64_t i) { return i < 5 ? 0.0f : folded(i); }, what + " apart");
            tensors.expect_bits<bf16>(
                narrow, [&](std::int64_t i) { return bf16(folded(i)); }, what + " narrow");
            tensors.expect_bits<float>(wide, begun, what + ": what the sum begins with");
          });
  });
}

/// A sum that goes on from a sum is that of all parts in the order in which they came, on any number of
/// ranks.
TEST_P(Conformance, ReduceScatterGoesOnFromAnEarlierSum) {
  run([&](Communicator& comm) {
    Tensors tensors(comm, device(comm));
    const std::int64_t n = 1003, base = comm.rank() * n;
    const Tensor full = tensors.make(n * comm.size(), DType::f32, true),
                 shard = tensors.make(n, DType::f32, false);
    for (int turn = 0; turn < 3; ++turn) {
      tensors.fill<float>(full, comm.rank(), turn);
      comm.reduce_scatter({{full, shard, 0, n, turn == 0 ? Tensor() : shard}}, DType::bf16).wait();
    }
    tensors.expect_bits<float>(
        shard,
        [&](std::int64_t i) {
          float sum = 0;
          for (int m = 0; m < 3 * comm.size(); ++m)
            sum += static_cast<float>(bf16(element<float>(m % comm.size(), base + i, m / comm.size())));
          return sum;
        },
        "three turns");
  });
}

TEST_P(Conformance, ReduceScatterBeginsSumsOfEveryType) {
  run([&](Communicator& comm) {
    Tensors tensors(comm, device(comm));
    const std::int64_t n = 517;
    for (const DType dtype : dtypes())
      with_type(dtype, [&]<class T>() {
        const Tensor full = tensors.make(n * comm.size(), dtype, true), shard = tensors.make(n, dtype, false);
        tensors.fill<T>(full, comm.rank()), tensors.fill<T>(shard, 99);
        comm.reduce_scatter({{full, shard, 0, n, shard}}, dtype).wait();
        tensors.expect_bits<T>(
            shard,
            [&](std::int64_t i) {
              const auto onto = static_cast<Wide<T>>(element<T>(99, i));
              return T(reference_fold<T>(comm.size(), comm.rank() * n + i, dtype, &onto));
            },
            cat("onto ", name_of(dtype)));
      });
  });
}

TEST_P(Conformance, BroadcastFromEveryRoot) {
  run([&](Communicator& comm) {
    Tensors tensors(comm, device(comm));
    for (int root = 0; root < comm.size(); ++root)
      for (const std::int64_t n : counts)
        for (const bool shared : {false, true}) {
          const Tensor x = tensors.make(n, DType::i32, shared);
          tensors.fill<std::int32_t>(x, comm.rank());
          comm.broadcast(x, root, {.label = "weights"}).wait();
          tensors.expect_bits<std::int32_t>(
              x, [&](std::int64_t i) { return element<std::int32_t>(root, i); }, "broadcast");
        }
  });
}

TEST_P(Conformance, AllToAllWithEqualBlocks) {
  run([&](Communicator& comm) {
    Tensors tensors(comm, device(comm));
    for (const std::int64_t n : counts)
      for (const bool shared : {false, true}) {
        const Tensor in = tensors.make(n * comm.size(), DType::f16, shared),
                     out = tensors.make(n * comm.size(), DType::f16, false);
        tensors.fill<f16>(in, comm.rank());
        comm.all_to_all(in, out).wait();
        tensors.expect_bits<f16>(
            out,
            [&](std::int64_t i) { return element<f16>(static_cast<int>(i / n), comm.rank() * n + i % n); },
            "all_to_all");
      }
  });
}

/// Elements that rank p has for rank q: none for some, many for others.
std::int64_t block(int p, int q, int scale) {
  return (p + 2 * q) % 3 == 0 ? 0 : scale * (1 + 5 * p + 3 * q) + p;
}

TEST_P(Conformance, AllToAllWithCounts) {
  run([&](Communicator& comm) {
    Tensors tensors(comm, device(comm));
    const int size = comm.size(), me = comm.rank();
    for (const int scale : {1, 977})
      for (const bool shared : {false, true}) {
        std::vector<std::int64_t> in_counts, out_counts;
        for (int q = 0; q < size; ++q)
          in_counts.push_back(block(me, q, scale)), out_counts.push_back(block(q, me, scale));
        const auto total = [](auto& v) { return std::accumulate(v.begin(), v.end(), std::int64_t{0}); };
        // Sizes differ by rank, so memory of the communicator has the largest.
        const std::int64_t most = size * scale * 8 * (size + 1) + size * size;
        const Tensor in = tensors.make(most, DType::i64, shared).range(0, total(in_counts));
        const Tensor out = tensors.make(total(out_counts), DType::i64, false);
        tensors.fill<std::int64_t>(in, me);
        comm.all_to_all(in, out, in_counts, out_counts, {.label = "tokens"}).wait();
        std::vector<std::int64_t> expected;
        for (int p = 0; p < size; ++p) {
          std::int64_t begin = 0;
          for (int q = 0; q < me; ++q) begin += block(p, q, scale);
          for (std::int64_t i = 0; i < block(p, me, scale); ++i)
            expected.push_back(element<std::int64_t>(p, begin + i));
        }
        tensors.expect_bits<std::int64_t>(
            out, [&](std::int64_t i) { return expected[static_cast<std::size_t>(i)]; }, "counts");
      }
  });
}

TEST_P(Conformance, ThreadsDoNotChangeBits) {
  CommOptions options = GetParam().options;
  options.threads = 3;
  run(options, [&](Communicator& comm) {
    Tensors tensors(comm, device(comm));
    const Tensor x = tensors.make(400001, DType::bf16, true);
    tensors.fill<bf16>(x, comm.rank());
    comm.all_reduce(x, ReduceOp::sum, 0.75).wait();
    tensors.expect_bits<bf16>(
        x, [&](std::int64_t i) { return bf16(reference_sum<bf16>(comm.size(), i, 0.75)); }, "threads");
  });
}

TEST_P(Conformance, SpecialValuesTravel) {
  run([&](Communicator& comm) {
    Tensors tensors(comm, device(comm));
    const float inf = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
    for (const std::int64_t n : {std::int64_t{4}, std::int64_t{8192}}) {
      const Tensor x = tensors.make(n, DType::bf16, true);
      const float special[] = {inf, comm.rank() == 0 ? nan : 1.0f, 3.0e38f, -0.0f};
      tensors.set<bf16>(x, [&](std::int64_t i) { return bf16(special[i % 4]); });
      comm.all_reduce(x).wait();
      const Tensor sums = tensors.read(x);
      for (std::int64_t i = 0; i < n; ++i) {
        const auto got = static_cast<float>(sums.data<bf16>()[i]);
        if (i % 4 == 0) {
          ASSERT_EQ(got, inf);
        }
        if (i % 4 == 1) {
          ASSERT_TRUE(got != got);
        }
        if (i % 4 == 2) {
          ASSERT_EQ(got, comm.size() == 1 ? static_cast<float>(bf16(3.0e38f)) : inf);
        }
        if (i % 4 == 3) {
          ASSERT_TRUE(got == 0 && std::signbit(got));
        }
      }
      tensors.set<bf16>(x.range(0, 1),
                        [&](std::int64_t) { return bf16(comm.rank() == comm.size() - 1 ? nan : 1.0f); });
      comm.all_reduce(x, ReduceOp::max).wait();
      ASSERT_TRUE(std::isnan(static_cast<float>(tensors.read(x).data<bf16>()[0])));
    }
  });
}

}  // namespace
}  // namespace sherd::comm::conformance
