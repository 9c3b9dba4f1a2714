// The optimizer's step with its states on NVMe, beside its transfers alone and its arithmetic alone, in
// alternating rounds of one process. Prints one JSON object per form of the states: median seconds, and the
// median over rounds of step / max(transfers, arithmetic). The model is synthetic: blocks with the shapes of
// a GPT's, one rank, ZeRO stage 3.
//
//   bench_offload_step --path DIR [--parameters 100e6] [--rounds 5] [--threads N] [--sub-group 4194304]
//   [--buffers 4]
//                      [--block 1048576] [--depth 8] [--forms fp32,split,split_moments16]
//                      [--parameters-on-nvme]
//                      [--serve]
//
// Forms: fp32 masters and moments (12 bytes per parameter); split masters (10); split masters and bf16
// moments (6). With --serve it answers each form named on a line of standard input with the seconds of one
// step (offload_vs_deepspeed.py). DIR needs the room for one form's states, with --serve for all.
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <functional>
#include <iostream>
#include <map>
#include <sstream>

#include "config/config.h"
#include "engine/distributed.h"
#include "engine/update_pipeline.h"

namespace {

using namespace sherd;
using engine::UpdateInstruction;
using engine::UpdateView;
using sharding::StateBuffer;
using tensor::Tensor;

struct Settings {
  std::filesystem::path path;
  std::int64_t parameters = 100'000'000, sub_group = 1 << 22;
  int rounds = 5, threads = available_cores(), buffers = 4, depth = 8;
  std::int64_t block = 1 << 20;
  std::vector<std::string> forms{"fp32", "split", "split_moments16"};
  bool parameters_on_nvme = false, serve = false;
};

template <class Body>
double seconds_of(const Body& body) {
  const auto start = std::chrono::steady_clock::now();
  body();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const std::size_t half = values.size() / 2;
  return values.size() % 2 ? values[half] : (values[half - 1] + values[half]) / 2;
}

/// A block with the parameters of a GPT's, which is never run.
class Block final : public nn::Module {
 public:
  explicit Block(std::int64_t width) {
    const auto weights = nn::Init::normal(0, 0.02);
    for (const char* norm : {"norm1", "norm2"})
      declare(norm, {2 * width}, nn::Init::ones(), {.decay = false});
    const std::pair<const char*, std::int64_t> linears[] = {
        {"qkv", 3}, {"projection", 1}, {"up", 4}, {"down", 4}};
    for (const auto& [name, times] : linears) {
      declare(name, {times * width, width}, weights);
      declare(std::string(name) + "_bias", {times * width}, nn::Init::zeros(), {.decay = false});
    }
    mark_block();
  }
};

class Blocks final : public nn::Module {
 public:
  explicit Blocks(std::int64_t parameters) {
    constexpr std::int64_t count = 8;
    const double width = std::sqrt(static_cast<double>(parameters) / (12.0 * count));
    for (std::int64_t i = 0; i < count; ++i)
      add(std::to_string(i), std::make_shared<Block>(std::max(64L, std::lround(width / 64) * 64)));
  }
};

config::Config configure(const Settings& s, const std::string& form, config::OffloadDevice states) {
  config::Config config;
  config.precision.compute = DType::bf16;
  config.optimizer.type = config::OptimizerType::adamw;
  config.optimizer.weight_decay = 0.1;
  config.zero.stage = 3;
  config.zero.offload_optimizer.device = states;
  if (s.parameters_on_nvme) {
    config.zero.offload_param.device = states;
    config.zero.offload_param.max_in_cpu = 0;
    config.zero.offload_param.buffer_count = 1;
    config.zero.offload_param.buffer_size = s.parameters / 4;
  }
  if (form == "fp32")
    config.training.split_masters = false;
  else if (form == "split_moments16")
    config.training.moments_dtype = DType::bf16;
  else
    require(form == "split", "--forms are fp32, split and split_moments16, not ", form);
  return config;
}

std::int64_t bytes_per_parameter(const Settings& s, const std::string& form) {
  const auto table = sharding::make_placements(configure(s, form, config::OffloadDevice::nvme));
  return static_cast<std::int64_t>(size_of(table.masters.dtype) + 2 * size_of(table.moments.dtype)) +
         (s.parameters_on_nvme ? 2 : 0);
}

/// A model with its states in one place, gradients in memory, and an optimizer.
struct Side {
  Side(const Settings& s, const config::Config& config, const sharding::StateSources& sources)
      : optimizer(config.optimizer, 1),
        model(std::make_shared<Blocks>(s.parameters),
              sharding::make_sharding_options(config, optimizer.moments()), sources) {
    std::uint64_t stream = 0;
    for (sharding::Segment* segment : model.trainable_segments())
      sources.kernels.fill_normal(segment->gradients().tensor(), RandomKey{7, ++stream}, 0, 0, 0.01);
  }
  engine::Optimizer optimizer;
  sharding::ShardedModel model;
};

template <class Visit>
void for_each_stored(sharding::Segment& segment, const Visit& visit) {
  if (segment.parameters().stored()) visit(segment.parameters());
  if (segment.masters().stored()) visit(segment.masters());
  for (StateBuffer& moments : segment.moments())
    if (moments.stored()) visit(moments);
}

/// The chunks of a step, as often as asked for, as reads and writes that nobody computes with.
class Transfers {
 public:
  Transfers(const std::vector<engine::UpdateChunk>& chunks, std::vector<UpdateInstruction> plan,
            offload::Store& store, device::Ledger& ledger, int buffers, std::size_t bytes)
      : chunks_(chunks),
        plan_(std::move(plan)),
        pool_(store, ledger, buffers, bytes, device::Category::workspace) {
    for (int i = 0; i < buffers; ++i) buffers_.push_back(pool_.try_acquire());
  }

