// Runs that begin from weights, and what `sherd import`, `export` and `checkpoint` make of them.
#include <filesystem>
#include <nlohmann/json.hpp>

#include "cli/train_fixture.h"

namespace sherd::cli {
namespace {

namespace fs = std::filesystem;

class Weights : public Train {
 protected:
  std::string in(const std::string& name) const { return (folder_ / name).string(); }
  std::vector<std::string> with(const std::vector<std::string>& sets,
                                std::vector<std::string> more = {}) const {
    for (const std::string& set : sets) more.insert(more.end(), {"--set", set});
    return train(more);
  }
  /// The losses of a run with these settings, as text.
  std::vector<std::string> losses(std::vector<std::string> sets, std::vector<std::string> more = {}) const {
    fs::remove(folder_ / "losses.jsonl");
    more.insert(more.end(), {"--metrics", in("losses.jsonl")});
    const Outcome got = sherd(with(sets, more));
    EXPECT_EQ(got.code, 0) << got.err;
    return metric("losses.jsonl", "loss");
  }
  const std::vector<std::string> llama_{"model.type=llama", "model.num_kv_heads=1", "model.qk_norm=true"};
};

/// From the checkpoint and from what was exported of it the same training begins, over other ranks too.
TEST_F(Weights, ARunBeginsFromACheckpointOrFromHuggingFacesFiles) {
  ASSERT_EQ(sherd(with(llama_, {"--ranks", "2"})).code, 0);
  const Outcome exported = sherd({"export", in("run"), "--output", in("hf"), "--dtype", "fp32"});
  ASSERT_EQ(exported.code, 0) << exported.err;
  EXPECT_THAT(exported.err, HasSubstr("as qwen3 in fp32, 1 file"));
  EXPECT_THAT(read_text(folder_ / "hf" / "config.json"), HasSubstr("\"Qwen3ForCausalLM\""));
  // The files' own model, with nothing of it in the configuration but what is not the model's.
  write_text(
      folder_ / "c.json",
      cat(R"({"train_batch_size": 4, "train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": {"lr": 0.003}},
      "bf16": {"enabled": true}, "zero_optimization": {"stage": 3}, "data": {"path": ")",
          prefix(), R"("},
      "training": {"steps": 2, "log_interval": 0}, "parallel": {"timeout_seconds": 60}})"));
  const auto from = [&](const char* folder) { return "training.init_from=" + in(folder); };
  const std::vector<std::string> here = losses({from("run")}), there = losses({from("hf")}),
                                 shared = losses({from("hf"), "zero_optimization.stage=2"}, {"--ranks", "2"}),
                                 cut =
                                     losses({from("hf"), "parallel.pipeline=2", "zero_optimization.stage=2"},
                                            {"--ranks", "2"});
  ASSERT_EQ(here.size(), 2u);
  EXPECT_EQ(there, here);
  EXPECT_EQ(shared, here);
  EXPECT_EQ(cut, here);
  std::vector<std::string> anew = llama_;
  anew.insert(anew.end(),
              {"model.seq_length=16", "model.hidden_size=32", "model.num_layers=2", "model.num_heads=2"});
  EXPECT_NE(losses(anew), here) << "weights of its own";
  // Imported, it is a checkpoint like others.
  const Outcome imported = sherd({"import", in("hf"), "--output", in("imported")});
  ASSERT_EQ(imported.code, 0) << imported.err;
  EXPECT_EQ(losses({from("imported")}), here);
  // It computes in the type that config.json says or, where it does not, that of the files.
  const nlohmann::json published = nlohmann::json::parse(read_text(folder_ / "hf" / "config.json"));
  int number = 0;
  const auto imported_in = [&](const nlohmann::json& said) {
    nlohmann::json config = published;
    config.erase("dtype"), config.erase("torch_dtype");
    config.update(said);
    write_text(folder_ / "hf" / "config.json", config.dump());
    const std::string to = cat("in", ++number);
    EXPECT_EQ(sherd({"import", in("hf"), "--output", in(to)}).code, 0);
    return nlohmann::json::parse(read_text(folder_ / to / "imported" / "manifest.json"))["compute_dtype"];
  };
  using nlohmann::json;
  for (const json& silent : {json::object(), json{{"dtype", nullptr}}, json{{"torch_dtype", "auto"}}})
    EXPECT_EQ(imported_in(silent), "fp32") << silent;
  EXPECT_EQ(imported_in({{"torch_dtype", "torch.bfloat16"}}), "bf16");
  EXPECT_EQ(imported_in({{"dtype", "float16"}, {"torch_dtype", "bfloat16"}}), "fp16") << "as transformers";
  write_text(folder_ / "hf" / "config.json", published.dump());
  // Nothing of the model may be said otherwise.
  const Outcome other = sherd(with({from("hf"), "model.hidden_size=64"}));
  EXPECT_EQ(other.code, 1);
  EXPECT_THAT(other.err, HasSubstr("of another shape than the model's are"));
}

TEST_F(Weights, AResumedRunGoesOnFromItsOwnCheckpoints) {
  ASSERT_EQ(sherd(with(llama_)).code, 0);
  const std::string begin = "training.init_from=" + in("run"), save = "training.save_dir=" + in("second");
  const std::vector<std::string> whole = losses({begin, save, "training.steps=4"});
  fs::remove_all(in("second"));
  ASSERT_EQ(sherd(with({begin, save, "training.steps=2"})).code, 0);
  const std::vector<std::string> rest = losses({begin, save, "training.steps=4"}, {"--resume"});
  EXPECT_EQ(rest, std::vector<std::string>(whole.begin() + 2, whole.end()));
}

TEST_F(Weights, ACheckpointIsInspectedVerifiedAndConverted) {
  ASSERT_EQ(sherd(with({"training.save_interval=3"}, {"--ranks", "2"})).code, 0);
  const Outcome shown = sherd({"checkpoint", "inspect", in("run"), "--parameters"});
  ASSERT_EQ(shown.code, 0) << shown.err;
  for (const char* part : {"others there   global_step3\n", "6, 24 samples", "2 ranks, data 2, shard 2",
                           "exp_avg (fp32) of 28", "blocks.0.attention.qkv.weight [96, 32]"})
    EXPECT_THAT(shown.out, HasSubstr(part));
  const Outcome verified = sherd({"checkpoint", "verify", in("run"), "--all"});
  EXPECT_EQ(verified.code, 0) << verified.err;
  EXPECT_EQ(count(verified.out, ": whole;"), 2u);

  const Outcome converted =
      sherd({"checkpoint", "convert", in("run"), "--output", in("three"), "--ranks", "3"});
  ASSERT_EQ(converted.code, 0) << converted.err;
  EXPECT_TRUE(fs::exists(folder_ / "three" / "global_step6" / "rank_00002.safetensors"));
  const std::vector<std::string> own = losses({}, {"--resume", "--steps", "8"});
  EXPECT_EQ(losses({"training.save_dir=" + in("three")}, {"--resume", "--steps", "8"}), own);

  const Outcome weights = sherd({"checkpoint", "convert", in("three"), "--tag", "global_step6", "--output",
                                 in("weights"), "--weights-only"});
  ASSERT_EQ(weights.code, 0) << weights.err;
  EXPECT_THAT(sherd({"checkpoint", "inspect", in("weights")}).out, HasSubstr("fp32 (fp32) of 28\n"));
  const Outcome resumed = sherd(with({"training.save_dir=" + in("weights")}, {"--resume", "--steps", "8"}));
  EXPECT_EQ(resumed.code, 1);
  EXPECT_THAT(resumed.err, HasSubstr("training.init_from"));

  const std::string file = in("run") + "/global_step3/rank_00001.safetensors";
  std::string bytes = read_text(file);
  bytes[bytes.size() - 5] ^= 1;
  write_text(file, bytes);
  const Outcome damaged = sherd({"checkpoint", "verify", in("run"), "--all"});
  EXPECT_EQ(damaged.code, 1);
  EXPECT_THAT(damaged.out, HasSubstr("global_step3: DAMAGED: "));
  EXPECT_THAT(damaged.err, HasSubstr("1 checkpoint of "));
  EXPECT_EQ(sherd({"checkpoint", "verify", in("run"), "--tag", "global_step3"}).code, 1);
  fs::resize_file(file, 100);  // whose head cannot be read
  const Outcome cut = sherd({"checkpoint", "verify", in("run"), "--all"});
  EXPECT_EQ(cut.code, 1);
  EXPECT_THAT(cut.out, HasSubstr("global_step3: DAMAGED: "));
  EXPECT_THAT(cut.out, HasSubstr("take another checkpoint of the run, by its tag"));
  EXPECT_THAT(cut.err, HasSubstr("1 checkpoint of "));
}

/// Tokenizer and settings go from the files through the run's checkpoints back into files; and neither a
/// resumed run nor an export needs the folder that the weights came from.
TEST_F(Weights, WhatCameWithTheWeightsStaysWithThem) {
  ASSERT_EQ(sherd(with(llama_)).code, 0);
  ASSERT_EQ(sherd({"export", in("run"), "--output", in("hf") + "/", "--dtype", "fp32"}).code, 0);
  std::string settings = read_text(folder_ / "hf" / "config.json");
  const std::string of_bytes = "\"eos_token_id\": 256";  // what ends a document
  ASSERT_NE(settings.find(of_bytes), std::string::npos) << settings;
  settings.replace(settings.find(of_bytes), of_bytes.size(), "\"eos_token_id\": [7, 9]");
  write_text(folder_ / "hf" / "config.json", settings);
  write_text(folder_ / "hf" / "tokenizer.json", "{}");
  const std::string begin = "training.init_from=" + in("hf"), save = "training.save_dir=" + in("tuned");
  const std::vector<std::string> whole = losses({begin, save, "training.steps=3"});
  fs::remove_all(in("tuned"));
  const Outcome begun = sherd(with({begin, save, "training.steps=2"}));
  ASSERT_EQ(begun.code, 0) << begun.err;
  EXPECT_THAT(begun.err, HasSubstr("the weights came with a tokenizer of their own"));
  fs::remove_all(in("hf"));
  EXPECT_EQ(losses({begin, save, "training.steps=3"}, {"--resume"}), std::vector<std::string>{whole[2]});
  const Outcome out = sherd({"export", in("tuned"), "--output", in("mine")});
  ASSERT_EQ(out.code, 0) << out.err;
  EXPECT_THAT(out.err, HasSubstr("data were made with 'byte', and the tokenizer that is exported"));
  EXPECT_EQ(read_text(folder_ / "mine" / "tokenizer.json"), "{}");
  const std::string kept = read_text(folder_ / "mine" / "config.json");
  EXPECT_THAT(kept, HasSubstr("7,\n    9"));
  EXPECT_THAT(kept, HasSubstr("\"bfloat16\""));
}

TEST_F(Weights, NothingThatWasSavedIsLost) {
  ASSERT_EQ(sherd(with(llama_)).code, 0);
  ASSERT_EQ(sherd({"export", in("run"), "--output", in("hf")}).code, 0);
  const std::string latest = read_text(folder_ / "run" / "latest");
  const Outcome imported = sherd({"import", in("hf"), "--output", in("run")});
  EXPECT_EQ(imported.code, 1);
  EXPECT_THAT(imported.err, HasSubstr("--resume could not go on"));
  const Outcome converted =
      sherd({"checkpoint", "convert", in("run"), "--output", in("run"), "--weights-only"});
  EXPECT_EQ(converted.code, 2);
  EXPECT_THAT(converted.err, HasSubstr("names the checkpoint itself"));
  EXPECT_EQ(read_text(folder_ / "run" / "latest"), latest);
  fs::create_directories(in("other.partial"));
  write_text(folder_ / "other.partial" / "mine", "x");
  const Outcome exported = sherd({"export", in("run"), "--output", in("other")});
  EXPECT_EQ(exported.code, 1);
  EXPECT_THAT(exported.err, HasSubstr("no export made it"));
  EXPECT_EQ(read_text(folder_ / "other.partial" / "mine"), "x");
  // The rest of an export that was killed goes.
  write_text(folder_ / "other.partial" / ".sherd-export", "");
  EXPECT_EQ(sherd({"export", in("run"), "--output", in("other")}).code, 0);
  EXPECT_FALSE(fs::exists(folder_ / "other.partial"));
  EXPECT_FALSE(fs::exists(folder_ / "other" / "mine"));
  EXPECT_FALSE(fs::exists(folder_ / "other" / ".sherd-export"));
}

TEST_F(Weights, MistakesAreNamed) {
  const auto expect = [&](const std::vector<std::string>& arguments, int code, const char* part) {
    const Outcome got = sherd(arguments);
    EXPECT_EQ(got.code, code) << got.err;
    EXPECT_THAT(got.err, HasSubstr(part));
  };
  expect({"checkpoint"}, 2, "inspect");
  expect({"checkpoint", "verfy", "x"}, 2, "did you mean 'verify'?");
  expect({"checkpoint", "verify", in("nothing")}, 1, "there is no such folder");
  fs::create_directories(folder_ / "runs" / "of_mine");
  expect({"checkpoint", "verify", in("runs")}, 1, "no checkpoint was completed");
  write_text(folder_ / "runs" / "of_mine" / "latest", "global_step1");
  expect({"checkpoint", "verify", in("runs")}, 1, "it is a folder of runs; name one of them: of_mine");
  expect({"import", in("nothing"), "--output", in("x")}, 1, "config.json");
  expect({"import", "--output", in("x")}, 2, "name one folder");
  expect(with({"training.init_from=" + in("nothing")}), 1, "nothing is downloaded");
  ASSERT_EQ(sherd(train()).code, 0);
  fs::create_directories(in("full"));
  write_text(folder_ / "full" / "x", "x");
  expect({"export", in("run"), "--output", in("full")}, 1, "is there already");
  expect({"export", in("run"), "--output", in("hf"), "--dtype", "int8"}, 2, "--dtype is bf16, fp16 or fp32");
  EXPECT_FALSE(fs::exists(folder_ / "hf"));
}

}  // namespace
}  // namespace sherd::cli
