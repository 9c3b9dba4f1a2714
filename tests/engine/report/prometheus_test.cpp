// What Prometheus reads, and how the server deals with clients that mean no good.
#include "engine/report/prometheus.h"

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <limits>
#include <sstream>

#include "comm/tcp/socket.h"
#include "support/expect_error.h"
#include "support/temp_folder.h"

namespace sherd::engine {
namespace {

using sherd::testing::expect_error;
using sherd::testing::read_text;
using sherd::testing::TempFolder;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

/// A client of plain sockets.
class Client {
 public:
  explicit Client(int port) : fd_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in to{};
    to.sin_family = AF_INET, to.sin_port = htons(static_cast<std::uint16_t>(port));
    to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    EXPECT_EQ(::connect(fd_, reinterpret_cast<const sockaddr*>(&to), sizeof to), 0);
  }
  ~Client() { ::close(fd_); }
  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;

  void send(const std::string& text) { ::send(fd_, text.data(), text.size(), MSG_NOSIGNAL); }
  /// All until the server closes, or what came in so many seconds.
  std::string read(double seconds = 10) {
    std::string out;
    const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
    for (char bytes[1024]; std::chrono::steady_clock::now() < end;) {
      pollfd one{fd_, POLLIN, 0};
      if (::poll(&one, 1, 50) == 0) continue;
      const ssize_t count = ::recv(fd_, bytes, sizeof bytes, 0);
      if (count <= 0) return out;
      out.append(bytes, static_cast<std::size_t>(count));
    }
    return out + "(still open)";
  }

 private:
  int fd_;
};

std::string asked(int port, const std::string& request) {
  Client client(port);
  client.send(request);
  return client.read();
}

StepMetrics step_of(std::int64_t number) {
  StepMetrics step;
  step.step = number;
  step.loss = 2.5;
  step.lr = 0.125;
  step.tokens = 1000 * number;
  step.step_ms = 250;
  step.mem = {1, 2, 3};
  comm::Traffic sent;
  sent.all_reduce = 64, sent.scalars = 8;
  step.axes = {{comm::Axis::shard, sent}};
  step.io = {10, 20};
  step.ranks.resize(2);
  step.ranks[1].parts = {500, 0, 0, 0, 0, 250};
  step.ranks[0].wait = 500;
  return step;
}

TEST(PrometheusText, HasGaugesOfTheNewestStepAndCountersOfAll) {
  PrometheusText metrics;
  EXPECT_THAT(metrics.text(), AllOf(HasSubstr("sherd_build_info{version="), Not(HasSubstr("sherd_loss"))));
  StepMetrics first = step_of(7);
  first.val_loss = 1.5, first.skipped = true;
  metrics.add(first);
  StepMetrics second = step_of(8);
  second.grad_norm = std::numeric_limits<double>::quiet_NaN(), second.loss_scale = HUGE_VAL;
  second.saved_step = 6, second.mfu = 0.5, second.local = {7, 4096, 1.25};
  metrics.add(second);
  const std::string text = "\n" + metrics.text();
  for (const char* line : {"sherd_step 8",
                           "sherd_loss 2.5",
                           "sherd_validation_loss 1.5",
                           "sherd_learning_rate 0.125",
                           "sherd_gradient_norm NaN",
                           "sherd_loss_scale +Inf",
                           "sherd_skipped_steps_total 1",
                           "sherd_tokens_total 8000",
                           "sherd_step_seconds 0.25",
                           "sherd_mfu 0.5",
                           "sherd_memory_peak_bytes{tier=\"device\"} 1",
                           "sherd_memory_peak_bytes{tier=\"nvme\"} 3",
                           "sherd_nvme_read_bytes_total 20",
                           "sherd_nvme_written_bytes_total 40",
                           "sherd_communication_bytes_total{axis=\"shard\"} 128",
                           "sherd_checkpoint_step 6",
                           "sherd_local_checkpoint_step 7",
                           "sherd_local_checkpoint_bytes 4096",
                           "sherd_local_checkpoint_seconds 1.25",
                           "sherd_rank_compute_seconds_total{rank=\"1\"} 1.5",
                           "sherd_rank_wait_seconds_total{rank=\"0\"} 1"})
    EXPECT_THAT(text, HasSubstr(std::string("\n") + line + "\n"));
}

TEST(PrometheusText, TellsOfCheckpointsWhatThereIs) {
  PrometheusText metrics;
  StepMetrics step = step_of(1);
  metrics.add(step);
  EXPECT_THAT(metrics.text(), Not(HasSubstr("checkpoint")));
  step.local = {0, 4096, 0};  // as a run begins that has gone on from it
  metrics.add(step);
  EXPECT_THAT(metrics.text(),
              AllOf(HasSubstr("\nsherd_local_checkpoint_step 0\n"), Not(HasSubstr("checkpoint_seconds")),
                    Not(HasSubstr("sherd_checkpoint"))));
}

TEST(PrometheusText, CountsRestartsAsTheLauncherDoes) {
  struct Variable {
    Variable(const char* name, const char* value) : name_(name) { ::setenv(name, value, 1); }
    ~Variable() { ::unsetenv(name_); }
    const char* name_;
  };
  const Variable none("TORCHELASTIC_RESTART_COUNT", ""), neither("SLURM_RESTART_COUNT", "");
  EXPECT_THAT(PrometheusText().text(), HasSubstr("\nsherd_restarts_total 0\n"));
  const Variable slurm("SLURM_RESTART_COUNT", "4");
  EXPECT_THAT(PrometheusText().text(), HasSubstr("\nsherd_restarts_total 4\n"));
  const Variable torchrun("TORCHELASTIC_RESTART_COUNT", "2");
  EXPECT_THAT(PrometheusText().text(), HasSubstr("\nsherd_restarts_total 2\n"));
}

TEST(MetricsTextfile, HasAPageThatGrowsOldNoLongerThanAsked) {
  const TempFolder folder;
  const auto path = folder / "sherd.prom";
  const auto text = [&] { return read_text(path); };
  {
    MetricsTextfile often(path, 0);
    EXPECT_THAT(text(), AllOf(HasSubstr("sherd_build_info"), Not(HasSubstr("sherd_step"))));
    often.tell(step_of(1));
    EXPECT_THAT(text(), AllOf(HasSubstr("\nsherd_step 1\n"), HasSubstr("sherd_nvme_read_bytes_total 10\n")));
    often.tell(step_of(2));
    EXPECT_THAT(text(), AllOf(HasSubstr("\nsherd_step 2\n"), HasSubstr("sherd_nvme_read_bytes_total 20\n")));
  }
  {
    MetricsTextfile seldom(path, 3600);
    seldom.tell(step_of(3)), seldom.tell(step_of(4));
    EXPECT_THAT(text(), Not(HasSubstr("sherd_step"))) << "of this run, and none yet";
  }
  EXPECT_THAT(text(), HasSubstr("\nsherd_step 4\n"));
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder.path()), {}), 1) << "no other file";
}

