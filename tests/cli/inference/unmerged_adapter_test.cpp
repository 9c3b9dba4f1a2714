// Prompts and bottlenecks, which are no part of the weights, as a person trains, exports and uses them.
#include "cli/inference/adapter_fixture.h"
#include "tensor/safetensors/safetensors.h"

namespace sherd::cli {
namespace {

class UnmergedRuns : public AdapterRuns {
 protected:
  /// The vectors of an exported prompt, or other elements of a file of weights.
  std::vector<float> vectors(const std::string& file, const std::string& name = "prompt_embeddings") const {
    const tensor::SafetensorsFile weights(folder_ / file);
    std::vector<float> out(static_cast<std::size_t>(weights.at(name).numel()));
    weights.read_bytes(weights.at(name), 0, std::as_writable_bytes(std::span(out)));
    return out;
  }
  Outcome export_prompt(const std::string& run, const std::string& to,
                        std::vector<std::string> more = {}) const {
    more.insert(more.begin(), {"export", in(run), "--output", in(to), "--adapter"});
    return sherd(more);
  }
  std::string scored(const std::string& checkpoint, std::vector<std::string> more = {}) const {
    more.insert(more.begin(),
                {"evaluate", "--checkpoint", in(checkpoint), "--data", prefix(), "--limit", "9"});
    const Outcome got = sherd(more);
    EXPECT_EQ(got.code, 0) << got.err;
    return got.out;
  }
  static void expect(const Outcome& got, int code, const char* text) {
    EXPECT_EQ(got.code, code);
    EXPECT_THAT(got.err, HasSubstr(text));
  }

