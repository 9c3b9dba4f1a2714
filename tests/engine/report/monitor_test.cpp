#include "engine/report/monitor.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <limits>

#include "support/expect_error.h"
#include "support/temp_folder.h"

namespace sherd::engine {
namespace {

namespace fs = std::filesystem;
using sherd::testing::read_text;
using sherd::testing::TempFolder;
using sherd::testing::write_text;
using ::testing::ElementsAre;

/// An event as this test reads it, bit by bit and with nothing of the code under test.
struct Event {
  double wall_time = 0;
  std::int64_t step = 0;
  std::string version;
  bool starts_session = false;
  std::vector<std::pair<std::string, float>> values;
};

/// CRC-32C by its definition: the remainder of the bits by the reflected polynomial 0x82f63b78.
std::uint32_t masked(const std::string& data) {
  std::uint32_t crc = ~0u;
  for (const char c : data) {
    crc ^= static_cast<unsigned char>(c);
    for (int bit = 0; bit < 8; ++bit) crc = crc & 1 ? crc >> 1 ^ 0x82f63b78u : crc >> 1;
  }
  crc = ~crc;
  return (crc >> 15 | crc << 17) + 0xa282ead8u;
}

std::uint64_t little(const std::string& data, std::size_t at, std::size_t bytes) {
  std::uint64_t out = 0;
  for (std::size_t i = 0; i < bytes; ++i)
    out += static_cast<std::uint64_t>(static_cast<unsigned char>(data.at(at + i))) << 8 * i;
  return out;
}

/// The fields of a message: number, and its varint, or its bytes.
struct Field {
  std::uint64_t number, varint;
  std::string bytes;
};

std::vector<Field> fields(const std::string& message) {
  std::vector<Field> out;
  std::size_t at = 0;
  const auto varint = [&] {
    std::uint64_t value = 0;
    for (int shift = 0;; shift += 7) {
      const auto byte = static_cast<unsigned char>(message.at(at++));
      value |= static_cast<std::uint64_t>(byte & 127) << shift;
      if (byte < 128) return value;
    }
  };
  while (at < message.size()) {
    const std::uint64_t key = varint();
    Field field{key >> 3, 0, ""};
    std::size_t size = 0;
    if (key % 8 == 0) field.varint = varint();
    if (key % 8 == 1) size = 8;
    if (key % 8 == 2) size = varint();
    if (key % 8 == 5) size = 4;
    field.bytes = message.substr(at, size);
    EXPECT_EQ(field.bytes.size(), size);
    at += size;
    out.push_back(field);
  }
  return out;
}

Event decode(const std::string& message) {
  Event event;
  for (const Field& field : fields(message)) {
    if (field.number == 1) std::memcpy(&event.wall_time, field.bytes.data(), 8);
    if (field.number == 2) event.step = static_cast<std::int64_t>(field.varint);
    if (field.number == 3) event.version = field.bytes;
    if (field.number == 7) event.starts_session = fields(field.bytes).at(0).varint == 1;
    if (field.number != 5) continue;
    for (const Field& value : fields(field.bytes)) {
      const std::vector<Field> parts = fields(value.bytes);
      float number = 0;
      std::memcpy(&number, parts.at(1).bytes.data(), 4);
      event.values.emplace_back(parts.at(0).bytes, number);
    }
  }
  return event;
}

std::vector<Event> events_of(const fs::path& file) {
  const std::string data = read_text(file);
  std::vector<Event> out;
  for (std::size_t at = 0; at < data.size();) {
    const std::size_t size = little(data, at, 8);
    EXPECT_EQ(little(data, at + 8, 4), masked(data.substr(at, 8)));
    const std::string event = data.substr(at + 12, size);
    EXPECT_EQ(little(data, at + 12 + size, 4), masked(event));
    out.push_back(decode(event));
    at += 16 + size;
  }
  return out;
}

std::vector<fs::path> monitor_files_in(const fs::path& folder) {
  std::vector<fs::path> out;
  for (const auto& entry : fs::directory_iterator(folder)) out.push_back(entry.path());
  std::sort(out.begin(), out.end());
  return out;
}

StepMetrics step(std::int64_t number) {
  StepMetrics metrics;
  metrics.step = number;
  metrics.loss = 1.0 / static_cast<double>(number);
  metrics.lr = 0.1;
  metrics.grad_norm = 2;
  metrics.step_ms = 5, metrics.tokens_per_s = 1000;
  return metrics;
}

config::Config config_of(const fs::path& folder, const char* more = "") {
  return config::parse_text(cat(R"({"tensorboard": {"enabled": true, "output_path": ")",
                                (folder / "tb").string(), R"(", "job_name": "a"}, "csv_monitor": {"enabled":
      true, "output_path": ")",
                                (folder / "csv").string(), R"(", "job_name": "b"})", more, "}"));
}

/// Steps that all event files of a folder hold, in the order of the files.
std::vector<std::int64_t> steps_in(const fs::path& folder) {
  std::vector<std::int64_t> out;
  for (const fs::path& file : monitor_files_in(folder))
    for (const Event& event : events_of(file))
      if (!event.values.empty()) out.push_back(event.step);
  return out;
}