TEST(MetricsTextfile, ThatCannotBeWrittenAnyMoreIsOneWarning) {
  const TempFolder folder;
  std::filesystem::create_directory(folder / "gone");
  const auto path = std::filesystem::path(folder / "gone") / "sherd.prom";
  MetricsTextfile file(path, 0);
  std::filesystem::remove_all(folder / "gone");
  ::testing::internal::CaptureStderr();
  for (int step = 1; step <= 3; ++step) EXPECT_NO_THROW(file.tell(step_of(step)));
  const std::string said = ::testing::internal::GetCapturedStderr();
  EXPECT_THAT(said, HasSubstr(cat("metrics are not up to date: cannot create '", path.string())));
  EXPECT_EQ(std::count(said.begin(), said.end(), '\n'), 1) << said;
  std::filesystem::create_directory(folder / "gone");
  file.tell(step_of(4));
  EXPECT_THAT(read_text(path), HasSubstr("\nsherd_step 4\n"));
  expect_error(ErrorKind::io, "none/x.prom", [&] { MetricsTextfile(folder / "none/x.prom"); });
}

TEST(PrometheusText, EverySampleFollowsItsFamilysHelpAndType) {
  PrometheusText metrics;
  StepMetrics all = step_of(1);
  all.saved_step = 1, all.local = {1, 1, 1};
  metrics.add(all);
  std::istringstream lines(metrics.text());
  std::string family, described;
  int families = 0;
  for (std::string line; std::getline(lines, line);) {
    if (line.starts_with("# HELP ")) {
      described = line.substr(7, line.find(' ', 7) - 7);
      EXPECT_GT(line.size(), described.size() + 10) << line;
      continue;
    }
    if (line.starts_with("# TYPE ")) {
      family = line.substr(7, line.find(' ', 7) - 7);
      EXPECT_EQ(family, described);
      EXPECT_EQ(line.ends_with(" counter"), family.ends_with("_total")) << line;
      ++families;
      continue;
    }
    EXPECT_EQ(line.substr(0, line.find_first_of("{ ")), family);
  }
  EXPECT_GT(families, 15);
  EXPECT_EQ(metrics.text().back(), '\n');
}

