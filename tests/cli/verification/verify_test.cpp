// `sherd verify`: what it finds in runs that were tampered with, and that it agrees on runs of each layout.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <nlohmann/json.hpp>
#include <random>
#include <set>

#include "cli/verification/replay.h"
#include "cli/verification/verified_run.h"
#include "engine/checkpoint/format.h"
#include "support/expect_error.h"

namespace sherd::cli {
namespace {

using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::Not;
namespace fs = std::filesystem;

constexpr const char* agrees = "the run agrees to the bit\n";
constexpr const char* differs = "the run does NOT agree";

class Verify : public VerifiedRun {
 protected:
  void expect_equal(const std::vector<std::string>& more = {}, const std::string& before = "",
                    std::size_t intervals = 3) const {
    const Outcome outcome = verify(more, before);
    EXPECT_EQ(outcome.code, 0) << outcome.out << outcome.err;
    EXPECT_THAT(outcome.out, HasSubstr(agrees));
    EXPECT_EQ(count(outcome.out, "  losses and gradient norms of 2 steps agree to the bit\n"), intervals)
        << outcome.out;
    EXPECT_THAT(outcome.out, Not(HasSubstr("not promised")));
  }
  /// The report on a run that is not as it was.
  std::string found(const std::vector<std::string>& more = {}) const {
    const Outcome outcome = verify(more);
    EXPECT_EQ(outcome.code, 5) << outcome.out << outcome.err;
    EXPECT_THAT(outcome.out, HasSubstr(differs));
    return outcome.out;
  }

