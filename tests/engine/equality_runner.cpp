// Runs one RunSpec (support/equality.h) on the ranks of a launcher, or on local ones, and writes every bit of
// the outcome to a file (support/equality_processes.h):
//   mpirun -n 2 equality_runner OUTPUT key=value…
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <fstream>

#include "base/log.h"
#include "support/equality.h"

namespace {

struct Task {
  sherd::test::RunSpec spec;
  sherd::comm::CommOptions options{.timeout_seconds = 60};
  int killed = -1;
};

/// The rank of this process, before it joins the others.
std::size_t launched_rank() {
  for (const char* name : {"OMPI_COMM_WORLD_RANK", "RANK"})
    if (const char* text = std::getenv(name)) return static_cast<std::size_t>(std::atoi(text));
  return 0;
}

Task parse(int argc, char** argv) {
  Task task;
  sherd::test::RunSpec& spec = task.spec;
  const std::map<std::string, std::function<void(const std::string&)>> keys{
      {"stage", [&](auto& v) { spec.stage = std::stoi(v); }},
      {"ranks", [&](auto& v) { spec.ranks = std::stoi(v); }},
      {"dtype", [&](auto& v) { spec.dtype = v; }},
      {"steps", [&](auto& v) { spec.steps = std::stoi(v); }},
      {"accumulation", [&](auto& v) { spec.accumulation = std::stoi(v); }},
      {"shard_size", [&](auto& v) { spec.shard_size = std::stoi(v); }},
      {"tensor", [&](auto& v) { spec.tensor = std::stoi(v); }},
      {"context", [&](auto& v) { spec.context = std::stoi(v); }},
      {"pipeline", [&](auto& v) { spec.pipeline = std::stoi(v); }},
      {"virtual_stages", [&](auto& v) { spec.virtual_stages = std::stoi(v); }},
      {"schedule", [&](auto& v) { spec.schedule = v; }},
      {"tied", [&](auto& v) { spec.tied = v == "1"; }},
      {"sequence_parallel", [&](auto& v) { spec.sequence_parallel = v == "1"; }},
      {"context_method", [&](auto& v) { spec.context_method = v; }},
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
      {"layers", [&](auto& v) { spec.layers = std::stoi(v); }},
      // The rank whose process is killed in the third step.
      {"killed",
       [&](auto& v) {
         task.killed = std::stoi(v);
         spec.before_batch = [killed = task.killed](int rank, int step) {
           if (rank == killed && step == 2) std::raise(SIGKILL);
         };
       }},
      // Before which instruction of the second step, of the third micro-batch.
      {"killed_in",
       [&](auto& v) {
         using Op = sherd::sharding::Instruction::Op;
         const std::map<std::string, Op> ops{
             {"forward", Op::forward}, {"backward", Op::backward}, {"send_activation", Op::send_activation}};
         spec.before_batch = nullptr;
         spec.before_instruction = [killed = task.killed, op = ops.at(v)](int rank, int step, const auto& i) {
           if (rank == killed && step == 1 && i.op == op && i.micro_batch == 2) std::raise(SIGKILL);
         };
       }},
      {"shared_memory", [&](auto& v) { task.options.shared_memory = v == "1"; }},
      // A digit for each rank: the machine that it takes itself to be on.
      {"machines", [&](auto& v) { task.options.machine = {v.at(launched_rank())}; }},
  };
  for (int i = 2; i < argc; ++i) {
    const std::string arg = argv[i];
    const auto equals = arg.find('=');
    const auto key = keys.find(arg.substr(0, equals));
    sherd::require(equals != std::string::npos && key != keys.end(), "unknown setting '", arg, "'");
    key->second(arg.substr(equals + 1));
  }
  return task;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) return std::fprintf(stderr, "usage: equality_runner OUTPUT key=value...\n"), 2;
  const Task task = parse(argc, argv);
  return sherd::launch(
      argc, argv,
      [&](sherd::DistributedPtr dist) {
        const sherd::test::RunSpec& spec = task.spec;
        sherd::require(dist->world_size() == spec.ranks, "started ", dist->world_size(),
                       " ranks for ranks=", spec.ranks);
        const auto bits = sherd::test::train(dist, spec).bits();
        if (dist->rank() != 0) return;
        std::ofstream out(argv[1], std::ios::binary);
        out.write(reinterpret_cast<const char*>(bits.data()), static_cast<std::streamsize>(bits.size()));
        sherd::require(out.good(), "cannot write ", argv[1]);
      },
      task.options);
}
