// Adapters beside a base in few bits (training.adapter.base_format): the bits of a run whose base holds the
// values that the blocks stand for, however they are spread and stored.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "engine/checkpoint/checkpoint.h"
#include "engine/checkpoint/weights.h"
#include "models/adapters/adapters.h"
#include "support/equality.h"
#include "support/expect_error.h"
#include "support/temp_folder.h"
#include "support/whole_tensors.h"
#include "tensor/formats/stored_format.h"

namespace sherd::test {
namespace {

using sherd::testing::expect_error;
using sherd::testing::TempFolder;
using sherd::testing::whole_tensors;

const std::string lora = R"("type": "lora", "rank": 4, "targets": "all-linear", "dropout": 0.1)";
const std::string in_8_bits = R"(, "base_dtype": "int8")";

struct BaseSetting {
  const char* name;
  StoredFormat format;
  std::string dtype;
  bool llama;
  std::string moe;

  /// Blocks of double formats are longer than a row, and begin anew on each tensor rank.
  bool is_double() const { return std::string(name).find("double") != std::string::npos; }
};

class BaseFormat : public ::testing::TestWithParam<BaseSetting> {
 protected:
  RunSpec spec(bool in_blocks = true) const {
    RunSpec out;
    out.dtype = GetParam().dtype, out.llama = GetParam().llama, out.moe = GetParam().moe;
    out.adapter = out.moe.empty() ? lora : R"("type": "lora", "targets": ["q_proj", "o_proj"])";
    const std::string name(tensor::name_of(GetParam().format));
    if (in_blocks)
      out.adapter += cat(R"(, "base_format": ")", name.substr(0, name.find('_')), "\"",
                         GetParam().is_double() ? R"(, "base_double_quant": true)" : "");
    out.steps = 5;
    return out;
  }
};

bool is_linear(const std::string& name) {
  return name.starts_with("blocks.") && name.ends_with(".weight") && name.find("norm") == std::string::npos &&
         name.find("router") == std::string::npos && !models::is_adapter(name);
}

TEST_P(BaseFormat, StagesTiersAndRestartsAgreeAndTheBaseStays) {
  RunSpec s = spec();
  const auto expected = train_local(s);
  RunSpec none = s;
  none.steps = 0;
  const auto before = train_local(none);
  for (const auto& [name, bytes] : expected.masters)
    EXPECT_EQ(bytes == before.masters.at(name), !models::is_adapter(name)) << name;
  for (int stage = 1; stage <= 3; ++stage) {
    s.stage = stage;
    EXPECT_TRUE(train_local(s).bits() == expected.bits()) << "stage " << stage;
  }
  const TempFolder folder;
  s.nvme_path = folder.path().string();
  s.offload_param_extra = R"(, "max_in_cpu": 0)";
  for (const char* tier : {"cpu", "nvme"}) {
    s.offload_param = s.offload_optimizer = tier;
    const auto got = train_local(s);
    EXPECT_TRUE(got.bits() == expected.bits()) << "on " << tier;
    if (tier == std::string("nvme")) {
      EXPECT_GT(got.io.read, 0U);
    }
  }
  s.recompute = "full", s.prefetch = 50'000, s.overlap = true;
  s.resume_at = 3, s.directory = (folder.path() / "saved").string();
  EXPECT_TRUE(train_local(s).bits() == expected.bits()) << "resumed, with recompute";
}

/// At stages 2 and 3 with sums in fp32, whatever the number of ranks.
TEST_P(BaseFormat, NumbersOfRanksAgree) {
  RunSpec s = spec();
  s.stage = 2, s.accumulate_in = "fp32", s.ranks = 1, s.accumulation = 4;
  const auto expected = train_local(s);
  s.stage = 3, s.ranks = 2, s.accumulation = 2;
  EXPECT_TRUE(train_local(s).bits() == expected.bits()) << "2 ranks";
  const TempFolder folder;
  s.ranks = 4, s.accumulation = 1, s.resume_at = 4, s.directory = folder.path().string();
  EXPECT_TRUE(train_local(s).bits() == expected.bits()) << "4 ranks, resumed";
}

/// The base's values, as the oracle reads them out of a checkpoint in 8 bits, put in the place of a base that
/// is not: losses and the adapter are the same to the bit.
TEST_P(BaseFormat, TrainsAsBesideTheValuesOfItsBlocks) {
  const TempFolder folder;
  RunSpec s = spec(), plain = spec(false);
  s.ranks = plain.ranks = 1, s.dropout = plain.dropout = 0;
  std::vector<double> losses[2];
  const auto run = [&](const RunSpec& r, std::size_t which) {
    launch_ranks(1, [&](DistributedPtr dist) {
      const auto engine = make_engine(dist, r);
      if (which == 1) {
        const engine::CheckpointReader reader(folder / "begun");
        engine::CheckpointWeights weights(reader, engine->device());
        engine->load_weights(weights);
      }
      engine->save_checkpoint(folder.path().string(), which == 0 ? "begun" : "plain_begun");
      for (int step = 0; step < 4; ++step)
        losses[which].push_back(
            engine->train_batch([&] { return synthetic_batch(engine->device(), 2, 24, 101, step, 0, 0); })
                .loss);
      engine->save_checkpoint(folder.path().string(), which == 0 ? "int8" : "plain");
    });
  };
  run(s, 0), run(plain, 1);
  EXPECT_EQ(losses[0], losses[1]);
  const auto in8 = whole_tensors(folder / "int8"), other = whole_tensors(folder / "plain"),
             begun = whole_tensors(folder / "plain_begun");
  int linear = 0;
  for (const auto& [name, bytes] : other) {
    const std::string parameter = name.substr(name.find('.') + 1);
    if (!name.starts_with("frozen.") || !is_linear(parameter)) {
      EXPECT_EQ(in8.at(name), bytes) << name;
      continue;
    }
    ++linear;
    EXPECT_EQ(begun.at(name), bytes) << name;
    // The oracle's values, rounded as this run keeps its base.
    const auto& values = in8.at(name);
    for (std::size_t i = 0; i < values.size() / 4; ++i) {
      float value;
      std::memcpy(&value, values.data() + 4 * i, 4);
      if (GetParam().dtype == "fp32") {
        ASSERT_EQ(std::memcmp(&bytes[4 * i], &value, 4), 0) << name << ", element " << i;
      } else {
        const bf16 rounded(value);
        ASSERT_EQ(std::memcmp(&bytes[2 * i], &rounded, 2), 0) << name << ", element " << i;
      }
    }
  }
  EXPECT_GT(linear, 6);

  if (GetParam().dtype == "fp32") return;
  s.fp8 = plain.fp8 = R"("recipe": "blockwise")";
  const std::vector<double> in_bf16 = losses[0];
  losses[0].clear(), losses[1].clear();
  run(s, 0), run(plain, 1);
  EXPECT_EQ(losses[0], losses[1]) << "with products in FP8";
  EXPECT_NE(losses[0], in_bf16);
}

/// Every tier holds what the formula says of the linear layers' weights, and the full ones go with their
/// block.
TEST_P(BaseFormat, TakesTheBytesOfItsBlocks) {
  RunSpec s = spec(), plain = spec(false);
  s.steps = plain.steps = 1, s.ranks = plain.ranks = 1;
  const auto in8 = train_local(s), other = train_local(plain);
  std::int64_t saved = 0;
  const std::int64_t width = GetParam().dtype == "fp32" ? 4 : 2;
  std::uint64_t linear = 0;
  for (const auto& [name, bytes] : other.parameters) {
    if (!is_linear(name)) continue;
    const auto count = static_cast<std::int64_t>(bytes.size()) / width;
    saved += count * width - tensor::stored_bytes(GetParam().format, count);
    linear += bytes.size();
  }
  if (!GetParam().is_double()) {  // whose blocks are larger than these weights
    ASSERT_GT(saved, 0);
  }
  EXPECT_EQ(in8.state_bytes[0] + static_cast<std::uint64_t>(saved), other.state_bytes[0]);
  const TempFolder folder;
  s.stage = plain.stage = 3, s.nvme_path = plain.nvme_path = folder.path().string();
  s.offload_param = plain.offload_param = "nvme";
  s.offload_param_extra = plain.offload_param_extra = R"(, "max_in_cpu": 0)";
  const int nvme = static_cast<int>(device::Tier::nvme);
  const auto stored = train_local(s), whole = train_local(plain);
  EXPECT_EQ(stored.state_bytes[nvme] + static_cast<std::uint64_t>(saved), whole.state_bytes[nvme]);
  EXPECT_EQ(stored.io.read<whole.io.read, saved> 0);
}

TEST_P(BaseFormat, ALateDeviceComputesTheSame) {
  RunSpec s = spec();
  s.ranks = 1, s.stage = 3;
  s.offload_param = "cpu", s.prefetch = 50'000, s.overlap = true;
  const auto expected = train_local(s);
  s.lazy = true;
  EXPECT_TRUE(train_local(s).bits() == expected.bits());
}

/// A checkpoint's base is read by any layout, and written again for any number of ranks.
TEST_P(BaseFormat, CheckpointsOpenInEveryLayout) {
  const TempFolder folder;
  RunSpec s = spec();
  s.ranks = 4, s.stage = 3, s.steps = 2, s.directory = folder.path().string();
  const auto saved = train_local(s, 0, 2);
  const std::string tag =
      testing::read_text(folder / "latest").substr(0, testing::read_text(folder / "latest").find('\n'));
  for (const auto& [ranks, stage, param] : {std::tuple{1, 0, "none"}, {2, 2, "none"}, {3, 3, "cpu"}}) {
    RunSpec t = s;
    t.ranks = ranks, t.stage = stage, t.offload_param = param;
    RunResult got;
    launch_ranks(ranks, [&](DistributedPtr dist) {
      RunResult mine;
      const auto engine = make_engine(dist, t);
      engine->load_checkpoint(folder.path().string());
      collect_weights(*engine, mine);
      if (dist->rank() == 0) got = std::move(mine);
      engine->save_checkpoint((folder.path() / "again").string(), "a");
    });
    EXPECT_TRUE(got.masters == saved.masters) << ranks << " ranks, stage " << stage;
    EXPECT_TRUE(whole_tensors(folder / "again" / "a") == whole_tensors(folder / tag));
  }
  const auto device = device::make_cpu_device(1);
  const engine::CheckpointReader reader(folder / tag);
  engine::copy_checkpoint(reader, folder / "copy", "c", 3, false, *device);
  EXPECT_TRUE(whole_tensors(folder / "copy" / "c") == whole_tensors(folder / tag));
}

/// Tensor ranks whose columns are a multiple of a block have the same blocks.
TEST_P(BaseFormat, LayoutsAgreeToRounding) {
  RunSpec s = spec();
  s.dtype = "fp32", s.hidden = GetParam().format == StoredFormat::fp8 ? 256 : 128, s.steps = 4, s.ranks = 1,
  s.accumulation = 2;
  const auto expected = train_local(s);
  for (int kind = GetParam().is_double() ? 1 : 0; kind < 3; ++kind) {
    RunSpec t = s;
    t.ranks = 2;
    (kind == 0 ? t.tensor : kind == 1 ? t.context : t.pipeline) = 2;
    if (kind == 1 && !t.moe.empty()) continue;
    const auto got = train_local(t);
    for (std::size_t i = 0; i < got.losses.size(); ++i)
      EXPECT_NEAR(got.losses[i], expected.losses[i], 2e-5) << "layout " << kind << ", step " << i;
  }
}

const std::string four_experts = R"("experts": 4, "top_k": 2)";

INSTANTIATE_TEST_SUITE_P(
    All, BaseFormat,
    ::testing::Values(BaseSetting{"int8_gpt2_bf16", StoredFormat::int8, "bf16", false, ""},
                      BaseSetting{"int8_llama_fp32", StoredFormat::int8, "fp32", true, ""},
                      BaseSetting{"int8_experts_bf16", StoredFormat::int8, "bf16", true, four_experts},
                      BaseSetting{"nf4_gpt2_bf16", StoredFormat::nf4, "bf16", false, ""},
                      BaseSetting{"nf4_experts_fp32", StoredFormat::nf4, "fp32", true, four_experts},
                      BaseSetting{"nf4_double_llama_bf16", StoredFormat::nf4_double, "bf16", true, ""},
                      BaseSetting{"fp4_llama_bf16", StoredFormat::fp4, "bf16", true, ""},
                      BaseSetting{"fp4_double_gpt2_fp32", StoredFormat::fp4_double, "fp32", false, ""},
                      BaseSetting{"mxfp4_llama_bf16", StoredFormat::mxfp4, "bf16", true, ""},
                      BaseSetting{"fp8_gpt2_bf16", StoredFormat::fp8, "bf16", false, ""},
                      BaseSetting{"bf16_llama_fp32", StoredFormat::bf16, "fp32", true, ""}),
    [](const auto& test) { return test.param.name; });

TEST(BaseFormatErrors, NameTheWeightAndTheKey) {
  RunSpec s;
  s.ranks = 1, s.adapter = lora + in_8_bits, s.steps = 1;
  RunSpec plain = s;
  plain.adapter = lora;
  const TempFolder folder;
  const auto make = [&](const RunSpec& spec, const std::function<void(Engine&)>& body) {
    launch_ranks(1, [&](DistributedPtr dist) { body(*make_engine(dist, spec)); });
  };
  make(s, [&](Engine& engine) { engine.save_checkpoint(folder.path().string(), "int8"); });
  make(plain, [&](Engine& engine) { engine.save_checkpoint(folder.path().string(), "plain"); });
  for (const bool from_8_bits : {true, false})
    expect_error(ErrorKind::data, "training.adapter.base_format that it was saved with", [&] {
      make(from_8_bits ? plain : s, [&](Engine& engine) {
        engine.load_checkpoint(folder.path().string(), from_8_bits ? "int8" : "plain");
      });
    });
  struct Infinite : nn::WeightSource {
    void check(const std::vector<nn::ParameterPtr>&) const override {}
    bool has(const std::string& name) const override { return name == "blocks.1.mlp.up.weight"; }
    void read(const std::string&, const tensor::Slice&, std::int64_t begin,
              const tensor::Tensor& to) override {
      std::fill_n(to.data<float>(), to.numel(), 1.0f);
      if (begin == 0) to.data<float>()[700] = INFINITY;
    }
  } source;
  expect_error(ErrorKind::data, "weight 'blocks.1.mlp.up.weight' holds values that are infinite",
               [&] { make(s, [&](Engine& engine) { engine.load_weights(source); }); });
}

}  // namespace
}  // namespace sherd::test