  engine::Manifest manifest_of(const std::string& tag) const {
    const fs::path path = run() / tag / "manifest.json";
    return engine::Manifest::from_json(read_text(path), path);
  }
  void write_manifest(const std::string& tag, const engine::Manifest& manifest) const {
    write_text(run() / tag / "manifest.json", manifest.to_json());
  }
  /// Changes the bits of one element of a tensor that a rank's file holds, whose sums then say so. Without a
  /// rank: of the first that has so many.
  template <class Change>
  void change(const std::string& tag, const std::string& tensor, std::size_t element, const Change& bits_of,
              const std::string& rank = "rank_") {
    engine::Manifest manifest = manifest_of(tag);
    const auto has = [&](const auto& file) {
      return file.first.starts_with(rank) && change_in(run() / tag / file.first, tensor, element, bits_of);
    };
    const auto file = std::ranges::find_if(manifest.files, has);
    require(file != manifest.files.end(), "there is no element ", element, " of ", tensor);
    file->second = engine::checksum_file(run() / tag / file->first);
    write_manifest(tag, manifest);
    ASSERT_EQ(sherd({"checkpoint", "verify", (run() / tag).string()}).code, 0) << "by its sums it is whole";
  }
  template <class Change>
  static bool change_in(const fs::path& file, const std::string& tensor, std::size_t element,
                        const Change& bits_of) {
    std::string bytes = read_text(file);
    std::uint64_t head = 0;
    if (!file.string().ends_with(".safetensors")) return false;
    std::memcpy(&head, bytes.data(), sizeof head);
    const auto entries = nlohmann::json::parse(bytes.substr(8, head));
    if (!entries.contains(tensor)) return false;
    const std::size_t width = entries[tensor]["dtype"] == "F32" ? 4 : 2;
    const auto offsets = entries[tensor]["data_offsets"].get<std::vector<std::size_t>>();
    if (offsets[0] + width * (element + 1) > offsets[1]) return false;
    char* place = bytes.data() + 8 + head + offsets[0] + width * element;
    std::uint32_t bits = 0;
    std::memcpy(&bits, place, width);
    bits = bits_of(bits);
    std::memcpy(place, &bits, width);
    fs::remove(file);  // it may be a link
    write_text(file, bytes);
    return true;
  }
};

std::uint32_t next_number(std::uint32_t bits) {
  return bits + 1;
}

TEST_F(Verify, AgreesOnRunsOfEachLayout) {
  const std::string nvme = "zero_optimization.offload_optimizer.nvme_path=" + (folder_ / "nvme").string();
  const std::vector<std::pair<std::string, std::vector<std::string>>> runs{
      {"2", {"zero_optimization.stage=0", "training.split_masters=false"}},
      {"2", {"zero_optimization.stage=1", "bf16.enabled=false", "gradient_clipping=0.1"}},
      {"2", {"zero_optimization.stage=2", "optimizer.type=AdamW8bit", "optimizer.params.lr=0.001"}},
      {"2", {"zero_optimization.stage=3", "training.recompute=full", "optimizer.type=Lamb"}},
      {"2", {"parallel.tensor=2"}},
      {"4", {"parallel.pipeline=2", "model.dropout=0.1", "training.eval_interval=1"}},
      {"2", {"parallel.context=2", "zero_optimization.stage=1"}},
      {"2",
       {"parallel.expert=2", "model.type=mixtral", "model.moe.experts=4", "model.moe.bias_update=0.001"}},
      {"2", {"zero_optimization.offload_optimizer.device=cpu", "training.moments_dtype=bf16"}},
      {"2", {"zero_optimization.offload_optimizer.device=nvme", nvme, "parallel.schedule=layered"}},
      {"2", {"bf16.enabled=false", "fp16.enabled=true", "fp16.initial_scale_power=30"}},
      {"2", {"training.adapter.type=lora", "training.adapter.r=2", "training.adapter.base_dtype=int8"}},
      {"4",
       {"optimizer.type=OneBitLamb", "optimizer.params.freeze_step=2", "zero_optimization.stage=1",
        "parallel.shard_size=2"}}};
  for (auto [ranks, keys] : runs) {
    SCOPED_TRACE(keys.front() + ", " + keys.back());
    keys.emplace_back("training.steps=4");
    ASSERT_NO_FATAL_FAILURE(trained(ranks, keys));
    expect_equal({}, "", 2);
    fs::remove_all(run());
  }
}

TEST_F(Verify, AgreesOnOtherNumbersOfRanksAtStages2And3) {
  for (const char* stage : {"2", "3"}) {
    ASSERT_NO_FATAL_FAILURE(trained("4", {cat("zero_optimization.stage=", stage), "train_batch_size=12",
                                          "data_types.grad_accum_dtype=fp32"}));
    for (const char* ranks : {"1", "2", "3"}) expect_equal({"--ranks", ranks});
    fs::remove_all(run());
  }
}

TEST_F(Verify, AgreesAsOnProcessorsWithoutAvx512) {
  const std::string before = "env DNNL_MAX_CPU_ISA=AVX2 ";
  ASSERT_NO_FATAL_FAILURE(trained("2", {}, before));
  expect_equal({}, before);
}

TEST_F(Verify, FindsAWeightThatOneUlpWasAddedTo) {
  ASSERT_NO_FATAL_FAILURE(trained("2"));
  const std::string weight = "fp32.blocks.1.mlp.up.weight";
  ASSERT_NO_FATAL_FAILURE(change("global_step4", weight, 70, next_number));
  const std::string told = found();
  // Only the interval that ends there has another weight at its end; the one behind begins with it.
  const std::size_t at = told.find("steps 3 to 4"), behind = told.find("steps 5 to 6");
  ASSERT_LT(at, behind);
  EXPECT_THAT(told.substr(0, at), HasSubstr("tensors and what else is saved agree to the bit"));
  const std::string in = told.substr(at, behind - at);
  EXPECT_THAT(in, HasSubstr("  losses and gradient norms of 2 steps agree to the bit\n"));
  EXPECT_THAT(in, HasSubstr(" 1 differ, in 1 of "));
  EXPECT_THAT(in, HasSubstr("first tensor that differs: " + weight + ", from element 70 on: "));
  EXPECT_THAT(in, HasSubstr("; 1 of 4096 elements differ, by at most 1 ulp\n"));
  EXPECT_THAT(found({"--step", "4"}), HasSubstr(weight));
  const Outcome before = verify({"--step", "2"});
  EXPECT_EQ(before.code, 0) << before.out;
  EXPECT_THAT(before.out, Not(HasSubstr("steps 3 to 4")));
}

TEST_F(Verify, NamesTheFirstOfSeveralTensorsOfAllRanks) {
  ASSERT_NO_FATAL_FAILURE(trained("2", {"training.steps=2", "bf16.enabled=false"}));
  // Weights come before the optimizer's states; sign and zero are numbers, too.
  for (const auto& [tensor, element] :
       std::vector<std::pair<std::string, std::size_t>>{{"exp_avg.blocks.0.attention.qkv.weight", 5},
                                                        {"fp32.norm.weight", 1},
                                                        {"fp32.blocks.1.mlp.up.weight", 2},
                                                        {"fp32.blocks.1.mlp.up.weight", 9}})
    ASSERT_NO_FATAL_FAILURE(change("global_step2", tensor, element,
                                   [&](std::uint32_t bits) { return bits + (element == 2 ? 7 : 1); }));
  const std::string told = found();
  EXPECT_THAT(told, HasSubstr(" 3 differ, in 4 of "));
  EXPECT_THAT(told, ContainsRegex("differs: fp32.blocks.1.mlp.up.weight, from element 2 on: [^;]*; 2 of 4096 "
                                  "elements differ, by at most 7 ulps"));
}

/// Elements are named by their place in the logical tensor, whatever ranks held of it, and ulps are those of
/// the type.
TEST_F(Verify, NamesElementsOfSlicesAndOf16Bits) {
  ASSERT_NO_FATAL_FAILURE(
      trained("2", {"training.steps=2", "parallel.tensor=2", "training.moments_dtype=bf16"}));
  const std::string second = "rank_00001";
  for (const auto& [tensor, element, place] : std::vector<std::tuple<std::string, std::size_t, std::string>>{
           {"exp_avg.blocks.0.mlp.up.weight", 3, "2051"},       // rows 64 to 127 of [128, 32]
           {"exp_avg.blocks.0.mlp.down.weight", 65, "193"}}) {  // columns 64 to 127 of [32, 128]
    ASSERT_NO_FATAL_FAILURE(change("global_step2", tensor, element, next_number, second));
    EXPECT_THAT(found(), HasSubstr(cat("differs: ", tensor, ", from element ", place, " on: ")));
    EXPECT_THAT(found(), HasSubstr("; 1 of 4096 elements differ, by at most 1 ulp\n"));
    ASSERT_NO_FATAL_FAILURE(change(
        "global_step2", tensor, element, [](std::uint32_t bits) { return bits - 1; }, second));
  }
  expect_equal({}, "", 1);
  fs::remove_all(run());
  // More than pass through memory at once: 2^20.
  ASSERT_NO_FATAL_FAILURE(trained("1", {"training.steps=2", "model.vocab_size=36000"}));
  ASSERT_NO_FATAL_FAILURE(change("global_step2", "fp32.tokens.weight", 1'100'000, next_number));
  EXPECT_THAT(found(), HasSubstr("differs: fp32.tokens.weight, from element 1100000 on: "));
  EXPECT_THAT(found(), HasSubstr("; 1 of 1155072 elements differ, by at most 1 ulp\n"));
}

TEST_F(Verify, CountsUlpsAcrossZero) {
  ASSERT_NO_FATAL_FAILURE(trained("1", {"training.steps=2", "training.moments_dtype=bf16"}));
  const std::string norm = "exp_avg_sq.norm.weight";
  std::uint32_t was = 0;
  ASSERT_NO_FATAL_FAILURE(
      change("global_step2", norm, 1, [&](std::uint32_t bits) { return was = bits, 0x8000u; }));
  EXPECT_THAT(found(), HasSubstr(cat("-0 in the checkpoint")));
  EXPECT_THAT(found(), HasSubstr(cat("by at most ", was + 1, " ulps")));
}

TEST_F(Verify, FindsWhatIsNoTensor) {
  ASSERT_NO_FATAL_FAILURE(trained("2", {"training.steps=2", "model.type=mixtral", "model.moe.experts=2",
                                        "model.moe.bias_update=0.001", "model.moe.router=sigmoid"}));
  const engine::Manifest whole = manifest_of("global_step2");
  engine::Manifest manifest = whole;
  ASSERT_FALSE(manifest.step_states.empty());
  const std::string path = manifest.step_states.begin()->first;
  manifest.step_states.begin()->second[1] += 1;
  write_manifest("global_step2", manifest);
  EXPECT_THAT(found(), HasSubstr("  what " + path + " learns once per step is another\n"));
  manifest = whole, manifest.data.position = 9;
  write_manifest("global_step2", manifest);
  EXPECT_THAT(found(), HasSubstr("  the loader's position was 9 and is 8\n"));
}

TEST_F(Verify, FindsAnUpdateThatWasNotMade) {
  ASSERT_NO_FATAL_FAILURE(trained("2"));
  engine::Manifest manifest = manifest_of("global_step4");
  // As one step less of the optimizer's would have left it.
  fs::remove_all(run() / "global_step4");
  fs::copy(run() / "global_step2", run() / "global_step4", fs::copy_options::recursive);
  const engine::Manifest old = manifest_of("global_step2");
  manifest.files = old.files, manifest.save_id = old.save_id, manifest.optimizer_steps = 3;
  write_manifest("global_step4", manifest);
  const std::string told = found();
  EXPECT_THAT(told, HasSubstr("the number of updates was 3 and is 4\n"));
  EXPECT_THAT(told, ContainsRegex("first tensor that differs: fp32"));
  EXPECT_THAT(told, ContainsRegex("first step that differs: step 5: loss was [0-9.]+ and is [0-9.]+\n"));
}

TEST_F(Verify, FindsWhatTheRecordDoesNotSay) {
  ASSERT_NO_FATAL_FAILURE(trained("2"));
  const std::string record = read_text(run() / "steps.jsonl");
  std::string lines = record;
  const std::size_t third = lines.find("\"step\":3"), norm = lines.find("\"grad_norm\":", third) + 12;
  const std::size_t end = lines.find(',', norm);
  const double value = std::stod(lines.substr(norm, end - norm));
  const double other = std::nextafter(value, 10);
  lines.replace(norm, end - norm, nlohmann::json(other).dump());
  write_text(run() / "steps.jsonl", lines);
  EXPECT_THAT(found(),
              HasSubstr(cat("first step that differs: step 3: gradient norm was ",
                            nlohmann::json(other).dump(), " and is ", nlohmann::json(value).dump())));
  lines = record;
  lines.replace(lines.find("false", lines.find("\"step\":6")), 5, "true");
  write_text(run() / "steps.jsonl", lines);
  EXPECT_THAT(found(), HasSubstr("step 6: update was skipped and is applied"));
  // Without the file, tensors tell.
  fs::remove(run() / "steps.jsonl");
  const Outcome none = verify();
  EXPECT_EQ(none.code, 0);
  EXPECT_THAT(none.out, HasSubstr("the folder has no steps.jsonl"));
  EXPECT_THAT(none.out, HasSubstr(agrees));
}

TEST_F(Verify, FindsAnotherSeed) {
  ASSERT_NO_FATAL_FAILURE(trained("2"));
  const auto with_seed = [&](const char* tag, const char* section, const char* was) {
    engine::Manifest manifest = manifest_of(tag);
    auto config = nlohmann::ordered_json::parse(manifest.config);
    ASSERT_EQ(config[section]["seed"].dump(), was);
    config[section]["seed"] = 77;
    manifest.config = config.dump();
    write_manifest(tag, manifest);
  };
  ASSERT_NO_FATAL_FAILURE(with_seed("global_step2", "training", "1234"));
  EXPECT_THAT(found({"--step", "2"}), HasSubstr("first step that differs: step 1: loss was "));
  ASSERT_NO_FATAL_FAILURE(with_seed("global_step6", "data", "1234"));
  EXPECT_THAT(found({"--step", "6"}), HasSubstr("first step that differs: step 5: loss was "));
  EXPECT_EQ(verify({"--step", "4"}).code, 0);
}

/// One token that a step reads, where the fingerprint of a dataset does not look.
TEST_F(Verify, FindsATokenThatWasChanged) {
  std::mt19937 random(3);
  std::string text;
  for (int i = 0; i < 1'300'000; ++i) text += i % 999 == 0 ? '\n' : static_cast<char>('a' + random() % 26);
  write_text(folder_ / "big.txt", text);
  const std::string big = (folder_ / "big").string();
  const Outcome prepared =
      sherd({"prepare", "--input", big + ".txt", "--tokenizer", "byte", "--output", big});
  ASSERT_EQ(prepared.code, 0) << prepared.err;
  const std::vector<std::string> keys{"data.path=" + big, "training.save_interval=2"};
  ASSERT_EQ(sherd(with(train({"--ranks", "2"}), keys)).code, 0);
  EXPECT_EQ(verify().code, 0);
  const config::Config config = config::parse_files({this->config()}, keys);
  const auto data = engine::open_token_data(config);
  const auto device = device::make_cpu_device(1);
  const auto loader = data->training_loader({4, 0, 1, true}, *device);
  const std::string original = read_text(big + ".bin");
  std::string tokens = original;
  std::size_t changed = 0;
  std::int64_t step = 0;
  for (std::int64_t at = 1; at <= 6 && changed == 0; ++at) {
    const tensor::Tensor ids = loader->next().at("tokens");
    for (std::int64_t row = 0; row < 4 && changed == 0; ++row) {
      std::string bytes;
      for (std::int64_t i = 0; i < 16; ++i) {
        const auto id = static_cast<std::uint16_t>(ids.data<std::int32_t>()[row * 16 + i]);
        bytes += {static_cast<char>(id & 255), static_cast<char>(id >> 8)};
      }
      const std::size_t place = tokens.find(bytes);
      if (place < (1 << 20) || place + 32 > tokens.size() - (1 << 20)) continue;
      changed = place + 10, step = at;
    }
  }
  ASSERT_NE(changed, 0u);
  tokens[changed] = tokens[changed] == 'a' ? 'b' : 'a';
  write_text(big + ".bin", tokens);
  ASSERT_EQ(engine::open_token_data(config)->fingerprint, data->fingerprint);
  const std::string told = found();
  EXPECT_THAT(told, HasSubstr(cat("first step that differs: step ", step, ": loss was ")));
  EXPECT_THAT(told, Not(HasSubstr("the dataset")));
  // And one that is not read, where the fingerprint looks.
  tokens = original;
  tokens[tokens.size() - 2] ^= 1;
  write_text(big + ".bin", tokens);
  EXPECT_THAT(found({"--step", "2"}), HasSubstr("the dataset " + big + " had 1"));
}

TEST_F(Verify, SaysWhichPromiseIsMissing) {
  ASSERT_NO_FATAL_FAILURE(trained("4", {"zero_optimization.stage=1", "bf16.enabled=false"}));
  const Outcome fewer = verify({"--ranks", "2"});
  EXPECT_EQ(fewer.code, 0) << fewer.out << fewer.err;
  EXPECT_THAT(fewer.out, HasSubstr("bits are not promised to be equal: 4 data-parallel ranks trained, and 2 "
                                   "replay: ZeRO stage 1 sums the micro-batches of each rank before ranks"));
  EXPECT_THAT(fewer.out, HasSubstr("the run agrees to rounding"));
  EXPECT_THAT(fewer.out,
              ContainsRegex("apart: losses by [0-9.e-]+, gradient norms by [0-9.e-]+ of themselves, "
                            "weights by [0-9.e-]+ of their way\n"));
  const Outcome older = verify({}, "env DNNL_MAX_CPU_ISA=SSE41 ");
  EXPECT_THAT(older.out, HasSubstr("bits are not promised to be equal: the instruction set was "));
  EXPECT_EQ(older.code, 0) << older.out;
  EXPECT_THAT(verify({"--set", "device.threads_per_rank=3", "--step", "2"}).out,
              HasSubstr("the number of compute threads per rank was 1 and is 3"));
  // A tolerance is no licence: counts are exact, and a weight that is far from its way is another.
  const engine::Manifest whole = manifest_of("global_step2");
  engine::Manifest manifest = whole;
  manifest.optimizer_steps = 1;
  write_manifest("global_step2", manifest);
  EXPECT_THAT(found({"--ranks", "2", "--step", "2"}), HasSubstr("the number of updates was 1 and is 2\n"));
  write_manifest("global_step2", whole);
  ASSERT_NO_FATAL_FAILURE(
      change("global_step4", "fp32.norm.weight", 3, [](std::uint32_t bits) { return bits ^ 0x00600000; }));
  EXPECT_THAT(found({"--ranks", "2", "--step", "4"}), ContainsRegex("weights by [0-9.e+]+ of their way"));
}

TEST_F(Verify, TakesKeysOfTheMachineAndRefusesThoseOfTheRun) {
  ASSERT_NO_FATAL_FAILURE(trained("2", {"training.steps=2"}));
  for (const char* ending : {".bin", ".idx", ".json"})
    fs::rename(prefix() + ending, (folder_ / "moved").string() + ending);
  fs::rename(run(), folder_ / "elsewhere");
  fs::rename(folder_ / "elsewhere", run());
  EXPECT_EQ(verify().code, 1);
  expect_equal({"--set", "data.path=" + (folder_ / "moved").string(), "--set", "zero_optimization.stage=2"},
               "", 1);
  for (const char* key : {"data.seed=3", "optimizer.params.lr=1", "training.seed=3", "gradient_clipping=2"}) {
    const Outcome refused = verify({"--set", key});
    EXPECT_EQ(refused.code, 2) << refused.err;
    EXPECT_THAT(refused.err, HasSubstr(": what is trained is as the run had it ("));
  }
  EXPECT_EQ(verify({"--ranks", "3"}).code, 2);
  EXPECT_EQ(verify({"--step", "1"}).code, 1);
  EXPECT_EQ(verify({"another"}).code, 2);
  EXPECT_THAT(sherd({"verify", folder_.path().string()}).err, HasSubstr("there is no checkpoint in '"));
}

TEST_F(Verify, UnderALauncherRanksReplayTogether) {
  ASSERT_NO_FATAL_FAILURE(trained("2"));
  const Outcome same = sherd_launched(2, {"verify", run().string()});
  EXPECT_EQ(count(same.err, "exit code 0\n"), 2u) << same.out << same.err;
  EXPECT_EQ(count(same.out, agrees), 1u) << same.out;
  ASSERT_NO_FATAL_FAILURE(change("global_step4", "exp_avg_sq.norm.weight", 1, next_number));
  const Outcome other = sherd_launched(2, {"verify", run().string(), "--step", "4"});
  EXPECT_EQ(count(other.err, "exit code 5\n"), 2u) << other.out << other.err;
  EXPECT_EQ(count(other.out, "exp_avg_sq.norm.weight"), 1u) << other.out;
  const Outcome none = sherd_launched(2, {"verify", folder_.path().string()});
  EXPECT_EQ(count(none.err, "exit code 1\n"), 2u) << none.err;
}

TEST_F(Verify, LeavesARunUnderWayAloneAndFollowsItsCourse) {
  ASSERT_NO_FATAL_FAILURE(trained("2"));
  // Back to step 2, with another rate: step 6 is of the course that was left.
  const std::vector<std::string> keys{"training.save_interval=2", "train_micro_batch_size_per_gpu=1",
                                      "optimizer.params.lr=0.01"};
  ASSERT_EQ(
      sherd(with(train({"--ranks", "2", "--resume", "--tag", "global_step2", "--steps", "4"}), keys)).code,
      0);
  const Outcome back = verify();
  EXPECT_EQ(back.code, 0) << back.out;
  EXPECT_THAT(back.out, HasSubstr("global_step6 was saved before global_step4, which the run came to after"));
  EXPECT_EQ(count(back.out, "losses and gradient norms of 2 steps agree to the bit"), 2u) << back.out;
  // As a run leaves it that goes back once more and is killed before it saves.
  fs::copy(run() / "global_step4", folder_ / "kept", fs::copy_options::recursive);
  ASSERT_EQ(sherd(with(train({"--ranks", "2", "--resume", "--tag", "global_step2", "--steps", "4"}),
                       {"train_micro_batch_size_per_gpu=1", "optimizer.params.lr=0.1"}))
                .code,
            0);
  fs::remove_all(run() / "global_step4");
  fs::rename(folder_ / "kept", run() / "global_step4");
  const Outcome other = verify({"--step", "4"});
  EXPECT_EQ(other.code, 0) << other.out;
  EXPECT_THAT(other.out, HasSubstr("of 2 steps no losses are recorded in steps.jsonl: tensors alone are"));
  // One that saves again and again, beside which this reads.
  const pid_t live = start(
      with(train({"--ranks", "2", "--resume", "--steps", "1000000", "--metrics",
                  (folder_ / "live.jsonl").string()}),
           {"training.save_interval=5000", "train_micro_batch_size_per_gpu=1", "optimizer.params.lr=0.01"}),
      "live.err");
  wait_for("live.jsonl", "\"step\":9,");
  const auto names = [&] {
    std::set<std::string> out;
    for (const auto& entry : fs::recursive_directory_iterator(run())) out.insert(entry.path().string());
    return out;
  };
  const auto before = names();
  EXPECT_TRUE(before.contains((run() / ".sherd.lock").string()));
  const Outcome beside = verify({"--step", "4"});
  EXPECT_EQ(names(), before);
  kill(live, SIGKILL);
  int status = 0;
  waitpid(live, &status, 0);
  EXPECT_EQ(beside.code, 0) << beside.out << beside.err;
  EXPECT_THAT(beside.out, HasSubstr(agrees));
  // One that goes between two looks.
  const auto record = engine::RecordedSteps::read(run());
  const Course course = course_of(run(), record, 4);
  ASSERT_EQ(course.intervals.size(), 1u);
  const Replay replay = prepare_replay(course.intervals[0], record, 1, {});
  const auto data = engine::open_token_data(replay.config);
  fs::remove_all(run() / "global_step2");
  launch_ranks(1, [&](const DistributedPtr& dist) {
    sherd::testing::expect_error(ErrorKind::io, "global_step2 was removed before it could be read",
                                 [&] { run_replay(dist, replay, record, data); });
  });
  // The first that is left has no beginning.
  const Outcome rest = verify();
  EXPECT_THAT(rest.err, HasSubstr("there is nothing to replay in '"));
}

}  // namespace
}  // namespace sherd::cli
