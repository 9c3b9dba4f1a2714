// Adapters as a person trains, exports and uses them.
#include "cli/inference/adapter_fixture.h"
#include "engine/checkpoint/checkpoint.h"

namespace sherd::cli {
namespace {

TEST_F(AdapterRuns, GoFromFilesToFilesAndOn) {
  const Outcome tuned = tune("tuned", {from("hf"), lora_});
  ASSERT_EQ(tuned.code, 0) << tuned.err;
  EXPECT_THAT(tuned.err, HasSubstr("trained is an adapter (lora)"));
  const auto by_file = losses();
  ASSERT_EQ(tune("as_well", {from("run"), lora_}).code, 0);
  EXPECT_EQ(losses(), by_file) << "from the base's checkpoint";
  // Resumed, from its own checkpoint alone.
  ASSERT_EQ(tune("resumed", {from("hf"), lora_, "training.steps=3"}).code, 0);
  ASSERT_EQ(tune("resumed", {from("nowhere"), lora_}, {"--resume"}).code, 0);
  EXPECT_EQ(losses(), std::vector<std::string>(by_file.begin() + 3, by_file.end()));

  const Outcome exported = sherd({"export", in("tuned"), "--output", in("peft"), "--adapter"});
  ASSERT_EQ(exported.code, 0) << exported.err;
  EXPECT_TRUE(fs::exists(folder_ / "peft" / "adapter_model.safetensors"));
  EXPECT_THAT(read_text(folder_ / "peft" / "adapter_config.json"), HasSubstr("\"fan_in_fan_out\": true"));
  // The same text from the run, from the base with the files, and with the run's checkpoint as an adapter.
  const std::string own = said("tuned").out;
  EXPECT_NE(own, said("run").out);
  EXPECT_EQ(said("run", {"--adapter", in("peft")}).out, own);
  EXPECT_EQ(said("run", {"--adapter", in("tuned")}).out, own);
  // A new run goes on from the files as from the checkpoint.
  const auto on = [&](const std::string& to, const std::vector<std::string>& sets) {
    const Outcome got = tune(to, sets);
    EXPECT_EQ(got.code, 0) << got.err;
    return losses();
  };
  const auto went_on = on("on_files", {from("hf"), "training.adapter.init_from=" + in("peft")});
  EXPECT_EQ(on("on_checkpoint", {from("run"), "training.adapter.init_from=" + in("tuned")}), went_on);
  EXPECT_EQ(on("on_both", {from("tuned"), lora_}), went_on) << "a checkpoint brings both";
  EXPECT_NE(went_on, by_file);
  // Merged, it is a model like others.
  ASSERT_EQ(sherd({"export", in("tuned"), "--output", in("merged"), "--dtype", "fp32"}).code, 0);
  EXPECT_EQ(tune("from_merged", {from("merged"), "training.steps=1"}).code, 0);
  const double plain = std::stod(went_on[0]), merged = std::stod(losses()[0]);
  EXPECT_NEAR(merged, plain, 0.01 * plain);
}

/// A base in 8 bits: nearly the losses of the base itself, and the same from any command and place.
TEST_F(AdapterRuns, ABaseIn8Bits) {
  const std::string in_8_bits = "training.adapter.base_dtype=int8";
  ASSERT_EQ(tune("plain", {from("hf"), lora_}).code, 0);
  const auto plain = losses();
  const Outcome tuned = tune("tuned", {from("hf"), lora_, in_8_bits});
  ASSERT_EQ(tuned.code, 0) << tuned.err;
  const auto by_file = losses();
  EXPECT_NE(by_file, plain);
  EXPECT_NEAR(std::stod(by_file[0]), std::stod(plain[0]), 0.01 * std::stod(plain[0]));
  ASSERT_EQ(tune("resumed", {from("hf"), lora_, in_8_bits, "training.steps=3"}).code, 0);
  ASSERT_EQ(tune("resumed", {from("nowhere"), lora_, in_8_bits}, {"--resume"}).code, 0);
  EXPECT_EQ(losses(), std::vector<std::string>(by_file.begin() + 3, by_file.end()));
  const std::string own = said("tuned").out;
  EXPECT_EQ(said("tuned", {"--offload", "cpu"}).out, own);
  EXPECT_EQ(said("tuned", {"--base-format", "compute"}).out, own) << "ready to be read, or not";
  EXPECT_EQ(said("tuned", {"--base-format", "int8"}).out, own);
  EXPECT_EQ(said("tuned", {"--adapter", in("tuned")}).out, own);
  EXPECT_EQ(said("run", {"--adapter", in("tuned"), "--offload", "cpu"}).out, own)
      << "quantised as it is read";
  ASSERT_EQ(sherd({"checkpoint", "verify", in("tuned")}).code, 0);
  ASSERT_EQ(sherd({"checkpoint", "convert", in("tuned"), "--output", in("for_3"), "--ranks", "3"}).code, 0);
  EXPECT_EQ(said("for_3").out, own);
  // A run begins from it, in 8 bits or not.
  const Outcome went_on = tune("on", {from("tuned"), "training.steps=1"});
  ASSERT_EQ(went_on.code, 0) << went_on.err;
  const std::string on = losses()[0];
  ASSERT_EQ(tune("on_plain", {from("tuned"), "training.steps=1", "training.adapter.base_dtype=compute"}).code,
            0);
  EXPECT_EQ(losses()[0], on);
  ASSERT_EQ(sherd({"export", in("tuned"), "--output", in("merged"), "--dtype", "fp32"}).code, 0);
  ASSERT_EQ(tune("from_merged", {from("merged"), "training.steps=1"}).code, 0);
  EXPECT_NEAR(std::stod(losses()[0]), std::stod(on), 0.01 * std::stod(on));
}

/// A file that all checkpoints of a run share, of weights that are elsewhere, takes no adapter with it.
TEST_F(AdapterRuns, OutliveADamagedBase) {
  ASSERT_EQ(tune("tuned", {from("hf"), lora_}).code, 0);
  const std::string own = said("tuned").out;
  const fs::path folder = engine::checkpoint_folder(folder_ / "tuned");
  const auto flip = [&](const std::string& file) {
    std::string bytes = read_text(folder / file);
    bytes.back() ^= 1;
    write_text(folder / file, bytes);
  };
  flip("rank_00000.frozen.safetensors");
  const Outcome resumed = tune("tuned", {from("hf"), lora_, "training.steps=9"}, {"--resume"});
  EXPECT_EQ(resumed.code, 1);
  EXPECT_THAT(resumed.err, HasSubstr("frozen.safetensors is damaged"));
  EXPECT_THAT(resumed.err, HasSubstr("begin a new run with training.init_from as this one began"));
  EXPECT_EQ(said("tuned").code, 1);
  const Outcome exported = sherd({"export", in("tuned"), "--output", in("peft"), "--adapter"});
  ASSERT_EQ(exported.code, 0) << exported.err;
  EXPECT_EQ(said("run", {"--adapter", in("peft")}).out, own);
  EXPECT_EQ(said("run", {"--adapter", in("tuned")}).out, own);
  const Outcome on = tune("on", {from("hf"), "training.adapter.init_from=" + in("tuned")});
  EXPECT_EQ(on.code, 0) << on.err;
  // The adapter's own are compared, too.
  flip("rank_00000.safetensors");
  for (const Outcome& got : {said("run", {"--adapter", in("tuned")}),
                             sherd({"export", in("tuned"), "--output", in("x"), "--adapter"}),
                             tune("y", {from("hf"), "training.adapter.init_from=" + in("tuned")})}) {
    EXPECT_EQ(got.code, 1);
    EXPECT_THAT(got.err, HasSubstr("rank_00000.safetensors is damaged"));
  }
}

/// A model with its adapter merged, in few bits again, is a base for others.
TEST_F(AdapterRuns, AreMergedIntoFewBits) {
  ASSERT_EQ(tune("tuned", {from("hf"), lora_}).code, 0);
  const auto exported = [&](const std::string& to, std::vector<std::string> more) {
    more.insert(more.begin(), {"export", in("tuned"), "--output", in(to)});
    return sherd(more);
  };
  const Outcome in_4_bits = exported("nf4", {"--format", "nf4"});
  ASSERT_EQ(in_4_bits.code, 0) << in_4_bits.err;
  EXPECT_THAT(in_4_bits.err, HasSubstr("its adapter merged, as gpt2 in bf16 and nf4, which rounded away "));
  EXPECT_THAT(read_text(folder_ / "nf4/config.json"), HasSubstr("\"bnb_4bit_quant_type\": \"nf4\""));
  EXPECT_LT(fs::file_size(folder_ / "nf4/model.safetensors"),
            fs::file_size(folder_ / "hf/model.safetensors") / 2);
  const std::string beside = R"(training.adapter={"type": "lora", "rank": 4, "base_format": "nf4"})";
  ASSERT_EQ(tune("again", {from("nf4"), beside}).code, 0);
  const auto again = losses();
  ASSERT_EQ(tune("as_numbers", {from("nf4"), R"(training.adapter={"type": "lora", "rank": 4})"}).code, 0);
  EXPECT_EQ(again, losses()) << "the base is in nf4 to the bit, in blocks or not";
  for (const auto& [more, why] :
       {std::pair{std::vector<std::string>{"--format", "nf5"}, "--format is gguf, nf4, nf4_double, fp4"},
        {{"--format", "nf4", "--adapter"}, "an adapter's are written whole"},
        {{"--format", "mxfp4"}, "mxfp4 is the form of GPT-OSS's experts"}}) {
    const Outcome got = exported("x", more);
    EXPECT_EQ(got.code, 2) << why;
    EXPECT_THAT(got.err, HasSubstr(why));
  }
}

/// LoRA that began as a part of the weights: the same from files and checkpoints, and written as one beside
/// the weights as they are.
TEST_F(AdapterRuns, BeginAsPartsOfTheWeights) {
  const std::string pissa =
      R"(training.adapter={"type": "lora", "rank": 4, "targets": "all-linear", "init_lora_weights": "pissa"})";
  const auto tuned = [&](const std::string& to, std::vector<std::string> sets,
                         std::vector<std::string> more = {}) {
    const Outcome got = tune(to, std::move(sets), std::move(more));
    EXPECT_EQ(got.code, 0) << got.err;
    return losses();
  };
  const auto plain = tuned("plain", {from("hf"), lora_}), by_file = tuned("tuned", {from("hf"), pissa});
  EXPECT_NEAR(std::stod(by_file[0]), std::stod(plain[0]), 0.01 * std::stod(plain[0]));
  EXPECT_NE(by_file[3], plain[3]);
  EXPECT_EQ(tuned("as_well", {from("run"), pissa}), by_file) << "from the base's checkpoint";
  tuned("resumed", {from("hf"), pissa, "training.steps=3"});
  EXPECT_EQ(tuned("resumed", {from("nowhere"), pissa}, {"--resume"}),
            std::vector<std::string>(by_file.begin() + 3, by_file.end()));
  const std::string own = said("tuned").out;
  EXPECT_EQ(said("run", {"--adapter", in("tuned")}).out, own);
  ASSERT_EQ(sherd({"export", in("tuned"), "--output", in("peft"), "--adapter"}).code, 0);
  EXPECT_THAT(read_text(folder_ / "peft" / "adapter_config.json"), HasSubstr("\"r\": 8"));
  const double on = std::stod(tuned("on", {from("tuned"), "training.steps=1"})[0]),
               doubled = std::stod(tuned("on_files", {from("hf"), "training.adapter.init_from=" + in("peft"),
                                                      "training.steps=1"})[0]);
  EXPECT_NEAR(doubled, on, 0.005 * on) << "twice the rank, of the model's own weights, in bf16";
  // Another base is told, and one that is gone.
  const auto exported = [&](std::vector<std::string> more) {
    more.insert(more.begin(), {"export", in("tuned"), "--output", in("x"), "--adapter"});
    return sherd(more);
  };
  Outcome got = exported({"--base", in("nowhere")});
  EXPECT_EQ(got.code, 2);
  EXPECT_THAT(got.err, HasSubstr("there is no such folder now; name that model with --base"));
  ASSERT_EQ(sherd({"export", in("plain"), "--output", in("merged"), "--dtype", "fp32"}).code, 0);
  fs::rename(folder_ / "hf", folder_ / "moved");
  EXPECT_EQ(exported({"--base", in("moved")}).code, 0);
  fs::remove_all(folder_ / "x");
  // An adapter's beginning, and the rows that it trains, stay.
  for (const auto& [change, why] : {std::pair{R"(training.adapter.init_lora_weights="uniform")",
                                              "init_lora_weights is not that in checkpoint"},
                                    {"training.adapter.alpha=3", "by which a part of the weights was taken"},
                                    {"training.adapter.trainable_token_indices=[3]",
                                     "trainable_token_indices are not those in checkpoint"}}) {
    got =
        tune("tuned", {"training.init_from=" + in("moved"), pissa, change, "training.steps=9"}, {"--resume"});
    EXPECT_EQ(got.code, 2);
    EXPECT_THAT(got.err, HasSubstr(why));
    got = tune("y", {from("tuned"), change});
    EXPECT_THAT(got.err, HasSubstr(why));
    got = tune("y", {from("run"), "training.adapter.init_from=" + in("tuned"), change});
    EXPECT_THAT(got.err, HasSubstr(why));
  }
  // A model that is nearly the one is another.
  ASSERT_EQ(sherd(train({"--set", "model.dropout=0", "--set", "training.save_dir=" + in("sibling"), "--set",
                         from("run"), "--set", "training.steps=1", "--set", "optimizer.params.lr=0.01"}))
                .code,
            0);
  got = exported({"--base", in("sibling")});
  EXPECT_EQ(got.code, 2);
  EXPECT_THAT(got.err, HasSubstr("are not those from which the adapter took its part"));
  // A run that went on from another has the part of the weights with which the first one began.
  tuned("went_on", {from("tuned"), "training.steps=1"});
  EXPECT_EQ(
      sherd({"export", in("went_on"), "--output", in("went_on_peft"), "--adapter", "--base", in("moved")})
          .code,
      0);
  // A base from which an adapter took its part is no base for another one.
  got = tune("y", {from("tuned"), "training.adapter.init_from=" + in("plain")});
  EXPECT_EQ(got.code, 2);
  EXPECT_THAT(got.err, HasSubstr("is no base for another one"));
  EXPECT_EQ(sherd({"export", in("plain"), "--output", in("x"), "--adapter", "--base", in("moved")}).code, 2);
}

/// Checkpoints that name the base's files in place of holding them: the same in every use, and small.
TEST_F(AdapterRuns, LeaveTheBaseWhereItIs) {
  const std::string nf4 =
      R"(training.adapter={"type": "lora", "rank": 4, "targets": "all-linear", "base_format": "nf4"})";
  const std::string apart = "training.adapter.save_base=false";
  const auto tuned = [&](const std::string& to, std::vector<std::string> sets,
                         std::vector<std::string> more = {}) {
    const Outcome got = tune(to, std::move(sets), std::move(more));
    EXPECT_EQ(got.code, 0) << got.err;
    return losses();
  };
  const std::string parts = R"(training.adapter={"type": "lora", "rank": 4, "init_lora_weights": "pissa",
                                                 "trainable_token_indices": [257, 32]})";
  for (const std::string& adapter : {lora_, parts, nf4}) {
    SCOPED_TRACE(adapter);
    const std::string ids = adapter == parts ? "model.vocab_size=258" : "model.vocab_size=257";
    for (const char* run : {"whole", "apart", "resumed", "copy", "merged", "other", "two"})
      fs::remove_all(folder_ / run);
    const auto want = tuned("whole", {from("hf"), adapter, ids});
    EXPECT_EQ(tuned("apart", {from("hf"), adapter, ids, apart}), want);
    const fs::path saved = engine::checkpoint_folder(folder_ / "apart");
    EXPECT_FALSE(fs::exists(saved / "rank_00000.frozen.safetensors"));
    EXPECT_THAT(read_text(saved / "manifest.json"), HasSubstr(in("hf")));
    EXPECT_EQ(said("apart").out, said("whole").out);
    EXPECT_EQ(said("apart", {"--offload", "cpu"}).out, said("whole", {"--offload", "cpu"}).out);
    if (adapter != parts) {  // whose ids the base has not
      const Outcome beside = said("run", {"--adapter", in("apart")});
      EXPECT_EQ(beside.code, 0) << beside.err;
      EXPECT_EQ(beside.out, said("run", {"--adapter", in("whole")}).out);
    }
    EXPECT_EQ(said("apart").code, 0);
    const Outcome verified = sherd({"verify", in("apart")});
    EXPECT_EQ(verified.code, 0) << verified.err;
    // It goes on, refers to the same, and over two ranks is what a whole one is.
    tuned("resumed", {from("hf"), adapter, ids, apart, "training.steps=3"});
    const auto on_two = [&](const std::string& run, const std::string& how) {
      fs::remove_all(folder_ / "two");
      fs::copy(folder_ / run, folder_ / "two", fs::copy_options::recursive);
      return tuned("two",
                   {from("nowhere"), adapter, ids, how, "training.steps=8", "zero_optimization.stage=3"},
                   {"--resume", "--ranks", "2"});
    };
    const auto two = on_two("whole", "model.dropout=0");
    EXPECT_EQ(two.size(), 2U);
    EXPECT_EQ(on_two("apart", apart), two);
    EXPECT_EQ(tuned("resumed", {from("nowhere"), adapter, ids, apart}, {"--resume"}),
              std::vector<std::string>(want.begin() + 3, want.end()));
    EXPECT_FALSE(
        fs::exists(engine::checkpoint_folder(folder_ / "resumed") / "rank_00000.frozen.safetensors"));
    EXPECT_EQ(said("resumed").out, said("whole").out);
    // A copy for other ranks refers to it, too, and a run that begins from both.
    ASSERT_EQ(sherd({"checkpoint", "convert", in("apart"), "--output", in("copy"), "--ranks", "3"}).code, 0);
    EXPECT_EQ(said("copy").out, said("whole").out);
    ASSERT_EQ(sherd({"checkpoint", "verify", in("copy")}).code, 0);
    const auto on = tuned("other", {from("whole"), "training.steps=1"});
    const std::string other = said("other").out;
    fs::remove_all(folder_ / "other");
    EXPECT_EQ(tuned("other", {from("apart"), apart, "training.steps=1"}), on);
    EXPECT_THAT(read_text(engine::checkpoint_folder(folder_ / "other") / "manifest.json"),
                HasSubstr(in("apart")))
        << "whose base is what it kept of hf";
    EXPECT_EQ(said("other").out, other);
    // Merged they are one model.
    ASSERT_EQ(sherd({"export", in("apart"), "--output", in("merged"), "--dtype", "fp32"}).code, 0);
    const std::string merged = read_text(folder_ / "merged/model.safetensors");
    fs::remove_all(folder_ / "merged");
    ASSERT_EQ(sherd({"export", in("whole"), "--output", in("merged"), "--dtype", "fp32"}).code, 0);
    EXPECT_TRUE(merged == read_text(folder_ / "merged/model.safetensors"));
    // With the base in its checkpoints again.
    EXPECT_EQ(tuned("resumed", {from("nowhere"), adapter, ids, "training.steps=8"}, {"--resume"}).size(), 2U);
    EXPECT_TRUE(fs::exists(engine::checkpoint_folder(folder_ / "resumed") / "rank_00000.frozen.safetensors"));
  }
  // Another adapter beside a run's, of which the base is meant alone, and tables that were trained whole.
  const std::string saved = R"(training.adapter={"type": "lora", "rank": 4, "modules_to_save": ["wte"])";
  tuned("plain_lora", {from("hf"), lora_});
  tuned("with_table", {from("hf"), saved + "}", apart});
  tuned("parts_and_table", {from("hf"), saved + R"(, "init_lora_weights": "pissa"})"});
  for (const auto& [to, how] : {std::pair("beside_whole", "model.dropout=0"), {"beside", apart.c_str()}})
    tuned(to,
          {from("with_table"), "training.adapter.init_from=" + in("plain_lora"), how, "training.steps=1"});
  for (const char* run : {"beside_whole", "beside"})
    ASSERT_EQ(sherd({"export", in(run), "--output", in(cat("merged_", run)), "--dtype", "fp32"}).code, 0);
  EXPECT_TRUE(read_text(folder_ / "merged_beside/model.safetensors") ==
              read_text(folder_ / "merged_beside_whole/model.safetensors"));
  // Without a folder there is nothing to refer to.
  EXPECT_THAT(tune("x", {lora_, apart}).err, HasSubstr("would name the files of init_from: give it"));
  // A base that has changed, is another, or is gone; what trained is whole.
  std::string bytes = read_text(folder_ / "hf/model.safetensors");
  bytes.back() ^= 1;
  write_text(folder_ / "hf/model.safetensors", bytes);
  for (const Outcome& got :
       {said("apart"), tune("apart", {from("hf"), nf4, apart, "training.steps=9"}, {"--resume"})}) {
    EXPECT_EQ(got.code, 1);
    EXPECT_THAT(got.err, HasSubstr("it is not the base that was trained beside"));
  }
  write_text(folder_ / "hf/model.safetensors", bytes + " ");
  EXPECT_THAT(said("apart").err, HasSubstr("it is not the base that was trained beside"));
  fs::remove_all(folder_ / "hf");
  EXPECT_THAT(said("apart").err, HasSubstr("put it there again, or a link to where it is"));
  EXPECT_EQ(sherd({"export", in("apart"), "--output", in("peft"), "--adapter"}).code, 0);
  EXPECT_EQ(said("run", {"--adapter", in("apart")}).code, 0);
}

