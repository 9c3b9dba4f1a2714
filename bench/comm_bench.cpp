// Collectives beside memcpy of the same bytes and, under mpirun, beside the MPI library's own, in alternating
// rounds. Prints one JSON object. bench/comm.sh runs it over both backends.
//
//   bench_comm [--mib 64] [--rounds 15] [--ranks 2]        (--ranks: local only)
#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <iostream>
#include <map>
#include <string>
#include <vector>

#include "comm/communicator.h"

#ifdef SHERD_BENCH_MPI
#include <mpi.h>
#endif

namespace {

using namespace sherd;
using Clock = std::chrono::steady_clock;

struct Settings {
  std::size_t bytes = std::size_t{64} << 20;
  int rounds = 15, ranks = 2;
};

/// What is timed: everybody starts together, and it is over when the last is done.
struct Contender {
  std::string name;
  std::function<void()> run, meet;
};

/// Milliseconds by contender and round.
using Times = std::map<std::string, std::vector<double>>;

Times alternate(const std::vector<Contender>& contenders, int rounds) {
  Times times;
  for (int round = -2; round < rounds; ++round)  // two to warm up
    for (const Contender& c : contenders) {
      c.meet();
      const auto start = Clock::now();
      c.run();
      c.meet();
      const double ms = std::chrono::duration<double, std::milli>(Clock::now() - start).count();
      if (round >= 0) times[c.name].push_back(ms);
    }
  return times;
}

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2),
                   values.end());
  return values[values.size() / 2];
}

/// Median over rounds of a's time by b's in the same round.
double ratio(const Times& times, const std::string& a, const std::string& b) {
  std::vector<double> ratios;
  for (std::size_t i = 0; i < times.at(a).size(); ++i) ratios.push_back(times.at(a)[i] / times.at(b)[i]);
  return median(ratios);
}

/// Buffers of one rank: in memory that peers reach, and in memory that they do not.
struct Buffers {
  tensor::Tensor full, shard, other;
};

Buffers make_buffers(comm::Communicator& comm, device::Device& device, std::size_t bytes, bool shared) {
  const auto n = static_cast<std::int64_t>(bytes / sizeof(float)) / comm.size() * comm.size();
  const auto make = [&](std::int64_t count) {
    const std::size_t size = static_cast<std::size_t>(count) * sizeof(float);
    const device::Storage storage = shared ? comm.allocate(device, size, device::Category::communication)
                                           : device.allocate(size, device::Category::communication);
    const tensor::Tensor x = tensor::Tensor::view_of(storage, 0, {count}, DType::f32);
    std::fill_n(x.data<float>(), count, 1e-3f);
    return x;
  };
  return {make(n), make(n / comm.size()), make(n)};
}

std::vector<Contender> ours(comm::Communicator& comm, const Buffers& b, const std::string& suffix) {
  const std::int64_t shard = b.shard.numel();
  const auto meet = [&comm] { comm.barrier(); };
  // A factor keeps the repeated sums from growing without end.
  return {{"all_reduce" + suffix,
           [&comm, b] { comm.all_reduce(b.full, comm::ReduceOp::sum, 1.0 / comm.size()); }, meet},
          {"reduce_scatter" + suffix,
           [&comm, b, shard] {
             comm.reduce_scatter({{b.full, b.shard, 0, shard}}, 1, DType::f32);
           },
           meet},
          {"all_gather" + suffix,
           [&comm, b] {
             comm.all_gather({{b.shard, b.full}});
           },
           meet}};
}

