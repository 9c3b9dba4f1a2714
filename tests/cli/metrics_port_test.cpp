// `sherd train --metrics-port`, `--metrics-textfile`: what a client reads while it trains, and what it is
// told where it cannot be.
#include <nlohmann/json.hpp>

#include "cli/train_fixture.h"
#include "comm/tcp/socket.h"

namespace sherd::cli {
namespace {

/// The reply on a port of this machine; empty where nobody answers.
std::string page(int port) {
  sockaddr_storage to{};
  to.ss_family = AF_INET;
  to = comm::with_port(to, port);
  const unsigned char loopback[] = {127, 0, 0, 1};
  std::memcpy(reinterpret_cast<char*>(&to) + 4, loopback, 4);
  const Deadline deadline = Deadline::after_seconds(5);
  const FileDescriptor socket =
      comm::connect_to(reinterpret_cast<const sockaddr*>(&to), comm::length_of(to), deadline);
  const std::string request = "GET /metrics HTTP/1.1\r\n\r\n";
  if (!socket || !comm::send_all(socket, request.data(), request.size(), deadline)) return "";
  std::string out;
  for (char c; comm::receive_all(socket, &c, 1, deadline);) out += c;
  return out;
}

TEST_F(Train, MetricsArePagesWhileItTrains) {
  int port = 0;
  {
    const FileDescriptor free = comm::listen_on(0);
    port = comm::port_of(free);
  }
  std::vector<std::string> endless =
      train({"--ranks", "2", "--steps", "1000000", "--metrics", (folder_ / "m.jsonl").string(),
             "--metrics-port", std::to_string(port), "--metrics-textfile", (folder_ / "m.prom").string(),
             "--set", "training.log_interval=1000000"});
  const pid_t child = start(endless, "train.err");
  wait_for("m.jsonl", "\"step\":", 2);
  const std::string text = page(port);
  EXPECT_THAT(text, HasSubstr("HTTP/1.1 200 OK"));
  EXPECT_THAT(text, HasSubstr("\nsherd_loss "));
  EXPECT_THAT(text, HasSubstr("\nsherd_communication_bytes_total{axis=\"shard\"} "));
  EXPECT_THAT(text, HasSubstr("\nsherd_rank_wait_seconds_total{rank=\"1\"} "));
  const Outcome second = sherd(train({"--metrics-port", std::to_string(port), "--set",
                                      cat("training.save_dir=", (folder_ / "other").string())}));
  EXPECT_EQ(second.code, 2);
  EXPECT_THAT(second.err, HasSubstr(cat("metrics cannot be served on 127.0.0.1:", port)));
  EXPECT_EQ(count(second.err, "error:"), 1u) << second.err;
  EXPECT_THAT(second.err, ::testing::Not(HasSubstr("step 1/"))) << "before it trains";
  kill(child, SIGTERM);
  int status = 0;
  waitpid(child, &status, 0);
  EXPECT_EQ(WEXITSTATUS(status), 143);
  EXPECT_EQ(page(port), "");
  EXPECT_THAT(read_text(folder_ / "m.prom"),
              HasSubstr(cat("\nsherd_step ", metric("m.jsonl", "step").back())));
  const auto line = nlohmann::json::parse(
      read_text(folder_ / "m.jsonl").substr(0, read_text(folder_ / "m.jsonl").find('\n')));
  EXPECT_EQ(line["ranks"]["compute_ms"].size(), 2u);
}

}  // namespace
}  // namespace sherd::cli