/// Magnitudes are the base's at first, and the adapter's own in its files.
TEST_F(AdapterRuns, WithMagnitudesAreUsedFromTheirFolders) {
  const std::string dora =
      R"(training.adapter={"type": "lora", "rank": 4, "targets": "all-linear", "use_dora": true})";
  ASSERT_EQ(tune("tuned", {from("hf"), dora}).code, 0);
  const std::string own = said("tuned").out;
  EXPECT_EQ(said("run", {"--adapter", in("tuned")}).out, own);
  ASSERT_EQ(sherd({"export", in("tuned"), "--output", in("peft"), "--adapter"}).code, 0);
  const Outcome both = sherd({"import", in("hf"), "--adapter", in("peft"), "--output", in("both")});
  ASSERT_EQ(both.code, 0) << both.err;
  EXPECT_EQ(tune("on", {from("both"), "training.steps=1"}).code, 0);
}

/// Tokens that the model did not have: their vectors alone are trained, and the model that is exported has
/// them.
TEST_F(AdapterRuns, TrainVectorsOfNewTokens) {
  const std::string grown = "model.vocab_size=261", tokens = R"(training.adapter={"type": "lora", "rank": 4,
                                                  "trainable_token_indices": [257, 258, 259, 260, 32]})";
  const Outcome got = tune("grown", {from("hf"), grown, tokens});
  ASSERT_EQ(got.code, 0) << got.err;
  EXPECT_THAT(got.err,
              HasSubstr("4 tokens of model.vocab_size 261 are new: their vectors begin as the mean"));
  const auto by_file = losses();
  ASSERT_EQ(tune("as_well", {from("run"), grown, tokens}).code, 0);
  EXPECT_EQ(losses(), by_file) << "from the base's checkpoint";
  ASSERT_EQ(tune("resumed", {from("hf"), grown, tokens, "training.steps=3"}).code, 0);
  ASSERT_EQ(tune("resumed", {from("nowhere"), tokens}, {"--resume"}).code, 0);
  EXPECT_EQ(losses(), std::vector<std::string>(by_file.begin() + 3, by_file.end()));
  ASSERT_EQ(sherd({"export", in("grown"), "--output", in("merged"), "--dtype", "fp32"}).code, 0);
  EXPECT_THAT(read_text(folder_ / "merged" / "config.json"), HasSubstr("\"vocab_size\": 261"));
  ASSERT_EQ(sherd({"export", in("grown"), "--output", in("peft"), "--adapter"}).code, 0);
  // The merged model says what base and files say together.
  ASSERT_EQ(tune("from_merged", {from("merged"), "training.steps=1"}).code, 0);
  const double merged = std::stod(losses()[0]);
  ASSERT_EQ(
      tune("from_both", {from("hf"), grown, "training.steps=1", "training.adapter.init_from=" + in("peft")})
          .code,
      0);
  EXPECT_NEAR(std::stod(losses()[0]), merged, 0.01 * merged);
  const Outcome without = tune("x", {from("hf"), tokens});
  EXPECT_EQ(without.code, 2);
  EXPECT_THAT(without.err, HasSubstr("there is no id 257 in a vocabulary of 257"));
}