  const std::string prompt_ =
      R"(training.adapter={"type": "prompt_tuning", "virtual_tokens": 4, "init_text": "The row"})";
  const std::string network_ = R"(training.adapter={"type": "p_tuning", "virtual_tokens": 3})";
  const std::string bottleneck_ = R"(training.adapter={"type": "bottleneck", "reduction_factor": 4})";
};

TEST_F(UnmergedRuns, GoFromFilesToFilesAndOn) {
  for (const auto& [name, adapter] :
       {std::pair{"prompt_", prompt_}, {"network_", network_}, {"bottleneck_", bottleneck_}}) {
    SCOPED_TRACE(name);
    const std::string at = name;
    const Outcome tuned = tune(at + "tuned", {from("hf"), adapter});
    ASSERT_EQ(tuned.code, 0) << tuned.err;
    const auto by_file = losses();
    // Resumed, from its own checkpoint alone.
    ASSERT_EQ(tune(at + "resumed", {from("hf"), adapter, "training.steps=3"}).code, 0);
    ASSERT_EQ(tune(at + "resumed", {from("nowhere"), adapter}, {"--resume"}).code, 0);
    EXPECT_EQ(losses(), std::vector<std::string>(by_file.begin() + 3, by_file.end()));

    const Outcome exported = export_prompt(at + "tuned", at + "peft");
    ASSERT_EQ(exported.code, 0) << exported.err;
    // The same text and scores from the run, from the base with the files, and with the run as an adapter.
    const std::string own = said(at + "tuned").out, score = scored(at + "tuned");
    EXPECT_NE(own, said("run").out);
    EXPECT_NE(score, scored("run"));
    for (const std::string& of : {at + "peft", at + "tuned"}) {
      EXPECT_EQ(said("run", {"--adapter", in(of)}).out, own);
      EXPECT_EQ(scored("run", {"--adapter", in(of)}), score);
    }
    EXPECT_EQ(said(at + "tuned", {"--offload", "cpu"}).out, own);
    expect(sherd({"export", in(at + "tuned"), "--output", in("x")}), 2, "is no part of the weights");
  }
  // A new run goes on from the files as from the checkpoint.
  for (const std::string at : {"prompt_", "bottleneck_"}) {
    ASSERT_EQ(tune(at + "on_files", {from("hf"), "training.adapter.init_from=" + in(at + "peft")}).code, 0);
    const auto went_on = losses();
    ASSERT_EQ(tune(at + "on", {from("run"), "training.adapter.init_from=" + in(at + "tuned")}).code, 0);
    EXPECT_EQ(losses(), went_on) << at;
  }
  ASSERT_EQ(tune("on_network", {from("hf"), "training.adapter.init_from=" + in("network_peft")}).code, 0);
  expect(tune("x", {from("hf"), network_, "training.adapter.init_from=" + in("network_peft")}), 2,
         "not the network");
}

TEST_F(UnmergedRuns, BeginAsTheyAreAsked) {
  const auto begun = [&](const std::string& to, const std::string& keys) {
    const Outcome got = tune(to,
                             {from("hf"), R"(training.adapter={"type": "prompt_tuning", )" + keys + "}",
                              "training.steps=1", "optimizer.params.weight_decay=0"},
                             {"--set", "optimizer.params.lr=0"});
    EXPECT_EQ(got.code, 0) << got.err;
    EXPECT_EQ(export_prompt(to, to + "_peft").code, 0);
    return vectors(to + "_peft/adapter_model.safetensors");
  };
  const std::vector<float> table = vectors("hf/model.safetensors", "transformer.wte.weight");
  const auto row = [&](std::size_t id) {
    return std::vector<float>(table.begin() + static_cast<std::ptrdiff_t>(id * 32),
                              table.begin() + static_cast<std::ptrdiff_t>((id + 1) * 32));
  };
  std::vector<float> text;
  for (const char c : {'a', 'b', 'c', 'a', 'b'})
    for (const float v : row(static_cast<std::size_t>(c))) text.push_back(v);
  EXPECT_EQ(begun("text", R"("virtual_tokens": 5, "init_text": "abc")"), text);
  const std::vector<float> drawn = begun("vocab", R"("virtual_tokens": 5, "init": "sample_vocab")");
  for (std::size_t i = 0; i < 5; ++i) {
    const std::vector<float> own(drawn.begin() + static_cast<std::ptrdiff_t>(i * 32),
                                 drawn.begin() + static_cast<std::ptrdiff_t>((i + 1) * 32));
    bool found = false;
    for (std::size_t id = 0; id < 257; ++id) found = found || own == row(id);
    EXPECT_TRUE(found) << "virtual token " << i;
  }
  expect(tune("x", {prompt_}), 2, "give its folder as training.init_from");
}

TEST_F(UnmergedRuns, TasksHaveTheirOwn) {
  std::string text;
  for (int i = 0; i < 200; ++i) text += cat("No. ", i % 9, ": jars of row ", i % 3, " are sharded!\n\n");
  write_text(folder_ / "other.txt", text);
  ASSERT_EQ(
      sherd({"prepare", "--input", in("other.txt"), "--tokenizer", "byte", "--output", in("other")}).code, 0);
  const std::string tasks = R"(training.adapter={"type": "prompt_tuning", "virtual_tokens": 4,
                               "tasks": [{"name": "rows"}, {"name": "jars"}]})";
  const auto sources = [&](const std::string& first, const std::string& second) {
    return cat(R"(data={"path": null, "split": [0.9, 0.1], "sources": [{"path": ")", prefix(),
               R"(", "task": ")", first, R"("}, {"path": ")", in("other"), R"(", "task": ")", second,
               R"("}]})");
  };
  const Outcome tuned = tune("tuned", {from("hf"), tasks, sources("rows", "jars")});
  ASSERT_EQ(tuned.code, 0) << tuned.err;
  std::vector<std::string> texts;
  for (const std::string& task : {std::string("rows"), std::string("jars")}) {
    const Outcome exported = export_prompt("tuned", task, {"--task", task});
    ASSERT_EQ(exported.code, 0) << exported.err;
    texts.push_back(scored("tuned", {"--task", task}));
    EXPECT_EQ(scored("run", {"--adapter", in(task)}), texts.back());
    EXPECT_EQ(said("run", {"--adapter", in(task)}).out, said("tuned", {"--task", task}).out);
    EXPECT_EQ(scored("run", {"--adapter", in("tuned"), "--task", task}), texts.back());
  }
  EXPECT_NE(texts[0], texts[1]);
  EXPECT_NE(vectors("rows/adapter_model.safetensors"), vectors("jars/adapter_model.safetensors"));
  expect(said("tuned"), 2, "there are prompts for rows, jars: say which with --task NAME");
  expect(said("tuned", {"--task", "jar"}), 2, "no task is called 'jar'; there are rows, jars");
  expect(said("run", {"--task", "jars"}), 2, "there are no prompts for several tasks here");
  expect(export_prompt("tuned", "x"), 2, "--task NAME");
  expect(tune("x", {from("hf"), tasks, sources("rows", "jar")}), 2, "no task is called 'jar'");
  expect(tune("x", {from("hf"), tasks}), 2, "data.sources[0].task");
  expect(tune("half", {from("hf"), tasks, sources("rows", "rows"), "training.steps=1"}), 0,
         "none of data.sources is of jars, whose prompt learns nothing");
  // Prompts lie in the order of their tasks: nobody gets another's.
  std::string turned = tasks;
  const std::string rows = R"({"name": "rows"})", jars = R"({"name": "jars"})";
  EXPECT_THAT(tasks, HasSubstr(rows + ", " + jars));
  turned.replace(turned.find(rows), (rows + ", " + jars).size(), jars + ", " + rows);
  const std::string both = "name these, in this order";
  expect(tune("tuned", {from("hf"), turned, sources("rows", "jars"), "training.steps=9"}, {"--resume"}), 2,
         both.c_str());
  const std::string before = "training.adapter.init_from=" + in("tuned");
  expect(tune("x", {from("hf"), turned, before, sources("rows", "jars")}), 2, both.c_str());
  expect(tune("x", {from("hf"), before, "training.adapter.virtual_tokens=3", sources("rows", "jars")}), 2,
         "training.adapter.virtual_tokens is 3, and the prompts");
  const std::string one =
      R"(training.adapter={"type": "prompt_tuning", "virtual_tokens": 3, "tasks": [{"name": "rows"}]})";
  const std::string source = cat(R"(data={"path": null, "split": [0.9, 0.1], "sources": [{"path": ")",
                                 prefix(), R"(", "task": "rows"}]})");
  expect(tune("x", {from("hf"), one, before, source}), 2, "the one to begin with is");
}

/// The estimate counts prompts.
TEST_F(UnmergedRuns, EstimatesCountThem) {
  const auto bytes = [&](const std::string& adapter) {
    const Outcome got = sherd({"estimate", "--config", config(), "--set", adapter, "--ranks", "1", "--json"});
    EXPECT_EQ(got.code, 0) << got.err;
    const std::size_t at = got.out.find("\"optimizer\"");
    EXPECT_NE(at, std::string::npos) << got.out;
    return std::stod(got.out.substr(got.out.find_first_of("0123456789", at)));
  };
  const double few = bytes(R"(training.adapter={"type": "prompt_tuning", "virtual_tokens": 1})"),
               many = bytes(R"(training.adapter={"type": "prompt_tuning", "virtual_tokens": 9})");
  // The lower half of a master and two moments each.
  EXPECT_EQ(many - few, 8 * 32 * 10);
}

}  // namespace
}  // namespace sherd::cli
