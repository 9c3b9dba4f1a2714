// What fits a machine, and the changes that make a run fit.
#include "planning/fit.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>

#include "comm/memory.h"
#include "planning/search.h"
#include "support/expect_error.h"
#include "support/temp_folder.h"

namespace sherd::planning {
namespace {

using sherd::testing::expect_error;
using ::testing::HasSubstr;

constexpr std::int64_t vocabulary = 1000;
constexpr std::uint64_t plenty = std::uint64_t{1} << 50;

MachineCapacity machine_with(std::uint64_t memory, std::uint64_t space = plenty) {
  return {memory, [space](const std::string&) { return space; }};
}

/// A configuration by its text, with a few keys more.
Reparse configuration(int stage, const std::vector<std::string>& keys = {}) {
  const std::string text = cat(R"({"train_micro_batch_size_per_gpu": 8, "bf16": {"enabled": true},
    "optimizer": {"type": "AdamW", "params": {"lr": 0.001}}, "zero_optimization": {"stage": )",
                               stage, R"(},
    "model": {"type": "gpt2", "seq_length": 128, "hidden_size": 128, "num_layers": 4, "num_heads": 4}})");
  return [text, keys](const std::vector<std::string>& more) {
    std::vector<std::string> all = keys;
    all.insert(all.end(), more.begin(), more.end());
    return config::parse_text(text, "test", all);
  };
}

std::uint64_t device_peak(const Reparse& reparse, const World& world) {
  return estimate_rank(reparse({}), vocabulary, world, 0).peaks.tiers[0].total_peak;
}

bool fits(const Reparse& reparse, const Remedy& remedy, const World& world, const MachineCapacity& machine) {
  const config::Config config = reparse(remedy.overrides());
  return shortfalls(config, {estimate_rank(config, vocabulary, world, 0)}, world, machine).empty();
}

TEST(Fit, NamesTheTierAndWhatItLacks) {
  const World world{2, 2};
  const std::uint64_t peak = device_peak(configuration(1), world);
  const auto limited = configuration(1, {cat("device.device_memory_limit=", peak - 1024)});
  const auto estimate = estimate_rank(limited({}), vocabulary, world, 0);
  const auto missing = shortfalls(limited({}), {estimate}, world, machine_with(plenty));
  ASSERT_EQ(missing.size(), 1u);
  EXPECT_EQ(missing[0].needed - missing[0].available, 1024u);
  EXPECT_THAT(missing[0].text(), HasSubstr("the device tier of each rank"));
  EXPECT_THAT(missing[0].text(), HasSubstr("device.device_memory_limit"));
  EXPECT_THAT(missing[0].text(), HasSubstr("1.00 KiB too little"));
  const auto exact = configuration(1, {cat("device.device_memory_limit=", peak)});
  EXPECT_TRUE(shortfalls(exact({}), {estimate}, world, machine_with(2 * resident_bytes(estimate))).empty());
  const auto shared =
      shortfalls(exact({}), {estimate}, world, machine_with(2 * resident_bytes(estimate) - 1));
  ASSERT_EQ(shared.size(), 1u) << "two ranks share the machine";
  EXPECT_THAT(shared[0].text(), HasSubstr("shared by 2 ranks"));
}

TEST(Fit, CountsHostAndFiles) {
  const World world{1, 1};
  const auto host =
      configuration(2, {"zero_optimization.offload_optimizer.device=cpu", "device.host_memory_limit=1000"});
  auto missing =
      shortfalls(host({}), {estimate_rank(host({}), vocabulary, world, 0)}, world, machine_with(0));
  ASSERT_EQ(missing.size(), 1u);
  EXPECT_THAT(missing[0].text(), HasSubstr("host_memory_limit"));
  const auto nvme = configuration(3, {"zero_optimization.offload_optimizer.device=nvme",
                                      "zero_optimization.offload_optimizer.nvme_path=/somewhere/fast"});
  missing =
      shortfalls(nvme({}), {estimate_rank(nvme({}), vocabulary, world, 0)}, world, machine_with(0, 1000));
  ASSERT_EQ(missing.size(), 1u);
  EXPECT_THAT(missing[0].text(), HasSubstr("the nvme tier in /somewhere/fast"));
}

/// Where a change is found, the run fits with it, and without any one of several keys of their own it does
/// not.
TEST(Remedy, IsOneThatFits) {
  int found = 0;
  for (const World world : {World{1, 1}, World{2, 2}, World{4, 2}})
    for (const int stage : {0, 3}) {
      const std::uint64_t peak = device_peak(configuration(stage), world);
      for (const double part : {0.97, 0.6, 0.3, 0.12, 0.02}) {
        const auto limited =
            configuration(stage, {cat("device.device_memory_limit=",
                                      static_cast<std::uint64_t>(static_cast<double>(peak) * part))});
        const Remedy remedy = cheapest_remedy(limited, vocabulary, world, machine_with(plenty));
        EXPECT_TRUE(part < 0.2 || !remedy.keys.empty())
            << world.ranks << " ranks, stage " << stage << ", " << part;
        if (remedy.keys.empty()) continue;
        ++found;
        EXPECT_TRUE(fits(limited, remedy, world, machine_with(plenty))) << remedy.line();
      }
    }
  EXPECT_GE(found, 20);
}

TEST(Remedy, TakesTheCheapestThatIsEnough) {
  const World world{4, 4};
  const std::uint64_t peak = device_peak(configuration(0), world);
  const auto limited = [&](double part) {
    return configuration(0, {cat("device.device_memory_limit=",
                                 static_cast<std::uint64_t>(static_cast<double>(peak) * part))});
  };
  EXPECT_EQ(cheapest_remedy(limited(0.97), vocabulary, world, machine_with(plenty)).line(),
            "--set zero_optimization.stage=1");
  // One rank has nothing to shard: the shortest step of the single changes that are enough.
  const World one{1, 1};
  const std::uint64_t alone = device_peak(configuration(0), one);
  const auto nearly = configuration(0, {cat("device.device_memory_limit=", alone - 1)});
  const Remedy remedy = cheapest_remedy(nearly, vocabulary, one, machine_with(plenty));
  const auto seconds = [&](const Remedy& with) {
    return plan_as_is(nearly(with.overrides()), usual_machine(false), vocabulary, 1).time.seconds;
  };
  ASSERT_TRUE(remedy.slow_down);
  EXPECT_NEAR(*remedy.slow_down, std::max(0.0, seconds(remedy) / seconds({}) - 1), 1e-9);
  int enough = 0;
  for (const Remedy& other :
       {Remedy{{{"training.recompute", "selective"}}, {}}, Remedy{{{"training.recompute", "full"}}, {}},
        Remedy{{{"train_micro_batch_size_per_gpu", "4"}, {"gradient_accumulation_steps", "2"}}, {}},
        Remedy{{{"zero_optimization.stage", "1"}, {"zero_optimization.offload_optimizer.device", "cpu"}}, {}},
        Remedy{{{"zero_optimization.stage", "3"}, {"zero_optimization.offload_param.device", "cpu"}}, {}}}) {
    if (!fits(nearly, other, one, machine_with(plenty))) continue;
    ++enough;
    EXPECT_LE(seconds(remedy), seconds(other)) << remedy.line() << " and not " << other.line();
  }
  EXPECT_GE(enough, 3);
}

/// The least number of `key`, beside full recompute, with which every rank of `world` has at most `most`,
/// tried one by one; and what it then has.
std::pair<int, std::uint64_t> least_part(const std::vector<std::string>& keys, const std::string& key,
                                         int all, std::uint64_t most, const World& world) {
  for (int number = 1; number <= all; ++number) {
    std::vector<std::string> with = keys;
    with.insert(with.end(), {"training.recompute=full", cat(key, "=", number)});
    std::uint64_t peak = 0;
    for (const engine::Estimate& stage : estimate_stages(configuration(1, with)({}), vocabulary, world))
      peak = std::max(peak, stage.peaks.tiers[0].total_peak);
    if (peak <= most) return {number, peak};
  }
  return {0, 0};
}

/// Long sequences, where activations weigh most by far, in micro-batches of one.
std::vector<std::string> of_activations(const std::vector<std::string>& more) {
  std::vector<std::string> keys{"model.seq_length=4096", "model.num_layers=8",
                                "train_micro_batch_size_per_gpu=1"};
  keys.insert(keys.end(), more.begin(), more.end());
  return keys;
}

TEST(Remedy, RecomputesAsFewBlocksAsAreEnough) {
  const World world{1, 1};
  const std::vector<std::string> keys = of_activations({});
  const std::uint64_t selective =
      device_peak(configuration(1, of_activations({"training.recompute=selective"})), world);
  const auto [number, peak] = least_part(keys, "training.recompute_blocks", 8, selective - 1, world);
  ASSERT_GT(number, 2);
  for (const auto& [limit, blocks] : {std::pair{peak, number}, {peak - 1, number + 1}}) {
    std::vector<std::string> limited = keys;
    limited.push_back(cat("device.device_memory_limit=", limit));
    EXPECT_EQ(cheapest_remedy(configuration(1, limited), vocabulary, world, machine_with(plenty)).line(),
              cat("--set training.recompute=full --set training.recompute_blocks=", blocks));
    // A part is priced by its share of the whole, which is near what it is by itself.
    const auto seconds = [&](const std::vector<std::string>& with) {
      return plan_as_is(configuration(1, keys)(with), usual_machine(false), vocabulary, 1).time.seconds;
    };
    const double alone =
        seconds({"training.recompute=full", cat("training.recompute_blocks=", blocks)}) / seconds({}) - 1;
    EXPECT_NEAR(
        cheapest_remedy(configuration(1, limited), vocabulary, world, machine_with(plenty)).slow_down.value(),
        alone, 0.02 * alone);
    // From a part that is too small.
    limited.insert(limited.end(), {"training.recompute=full", "training.recompute_blocks=1"});
    EXPECT_EQ(cheapest_remedy(configuration(1, limited), vocabulary, world, machine_with(plenty)).line(),
              cat("--set training.recompute=full --set training.recompute_blocks=", blocks));
  }
}

TEST(Remedy, RecomputesAsFewMicroBatchesAsAreEnough) {
  const World world{4, 4};
  const std::vector<std::string> keys =
      of_activations({"parallel.pipeline=4", "gradient_accumulation_steps=6", "model.tie_embeddings=false"});
  const auto selective = estimate_stages(
      configuration(1, of_activations({"parallel.pipeline=4", "gradient_accumulation_steps=6",
                                       "model.tie_embeddings=false", "training.recompute=selective"}))({}),
      vocabulary, world);
  std::uint64_t most = 0;
  for (const engine::Estimate& stage : selective) most = std::max(most, stage.peaks.tiers[0].total_peak);
  const auto [number, peak] = least_part(keys, "training.recompute_micro_batches", 4, most - 1, world);
  ASSERT_GT(number, 1);
  std::vector<std::string> limited = keys;
  limited.push_back(cat("device.device_memory_limit=", peak));
  EXPECT_EQ(cheapest_remedy(configuration(1, limited), vocabulary, world, machine_with(plenty)).line(),
            cat("--set training.recompute=full --set training.recompute_micro_batches=", number));
}

/// Memory alone is asked for with fewer micro-batches, and is that of all but for their losses.
TEST(Fit, MemoryAloneIsThatOfAllMicroBatches) {
  struct Case {
    int pipeline, chunks, group;
    const char *schedule, *recompute;
    int stage, micro_batches = 25;
  };
  for (const Case& c :
       {Case{2, 1, 0, "1f1b", "none", 1}, Case{4, 1, 0, "1f1b", "full", 3},
        Case{3, 1, 0, "zero_bubble", "none", 2}, Case{4, 1, 0, "zero_bubble", "full", 1},
        Case{2, 3, 0, "interleaved", "none", 1, 24}, Case{3, 2, 5, "interleaved", "none", 3, 28},
        Case{2, 2, 2, "interleaved", "full", 2, 24}, Case{2, 1, 0, "gpipe", "none", 1}}) {
    const World world{2 * c.pipeline, 2 * c.pipeline};
    std::vector<std::string> keys{
        cat("parallel.pipeline=", c.pipeline), cat("parallel.schedule=", c.schedule),
        cat("parallel.virtual_stages=", c.chunks), cat("training.recompute=", c.recompute),
        cat("gradient_accumulation_steps=", c.micro_batches)};
    if (c.group > 0) keys.push_back(cat("parallel.micro_batch_group=", c.group));
    const config::Config config = configuration(c.stage, keys)({});
    for (int stage = 0; stage < c.pipeline; ++stage) {
      SCOPED_TRACE(cat(c.schedule, ", stage ", stage, " of ", c.pipeline, ", ", c.chunks, " chunks"));
      const engine::Estimate all = estimate_rank(config, vocabulary, world, 2 * stage),
                             some =
                                 estimate_rank(config, vocabulary, world, 2 * stage, {.memory_alone = true});
      constexpr double bytes_of_a_loss = 64;
      for (const std::size_t tier : {0, 1})
        EXPECT_NEAR(static_cast<double>(some.peaks.tiers[tier].total_peak),
                    static_cast<double>(all.peaks.tiers[tier].total_peak), c.micro_batches * bytes_of_a_loss);
      EXPECT_EQ(some.traffic.p2p < all.traffic.p2p, c.schedule != std::string("gpipe"));
    }
  }
}

TEST(Fit, AnEstimateEndsWithTheDevicesRoom) {
  const World world{4, 4};
  const config::Config config = configuration(1, {"parallel.pipeline=2"})({});
  const std::uint64_t peak = estimate_rank(config, vocabulary, world, 0).peaks.tiers[0].total_peak;
  EXPECT_EQ(estimate_rank(config, vocabulary, world, 0, {.device_room = peak}).peaks.tiers[0].total_peak,
            peak);
  expect_error(ErrorKind::memory, "device",
               [&] { estimate_rank(config, vocabulary, world, 0, {.device_room = peak - 1}); });
}

/// In a long pipeline the outer stages are looked at first, and what is proposed fits all stages.
TEST(Remedy, FitsTheStagesBetween) {
  const World world{8, 8};
  const std::vector<std::string> keys =
      of_activations({"parallel.pipeline=8", "gradient_accumulation_steps=8", "model.num_layers=22"});
  std::uint64_t most = 0;
  for (const engine::Estimate& stage : estimate_stages(configuration(1, keys)({}), vocabulary, world))
    most = std::max(most, stage.peaks.tiers[0].total_peak);
  for (const double part : {0.97, 0.7, 0.5}) {
    std::vector<std::string> limited = keys;
    limited.push_back(
        cat("device.device_memory_limit=", static_cast<std::uint64_t>(static_cast<double>(most) * part)));
    const auto reparse = configuration(1, limited);
    const Remedy remedy = cheapest_remedy(reparse, vocabulary, world, machine_with(plenty));
    ASSERT_FALSE(remedy.keys.empty()) << part;
    const config::Config config = reparse(remedy.overrides());
    EXPECT_TRUE(
        shortfalls(config, estimate_stages(config, vocabulary, world), world, machine_with(plenty)).empty())
        << remedy.line();
  }
}

TEST(Fit, NoReplicaTakesMoreThanTheEstimateSays) {
  const config::Config config =
      configuration(2, {"parallel.shard_size=2", "gradient_accumulation_steps=2", "model.seq_length=16",
                        "train_micro_batch_size_per_gpu=1", "zero_optimization.reduce_bucket_size=100000",
                        "zero_optimization.overlap_comm=true"})({});
  std::vector<std::uint64_t> peaks;
  for (int rank = 0; rank < 8; ++rank)
    peaks.push_back(estimate_rank(config, vocabulary, {8, 8}, rank).peaks.tiers[0].total_peak);
  EXPECT_GT(peaks[6], peaks[0]);
  const engine::Estimate told = estimate_stages(config, vocabulary, {8, 8}).at(0);
  EXPECT_EQ(told.peaks.tiers[0].total_peak, *std::max_element(peaks.begin(), peaks.end()));
  EXPECT_EQ(told.peaks.tiers[0].total_peak, peaks[static_cast<std::size_t>(told.rank)]);
  EXPECT_EQ(estimate_stages(config, vocabulary, {8, 8}, 1).at(0).rank, 1);
}

TEST(Fit, SizesBeyondAnyMachineAreRefusedBeforeTheyOverflow) {
  const World world{1, 1};
  const auto refused = [&](const std::vector<std::string>& keys, const std::string& part) {
    const config::Config config = configuration(0, keys)({});
    sherd::testing::expect_error(ErrorKind::config, part,
                                 [&] { estimate_rank(config, vocabulary, world, 0); });
  };
  refused({"model.hidden_size=1048576", "model.num_layers=2048"},
          "parameters, and at most 100T are supported: lower model.");
  refused({"train_micro_batch_size_per_gpu=2000000000", "model.seq_length=16777216"},
          "lower train_micro_batch_size_per_gpu or model.seq_length");
  EXPECT_GT(device_peak(configuration(0, {"model.hidden_size=65536"}), world), std::uint64_t{1} << 40);
  const auto longest = configuration(0, {"model.seq_length=16777216", "train_micro_batch_size_per_gpu=1"});
  EXPECT_GT(device_peak(longest, world), std::uint64_t{1} << 30);
}

TEST(Shortfalls, GpusHoldTheDeviceTierAndTheMachineTheHost) {
  const auto plain = configuration(2, {"zero_optimization.offload_optimizer.device=cpu"});
  const World world{4, 4};
  const auto estimate = estimate_rank(plain({}), vocabulary, world, 0);
  const std::uint64_t on_device = estimate.peaks.tiers[0].total_peak;
  ASSERT_GT(on_device, 0u);
  ASSERT_GT(estimate.peaks.tiers[1].total_peak, 0u);
  const std::uint64_t both = 4 * resident_bytes(estimate);
  MachineCapacity machine = machine_with(both - 1);
  EXPECT_EQ(shortfalls(plain({}), {estimate}, world, machine).size(), 1u)
      << "on CPUs both tiers share the memory";
  machine.memory = both, machine.on_gpus = true, machine.gpus = 4;
  machine.gpu_memory = on_device + untracked_of_cuda + comm::nccl_memory(4, 4, comm::nccl_channels());
  EXPECT_TRUE(shortfalls(plain({}), {estimate}, world, machine).empty());
  --machine.gpu_memory;
  EXPECT_EQ(shortfalls(plain({}), {estimate}, world, machine).size(), 1u);
  // Ranks that share GPUs do without NCCL.
  machine.gpu_memory = on_device + untracked_of_cuda;
  machine.gpus = 2;
  auto missing = shortfalls(plain({}), {estimate}, world, machine);
  ASSERT_EQ(missing.size(), 1u);
  EXPECT_EQ(missing[0].what, "the memory of a GPU, shared by 2 ranks,");
  EXPECT_EQ(missing[0].needed, 2 * (on_device + untracked_of_cuda));
  machine.memory = both - 1;
  EXPECT_EQ(shortfalls(plain({}), {estimate}, world, machine).size(), 2u);
  // One visible GPU is this rank's own where a launcher shows each rank another.
  machine.memory = both, machine.gpus = 1, machine.ranks_per_gpu = 1;
  machine.gpu_memory += untracked_for_nccl(plain({}).parallel, world, machine);
  EXPECT_TRUE(shortfalls(plain({}), {estimate}, world, machine).empty());
  machine.ranks_per_gpu = 4;
  missing = shortfalls(plain({}), {estimate}, world, machine);
  ASSERT_EQ(missing.size(), 1u);
  EXPECT_EQ(missing[0].what, "the memory of a GPU, shared by 4 ranks,");
}

TEST(Shortfalls, CountWhatNcclTakesForThePairsOfStages) {
  config::Parallel parallel;
  MachineCapacity machine;
  const World world{4, 4};
  const int channels = comm::nccl_channels();
  EXPECT_EQ(untracked_for_nccl(parallel, world, machine), 0u) << "on CPUs";
  machine.on_gpus = true;
  const std::uint64_t all = untracked_for_nccl(parallel, world, machine);
  parallel.pipeline = 2;
  EXPECT_EQ(untracked_for_nccl(parallel, world, machine) - all,
            comm::nccl_pairs_memory(1, 2, true, channels));
  parallel.pipeline = 4;
  const std::uint64_t between = comm::nccl_pairs_memory(3, 3, true, channels);
  EXPECT_EQ(untracked_for_nccl(parallel, world, machine) - all, between);
  parallel.pipeline = 2, parallel.virtual_stages = 2;
  EXPECT_EQ(untracked_for_nccl(parallel, world, machine) - all, between);
}

TEST(Remedy, LooksForSpaceOutsideOfMemory) {
  // The host has what the device has not: a machine that is too small needs files, or less to hold.
  const auto plain =
      configuration(3, {"model.hidden_size=1024", "model.num_layers=12", "training.recompute=full",
                        "train_micro_batch_size_per_gpu=1", "zero_optimization.offload_param.device=cpu",
                        "zero_optimization.offload_optimizer.device=cpu"});
  const World world{1, 1};
  const auto estimate = estimate_rank(plain({}), vocabulary, world, 0);
  const std::uint64_t held = estimate.peaks.tiers[0].total_peak + estimate.peaks.tiers[1].total_peak;
  const MachineCapacity small = machine_with(held * 3 / 4);
  const Remedy remedy = cheapest_remedy(plain, vocabulary, world, small);
  EXPECT_THAT(remedy.line(), HasSubstr("zero_optimization.offload_optimizer.device=nvme"));
  EXPECT_THAT(remedy.line(), HasSubstr("nvme_path="));
  EXPECT_TRUE(fits(plain, remedy, world, small));
  EXPECT_TRUE(cheapest_remedy(plain, vocabulary, world, machine_with(1000)).keys.empty());
  EXPECT_THROW(require_fit(plain, vocabulary, world, machine_with(1000)), Error);
}

/// Large enough that states weigh more than the buffers in which they come and go.
std::vector<std::string> with_states_on_host(const std::string& more) {
  return {"model.hidden_size=512", "model.num_layers=8", "zero_optimization.offload_optimizer.device=cpu",
          more};
}

TEST(Remedy, TakesTheHostsLimitForWhatItIs) {
  std::vector<std::string> on_host = with_states_on_host("training.recompute=full");
  on_host.emplace_back("train_micro_batch_size_per_gpu=1");
  for (const World world : {World{1, 1}, World{2, 2}})
    for (const int stage : {1, 3}) {
      const auto plain = configuration(stage, on_host);
      const auto estimate = estimate_rank(plain({}), vocabulary, world, 0);
      const std::uint64_t on_device = estimate.peaks.tiers[0].total_peak,
                          in_host = estimate.peaks.tiers[1].total_peak;
      // The device has what the host lacks.
      std::vector<std::string> keys = on_host;
      keys.push_back(cat("device.host_memory_limit=", in_host / 2));
      const Remedy back =
          cheapest_remedy(configuration(stage, keys), vocabulary, world, machine_with(plenty));
      EXPECT_EQ(back.line(), "--set zero_optimization.offload_optimizer.device=none");
      // Neither has it: files, in parts that are smaller than all of it.
      keys.push_back(cat("device.device_memory_limit=", on_device));
      const auto both = configuration(stage, keys);
      const Remedy remedy = cheapest_remedy(both, vocabulary, world, machine_with(plenty));
      EXPECT_THAT(remedy.line(), HasSubstr("zero_optimization.offload_optimizer.device=nvme"))
          << world.ranks << ", stage " << stage;
      EXPECT_TRUE(fits(both, remedy, world, machine_with(plenty))) << remedy.line();
    }
}

TEST(Remedy, MovesNothingBackToGpusThatAreElsewhere) {
  const World world{1, 1};
  const std::vector<std::string> on_host = with_states_on_host("device.type=cuda");
  const std::uint64_t in_host =
      estimate_rank(configuration(2, on_host)({}), vocabulary, world, 0).peaks.tiers[1].total_peak;
  MachineCapacity machine = machine_with(plenty);
  machine.on_gpus = true;
  std::vector<std::string> keys = on_host;
  keys.push_back(cat("device.host_memory_limit=", in_host / 2));
  const Remedy elsewhere = cheapest_remedy(configuration(2, keys), vocabulary, world, machine);
  EXPECT_THAT(elsewhere.line(), HasSubstr("zero_optimization.offload_optimizer.device=nvme"));
  EXPECT_TRUE(fits(configuration(2, keys), elsewhere, world, machine));
  keys.push_back("device.device_memory_limit=80GB");
  EXPECT_EQ(cheapest_remedy(configuration(2, keys), vocabulary, world, machine).line(),
            "--set zero_optimization.offload_optimizer.device=none");
}

TEST(Remedy, LeavesADriveThatIsFull) {
  const auto on_nvme = configuration(3, {"zero_optimization.offload_optimizer.device=nvme",
                                         "zero_optimization.offload_optimizer.nvme_path=/somewhere/fast"});
  const World world{1, 1};
  const MachineCapacity machine = machine_with(plenty, 1000);
  const Remedy remedy = cheapest_remedy(on_nvme, vocabulary, world, machine);
  EXPECT_EQ(remedy.line(), "--set zero_optimization.offload_optimizer.device=cpu");
  EXPECT_TRUE(fits(on_nvme, remedy, world, machine));
}

}  // namespace
}  // namespace sherd::planning