  bool registered() const { return pool_.registered(); }

  void run() {
    using Op = UpdateInstruction::Op;
    std::vector<std::vector<offload::Io>> under_way(buffers_.size());
    for (const UpdateInstruction& instruction : plan_) {
      auto& ios = under_way[static_cast<std::size_t>(instruction.buffer)];
      if (instruction.op != Op::write) wait(ios);  // its writes, or an update's reads
      if (instruction.op == Op::read || instruction.op == Op::write) start(instruction, ios);
    }
    for (auto& ios : under_way) wait(ios);
  }

 private:
  static void wait(std::vector<offload::Io>& ios) {
    for (offload::Io& io : ios) io.wait();
    ios.clear();
  }
  void start(const UpdateInstruction& instruction, std::vector<offload::Io>& ios) {
    const engine::UpdateChunk& chunk = chunks_[instruction.chunk];
    std::byte* at = buffers_[static_cast<std::size_t>(instruction.buffer)].data();
    for_each_stored(*chunk.segment, [&](StateBuffer& state) {
      const std::size_t bytes = static_cast<std::size_t>(chunk.end - chunk.begin) * size_of(state.dtype());
      const Tensor memory =
          Tensor::view_of(device::Storage({at, bytes}, nullptr), 0, {chunk.end - chunk.begin}, state.dtype());
      at += (bytes + 4095) / 4096 * 4096;
      ios.push_back(instruction.op == UpdateInstruction::Op::read ? state.read(chunk.begin, memory)
                                                                  : state.write(chunk.begin, memory));
    });
  }

  const std::vector<engine::UpdateChunk>& chunks_;
  std::vector<UpdateInstruction> plan_;
  offload::BufferPool pool_;
  std::vector<offload::Buffer> buffers_;
};

/// One form of the states, and what is measured of it.
class Form {
 public:
  Form(const Settings& s, const std::string& name, device::Device& device, comm::Communicator& group)
      : s_(s),
        name_(name),
        device_(device),
        group_(group),
        kernels_(tensor::make_kernels(device)),
        store_(store_options(s, name), device.ledger()) {
    const sharding::StateSources sources{group, *kernels_, &store_, &store_};
    stored_ = std::make_unique<Side>(s, configure(s, name, config::OffloadDevice::nvme), sources);
    pipeline_ = std::make_unique<engine::UpdatePipeline>(
        stored_->model, sources, engine::UpdatePipelineOptions{s.sub_group, s.buffers, true, true});
    chunks_ = engine::cut_update(stored_->model.trainable_segments(), s.sub_group);
    step();  // disks are slower where nothing has been written yet
    moved_ = {store_.bytes_read(), store_.bytes_written()};
    step();
    moved_ = {store_.bytes_read() - moved_[0], store_.bytes_written() - moved_[1]};
  }