#ifdef SHERD_BENCH_MPI
std::vector<Contender> theirs(int ranks, const Buffers& b) {
  const auto meet = [] { MPI_Barrier(MPI_COMM_WORLD); };
  const int n = static_cast<int>(b.full.numel()), shard = static_cast<int>(b.shard.numel());
  const std::vector<int> counts(static_cast<std::size_t>(ranks), shard);
  return {
      {"mpi_all_reduce",
       [b, n] { MPI_Allreduce(MPI_IN_PLACE, b.full.raw(), n, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD); }, meet},
      {"mpi_reduce_scatter",
       [b, counts] {
         MPI_Reduce_scatter(b.full.raw(), b.shard.raw(), counts.data(), MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
       },
       meet},
      {"mpi_all_gather",
       [b, shard] {
         MPI_Allgather(b.shard.raw(), shard, MPI_FLOAT, b.full.raw(), shard, MPI_FLOAT, MPI_COMM_WORLD);
       },
       meet}};
}
#endif

void print(const std::string& backend, int ranks, const Settings& settings, const Times& times,
           double barrier) {
  std::cout << "{\"backend\": \"" << backend << "\", \"ranks\": " << ranks
            << ", \"mib\": " << (settings.bytes >> 20) << ", \"rounds\": " << settings.rounds
            << ", \"barrier_us\": " << barrier << ",\n \"median_ms\": {";
  const char* comma = "";
  for (const auto& [name, values] : times)
    std::cout << comma << "\"" << name << "\": " << median(values), comma = ", ";
  std::cout << "},\n \"of_memcpy\": {";
  comma = "";
  for (const auto& [name, values] : times)
    if (name != "memcpy")
      std::cout << comma << "\"" << name << "\": " << ratio(times, name, "memcpy"), comma = ", ";
  std::cout << "}";
  if (times.contains("mpi_all_reduce")) {
    std::cout << ",\n \"times_faster_than_mpi\": {";
    comma = "";
    for (const std::string name : {"all_reduce", "reduce_scatter", "all_gather"})
      for (const std::string suffix : {"", "_staged"}) {
        std::cout << comma << "\"" << name << suffix << "\": " << ratio(times, "mpi_" + name, name + suffix);
        comma = ", ";
      }
    std::cout << "}";
  }
  std::cout << "}" << std::endl;
}

/// Microseconds per barrier.
double barrier_us(comm::Communicator& comm) {
  constexpr int turns = 2000;
  comm.barrier();
  const auto start = Clock::now();
  for (int i = 0; i < turns; ++i) comm.barrier();
  return std::chrono::duration<double, std::micro>(Clock::now() - start).count() / turns;
}

void measure(comm::Communicator& comm, const Settings& settings, bool mpi) {
  const auto device = device::make_cpu_device(1);
  const Buffers shared = make_buffers(comm, *device, settings.bytes, true);
  const Buffers hidden = make_buffers(comm, *device, settings.bytes, false);
  std::vector<Contender> contenders{
      {"memcpy", [&] { std::memcpy(hidden.other.raw(), hidden.full.raw(), hidden.full.bytes()); },
       [&] { comm.barrier(); }}};
  const auto add = [&](std::vector<Contender> more) {
    contenders.insert(contenders.end(), more.begin(), more.end());
  };
  add(ours(comm, shared, ""));
#ifdef SHERD_BENCH_MPI
  if (mpi) add(ours(comm, hidden, "_staged")), add(theirs(comm.size(), hidden));
#endif
  const Times times = alternate(contenders, settings.rounds);
  const double barrier = barrier_us(comm);
  if (comm.rank() == 0) print(mpi ? "mpi" : "local", comm.size(), settings, times, barrier);
}

}  // namespace

int main(int argc, char** argv) {
  Settings settings;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string key = argv[i];
    const long value = std::atol(argv[i + 1]);
    if (key == "--mib")
      settings.bytes = static_cast<std::size_t>(value) << 20;
    else if (key == "--rounds")
      settings.rounds = static_cast<int>(value);
    else if (key == "--ranks")
      settings.ranks = static_cast<int>(value);
    else
      return std::cerr << "unknown option " << key << "\n", 1;
  }
  try {
    const bool mpi = comm::launched_by_mpi();
    if (mpi)
      measure(*comm::make_mpi_world({}), settings, true);
    else
      comm::run_local(settings.ranks, {}, [&](comm::Communicator& c) { measure(c, settings, false); });
  } catch (const std::exception& error) {
    std::cerr << "bench_comm: " << error.what() << "\n";
    return 1;
  }
  return 0;
}
