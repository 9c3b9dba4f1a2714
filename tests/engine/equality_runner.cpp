// Runs one RunSpec (support/equality.h) as an MPI job or on local ranks and writes every bit of the outcome
// to a file:
//   mpirun -n 2 equality_runner OUTPUT key=value…
#include <cstdio>
#include <fstream>

#include "base/log.h"
#include "support/equality.h"

namespace {

sherd::test::RunSpec parse(int argc, char** argv) {
  sherd::test::RunSpec spec;
  const std::map<std::string, std::function<void(const std::string&)>> keys{
      {"stage", [&](auto& v) { spec.stage = std::stoi(v); }},
      {"ranks", [&](auto& v) { spec.ranks = std::stoi(v); }},
      {"dtype", [&](auto& v) { spec.dtype = v; }},
      {"steps", [&](auto& v) { spec.steps = std::stoi(v); }},
      {"accumulation", [&](auto& v) { spec.accumulation = std::stoi(v); }},
      {"shard_size", [&](auto& v) { spec.shard_size = std::stoi(v); }},
      {"bucket", [&](auto& v) { spec.bucket = std::stol(v); }},
      {"prefetch", [&](auto& v) { spec.prefetch = std::stol(v); }},
      {"persistence", [&](auto& v) { spec.persistence = std::stol(v); }},
      {"overlap", [&](auto& v) { spec.overlap = v == "1"; }},
      {"recompute", [&](auto& v) { spec.recompute = v; }},
      {"resume_at", [&](auto& v) { spec.resume_at = std::stoi(v); }},
      {"offload_param", [&](auto& v) { spec.offload_param = v; }},
      {"offload_optimizer", [&](auto& v) { spec.offload_optimizer = v; }},
      {"nvme_path", [&](auto& v) { spec.nvme_path = v; }},
      {"max_in_cpu",
       [&](auto& v) {
         if (spec.offload_param == "nvme") spec.offload_param_extra = ", \"max_in_cpu\": " + v;
       }},
      {"directory", [&](auto& v) { spec.directory = v; }},
  };
  for (int i = 2; i < argc; ++i) {
    const std::string arg = argv[i];
    const auto equals = arg.find('=');
    const auto key = keys.find(arg.substr(0, equals));
    sherd::require(equals != std::string::npos && key != keys.end(), "unknown setting '", arg, "'");
    key->second(arg.substr(equals + 1));
  }
  return spec;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) return std::fprintf(stderr, "usage: equality_runner OUTPUT key=value...\n"), 2;
  sherd::comm::CommOptions options;
  options.timeout_seconds = 60;
  return sherd::launch(
      argc, argv,
      [&](sherd::DistributedPtr dist) {
        const auto spec = parse(argc, argv);
        sherd::require(dist->world_size() == spec.ranks, "started ", dist->world_size(),
                       " ranks for ranks=", spec.ranks);
        const auto bits = sherd::test::train(dist, spec).bits();
        if (dist->rank() != 0) return;
        std::ofstream out(argv[1], std::ios::binary);
        out.write(reinterpret_cast<const char*>(bits.data()), static_cast<std::streamsize>(bits.size()));
        sherd::require(out.good(), "cannot write ", argv[1]);
      },
      options);
}
