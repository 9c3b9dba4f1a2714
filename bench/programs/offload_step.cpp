// The optimizer's step with its states on NVMe, beside its transfers alone and its arithmetic alone, in
// alternating rounds of one process. Prints one JSON object per form of the states: median seconds, and the
// median over rounds of step / max(transfers, arithmetic). The model is synthetic: blocks with the shapes of
// a GPT's, one rank, ZeRO stage 3.
//
// Forms: fp32 masters and moments (12 bytes per parameter); split masters (10); split masters and bf16
// moments (6), or moments in 8 bits (4; split_moments8). With --serve it answers each form named on a line of
// standard input with the seconds of one step (offload_vs_deepspeed.py). The folder of --path
// needs the room for one form's states, with --serve for all.
#include <algorithm>
#include <iostream>
#include <map>

#include "bench/programs/offload_form.h"
#include "bench/programs/options.h"
#include "bench/programs/serving.h"
#include "engine/distributed.h"

namespace {

using namespace sherd;
using bench::OffloadForm;
using bench::OffloadSettings;

void check_space(const OffloadSettings& s) {
  require(std::filesystem::is_directory(s.path), "--path '", s.path.string(), "' is no folder");
  std::int64_t bytes = 0;
  for (const std::string& form : s.forms) {
    const std::int64_t of_form = bytes_per_parameter(s, form) * s.parameters;
    bytes = s.serve ? bytes + of_form : std::max(bytes, of_form);
  }
  const auto needed = static_cast<std::uintmax_t>(static_cast<double>(bytes) * 1.1);
  const std::uintmax_t free = std::filesystem::space(s.path).available;
  require(free >= needed, "'", s.path.string(), "' has ", free, " bytes free, and ", needed,
          " are needed: name fewer --parameters or another --path");
}

void serve(const OffloadSettings& s, device::Device& device, comm::Communicator& group) {
  std::map<std::string, std::unique_ptr<OffloadForm>> forms;
  for (const std::string& name : s.forms) forms[name] = std::make_unique<OffloadForm>(s, name, device, group);
  bench::serve(cat("{\"parameters\": ", forms.begin()->second->parameters(), "}"),
               [&](const std::string& line) {
                 require(forms.contains(line), "no form \"", line, "\"");
                 return forms[line]->step();
               });
}

OffloadSettings parse(int argc, char** argv) {
  OffloadSettings s;
  bench::Options(
      "bench_offload_step",
      "--path DIR [--parameters 100e6] [--rounds 5] [--threads N] [--sub-group 4194304] [--buffers 4]\n"
      "  [--block 1048576] [--depth 8] [--forms fp32,split,split_moments16] [--parameters-on-nvme] [--serve]")
      .value("path", s.path)
      .value("parameters", s.parameters)
      .value("rounds", s.rounds)
      .value("threads", s.threads)
      .value("sub-group", s.sub_group)
      .value("buffers", s.buffers)
      .value("block", s.block)
      .value("depth", s.depth)
      .value("forms", [&](const std::string& text) { s.forms = bench::split_at_commas(text); })
      .flag("parameters-on-nvme", s.parameters_on_nvme)
      .flag("serve", s.serve)
      .parse(argc, argv);
  require(!s.path.empty(), "--path says where");
  require(s.parameters > 0 && s.rounds > 0 && s.threads > 0, "numbers must be positive");
  require(!s.forms.empty(), "--forms names none");
  return s;
}

void run(OffloadSettings s) {
  check_space(s);
  const bench::WorkFolder folder(s.path, "offload_step");
  s.path = folder.path();
  const auto device = device::make_cpu_device(s.threads);
  launch_ranks(1, [&](const DistributedPtr& dist) {
    if (s.serve) return serve(s, *device, dist->world());
    for (const std::string& name : s.forms) OffloadForm(s, name, *device, dist->world()).report(s.rounds);
  });
}

}  // namespace

int main(int argc, char** argv) {
  return bench::guarded("bench_offload_step", [&] { run(parse(argc, argv)); });
}
