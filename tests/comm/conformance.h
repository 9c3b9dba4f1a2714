#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <chrono>
#include <cstdint>
#include <functional>
#include <ostream>
#include <string>
#include <thread>
#include <vector>

#include "base/random.h"
#include "comm/communicator.h"

/// One suite for every backend. A case says how to run a body on every rank: threads here (local_test.cpp),
/// or this very process as one of mpirun's (process_main.cpp); and on what device each rank has its tensors.
/// Expected values are computed serially, in rank order, so backends that pass are equal to each other to the
/// bit.
namespace sherd::comm::conformance {

using tensor::Shape;

struct Case {
  std::string name;
  int ranks = 1;
  CommOptions options;
  std::function<void(const CommOptions&, const std::function<void(Communicator&)>&)> run;
  /// A rank's own, for the tensors of one test.
  std::function<std::shared_ptr<device::Device>(Communicator&)> device = [](Communicator&) {
    return device::make_cpu_device(1);
  };
  /// Calls are only queued for a GPU: what goes wrong is thrown later, by its synchronize() and further
  /// calls.
  bool queues = false;
  /// The ranks share memory, so that each knows for whom another waits.
  bool one_machine = true;
  /// Why this machine cannot run the case, or empty.
  std::function<std::string()> unavailable = [] { return std::string(); };
};
inline void PrintTo(const Case& c, std::ostream* out) {
  *out << c.name;
}

class Conformance : public ::testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    if (const std::string why = GetParam().unavailable(); !why.empty()) GTEST_SKIP() << why;
  }
  int ranks() const { return GetParam().ranks; }
  std::shared_ptr<device::Device> device(Communicator& comm) const { return GetParam().device(comm); }
  void run(const std::function<void(Communicator&)>& body) const { run(GetParam().options, body); }
  void run(const CommOptions& options, const std::function<void(Communicator&)>& body) const {
    GetParam().run(options, body);
  }
};