TEST(Monitors, WriteEventFilesThatAnotherDecoderReads) {
  TempFolder folder;
  {
    Monitors monitors(config_of(folder.path()));
    ASSERT_TRUE(monitors.enabled());
    monitors.write(step(1), 300);
    StepMetrics second = step(2);
    second.val_loss = 7.5, second.mfu = 0.25, second.grad_norm = std::numeric_limits<double>::quiet_NaN();
    monitors.write(second, 600);
    // Written steps are in the file, whatever becomes of the process.
    EXPECT_THAT(steps_in(folder / "tb" / "a"), ElementsAre(300, 600));
  }
  const auto files = monitor_files_in(folder / "tb" / "a");
  ASSERT_EQ(files.size(), 1u);
  EXPECT_THAT(files[0].filename().string(),
              ::testing::MatchesRegex("events\\.out\\.tfevents\\.[0-9]+\\..+\\.0"));
  const std::vector<Event> events = events_of(files[0]);
  ASSERT_EQ(events.size(), 3u);
  EXPECT_EQ(events[0].version, "brain.Event:2");
  EXPECT_FALSE(events[0].starts_session);
  EXPECT_NEAR(events[1].wall_time, static_cast<double>(std::time(nullptr)), 100);
  using Pairs = std::vector<std::pair<std::string, float>>;
  EXPECT_EQ(events[1].values, (Pairs{{"Train/Samples/train_loss", 1.0f},
                                     {"Train/Samples/lr", 0.1f},
                                     {"Train/Samples/grad_norm", 2.0f},
                                     {"Train/Samples/step_ms", 5.0f},
                                     {"Train/Samples/tokens_per_s", 1000.0f}}));
  ASSERT_EQ(events[2].values.size(), 7u);
  EXPECT_EQ(events[2].values[2], (Pairs::value_type{"Train/Samples/eval_loss", 7.5f}));
  EXPECT_TRUE(std::isnan(events[2].values[3].second));
  EXPECT_EQ(events[2].values[6], (Pairs::value_type{"Train/Samples/mfu", 0.25f}));
}

TEST(Monitors, WriteCsvAsDeepSpeedDoes) {
  TempFolder folder;
  Monitors monitors(config_of(folder.path(), R"(, "fp16": {"enabled": true})"));
  StepMetrics first = step(1);
  first.loss_scale = 65536;
  monitors.write(first, 8);
  monitors.write(step(3), 24);
  const fs::path csv = folder / "csv" / "b";
  EXPECT_EQ(read_text(csv / "Train_Samples_train_loss.csv"),
            "step,train_loss\r\n8,1\r\n24,0.3333333333333333\r\n");
  EXPECT_EQ(read_text(csv / "Train_Samples_lr.csv"), "step,lr\r\n8,0.1\r\n24,0.1\r\n");
  EXPECT_EQ(read_text(csv / "Train_Samples_loss_scale.csv"), "step,loss_scale\r\n8,65536\r\n24,1\r\n");
  EXPECT_FALSE(fs::exists(csv / "Train_Samples_eval_loss.csv"));
}

TEST(Monitors, GoOnAfterAResumeWithoutStepsTwice) {
  TempFolder folder;
  const config::Config config = config_of(folder.path());
  const auto run = [&](std::optional<std::int64_t> resumed_at, std::int64_t first, std::int64_t last) {
    Monitors monitors(config, resumed_at);
    for (std::int64_t i = first; i <= last; ++i) {
      StepMetrics metrics = step(i);
      if (i % 3 == 0) metrics.val_loss = 1;
      monitors.write(metrics, 10 * i);
    }
  };
  const fs::path tb = folder / "tb" / "a", csv = folder / "csv" / "b";
  run({}, 1, 2);  // an earlier run, which is nobody else's to cut
  const std::string earlier = read_text(monitor_files_in(tb)[0]);
  run({}, 1, 7);
  run(40, 5, 9);
  run(60, 7, 8);
  EXPECT_THAT(steps_in(tb), ElementsAre(10, 20, 10, 20, 30, 40, 50, 60, 70, 80));
  EXPECT_EQ(read_text(monitor_files_in(tb)[0]), earlier);
  const std::vector<Event> last = events_of(monitor_files_in(tb).back());
  EXPECT_TRUE(last.at(1).starts_session) << "readers that know dropped steps forget them";
  EXPECT_EQ(last.at(1).step, 61);
  EXPECT_EQ(read_text(csv / "Train_Samples_lr.csv"),
            "step,lr\r\n10,0.1\r\n20,0.1\r\nstep,lr\r\n10,0.1\r\n20,0.1\r\n30,0.1\r\n40,0.1\r\n50,0.1\r\n"
            "60,0.1\r\n70,0.1\r\n80,0.1\r\n");
  EXPECT_EQ(read_text(csv / "Train_Samples_eval_loss.csv"), "step,eval_loss\r\n30,1\r\n60,1\r\n");
}

TEST(Monitors, DropWhatACrashCutOff) {
  TempFolder folder;
  const config::Config config = config_of(folder.path());
  { Monitors(config).write(step(1), 10); }
  const fs::path events = monitor_files_in(folder / "tb" / "a")[0];
  const fs::path csv = folder / "csv" / "b" / "Train_Samples_lr.csv";
  const std::string whole = read_text(events);
  write_text(events, whole + std::string("\x20\0\0\0\0\0\0\0half", 12));
  write_text(csv, read_text(csv) + "20,0.");
  { Monitors(config, 10).write(step(2), 20); }
  EXPECT_EQ(read_text(events), whole);
  EXPECT_THAT(steps_in(folder / "tb" / "a"), ElementsAre(10, 20));
  EXPECT_EQ(read_text(csv), "step,lr\r\n10,0.1\r\n20,0.1\r\n");
}

TEST(Monitors, AreOffUnlessAskedFor) {
  TempFolder folder;
  Monitors monitors(config::parse_text(R"({"tensorboard": {"output_path": "/nowhere"}})"));
  EXPECT_FALSE(monitors.enabled());
  monitors.write(step(1), 10);
  write_text(folder / "tb", "a file");
  sherd::testing::expect_error(ErrorKind::io, "give tensorboard.output_path another one",
                               [&] { Monitors refused(config_of(folder.path())); });
}

}  // namespace
}  // namespace sherd::engine