  std::int64_t parameters() const { return stored_->model.parameter_count(); }

  /// Seconds of a whole step.
  double step() {
    return seconds_of([&] {
      stored_->optimizer.begin_step();
      pipeline_->run(stored_->optimizer, 1);
    });
  }

  /// Prints what `rounds` rounds gave.
  void report(int rounds) {
    const sharding::StateSources sources{group_, *kernels_};
    Side in_memory(s_, configure(s_, name_, config::OffloadDevice::cpu), sources);
    Transfers transfers(chunks_, pipeline_->plan(), store_, device_.ledger(), s_.buffers,
                        pipeline_->buffer_bytes());
    for (int warm_up = 0; warm_up < 2; ++warm_up) update(in_memory);  // as many steps as the other side
    transfers.run();
    const std::array<std::function<double()>, 3> cases{
        [&] { return step(); }, [&] { return seconds_of([&] { transfers.run(); }); },
        [&] { return seconds_of([&] { update(in_memory); }); }};
    std::array<std::vector<double>, 3> seconds;
    std::vector<double> ratios;
    for (std::size_t round = 0; round < static_cast<std::size_t>(rounds); ++round) {
      for (std::size_t i = 0; i < cases.size(); ++i) {  // who goes first changes
        const std::size_t which = (round + i) % cases.size();
        seconds[which].push_back(cases[which]());
      }
      ratios.push_back(seconds[0].back() / std::max(seconds[1].back(), seconds[2].back()));
    }
    check_equal(in_memory);
    print(seconds, median(ratios), transfers.registered());
  }

 private:
  static offload::StoreOptions store_options(const Settings& s, const std::string& name) {
    offload::StoreOptions options;
    options.folder = s.path / name;
    options.block_size = static_cast<std::size_t>(s.block);
    options.queue_depth = s.depth;
    return options;
  }

  /// The same update, chunk by chunk, where all states are in memory.
  void update(Side& side) {
    side.optimizer.begin_step();
    const std::vector<sharding::Segment*> segments = side.model.trainable_segments();
    std::size_t index = 0;
    for (const engine::UpdateChunk& chunk : chunks_) {
      const sharding::Segment& segment = *segments[index];
      const auto range = [&](const StateBuffer& state) { return state.range(chunk.begin, chunk.end); };
      UpdateView view{&segment,
                      chunk.begin,
                      range(segment.parameters()),
                      range(segment.gradients()),
                      range(segment.masters()),
                      {}};
      for (const StateBuffer& moments : segment.moments()) view.moments.push_back(range(moments));
      require(side.optimizer.update(view, 1, *kernels_), "the update overflowed");
      if (chunk.last) ++index;
    }
  }

  /// Both sides have made the same steps.
  void check_equal(Side& in_memory) {
    const auto ours = stored_->model.trainable_segments(), theirs = in_memory.model.trainable_segments();
    for (std::size_t i = 0; i < ours.size(); ++i) {
      const std::int64_t count = std::min<std::int64_t>(ours[i]->update_end(), 1 << 16);
      const Tensor a = Tensor::empty(device_, {count}, DType::f32),
                   b = Tensor::empty(device_, {count}, DType::f32);
      ours[i]->read_masters(ours[i]->update_end() - count, a);
      theirs[i]->read_masters(theirs[i]->update_end() - count, b);
      require(std::memcmp(a.raw(), b.raw(), a.bytes()) == 0, "the weights of '", ours[i]->name(),
              "' on NVMe are not those in memory");
    }
  }

  void print(const std::array<std::vector<double>, 3>& seconds, double ratio, bool registered) const {
    const double step = median(seconds[0]), transfers = median(seconds[1]);
    const auto bytes = static_cast<double>(moved_[0] + moved_[1]);
    std::cout << "{\"bench\": \"offload_step\", \"form\": \"" << name_
              << "\", \"parameters\": " << stored_->model.parameter_count() << ", \"threads\": " << s_.threads
              << ", \"parameters_on_nvme\": " << (s_.parameters_on_nvme ? "true" : "false")
              << ", \"chunks\": " << chunks_.size() << ", \"sub_group\": " << s_.sub_group
              << ", \"buffers\": " << s_.buffers << ", \"buffer_bytes\": " << pipeline_->buffer_bytes()
              << ", \"block_size\": " << s_.block << ", \"queue_depth\": " << s_.depth << ", \"backend\": \""
              << store_.backend_name() << "\", \"registered\": " << (registered ? "true" : "false")
              << ", \"rounds\": " << seconds[0].size() << ", \"bytes_read\": " << moved_[0]
              << ", \"bytes_written\": " << moved_[1] << ", \"step_s\": " << step
              << ", \"transfers_s\": " << transfers << ", \"arithmetic_s\": " << median(seconds[2])
              << ", \"step_gb_per_s\": " << bytes / step * 1e-9
              << ", \"transfers_gb_per_s\": " << bytes / transfers * 1e-9 << ", \"step_by_larger\": " << ratio
              << "}" << std::endl;
  }

