// Prices of work and of whole steps, against closed formulas.
#include "engine/estimate/step_time.h"

#include <gtest/gtest.h>

#include "sharding/schedule/schedules.h"

#include "config/config.h"
#include "support/expect_error.h"

namespace sherd::engine {
namespace {

using comm::Collective;
using comm::CommWork;
using tensor::KernelFamily;
using tensor::KernelWork;

constexpr double peak = 100e12, bandwidth = 1e12, near = 100e9, far = 10e9;

/// Ranks of four to a machine, without latencies.
config::Machine plain_machine() {
  config::Machine machine;
  machine.name = "plain", machine.devices = 4, machine.memory = 1;
  config::DeviceRates rates;
  rates.products = {{.dtype = DType::bf16, .peak = peak}};
  rates.bandwidth = bandwidth;
  machine.rates = {rates};
  machine.links = {{.name = "near", .ranks = 4, .bandwidth = near}, {.name = "far", .bandwidth = far}};
  return machine;
}

KernelWork product(std::int64_t m, std::int64_t n, std::int64_t k) {
  return {.family = KernelFamily::gemm,
          .dtype = DType::bf16,
          .flops = 2.0 * static_cast<double>(m) * static_cast<double>(n) * static_cast<double>(k),
          .bytes = 2.0 * static_cast<double>(m * k + k * n + m * n),
          .rows = m,
          .columns = n,
          .depth = k};
}

TEST(Price, AProductTakesItsFlopsOrItsBytes) {
  const config::DeviceRates rates = plain_machine().rates[0];
  EXPECT_DOUBLE_EQ(seconds_of(product(4096, 4096, 4096), rates), 2 * std::pow(4096.0, 3) / peak);
  const KernelWork thin = product(1, 4096, 4096);
  EXPECT_DOUBLE_EQ(seconds_of(thin, rates), thin.bytes / bandwidth) << "a weight is read for one row";
}

TEST(Price, ShallowAndOddProductsAreSlower) {
  config::DeviceRates rates = plain_machine().rates[0];
  rates.products[0].efficiency = 0.8, rates.products[0].half_depth = 256;
  EXPECT_DOUBLE_EQ(seconds_of(product(8192, 8192, 256), rates),
                   product(8192, 8192, 256).flops / (peak * 0.8 / 2));
  KernelWork in_fp8 = product(8192, 8192, 512);
  in_fp8.fp8 = true, rates.products[0].fp8 = 2;
  EXPECT_DOUBLE_EQ(seconds_of(in_fp8, rates), in_fp8.flops / (2 * peak * 0.8 / 2))
      << "tiles begin and end in the same time";
  rates.products[0].half_depth = 0;
  rates.units = 100;  // of tiles of 128 × 128
  EXPECT_NEAR(seconds_of(product(1280, 1280, 4096), rates), product(1280, 1280, 4096).flops / (0.8 * peak),
              1e-12)
      << "100 tiles fill the units once";
  EXPECT_GT(seconds_of(product(1408, 1280, 4096), rates), 1.3 * seconds_of(product(1280, 1280, 4096), rates))
      << "110 tiles take another turn";
}

TEST(Price, MeasuredProductsDecideWhereThereAreSome) {
  config::DeviceRates rates = plain_machine().rates[0];
  rates.products[0].measured = {{128, 128, 128, 1e12}, {4096, 4096, 4096, 50e12}};
  EXPECT_DOUBLE_EQ(seconds_of(product(4096, 4096, 4096), rates), 2 * std::pow(4096.0, 3) / 50e12);
  const double between = product(724, 724, 724).flops / seconds_of(product(724, 724, 724), rates);
  EXPECT_NEAR(between, std::sqrt(1e12 * 50e12), 0.01 * between) << "halfway, by logarithms";
}

TEST(Price, AttentionFormsTheScoresThatAreSeenOrStoresAll) {
  config::DeviceRates rates = plain_machine().rates[0];
  const KernelWork attention{.family = KernelFamily::attention,
                             .dtype = DType::bf16,
                             .flops = 1e12,
                             .bytes = 8,
                             .depth = 64,
                             .scores = 1e9,
                             .pairs = 2e9,
                             .keys = 1000};
  config::AttentionRates& attention_rates = rates.products[0].attention;
  EXPECT_DOUBLE_EQ(seconds_of(attention, rates), 1e12 / (0.5 * peak));
  attention_rates.half_keys = 1000, attention_rates.half_width = 64;
  EXPECT_DOUBLE_EQ(seconds_of(attention, rates), 4 * 1e12 / (0.5 * peak));
  attention_rates = {.forward = 0.5, .forward_score_bytes = 10};
  EXPECT_DOUBLE_EQ(seconds_of(attention, rates), 2 * 1e12 / (0.5 * peak) + 10 * 2e9 / bandwidth);
}

/// An all-gather over that many ranks that lie so far apart, of `bytes` in all.
CommWork gathered(double bytes, int ranks, int stride = 1) {
  return {.kind = Collective::all_gather,
          .bytes = static_cast<std::uint64_t>(bytes * (ranks - 1) / ranks),
          .ranks = ranks,
          .stride = stride};
}

TEST(Price, ARingSendsAllButItsOwnPartOverEachLink) {
  const config::Machine machine = plain_machine();
  EXPECT_NEAR(seconds_of(gathered(8e9, 4), machine), 8e9 * 3 / 4 / near, 1e-9);
  EXPECT_NEAR(seconds_of(gathered(8e9, 8, 4), machine), 8e9 * 7 / 8 / far, 1e-9) << "one rank per machine";
  // Two machines of four: each takes half of the whole over its four ranks' links.
  EXPECT_NEAR(seconds_of(gathered(8e9, 8), machine), 8e9 / 2 / 4 / far, 1e-9);
  EXPECT_EQ(seconds_of(gathered(8e9, 1), machine), 0);
  const CommWork all{.kind = Collective::all_to_all, .bytes = 7'000'000'000, .ranks = 8};
  EXPECT_NEAR(seconds_of(all, machine), 4e9 / far, 1e-9) << "four of seven blocks leave the machine";
  const CommWork next{.kind = Collective::send, .bytes = 1'000'000'000, .ranks = 2, .stride = 4};
  EXPECT_NEAR(seconds_of(next, machine), 1e9 / far, 1e-9);
  const CommWork around{.kind = Collective::send, .bytes = 1'000'000'000, .ranks = 8};
  EXPECT_NEAR(seconds_of(around, machine), 1e9 / far, 1e-9) << "some pass on to the other machine";
  EXPECT_EQ(seconds_of(CommWork{.kind = Collective::receive, .ranks = 2}, machine), 0)
      << "its sender tells it";
}

TEST(Price, AsynchronousCallsHideBehindKernels) {
  const config::Machine machine = plain_machine();
  config::DeviceRates rates = machine.rates[0];
  const Work second = KernelWork{.family = KernelFamily::norm, .bytes = bandwidth};
  CommWork call = gathered(near * 4 / 3, 4);
  const auto seconds = [&](bool async) {
    call.async = async;
    return price({second, call, second}, machine, rates);
  };
  EXPECT_NEAR(seconds(false).seconds, 3, 1e-9);
  EXPECT_NEAR(seconds(false).exposed, 1, 1e-9);
  EXPECT_NEAR(seconds(true).seconds, 2, 1e-9);
  EXPECT_NEAR(seconds(true).calls, 1, 1e-9);
  rates.overlap = 0.25;
  EXPECT_NEAR(seconds(true).seconds, 2.75, 1e-9) << "and slow them down";
  rates.launch = 2;
  EXPECT_NEAR(seconds(true).seconds, 6, 1e-9) << "three are queued";
}

TEST(Price, TheHostQueuesNothingAheadOfWhatItReads) {
  const config::Machine machine = plain_machine();
  config::DeviceRates rates = machine.rates[0];
  rates.launch = 2;
  const auto kernel = [](double seconds, bool host_reads = false) {
    return KernelWork{
        .family = KernelFamily::routing, .bytes = seconds * bandwidth, .host_reads = host_reads};
  };
  const auto seconds = [&](const std::vector<Work>& pass) { return price(pass, machine, rates).seconds; };
  EXPECT_NEAR(seconds({kernel(9), kernel(1), kernel(1), kernel(1)}), 12, 1e-9) << "queued behind the first";
  EXPECT_NEAR(seconds({kernel(9, true), kernel(1), kernel(1), kernel(1)}), 9 + 3 * 2, 1e-9);
  EXPECT_NEAR(seconds({kernel(1, true), kernel(9), kernel(1), kernel(1)}), 2 + 11, 1e-9)
      << "itself is queued";
}

/// A model of like parts, each of one product of a second forward, two backward, and a billion parameters.
ModelWork like_parts(std::size_t count, std::uint64_t output = 0) {
  ModelWork model;
  const KernelWork second{.family = KernelFamily::gemm,
                          .dtype = DType::bf16,
                          .flops = peak,
                          .bytes = 8,
                          .rows = 1,
                          .columns = 1,
                          .depth = 1};
  KernelWork of_weights = second;
  of_weights.weight_gradient = true;
  PartWork part;
  part.forward = {second}, part.backward = {second, of_weights};
  part.trained = 1'000'000'000, part.output = output;
  model.kinds = {part};
  model.parts.assign(count, 0);
  model.weights.assign(count, 1);
  return model;
}

config::Config config_of(const std::string& keys) {
  config::Config config = config::parse_text(
      cat(R"({"bf16": {"enabled": true}, "train_micro_batch_size_per_gpu": 1)", keys, "}"), "step");
  return config;
}

StepTime time_of(const std::string& keys, const ModelWork& model, int ranks, std::int64_t micro_batches,
                 const config::Machine& machine = plain_machine()) {
  config::Config config = config_of(keys);
  config.batch.gradient_accumulation_steps = micro_batches;
  return step_time(config, model, machine, ranks);
}

/// Where device and host are one memory, gradients are read and written on their way to the optimizer there.
TEST(StepTime, CopiesBetweenTiersOfOneMemoryTakeAPassOverIt) {
  config::Machine machine = plain_machine();
  machine.memory = 0;
  machine.rates[0].bandwidth = machine.rates[0].update = machine.host.update = 1e12;
  const double on_device = time_of("", like_parts(1), 1, 1, machine).update;
  const double on_host =
      time_of(R"(, "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}})", like_parts(1),
              1, 1, machine)
          .update;
  EXPECT_NEAR(on_host - on_device, 2 * 1e9 * 2 / 1e12, 1e-9) << "a billion of two bytes, read and written";
}

TEST(StepTime, AccumulatesMicroBatches) {
  for (const std::int64_t m : {1, 7, 1000}) {
    const StepTime step = time_of("", like_parts(5), 1, m);
    EXPECT_NEAR(step.seconds - step.update, 15.0 * static_cast<double>(m), 1e-6 * static_cast<double>(m));
    EXPECT_NEAR(step.kernels[0], 15.0 * static_cast<double>(m), 1e-6 * static_cast<double>(m));
    EXPECT_NEAR(step.flops, 15 * peak * static_cast<double>(m), 1e-6 * peak * static_cast<double>(m));
    EXPECT_NEAR(step.mfu(), 1, 0.01);
  }
}

TEST(StepTime, BubblesAreThoseOfThePapers) {
  for (const std::int64_t p : {2, 4})
    for (const std::int64_t m : {p, 8 * p, 400 * p}) {
      const auto bubble = [&](const std::string& more) {
        return time_of(cat(R"(, "parallel": {"pipeline": )", p, more, "}"), like_parts(16),
                       static_cast<int>(p), m)
            .bubble;
      };
      const double ideal = static_cast<double>(p - 1) / static_cast<double>(m);
      EXPECT_NEAR(bubble(""), ideal, 1e-6 + 0.02 * ideal) << p << " " << m;
      EXPECT_NEAR(bubble(R"(, "virtual_stages": 4)"), ideal / 4, 1e-6 + 0.02 * ideal) << p << " " << m;
      EXPECT_LT(bubble(R"(, "schedule": "zero_bubble")"), 0.7 * ideal) << p << " " << m;
    }
}

/// A search prices what may be among the best alone, by this.
TEST(StepTime, NoStepIsShorterThanAStagesShareOfThePasses) {
  const ModelWork model = like_parts(16, 1'000'000'000);
  EXPECT_DOUBLE_EQ(pass_seconds(model, plain_machine(), 8), 16 * 3);
  for (const int p : {1, 2, 4})
    for (const char* more : {"", R"(, "virtual_stages": 2)", R"(, "schedule": "zero_bubble")"})
      for (const int ranks : {p, 4 * p})
        for (const std::int64_t m : {4, 100}) {
          if (p == 1 && *more) continue;
          const StepTime step =
              time_of(cat(R"(, "zero_optimization": {"stage": 1}, "parallel": {"pipeline": )", p, more, "}"),
                      model, ranks, m);
          EXPECT_GE(step.seconds, 0.999 * 16 * 3 * static_cast<double>(m) / p) << p << more << ranks << m;
        }
  ModelWork some = model;
  some.keeping = some.parts;
  EXPECT_EQ(pass_seconds(some, plain_machine(), 8), 0) << "nothing is said of several kinds";
}

/// A pipeline of p stages takes p − 1 + m times of a stage for m micro-batches that only go forward.
TEST(StepTime, PassesBeforeAStepAreForwardAlone) {
  ModelWork model = like_parts(8), plain = model;
  model.kinds[0].reference = model.kinds[0].forward;
  for (const int p : {1, 2, 4})
    for (const std::int64_t m : {1, 4, 400}) {
      const std::string keys = cat(R"(, "parallel": {"pipeline": )", p, "}");
      const StepTime with = time_of(keys, model, p, m), without = time_of(keys, plain, p, m);
      const double stage = 8.0 / p, batches = static_cast<double>(m);
      EXPECT_NEAR(with.seconds - without.seconds, stage * (p - 1 + batches), 1e-6 * batches) << p << ' ' << m;
      EXPECT_NEAR(with.kernels[0] - without.kernels[0], stage * batches, 1e-6 * batches);
      EXPECT_NEAR(with.idle - without.idle, stage * (p - 1), 1e-6 * batches);
      EXPECT_NEAR(with.gather + with.reduce + with.exchange, 0, 1e-6 * batches);
    }
}

/// Korthikanti et al. 2022, appendix: of W micro-batches in flight W − r keep their activations, so a stage
/// computes forward again for r of every W.
TEST(StepTime, MicroBatchesThatKeepTheirActivationsRunNothingAgain) {
  ModelWork model = like_parts(8);
  PartWork again = model.kinds[0];
  again.backward.push_back(again.forward[0]);
  model.kinds.push_back(again);
  model.parts.assign(8, 1), model.keeping.assign(8, 0);
  const auto computed = [&](int stages, int recomputed, std::int64_t m) {
    const StepTime step = time_of(cat(R"(, "training": {"recompute": "full", "recompute_micro_batches": )",
                                      recomputed, R"(}, "parallel": {"pipeline": )", stages, "}"),
                                  model, stages, m);
    EXPECT_NEAR(step.exchange + step.gather, 0, 1e-6);
    return step.kernels[0];
  };
  for (const std::int64_t m : {4, 8, 400})
    for (const int r : {0, 1, 2, 4}) {
      const double parts = 2, batches = static_cast<double>(m);
      EXPECT_NEAR(computed(4, r, m), parts * batches * (3 + r / 4.0), 1e-6 * batches) << m << ' ' << r;
    }
  // Interleaved keeps them by groups; what the list says of the whole step counts.
  for (const std::int64_t m : {8, 400}) {
    auto list = sharding::interleaved({.stages = 4, .chunks = 2, .micro_batches = m});
    sharding::keep_activations(list, sharding::most_in_flight(list) - 2);
    double more = 0;
    for (const sharding::Instruction& i : list)
      more += i.op == sharding::Instruction::Op::forward && !i.keeps_activations ? 1 : 0;
    EXPECT_GT(more, 0);
    const double seconds = time_of(
                               R"(, "training": {"recompute": "full", "recompute_micro_batches": 2},
           "parallel": {"pipeline": 4, "virtual_stages": 2})",
                               model, 4, m)
                               .kernels[0];
    EXPECT_NEAR(seconds, 2 * 3 * static_cast<double>(m) + more, 0.01 * seconds) << m;
  }
  EXPECT_NEAR(computed(1, 0, 5), 8 * 5 * 3, 1e-6);
  EXPECT_NEAR(computed(1, 1, 5), 8 * 5 * 4, 1e-6);
}

TEST(StepTime, WeightGradientsNeedNoParameters) {
  const auto gathered = [](const char* schedule) {
    return time_of(cat(R"(, "zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": 0},
                       "parallel": {"pipeline": 2, "schedule": ")",
                       schedule, "\"}"),
                   like_parts(8), 4, 6)
        .gather;
  };
  EXPECT_GT(gathered("1f1b"), 0.1);
  EXPECT_NEAR(gathered("zero_bubble"), gathered("1f1b"), 1e-6);
}

TEST(StepTime, StagesReduceAndGatherWhatTheyShard) {
  constexpr double gradients = 2 * 1e9 * 6;  // bytes, of six parts
  const double ring = gradients * 3 / 4 / near;
  const auto of = [&](int stage, std::int64_t m, const std::string& more = "") {
    return time_of(cat(R"(, "zero_optimization": {"stage": )", stage, more, "}"), like_parts(6), 4, m);
  };
  const auto beyond = [&](const StepTime& step, double m) { return step.seconds - step.update - 18 * m; };
  EXPECT_NEAR(beyond(of(0, 3), 3), 2 * ring, 1e-6) << "an all-reduce, once";
  EXPECT_NEAR(beyond(of(1, 3), 3), ring, 1e-6);
  EXPECT_NEAR(beyond(of(2, 3), 3), 3 * ring, 1e-6) << "after each micro-batch";
  EXPECT_NEAR(beyond(of(2, 3, R"(, "overlap_comm": true)"), 3), 3 * ring / 6, 1e-6)
      << "all hide behind backward but those of the part that ends it";
  // The first part's parameters hide behind nothing, nor the last gradients.
  EXPECT_NEAR(beyond(of(3, 1), 1), ring / 6 * 3, 1e-6);
  EXPECT_NEAR(beyond(of(3, 1, R"(, "stage3_prefetch_bucket_size": 0)"), 1), 2 * ring + ring / 6, 1e-6);
  const double updated = 1e9 * 6 * (4 + 16 + 4 + 4) / bandwidth;  // gradient, moments, master, parameter
  EXPECT_NEAR(of(0, 1).update, updated, 0.2 * updated);
  EXPECT_NEAR(of(3, 1).update, of(0, 1).update / 4, 1e-6);
  EXPECT_NEAR(of(1, 1).update, of(3, 1).update + ring, 1e-6) << "and published";
}

TEST(StepTime, AutoIsLayeredWhereItIsInTraining) {
  config::Machine slow = plain_machine();
  slow.links[0].bandwidth = 0.1e9;  // 15 s for the parameters of a part
  const auto seconds = [&](const std::string& schedule) {
    return time_of(std::string(R"(, "zero_optimization": {"stage": 3}, "training": {"recompute": "full"})") +
                       R"(, "parallel": {"schedule": ")" + schedule + "\"}",
                   like_parts(6), 4, 4, slow)
        .seconds;
  };
  EXPECT_EQ(seconds("auto"), seconds("layered"));
  const double gather = 2e9 * 3 / 4 / 0.1e9;
  // Parameters come 48 times, or 10: with layered those that reductions do not hide behind.
  EXPECT_GT(seconds("accumulate") - seconds("layered"), 20 * gather);
}

TEST(StepTime, MachinesSayWhatTheyLack) {
  const auto refused = [](const std::string& keys, const config::Machine& machine, int ranks,
                          const char* text) {
    testing::expect_error(ErrorKind::config, text, [&] { time_of(keys, like_parts(1), ranks, 1, machine); });
  };
  const std::string host = R"(, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}})";
  config::Machine machine = plain_machine();
  refused(host, machine, 1, "no host.update");
  machine.host.update = 1e9;
  refused(host, machine, 1, "no host.to_device");
  machine.links.pop_back();
  refused("", machine, 8, "no link of 'plain' joins 8 ranks");
  machine.rates[0].families = {{.family = "norms", .bandwidth = 1}};
  refused("", machine, 1, "'norms'");
}

TEST(StepTime, HybridShardsReduceTwice) {
  const std::string hybrid = R"(, "zero_optimization": {"stage": 1}, "parallel": {"shard_size": 4})";
  const double bytes = 2 * 1e9;
  const StepTime step = time_of(hybrid, like_parts(1), 8, 1);
  EXPECT_NEAR(step.seconds - step.update, 3 + bytes * 3 / 4 / near + 2 * (bytes / 4) / 2 / far, 1e-6);
}

TEST(StepTime, TransfersBetweenStagesAreWaitedFor) {
  const std::string two = R"(, "parallel": {"pipeline": 2})";
  const std::uint64_t bytes = static_cast<std::uint64_t>(near) / 10;  // a tenth of a second
  const StepTime slow = time_of(two, like_parts(2, bytes), 2, 2), quick = time_of(two, like_parts(2), 2, 2);
  EXPECT_NEAR(slow.seconds - quick.seconds, 0.2, 0.05) << "one there, one back";
}

TEST(StepTime, AnUpdateMovesTheStates) {
  EXPECT_EQ(update_bytes(config::parse_text("{}", "fp32")), 28) << "sherd bench adam";
  EXPECT_EQ(update_bytes(config_of(R"(, "data_types": {"grad_accum_dtype": "fp32"})")), 4 + 16 + 4 + 4);
}

TEST(StepTime, AnOffloadedUpdateTakesTheHostsTime) {
  config::Machine machine = plain_machine();
  machine.host = {.update = 50e9, .to_device = 20e9, .from_device = 20e9};
  const std::string keys = R"(, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}})";
  const StepTime one = time_of(keys, like_parts(1), 1, 1, machine),
                 four = time_of(keys, like_parts(1), 4, 1, machine);
  EXPECT_NEAR(one.update, 28e9 / 50e9, 0.2 * 28 / 50);
  EXPECT_NEAR(four.update - one.update, 2 * 1e9 * 3 / 4 / near, 1e-6)
      << "four share the host, and each has a quarter, which it publishes";
}

}  // namespace
}  // namespace sherd::engine
