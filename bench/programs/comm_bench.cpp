// The collectives of `sherd bench comm` beside the MPI library's own, in alternating rounds. Prints one JSON
// object: that of the command, each case with times_faster_than_mpi. Run by bench/comm.sh, under mpirun.
#include <mpi.h>

#include <iostream>
#include <string>
#include <vector>

#include "bench/programs/options.h"
#include "bench/suite/comm_bench.h"

namespace {

using namespace sherd;
using bench::Contender;

std::vector<Contender> of_mpi(int ranks, const bench::CollectiveBuffers& b) {
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

void measure(comm::Communicator& comm, bench::CommBenchOptions options) {
  options.staged = true;
  options.others = [&](const bench::CollectiveBuffers& own) { return of_mpi(comm.size(), own); };
  const bench::Rounds times = bench::measure_collectives(comm, options, {});
  const double barrier = bench::measure_barrier(comm);
  if (comm.rank() != 0) return;
  bench::BenchReport report = bench::comm_report(times, options, "mpi", comm.size(), barrier);
  for (auto& row : report.rows) {
    const auto& name = std::get<std::string>(row[0].value);
    const std::string theirs = "mpi_" + name.substr(0, name.find("_staged"));
    if (!times.has(theirs)) continue;
    row.push_back({"mpi_median_ms", "", times.median_seconds(theirs) * 1e3});
    row.push_back({"times_faster_than_mpi", "", times.ratio(theirs, name)});
  }
  std::cout << bench::as_json(report) << std::flush;
}

}  // namespace

int main(int argc, char** argv) {
  return bench::guarded("bench_comm", [&] {
    bench::CommBenchOptions options;
    std::size_t mib = options.bytes >> 20;
    bench::Options("bench_comm", "[--mib 64] [--rounds 15]")
        .value("mib", mib)
        .value("rounds", options.rounds)
        .parse(argc, argv);
    require(mib > 0 && options.rounds > 0, "numbers must be positive");
    options.bytes = mib << 20;
    measure(*comm::make_mpi_world({}), options);
  });
}