  const Settings& s_;
  std::string name_;
  device::Device& device_;
  comm::Communicator& group_;
  std::unique_ptr<tensor::Kernels> kernels_;
  offload::Store store_;
  std::unique_ptr<Side> stored_;
  std::unique_ptr<engine::UpdatePipeline> pipeline_;
  std::vector<engine::UpdateChunk> chunks_;
  std::array<std::uint64_t, 2> moved_{};  // read and written by one step
};

/// A folder of its own below `parent`, gone with this.
class WorkFolder {
 public:
  explicit WorkFolder(const std::filesystem::path& parent)
      : path_(parent / cat("offload_step.", ::getpid())) {
    std::filesystem::create_directories(path_);
  }
  ~WorkFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  WorkFolder(const WorkFolder&) = delete;
  WorkFolder& operator=(const WorkFolder&) = delete;
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

void check_space(const Settings& s) {
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

void serve(const Settings& s, device::Device& device, comm::Communicator& group) {
  std::map<std::string, std::unique_ptr<Form>> forms;
  for (const std::string& name : s.forms) forms[name] = std::make_unique<Form>(s, name, device, group);
  std::cout << "ready " << forms.begin()->second->parameters() << std::endl;
  for (std::string line; std::getline(std::cin, line);) {
    require(forms.contains(line), "no form \"", line, "\"");
    std::cout << forms[line]->step() << std::endl;
  }
}

std::vector<std::string> split_at_commas(const std::string& text) {
  std::vector<std::string> out;
  std::istringstream in(text);
  for (std::string part; std::getline(in, part, ',');) out.push_back(part);
  return out;
}

Settings parse(int argc, char** argv) {
  Settings s;
  for (int i = 1; i < argc; ++i) {
    const std::string key = argv[i];
    if (key == "--serve" || key == "--parameters-on-nvme") {
      (key == "--serve" ? s.serve : s.parameters_on_nvme) = true;
      continue;
    }
    require(i + 1 < argc, key, " needs a value");
    const std::string value = argv[++i];
    if (key == "--path")
      s.path = value;
    else if (key == "--parameters")
      s.parameters = static_cast<std::int64_t>(std::stod(value));
    else if (key == "--rounds")
      s.rounds = std::stoi(value);
    else if (key == "--threads")
      s.threads = std::stoi(value);
    else if (key == "--sub-group")
      s.sub_group = std::stoll(value);
    else if (key == "--buffers")
      s.buffers = std::stoi(value);
    else if (key == "--block")
      s.block = std::stoll(value);
    else if (key == "--depth")
      s.depth = std::stoi(value);
    else if (key == "--forms")
      s.forms = split_at_commas(value);
    else
      fail(ErrorKind::usage, "unknown option ", key);
  }
  require(!s.path.empty(), "--path says where");
  require(s.parameters > 0 && s.rounds > 0 && s.threads > 0, "numbers must be positive");
  return s;
}

void run(Settings s) {
  check_space(s);
  const WorkFolder folder(s.path);
  s.path = folder.path();
  const auto device = device::make_cpu_device(s.threads);
  launch_ranks(1, [&](const DistributedPtr& dist) {
    if (s.serve) return serve(s, *device, dist->world());
    for (const std::string& name : s.forms) Form(s, name, *device, dist->world()).report(s.rounds);
  });
}

}  // namespace

int main(int argc, char** argv) {
  try {
    run(parse(argc, argv));
    return 0;
  } catch (const std::exception& error) {
    std::cerr << "bench_offload_step: " << error.what() << "\n";
    return 1;
  }
}