/// Throws what the group fails with in the next eight seconds.
inline void wait_for_failure(Communicator& comm) {
  for (int turn = 0; turn < 400; ++turn) {
    comm.part({});  // of nobody: asks nobody
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
}

/// Element i of rank r's test data: thousands of distinct values with rounding errors in their sums. Making
/// and checking them takes most of the suite's time: hence one multiplication that mixes.
inline double value_at(int rank, std::int64_t i, int salt = 0) {
  std::uint64_t bits = (static_cast<std::uint64_t>(salt) << 44 ^ static_cast<std::uint64_t>(rank) << 36) +
                       static_cast<std::uint64_t>(i) + 1;
  bits *= 0x9e3779b97f4a7c15ull;
  bits = (bits ^ bits >> 32) * 0xbf58476d1ce4e5b9ull;
  return (static_cast<double>(static_cast<std::uint32_t>(bits >> 32) % 20011) - 10000.0) * (1 / 777.0);
}

template <class T>
T element(int rank, std::int64_t i, int salt = 0) {
  if constexpr (std::is_integral_v<T>)
    return static_cast<T>(static_cast<std::int64_t>(value_at(rank, i, salt) * 1000));
  else if constexpr (std::is_same_v<T, double>)
    return value_at(rank, i, salt);
  else
    return T(static_cast<float>(value_at(rank, i, salt)));
}

template <class T>
void fill(const Tensor& x, int rank, int salt = 0) {
  T* data = x.data<T>();
  for (std::int64_t i = 0; i < x.numel(); ++i) data[i] = element<T>(rank, i, salt);
}

/// Runs body.operator()<T>() with the element type.
template <class Body>
void with_type(DType dtype, const Body& body) {
  switch (dtype) {
    case DType::f32:
      return body.template operator()<float>();
    case DType::bf16:
      return body.template operator()<bf16>();
    case DType::f16:
      return body.template operator()<f16>();
    case DType::f64:
      return body.template operator()<double>();
    case DType::i32:
      return body.template operator()<std::int32_t>();
    case DType::i64:
      return body.template operator()<std::int64_t>();
    case DType::u16:
      return body.template operator()<std::uint16_t>();
    case DType::u8:
      return body.template operator()<std::uint8_t>();
  }
}
inline const std::vector<DType>& dtypes() {
  static const std::vector<DType> all{DType::f32, DType::bf16, DType::f16, DType::f64,
                                      DType::i32, DType::i64,  DType::u16, DType::u8};
  return all;
}

/// The type in which sums of T run.
template <class T>
using Wide = std::conditional_t<std::is_integral_v<T> || std::is_same_v<T, double>, T, float>;

/// The sum of element i over ranks, in rank order, times `factor`; as reductions define it.
template <class T>
Wide<T> reference_sum(int ranks, std::int64_t i, double factor = 1, int salt = 0) {
  Wide<T> sum = static_cast<Wide<T>>(element<T>(0, i, salt));
  for (int r = 1; r < ranks; ++r)
    sum = static_cast<Wide<T>>(sum + static_cast<Wide<T>>(element<T>(r, i, salt)));
  return factor == 1 ? sum : static_cast<Wide<T>>(sum * static_cast<Wide<T>>(factor));
}

/// `value` as it is after a rounding to `rounding`, which is no integer's.
template <class W>
W rounded_to(DType rounding, W value) {
  if constexpr (std::is_integral_v<W>)
    return value;
  else
    return rounding == DType::bf16  ? static_cast<W>(static_cast<float>(bf16(static_cast<float>(value))))
           : rounding == DType::f16 ? static_cast<W>(static_cast<float>(f16(static_cast<float>(value))))
           : rounding == DType::f32 ? static_cast<W>(static_cast<float>(value))
                                    : value;
}

/// The sum that a reduce-scatter makes of element i of every rank: each rounded alone, then added in rank
/// order to `onto`, where given.
template <class T>
Wide<T> reference_fold(int ranks, std::int64_t i, DType rounding, const Wide<T>* onto = nullptr,
                       int salt = 0) {
  const auto source = [&](int r) {
    return rounded_to(rounding, static_cast<Wide<T>>(element<T>(r, i, salt)));
  };
  Wide<T> sum = onto ? static_cast<Wide<T>>(*onto + source(0)) : source(0);
  for (int r = 1; r < ranks; ++r) sum = static_cast<Wide<T>>(sum + source(r));
  return sum;
}

/// The bits of an element, as a number.
template <class T>
auto bits_of(T value) {
  using std::conditional_t;
  using Bits = conditional_t<sizeof(T) == 8, std::uint64_t,
                             conditional_t<sizeof(T) == 4, std::uint32_t,
                                           conditional_t<sizeof(T) == 2, std::uint16_t, std::uint8_t>>>;
  return std::bit_cast<Bits>(value);
}

/// Compares bits; reports the first difference once.
template <class T, class Expected>
void expect_bits(const Tensor& x, const Expected& expected, const std::string& what) {
  const T* data = x.data<T>();
  for (std::int64_t i = 0; i < x.numel(); ++i) {
    const T want = expected(i);
    if (bits_of(data[i]) == bits_of(want)) continue;
    ADD_FAILURE() << what << ": element " << i << " of " << x.numel() << " is "
                  << static_cast<double>(Wide<T>(data[i])) << ", not " << static_cast<double>(Wide<T>(want));
    return;
  }
}

/// Tensors of one rank: those of make() that are `shared` come from the communicator's own memory, the others
/// from the device, so that both ways of reaching a peer are taken. The test reads and writes them through
/// here, for the processor does not reach all of them.
class Tensors {
 public:
  /// Collective where `device` is a GPU.
  Tensors(Communicator& comm, std::shared_ptr<device::Device> device)
      : comm_(comm), device_(std::move(device)) {
    if (device_->accelerator()) comm.bind(device_);
  }
  Communicator& comm() { return comm_; }
  device::Device& device() { return *device_; }
  const std::shared_ptr<device::Device>& shared_device() { return device_; }

  /// Collective when `shared`.
  Tensor make(std::int64_t n, DType dtype, bool shared) {
    if (!shared) return Tensor::empty(*device_, {n}, dtype);
    const std::size_t bytes = static_cast<std::size_t>(n) * size_of(dtype);
    return Tensor::view_of(comm_.allocate(*device_, bytes, device::Category::communication), 0, {n}, dtype);
  }
  /// Element i becomes value(i).
  template <class T, class Value>
  void set(const Tensor& x, const Value& value) {
    const Tensor here = reachable()
                            ? x
                            : Tensor::empty(*device_, {x.numel()}, x.dtype(), device::Category::communication,
                                            device_->processor_tier());
    T* data = here.data<T>();
    for (std::int64_t i = 0; i < x.numel(); ++i) data[i] = value(i);
    if (!reachable()) device_->copy(x.raw(), here.raw(), x.bytes());
  }
  template <class T>
  void fill(const Tensor& x, int rank, int salt = 0) {
    set<T>(x, [&](std::int64_t i) { return element<T>(rank, i, salt); });
  }
  /// Waits for what a GPU was given, and throws what became of it.
  void finish() { device_->synchronize(); }
  void zero(const Tensor& x) { device_->zero(x.raw(), x.bytes()); }
  /// Its elements, with all work on it done, where the processor can read them.
  Tensor read(const Tensor& x) { return tensor::to_host(*device_, x); }
  template <class T, class Expected>
  void expect_bits(const Tensor& x, const Expected& expected, const std::string& what) {
    conformance::expect_bits<T>(read(x), expected, what);
  }

 private:
  bool reachable() const { return device_->processor_tier() == device::Tier::device; }

  Communicator& comm_;
  std::shared_ptr<device::Device> device_;
};

/// The message of the Error{kind} that `body` throws; a failure and "" when it throws none or another.
inline std::string error_of(ErrorKind kind, const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), kind) << error.what();
    return error.what();
  }
  ADD_FAILURE() << "nothing was thrown";
  return "";
}

}  // namespace sherd::comm::conformance