TEST(MetricsServer, AnswersWhatIsAskedAndNothingElse) {
  MetricsServer server("127.0.0.1", 0);
  EXPECT_EQ(server.url(), cat("http://127.0.0.1:", server.port(), "/metrics"));
  server.tell(step_of(3));
  const std::string reply = asked(server.port(), "GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n");
  EXPECT_THAT(reply, StartsWith("HTTP/1.1 200 OK\r\n"));
  EXPECT_THAT(reply, HasSubstr("\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\n"));
  EXPECT_THAT(reply, HasSubstr("\nsherd_step 3\n"));
  const std::string body = reply.substr(reply.find("\r\n\r\n") + 4);
  EXPECT_THAT(reply, HasSubstr(cat("\r\nContent-Length: ", body.size(), "\r\n")));
  server.tell(step_of(4));
  EXPECT_THAT(asked(server.port(), "GET /metrics?x=1 HTTP/1.0\n\n"), HasSubstr("\nsherd_step 4\n"));
  EXPECT_THAT(asked(server.port(), "GET / HTTP/1.1\r\n\r\n"), StartsWith("HTTP/1.1 404 "));
  EXPECT_THAT(asked(server.port(), "GET /metricsx HTTP/1.1\r\n\r\n"), StartsWith("HTTP/1.1 404 "));
  EXPECT_THAT(asked(server.port(), "POST /metrics HTTP/1.1\r\n\r\n"),
              AllOf(StartsWith("HTTP/1.1 405 "), HasSubstr("\r\nAllow: GET\r\n")));
  EXPECT_THAT(asked(server.port(), "hello\r\n\r\n"), StartsWith("HTTP/1.1 400 "));
  EXPECT_THAT(asked(server.port(), "GET /metrics\r\n\r\n"), StartsWith("HTTP/1.1 400 "));
}

TEST(MetricsServer, ARequestMayComeInPiecesButNotWithoutEnd) {
  MetricsServer server("127.0.0.1", 0);
  Client slow(server.port());
  for (const char c : std::string("GET /metrics HTTP/1.1\r\n\r")) slow.send({c});
  EXPECT_EQ(slow.read(0.1), "(still open)");
  slow.send("\n");
  EXPECT_THAT(slow.read(), StartsWith("HTTP/1.1 200 "));
  Client endless(server.port());
  const auto begin = std::chrono::steady_clock::now();
  for (int i = 0; i < 100; ++i) endless.send(std::string(1000, 'x'));
  EXPECT_THAT(endless.read(), Not(HasSubstr("200 OK")));
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(4)) << "before its time is over";
}

/// Clients that say nothing take all places, and lose them.
TEST(MetricsServer, SilentClientsHoldItUpForAWhileOnly) {
  MetricsServer server("127.0.0.1", 0, 1);
  std::vector<std::unique_ptr<Client>> silent;
  for (int i = 0; i < 4; ++i) silent.push_back(std::make_unique<Client>(server.port()));
  ::usleep(50'000);
  Client waiting(server.port());
  waiting.send("GET /metrics HTTP/1.1\r\n\r\n");
  EXPECT_EQ(waiting.read(0.3), "(still open)") << "more connections than a few";
  silent.front().reset();
  EXPECT_THAT(waiting.read(2), StartsWith("HTTP/1.1 200 "));
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_EQ(silent.back()->read(), "");
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(3));
  server.tell(step_of(1));
  EXPECT_THAT(asked(server.port(), "GET /metrics HTTP/1.1\r\n\r\n"), HasSubstr("sherd_step 1\n"));
}

TEST(MetricsServer, TakenPortsAndOddAddressesAreErrors) {
  const MetricsServer server("127.0.0.1", 0);
  expect_error(ErrorKind::config,
               cat("metrics cannot be served on 127.0.0.1:", server.port(), ": Address already"),
               [&] { MetricsServer("127.0.0.1", server.port()); });
  // One that is given up meanwhile is had.
  auto leaves = std::make_unique<MetricsServer>("127.0.0.1", 0);
  const int port = leaves->port();
  {
    const std::jthread later([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(200));
      leaves.reset();
    });
    EXPECT_NO_THROW(MetricsServer("127.0.0.1", port, 5, 60));
  }
  expect_error(ErrorKind::usage, "'example.org' is no address", [&] { MetricsServer("example.org", 0); });
  const MetricsServer six("::1", 0);
  EXPECT_EQ(six.url(), cat("http://[::1]:", six.port(), "/metrics"));
}

}  // namespace
}  // namespace sherd::engine