/// A model and an adapter of it in published files become one checkpoint, which is used as a run's.
TEST_F(AdapterRuns, AreImportedBesideTheirModel) {
  ASSERT_EQ(tune("tuned", {from("hf"), lora_}).code, 0);
  ASSERT_EQ(sherd({"export", in("tuned"), "--output", in("peft"), "--adapter"}).code, 0);
  const Outcome imported = sherd({"import", in("hf"), "--output", in("both"), "--adapter", in("peft")});
  ASSERT_EQ(imported.code, 0) << imported.err;
  EXPECT_THAT(imported.err, HasSubstr("and an adapter with "));
  EXPECT_THAT(imported.err, Not(HasSubstr("was trained on"))) << "it is the base that the file names";
  ASSERT_EQ(sherd({"export", in("both"), "--output", in("again"), "--adapter"}).code, 0);
  EXPECT_EQ(read_text(folder_ / "again/adapter_model.safetensors"),
            read_text(folder_ / "peft/adapter_model.safetensors"));
  // To go on from it is to go on from the two.
  ASSERT_EQ(tune("of_two", {from("hf"), "training.adapter.init_from=" + in("peft")}).code, 0);
  const auto of_two = losses();
  ASSERT_EQ(tune("of_both", {from("both")}).code, 0);
  EXPECT_EQ(losses(), of_two);
  const Outcome on = tune("on", {from("both"), "training.steps=1"});
  EXPECT_EQ(on.code, 0) << on.err;
  EXPECT_THAT(on.err, HasSubstr("trained is an adapter (lora)"));
  // Another base, and another form of it, is told.
  fs::copy(folder_ / "hf", folder_ / "copy");
  const Outcome other = sherd({"import", in("copy"), "--output", in("x"), "--adapter", in("peft")});
  EXPECT_EQ(other.code, 0) << other.err;
  EXPECT_THAT(other.err, HasSubstr("the adapter was trained on '" + in("hf")));
  std::string config = read_text(folder_ / "hf" / "config.json");
  config.insert(config.rfind('}'), R"(, "quantization_config": {"quant_method": "bitsandbytes",
    "load_in_4bit": true, "bnb_4bit_quant_type": "nf4"})");
  write_text(folder_ / "hf" / "config.json", config);
  const Outcome full = sherd({"import", in("copy"), "--output", in("y"), "--adapter", in("peft")});
  EXPECT_THAT(full.err, HasSubstr("trained beside weights in bitsandbytes nf4, and those here are in full"));
}

