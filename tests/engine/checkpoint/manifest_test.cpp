#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "engine/checkpoint/checkpoint.h"
#include "engine/checkpoint/sample_manifest.h"
#include "support/expect_error.h"

namespace sherd::engine {
namespace {

using sherd::testing::expect_error;

void expect_bad(const std::string& text, const std::string& part) {
  expect_error(ErrorKind::data, part, [&] { Manifest::from_json(text, "/somewhere/manifest.json"); });
  expect_error(ErrorKind::data, "'/somewhere/manifest.json' is not a manifest",
               [&] { Manifest::from_json(text, "/somewhere/manifest.json"); });
}

TEST(Manifest, ComesBackAsItWasWritten) {
  const Manifest written = sample_manifest();
  const Manifest read = Manifest::from_json(written.to_json(), "m");
  EXPECT_EQ(read.to_json(), written.to_json());
  EXPECT_EQ(read.grid, (std::map<std::string, std::int64_t>{{"data", 2}}));
  EXPECT_EQ(read.save_id, "0123456789abcdef");
  EXPECT_EQ(read.lr, std::vector<std::optional<double>>{0.003});
  EXPECT_EQ(read.client.at("note"), "ü \"quoted\"\n");
  EXPECT_EQ(read.shapes.at("wte.weight"), (std::vector<std::int64_t>{256, 32}));
  EXPECT_EQ(read.files.at("rank_00001.safetensors"), (FileChecksum{777, 4294967295u}));
}

TEST(Manifest, HoldsRatesByParameterGroup) {
  using Rates = std::vector<std::optional<double>>;
  Manifest written = sample_manifest();
  EXPECT_NE(written.to_json().find("\"lr\": 0.003,"), std::string::npos)
      << "one group: as before there were any";
  for (const Rates& rates : {Rates{}, Rates{0.5}, Rates{std::nullopt, 0.25}, Rates{1, 0, std::nullopt}}) {
    written.lr = rates;
    EXPECT_EQ(Manifest::from_json(written.to_json(), "m").lr, rates);
  }
}

TEST(Manifest, HoldsStepStatesToTheBit) {
  Manifest written = sample_manifest();
  EXPECT_EQ(written.to_json().find("step_states"), std::string::npos) << "none: as before there were any";
  written.step_states = {{"blocks.0.mlp", {0, 0.001f, -0.003f, 1e-38f}}, {"blocks.11.mlp", {3.4e38f}}};
  const std::string good = written.to_json();
  EXPECT_EQ(Manifest::from_json(good, "m").step_states, written.step_states);
  const auto with = [&](const std::string& value) {
    std::string bad = good;
    const std::size_t at = bad.find("0.0010");
    return sealed(bad.replace(at, bad.find(',', at) - at, value));
  };
  for (const char* value : {"0.001", "1e39", "null", "\"1\"", "[1]"})
    expect_bad(with(value), "the step state of 'blocks.0.mlp' holds ");
  EXPECT_EQ(Manifest::from_json(with("0.5"), "m").step_states.at("blocks.0.mlp")[1], 0.5f);
}

TEST(Manifest, NoByteCanChangeUnnoticed) {
  const std::string good = sample_manifest().to_json();
  for (std::size_t at = 0; at < good.size(); ++at)
    for (const char other : {static_cast<char>(good[at] ^ 1), '9', ' '}) {
      if (good[at] == other) continue;
      std::string bad = good;
      bad[at] = other;
      EXPECT_THROW(Manifest::from_json(bad, "m"), Error) << at << ": " << bad;
    }
  for (std::size_t size = 0; size < good.size(); ++size)
    EXPECT_THROW(Manifest::from_json(good.substr(0, size), "m"), Error) << size;
  for (const char* key : {"position", "global_steps", "optimizer_steps", "scheduler", "skipped_steps"}) {
    std::string bad = good;
    const std::size_t digit = bad.find_first_of("0123456789", bad.find(cat("\"", key, "\"")));
    bad[digit] = bad[digit] == '1' ? '0' : '1';
    expect_bad(bad, "its checksum does not match");
  }
}

TEST(Manifest, SaysWhatItsFrozenFilesBear) {
  Manifest written = sample_manifest();
  EXPECT_EQ(written.to_json().find("frozen"), std::string::npos) << "none: as before there were any";
  written.frozen_id = "fedcba9876543210";
  written.files[frozen_file(1)] = {99, 3};
  const Manifest read = Manifest::from_json(written.to_json(), "m");
  EXPECT_EQ(read.frozen_id, written.frozen_id);
  EXPECT_EQ(read.files.at("rank_00001.frozen.safetensors"), (FileChecksum{99, 3}));
  written.files[frozen_file(2)] = {99, 3};
  expect_bad(written.to_json(), "files of more than its 2 ranks");
}

TEST(Manifest, OneWithoutItsChecksumOrOfAnotherFormatIsRefused) {
  const std::string good = sample_manifest().to_json();
  const std::string unsealed = good.substr(0, good.rfind(",\n \"crc32c\"")) + "\n}\n";
  expect_bad(unsealed, "its checksum is missing");
  for (const int other : {1, 2, 3, 4, 6})
    for (const std::string& text :
         {in_format(good, other), sealed(in_format(good, other)), in_format(unsealed, other)})
      expect_bad(text, cat("it is of format 'sherd-checkpoint-", other, "', and this build reads ",
                           checkpoint_format));
}

TEST(Manifest, ValuesAreHeldToTheirRanges) {
  const std::string good = sample_manifest().to_json();
  const auto with = [&](const std::string& part, const std::string& other) {
    std::string text = good;
    const std::size_t at = text.find(part);
    EXPECT_NE(at, std::string::npos) << part;
    return sealed(text.replace(at, part.size(), other));
  };
  const std::string range = ", not a whole number from ";
  for (const char* value :
       {"-1", "18446744073709551615", "9223372036854775807", "1.5", "\"7\"", "null", "8e0"})
    expect_bad(with("\"global_steps\": 7", cat("\"global_steps\": ", value)),
               cat("global_steps is ", value == std::string("8e0") ? "8.0" : value, range));
  expect_bad(with("\"global_steps\": 7", "\"global_steps\": 1e400"), "1e400");
  expect_bad(with("\"skipped_steps\": 1", "\"skipped_steps\": 8"),
             cat("skipped_steps is 8", range, "0 to 7"));
  expect_bad(with("\"optimizer_steps\": 6", "\"optimizer_steps\": 8"), "optimizer_steps is 8");
  expect_bad(with("\"world_size\": 2", "\"world_size\": 0"), cat("world_size is 0", range));
  expect_bad(with("\"world_size\": 2", "\"world_size\": 3"), "it names no file of rank 2");
  expect_bad(with("\"world_size\": 2", "\"world_size\": 1"), "files of more than its 1 ranks");
  expect_bad(with("\"scheduler\": \"5\"", "\"scheduler\": \"five\""), "no saved schedule");
  expect_bad(with("\"scheduler\": \"5\"", "\"scheduler\": \"9223372036854775807\""), "scheduler is beyond");
  expect_bad(with("\"lr\": 0.003", "\"lr\": -1"), "lr is not");
  expect_bad(with("   256,\n   32", "   -256,\n   32"), "the shape of 'wte.weight' is -256");
  expect_bad(with("   256,\n   32", "   9007199254740992,\n   9007199254740992"), "has more than");
  expect_bad(with("\"rank_00001.safetensors\"", "\"../rank_00001.safetensors\""),
             "is not the name of a file");
  expect_bad(with("\"bytes\": 777", "\"bytes\": -1"), "bytes is -1");
  expect_bad(with("\"global_steps\": 7", "\"global_steps\": 7, \"global_steps\": 7"),
             "'global_steps' appears twice");
  expect_bad(with("\"global_samples\"", "\"global\\nsamples\""), "it has no global_samples");
  expect_bad(std::string(300'000, '['), "nested deeper");
  expect_bad("[]", "is not an object");
  expect_bad("", "parse error");
}

TEST(Manifest, TakesUtf8Only) {
  Manifest manifest = sample_manifest();
  manifest.client["note"] = "\xff";
  expect_error(ErrorKind::usage, "UTF-8", [&] { (void)manifest.to_json(); });
}

TEST(Manifest, NumbersOfTheDataAndTheGridAreChecked) {
  const auto with = [](const std::string& part, const std::string& other) {
    std::string text = sample_manifest().to_json();
    const std::size_t at = text.find(part);
    EXPECT_NE(at, std::string::npos) << part;
    return sealed(text.replace(at, part.size(), other));
  };
  EXPECT_EQ(Manifest::from_json(with("\"position\": 28", "\"position\": 29"), "m").data.position, 29);
  for (const char* value : {"-1", "\"5\"", "null", "true", "1.5", "1e30", "[3]", "1152921504606846977",
                            "9223372036854775807", "18446744073709551615"})
    expect_bad(with("\"position\": 28", cat("\"position\": ", value)), "data.position is");
  expect_bad(with("\"fingerprint\": 4294967295", "\"fingerprint\": 4294967296"),
             "data.fingerprint is 4294967296");
  for (const char* value : {"0", "-1", "\"2\"", "1048577"})
    expect_bad(with("\"data\": 2", cat("\"data\": ", value)), "grid.data is");
  expect_bad(with("\"tokenizer\": \"byte\"", "\"tokenizer\": 5"), "tokenizer is not a string");
}

}  // namespace
}  // namespace sherd::engine
