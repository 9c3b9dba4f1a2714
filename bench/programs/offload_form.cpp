#include "bench/programs/offload_form.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <iostream>

#include "bench/programs/serving.h"
#include "bench/suite/rounds.h"
#include "config/config.h"
#include "engine/update/update_pipeline.h"

namespace sherd::bench {
namespace {

using engine::UpdateInstruction;
using engine::UpdateView;
using sharding::StateBuffer;
using tensor::Tensor;

/// A block with the parameters of a GPT's, which is never run.
class OffloadedBlock final : public nn::Module {
 public:
  explicit OffloadedBlock(std::int64_t width) {
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

class OffloadedBlocks final : public nn::Module {
 public:
  explicit OffloadedBlocks(std::int64_t parameters) {
    constexpr std::int64_t count = 8;
    const double width = std::sqrt(static_cast<double>(parameters) / (12.0 * count));
    for (std::int64_t i = 0; i < count; ++i)
      add(std::to_string(i), std::make_shared<OffloadedBlock>(std::max(64L, std::lround(width / 64) * 64)));
  }
};

config::Config configure(const OffloadSettings& s, const std::string& form, config::OffloadDevice states) {
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
  else if (form == "split_moments8")
    config.optimizer.type = config::OptimizerType::adamw8bit;
  else
    require(form == "split", "--forms are fp32, split, split_moments16 and split_moments8, not ", form);
  return config;
}

/// A model with its states in one place, gradients in memory, and an optimizer.
struct UpdatedModel {
  UpdatedModel(const OffloadSettings& s, const config::Config& config, const sharding::StateSources& sources)
      : optimizer(config.optimizer, 1),
        model(std::make_shared<OffloadedBlocks>(s.parameters), optimizer.sharding_options(config), sources) {
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
            offload::Store& store, std::size_t buffers, std::size_t bytes)
      : chunks_(chunks),
        plan_(std::move(plan)),
        buffers_(buffers),
        bytes_(bytes),
        pages_(store.pages(buffers * bytes, device::Category::workspace)) {}

  bool registered() const { return pages_.registered(); }

  void run() {
    using Op = UpdateInstruction::Op;
    std::vector<std::vector<offload::Io>> under_way(buffers_);
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
    std::byte* at = pages_.data() + static_cast<std::size_t>(instruction.buffer) * bytes_;
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
  std::size_t buffers_, bytes_;
  offload::Pages pages_;
};

}  // namespace

std::int64_t bytes_per_parameter(const OffloadSettings& s, const std::string& form) {
  const auto table = sharding::make_placements(configure(s, form, config::OffloadDevice::nvme));
  const DType moments = form == "split_moments8" ? DType::u8 : table.moments.dtype;
  return static_cast<std::int64_t>(size_of(table.masters.dtype) + 2 * size_of(moments)) +
         (s.parameters_on_nvme ? 2 : 0);
}

struct OffloadForm::Parts {
 public:
  Parts(const OffloadSettings& s, const std::string& name, device::Device& device, comm::Communicator& group)
      : s_(s),
        name_(name),
        device_(device),
        group_(group),
        kernels_(tensor::make_kernels(device)),
        store_(store_options(s, name), device.ledger()) {
    const sharding::StateSources sources{group, *kernels_, &store_, &store_};
    stored_ = std::make_unique<UpdatedModel>(s, configure(s, name, config::OffloadDevice::nvme), sources);
    pipeline_ = std::make_unique<engine::UpdatePipeline>(
        stored_->model, sources, engine::UpdatePipelineOptions{s.sub_group, s.buffers, true, true});
    chunks_ = engine::cut_update(stored_->model.trainable_segments(), s.sub_group);
    step();  // disks are slower where nothing has been written yet
    moved_ = {store_.bytes_read(), store_.bytes_written()};
    step();
    moved_ = {store_.bytes_read() - moved_[0], store_.bytes_written() - moved_[1]};
  }

  std::int64_t parameters() const { return stored_->model.parameter_count(); }

  double step() {
    return seconds_of([&] {
      stored_->optimizer.begin_step();
      pipeline_->run(stored_->optimizer, 1);
    });
  }

  void report(int rounds) {
    const sharding::StateSources sources{group_, *kernels_};
    UpdatedModel in_memory(s_, configure(s_, name_, config::OffloadDevice::cpu), sources);
    Transfers transfers(chunks_, pipeline_->plan(), store_, static_cast<std::size_t>(s_.buffers),
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
    print(seconds, bench::median(ratios), transfers.registered());
  }

 private:
  static offload::StoreOptions store_options(const OffloadSettings& s, const std::string& name) {
    offload::StoreOptions options;
    options.folder = s.path / name;
    options.block_size = static_cast<std::size_t>(s.block);
    options.queue_depth = s.depth;
    return options;
  }

  /// The same update, chunk by chunk, where all states are in memory.
  void update(UpdatedModel& side) {
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
                      {},
                      {}};
      for (std::size_t i = 0; i < segment.moments().size(); ++i) {
        view.moments.push_back(range(segment.moments()[i]));
        view.scales.push_back(segment.scales(i, chunk.begin, chunk.end));
      }
      require(side.optimizer.update_of(segment).pass(optim::Phase::elementwise, view, 1, *kernels_),
              "the update overflowed");
      if (chunk.last) ++index;
    }
  }

  /// Both sides have made the same steps.
  void check_equal(UpdatedModel& in_memory) {
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
    const double step = bench::median(seconds[0]), transfers = bench::median(seconds[1]);
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
              << ", \"transfers_s\": " << transfers << ", \"arithmetic_s\": " << bench::median(seconds[2])
              << ", \"step_gb_per_s\": " << bytes / step * 1e-9
              << ", \"transfers_gb_per_s\": " << bytes / transfers * 1e-9 << ", \"step_by_larger\": " << ratio
              << "}" << std::endl;
  }

  const OffloadSettings& s_;
  std::string name_;
  device::Device& device_;
  comm::Communicator& group_;
  std::unique_ptr<tensor::Kernels> kernels_;
  offload::Store store_;
  std::unique_ptr<UpdatedModel> stored_;
  std::unique_ptr<engine::UpdatePipeline> pipeline_;
  std::vector<engine::UpdateChunk> chunks_;
  std::array<std::uint64_t, 2> moved_{};  // read and written by one step
};

OffloadForm::OffloadForm(const OffloadSettings& settings, const std::string& name, device::Device& device,
                         comm::Communicator& group)
    : parts_(std::make_unique<Parts>(settings, name, device, group)) {}

OffloadForm::~OffloadForm() = default;

std::int64_t OffloadForm::parameters() const {
  return parts_->parameters();
}

double OffloadForm::step() {
  return parts_->step();
}

void OffloadForm::report(int rounds) {
  parts_->report(rounds);
}

}  // namespace sherd::bench