TEST_F(AdapterRuns, WhatDoesNotFitIsSaid) {
  const auto expect = [](const Outcome& got, const char* text, int code = 2) {
    EXPECT_EQ(got.code, code) << got.err;
    EXPECT_THAT(got.err, HasSubstr(text));
  };
  expect(tune("a", {from("hf"), "training.adapter.type=lora", R"(training.adapter.targets=["q_proj"])"}),
         "there are attn.c_attn, attn.c_proj, mlp.c_fc, mlp.c_proj");
  expect(tune("b", {from("hf"), "training.adapter.init_from=" + in("run")}), "a run without an adapter");
  expect(tune("c", {from("hf"), "training.adapter.init_from=" + in("none")}), "is no folder here", 1);
  ASSERT_EQ(tune("tuned", {from("hf"), lora_, "training.steps=1"}).code, 0);
  const Outcome alone = tune("d", {from("tuned"), "training.steps=1"});
  EXPECT_EQ(alone.code, 0) << alone.err;
  EXPECT_THAT(alone.err, HasSubstr("trained is an adapter (lora)")) << "the checkpoint says so";
  expect(tune("e", {"training.adapter.init_from=" + in("tuned")}), "give its folder as training.init_from");
  expect(tune("f", {from("hf"), "training.adapter.init_from=" + in("tuned"), "training.adapter.rank=5"}),
         "lora_A", 1);
  expect(sherd({"export", in("run"), "--output", in("x"), "--adapter"}), "a run without training.adapter");
  // By chance is not what anybody wants, and may be what a test of speed does.
  const Outcome drawn = tune("g", {lora_, "training.steps=1"});
  EXPECT_EQ(drawn.code, 0) << drawn.err;
  EXPECT_THAT(drawn.err, HasSubstr("these are drawn by chance"));
}

}  // namespace
}  // namespace sherd::cli
