#include "bench/suite/comm_bench.h"

#include <algorithm>
#include <chrono>
#include <cstring>

#include "base/error.h"
#include "base/text/excerpt.h"
#include "engine/report/gemm_probe.h"
#include "engine/report/report.h"

namespace sherd::bench {
namespace {

using tensor::Tensor;

/// fp32 elements of the full tensor: as many on every rank.
std::int64_t elements(const CommBenchOptions& options, int ranks) {
  return std::max<std::int64_t>(static_cast<std::int64_t>(options.bytes / sizeof(float)) / ranks, 1) * ranks;
}

Tensor make(comm::Communicator& comm, device::Device& device, std::int64_t count, bool reachable) {
  const std::size_t size = static_cast<std::size_t>(count) * sizeof(float);
  const device::Storage storage = reachable ? comm.allocate(device, size, device::Category::communication)
                                            : device.allocate(size, device::Category::communication);
  const Tensor x = Tensor::view_of(storage, 0, {count}, DType::f32);
  std::fill_n(x.data<float>(), count, 1e-3f);
  return x;
}

/// Round a ring: every rank sends its tensor to the next one.
void pass_on(comm::Communicator& comm, const CollectiveBuffers& b) {
  comm::CallOptions later;
  later.async = true;
  comm::Work sent = comm.send(b.full, (comm.rank() + 1) % comm.size(), later);
  comm.receive(b.other, (comm.rank() + comm.size() - 1) % comm.size()).wait();
  sent.wait();
}

std::vector<Contender> collectives(comm::Communicator& comm, const CollectiveBuffers& b,
                                   const std::string& suffix) {
  const std::int64_t shard = b.shard.numel();
  const auto meet = [&comm] { comm.barrier(); };
  // A factor keeps the repeated sums from growing without end.
  std::vector<Contender> out{
      {"all_reduce" + suffix,
       [&comm, b] { comm.all_reduce(b.full, comm::ReduceOp::sum, 1.0 / comm.size()).wait(); }, meet},
      {"reduce_scatter" + suffix,
       [&comm, b, shard] {
         comm.reduce_scatter({{b.full, b.shard, 0, shard}}, DType::f32).wait();
       },
       meet},
      {"all_gather" + suffix,
       [&comm, b] {
         comm.all_gather({{b.shard, b.full}}).wait();
       },
       meet}};
  if (comm.size() > 1) out.push_back({"send" + suffix, [&comm, b] { pass_on(comm, b); }, meet});
  return out;
}

}  // namespace

double comm_bench_memory(const CommBenchOptions& options, int ranks) {
  const auto full = static_cast<double>(elements(options, ranks)) * sizeof(float);
  return 5 * full + 2 * full / ranks;
}

Rounds measure_collectives(comm::Communicator& comm, const CommBenchOptions& options, const Tell& tell) {
  const auto device = device::make_cpu_device(1);
  const std::int64_t n = elements(options, comm.size()), part = n / comm.size();
  const auto buffers = [&](bool reached) {
    return CollectiveBuffers{make(comm, *device, n, reached), make(comm, *device, part, reached),
                             make(comm, *device, n, reached)};
  };
  const CollectiveBuffers reachable = buffers(true), own = buffers(false);
  const Tensor copy = make(comm, *device, n, false);
  std::vector<Contender> contenders{{"memcpy",
                                     [&] { std::memcpy(copy.raw(), own.full.raw(), own.full.bytes()); },
                                     [&] { comm.barrier(); }}};
  const auto add = [&](std::vector<Contender> more) {
    contenders.insert(contenders.end(), more.begin(), more.end());
  };
  add(collectives(comm, reachable, ""));
  if (options.staged) add(collectives(comm, own, "_staged"));
  if (options.others) add(options.others(own));
  Rounds times(options.rounds, tell);
  times.run(contenders, 2);
  comm.barrier();  // nobody leaves with memory that others still read
  return times;
}

double measure_barrier(comm::Communicator& comm) {
  using Clock = std::chrono::steady_clock;
  constexpr int turns = 1000;
  comm.barrier();
  const auto start = Clock::now();
  for (int i = 0; i < turns; ++i) comm.barrier();
  return std::chrono::duration<double, std::micro>(Clock::now() - start).count() / turns;
}

BenchReport comm_report(const Rounds& times, const CommBenchOptions& options, const std::string& backend,
                        int ranks, double barrier_us) {
  const double bytes = static_cast<double>(elements(options, ranks)) * sizeof(float);
  BenchReport report{
      "comm",
      cat("Collectives of ", engine::human_bytes(static_cast<std::uint64_t>(bytes)), " of fp32 between ",
          counted(ranks, backend + " rank")),
      "a memcpy of as many bytes by every rank at once. Above 1 where a collective moves less than "
      "such a copy (in place, nothing is written that was not read)",
      {{"processor", "", engine::cpu_model()},
       {"backend", "backend", backend},
       {"ranks", "ranks", std::int64_t{ranks}},
       {"bytes", "", static_cast<std::int64_t>(bytes)},
       {"rounds", "rounds", std::int64_t{options.rounds}},
       {"barrier_us", "microseconds per barrier", barrier_us}},
      {},
      {}};
  struct CollectiveRow {
    const char *name, *what;
    double crossing;  // bytes that leave or reach each rank, by those of the full tensor
  };
  const double share = static_cast<double>(ranks - 1) / ranks;
  for (const CollectiveRow& c :
       {CollectiveRow{"all_reduce", "all-reduce", 2 * share},
        CollectiveRow{"reduce_scatter", "reduce-scatter", share},
        CollectiveRow{"all_gather", "all-gather", share}, CollectiveRow{"send", "send to the next rank", 1}})
    for (const char* suffix : {"", "_staged"}) {
      const std::string name = cat(c.name, suffix);
      if (!times.has(name)) continue;
      std::vector<ReportField> row{{"case", "", name},
                                   {"what", "collective", cat(c.what, *suffix ? ", staged" : "")}};
      add_rates(row, times, name, bytes, "memcpy", bytes, "gb_per_s", "GB/s");
      row.push_back({"bus_gb_per_s", "bus GB/s", c.crossing * bytes / times.median_seconds(name) * 1e-9});
      report.rows.push_back(std::move(row));
    }
  if (options.staged)
    report.notes.emplace_back(
        "staged: tensors that lie where other ranks do not reach, and are copied on the way");
  return report;
}

}  // namespace sherd::bench
